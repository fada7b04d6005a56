"""Tiny checkpoints made on the spot, caches for them, and the reference they are compared with.

The reference is transformers: its classes draw the weights with a fixed seed and write the files, so that neither
the names, the shapes nor the formats are ours.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
import transformers

from rooflight.models.config import ModelConfig
from rooflight.models.decoder import Decoder
from rooflight.ops import AttentionMeta

transformers.utils.logging.disable_progress_bar()
transformers.utils.logging.set_verbosity_error()

SHAPE: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CLASSES = {
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
}
# What each family has beside the plain decoder.
EXTRAS: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32, "attention_bias": True},
    "qwen2": {},
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"head_dim": 32, "sliding_window": 24},
}


def reference_model(family: str, *, seed: int = 0, **overrides: Any) -> Any:
    """A tiny transformers model in FP32: biases and norms random too, so that none of them can be dropped unseen."""
    config_class, model_class = CLASSES[family]
    settings = SHAPE | EXTRAS[family] | overrides
    torch.manual_seed(seed)
    model = model_class(config_class(**settings)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.5 if name.endswith("bias") else parameter.shape[-1] ** -0.5)
    return model


def save(model: Any, folder: Path, **kwargs: Any) -> Path:
    model.save_pretrained(folder, **kwargs)
    return folder


def edit_config(folder: Path, *, remove: Sequence[str] = (), **changes: Any) -> Path:
    """Rewrites keys of the folder's config.json."""
    path = folder / "config.json"
    config = {key: value for key, value in json.loads(path.read_text()).items() if key not in remove}
    path.write_text(json.dumps(config | changes))
    return folder


def prompt(length: int, *, vocab_size: int = 1000, seed: int = 1) -> torch.Tensor:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def reference_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """(tokens, vocabulary) FP32 of one sequence."""
    logits: torch.Tensor = model(ids[None]).logits[0].float()
    return logits


@dataclass
class Paged:
    """Caches and block tables for `num_seqs` sequences of up to `capacity` tokens, pages deliberately out of order.

    Unused slots hold NaN: attention that reads one shows it.
    """

    config: ModelConfig
    num_seqs: int
    capacity: int
    page_size: int = 16
    dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        per_seq = -(-self.capacity // self.page_size)
        num_pages = per_seq * self.num_seqs
        shape = (num_pages, self.config.num_kv_heads, self.page_size, self.config.head_dim)
        self.caches = [
            (torch.full(shape, torch.nan, dtype=self.dtype), torch.full(shape, torch.nan, dtype=self.dtype))
            for _ in range(self.config.num_layers)
        ]
        order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(7))
        self.block_table = order.view(self.num_seqs, per_seq).to(torch.int32)
        self.lengths = [0] * self.num_seqs

    def step(self, counts: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, AttentionMeta]:
        """(positions, slots, meta) for `counts[s]` new tokens of each sequence; advances the lengths."""
        positions, slots = [], []
        for seq, count in enumerate(counts):
            new = torch.arange(self.lengths[seq], self.lengths[seq] + count)
            pages = self.block_table[seq][new // self.page_size].long()
            positions.append(new)
            slots.append(pages * self.page_size + new % self.page_size)
            self.lengths[seq] += count
        starts = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        meta = AttentionMeta(self.block_table, lengths, starts, max(counts), max(self.lengths))
        return torch.cat(positions), torch.cat(slots), meta


@torch.inference_mode()
def decoder_logits(decoder: Decoder, ids: torch.Tensor, chunks: Sequence[int] | None = None) -> torch.Tensor:
    """Teacher-forced logits (tokens, vocabulary) of one sequence, prefilled whole or in `chunks`.

    A chunk of 1 that is not the first goes through decode attention.
    """
    paged = Paged(decoder.config, 1, len(ids), dtype=decoder.embed.dtype)
    parts = []
    done = 0
    for count in chunks or [len(ids)]:
        positions, slots, meta = paged.step([count])
        decode = count == 1 and done > 0
        hidden = decoder(ids[done : done + count], positions, paged.caches, slots, meta, decode)
        parts.append(decoder.logits(hidden))
        done += count
    return torch.cat(parts)


def chunks_of(length: int, size: int) -> list[int]:
    return [min(size, length - start) for start in range(0, length, size)]


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude; NaN counts as infinite."""
    error = float((actual - expected).abs().max() / expected.abs().max())
    return error if error == error else float("inf")


GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    if stem.startswith("model.layers."):
        index, _, rest = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{index}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def pair_rows(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Row order of llama.cpp's converter for Llama q and k: each head's halves become neighbouring pairs."""
    halves = rows.reshape(num_heads, 2, rows.shape[0] // num_heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape)


def write_gguf(
    model: Any,
    path: Path,
    type_name: str = "F32",
    *,
    metadata: Mapping[str, Any] | None = None,
    extra: Mapping[str, np.ndarray] | None = None,
    skip: Sequence[str] = (),
) -> Path:
    """Writes a transformers model as GGUF: matrices as `type_name`, vectors as F32, Llama's q and k in pairs.

    `metadata` adds keys or replaces them (None leaves one out); `extra` adds F32 tensors; `skip` leaves some out.
    """
    config = model.config
    arch = {"mistral": "llama"}.get(config.model_type, config.model_type)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    values: dict[str, Any] = {
        f"{arch}.block_count": config.num_hidden_layers,
        f"{arch}.context_length": config.max_position_embeddings,
        f"{arch}.embedding_length": config.hidden_size,
        f"{arch}.feed_forward_length": config.intermediate_size,
        f"{arch}.attention.head_count": config.num_attention_heads,
        f"{arch}.attention.head_count_kv": config.num_key_value_heads,
        f"{arch}.attention.key_length": head_dim,
        f"{arch}.attention.value_length": head_dim,
        f"{arch}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{arch}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        "tokenizer.ggml.tokens": [f"t{i}" for i in range(config.vocab_size)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    if getattr(config, "sliding_window", None):
        values[f"{arch}.attention.sliding_window"] = config.sliding_window
    values |= metadata or {}
    writer = gguf.GGUFWriter(path, values.pop("general.architecture", arch))
    for key, value in values.items():
        if value is not None:
            _add_value(writer, key, value)
    for name, tensor in model.state_dict().items():
        if name in skip or (name == "lm_head.weight" and config.tie_word_embeddings):
            continue
        rows = tensor.float().numpy()
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            rows = pair_rows(rows, heads)
        kind = gguf.GGMLQuantizationType[type_name if rows.ndim == 2 else "F32"]
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(rows, kind), raw_dtype=kind)
    for name, rows in (extra or {}).items():
        writer.add_tensor(name, rows.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_value(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
