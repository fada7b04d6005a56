"""From a Hugging Face `config.json` to a `ModelConfig`.

Four architectures, one decoder. Where a key is absent the value is the one that the published definition of that
architecture takes, so that a file means here what it means to its authors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rooflight.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig
from rooflight.models.hf_rope import number, rope_from_hf


@dataclass(frozen=True)
class _Family:
    """How an architecture differs from the plainest one."""

    name: str
    qk_norm: bool = False
    qkv_bias: bool = False  # always there, with no key that says so
    bias_key: bool = False  # `attention_bias`: q, k, v and o
    mlp_bias_key: bool = False
    default_head_dim: int | None = None
    default_sliding_window: int | None = None
    window_is_optional: bool = False  # counts only with `use_sliding_window`


ARCHITECTURES = {
    "Qwen3ForCausalLM": _Family(
        "qwen3",
        qk_norm=True,
        bias_key=True,
        default_head_dim=128,
        default_sliding_window=4096,
        window_is_optional=True,
    ),
    "Qwen2ForCausalLM": _Family("qwen2", qkv_bias=True, default_sliding_window=4096, window_is_optional=True),
    "LlamaForCausalLM": _Family("llama", bias_key=True, mlp_bias_key=True),
    "MistralForCausalLM": _Family("mistral", default_sliding_window=4096),
}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def from_hf_config(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any] | None = None,
    *,
    file_dtype: torch.dtype | None = None,
) -> ModelConfig:
    """The decoder that a `config.json` describes.

    `generation_config` (the file of that name) may add end tokens. `file_dtype` is used where the config names no
    dtype, and float32 where that is None too. ValueError names the key, what it must be and what it was.
    """
    flat = _flattened(config)
    family = _family(flat)
    quantised = flat.get("quantization_config")
    if quantised is not None:
        method = quantised.get("quant_method") if isinstance(quantised, Mapping) else quantised
        raise ValueError(f"quantised Hugging Face checkpoints are not read, this one is {method!r}")
    if flat.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act must be 'silu', was {flat['hidden_act']!r}")
    num_layers = _integer(flat, "num_hidden_layers", at_most=MAX_LAYERS)
    num_heads = _integer(flat, "num_attention_heads")
    max_positions = _integer(flat, "max_position_embeddings")
    attention_bias = family.bias_key and _flag(flat, "attention_bias")
    return ModelConfig(
        family=family.name,
        vocab_size=_integer(flat, "vocab_size"),
        hidden_size=_integer(flat, "hidden_size"),
        intermediate_size=_integer(flat, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_integer(flat, "num_key_value_heads", num_heads),
        head_dim=_head_dim(flat, family),
        max_position_embeddings=max_positions,
        rms_norm_eps=number(flat, "rms_norm_eps", 1e-6),
        rope=rope_from_hf(flat, max_positions),
        tie_word_embeddings=_flag(flat, "tie_word_embeddings"),
        qk_norm=family.qk_norm,
        qkv_bias=family.qkv_bias or attention_bias,
        o_bias=attention_bias,
        mlp_bias=family.mlp_bias_key and _flag(flat, "mlp_bias"),
        sliding_windows=_sliding_windows(flat, family, num_layers),
        dtype=config_dtype(config) or file_dtype or torch.float32,
        bos_id=next(iter(_token_ids(flat, "bos_token_id")), None),
        eos_ids=_eos_ids(flat, generation_config or {}),
    )


def config_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """`dtype`, or its older name `torch_dtype`, at top level or in a text sub-config; None if it has neither."""
    flat = _flattened(config)
    given = {str(flat[key]).removeprefix("torch.") for key in ("dtype", "torch_dtype") if flat.get(key) is not None}
    if len(given) > 1:
        raise ValueError(f"dtype is {flat['dtype']!r} but torch_dtype is {flat['torch_dtype']!r}")
    for name in given:
        if name not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, was {name!r}")
        return _DTYPES[name]
    return None


def _flattened(config: Mapping[str, Any]) -> dict[str, Any]:
    """A text sub-config laid over the top level, so that either may hold a key."""
    text = config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(config)
    top = {key: value for key, value in config.items() if key != "text_config"}
    nested = {key: value for key, value in text.items() if value is not None}
    if not nested.get("architectures") and nested.get("model_type") is not None:
        top.pop("architectures", None)  # the outer class wraps more than the text model
    return top | nested


def _family(config: Mapping[str, Any]) -> _Family:
    names = config.get("architectures") or []
    names = names if isinstance(names, list) else [names]
    for name in names:
        if isinstance(name, str) and name in ARCHITECTURES:
            return ARCHITECTURES[name]
    if not names:  # hand-written and nested configs have only this
        for family in ARCHITECTURES.values():
            if family.name == config.get("model_type"):
                return family
    was = ", ".join(map(str, names)) or config.get("model_type")
    raise ValueError(f"architecture must be one of {', '.join(ARCHITECTURES)}, was {was}")


def _head_dim(config: Mapping[str, Any], family: _Family) -> int:
    """Given, or the family's own, or hidden_size over heads. A null means the last."""
    if "head_dim" not in config and family.default_head_dim is not None:
        return family.default_head_dim
    if config.get("head_dim") is not None:
        return _integer(config, "head_dim")
    hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
    if hidden % heads != 0:
        raise ValueError(
            "hidden_size must be a multiple of num_attention_heads where head_dim is not given, "
            f"were {hidden} and {heads}"
        )
    return hidden // heads


