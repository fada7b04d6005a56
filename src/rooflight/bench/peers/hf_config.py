"""A Hugging Face config.json for one of our presets, so that peers can build a model of the same shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from rooflight.models.config import ModelConfig, RopeConfig
from rooflight.models.hf_config import ARCHITECTURES


def hf_config(config: ModelConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What `from_hf_config` reads back as the same config, at `dtype`.

    ValueError for what such a file cannot say: windows of some layers, a RoPE other than plain or that of Llama 3.
    """
    if any(config.sliding_windows):
        raise ValueError("the model must have full attention in every layer for a peer to build it")
    architecture = next(name for name, family in ARCHITECTURES.items() if family.name == config.family)
    fields = {
        "architectures": [architecture],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": config.max_position_embeddings,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "attention_bias": config.o_bias,
        "mlp_bias": config.mlp_bias,
        "sliding_window": None,
        "use_sliding_window": False,
        "rope_theta": config.rope.theta,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": config.bos_id,
        "eos_token_id": list(config.eos_ids) or None,
    }
    scaling = _rope_scaling(config.rope)
    return fields | ({"rope_scaling": scaling} if scaling else {})


def write_folder(config: ModelConfig, dtype: torch.dtype, folder: Path) -> Path:
    """A folder with that config.json and no weights."""
    (folder / "config.json").write_text(json.dumps(hf_config(config, dtype), indent=1) + "\n")
    return folder


def _rope_scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.rope_type == "default":
        return None
    if rope.rope_type != "llama3":
        raise ValueError(f"rope type must be default or llama3 for a peer to build the model, was {rope.rope_type!r}")
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_position_embeddings,
    }