def _sliding_windows(config: Mapping[str, Any], family: _Family, num_layers: int) -> tuple[int, ...]:
    """One window a layer, 0 for full attention. `layer_types` decides where it is given."""
    window = 0
    if not family.window_is_optional or _flag(config, "use_sliding_window"):
        default = family.default_sliding_window
        given = config.get("sliding_window", default) if family.name != "llama" else None
        window = 0 if given is None else _integer({"sliding_window": given}, "sliding_window")
    layer_types = config.get("layer_types")
    if layer_types is None:
        # 28 is the published default of both families that have the key.
        first = _integer(config, "max_window_layers", 28, least=0) if family.window_is_optional else 0
        return tuple(window if index >= first else 0 for index in range(num_layers))
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        raise ValueError(f"layer_types must be a list of {num_layers} entries, was {layer_types!r}")
    known = {"full_attention": 0, "sliding_attention": window}
    for layer_type in layer_types:
        if not isinstance(layer_type, str) or layer_type not in known:
            raise ValueError(f"layer_types may hold {' and '.join(known)}, had {layer_type!r}")
        if layer_type == "sliding_attention" and window == 0:
            raise ValueError("layer_types names sliding_attention, but no sliding_window is in force")
    return tuple(known[layer_type] for layer_type in layer_types)


def _eos_ids(config: Mapping[str, Any], generation_config: Mapping[str, Any]) -> tuple[int, ...]:
    """Every end token of both files, each once: any of them ends an answer."""
    both = (*_token_ids(config, "eos_token_id"), *_token_ids(generation_config, "eos_token_id"))
    return tuple(dict.fromkeys(both))


def _token_ids(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    value = config.get(key)
    values = value if isinstance(value, list | tuple) else [] if value is None else [value]
    for item in values:
        if isinstance(item, bool) or not isinstance(item, int):
            raise ValueError(f"{key} must be a token id or a list of them, was {value!r}")
    return tuple(values)


def _integer(
    config: Mapping[str, Any], key: str, default: int | None = None, *, least: int = 1, at_most: int = MAX_SIZE
) -> int:
    value = config.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= at_most:
        raise ValueError(f"{key} must be an integer from {least} to {at_most}, was {value!r}")
    return value


def _flag(config: Mapping[str, Any], key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key} must be true or false, was {value!r}")
    return bool(value)
