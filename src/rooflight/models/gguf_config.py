"""From the metadata of a GGUF file to a `ModelConfig`.

Biases, the head and the vocabulary are taken from the tensors that are there: GGUF has no keys for them. Mistral
files call themselves `llama`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.models.config import MAX_LAYERS, MAX_SIZE, ModelConfig, RopeConfig
from rooflight.models.hf_rope import DEFAULT_THETA, number, yarn_mscale

ARCHITECTURES = ("llama", "qwen2", "qwen3")
ROPE_FREQS = "rope_freqs.weight"  # divisors of the frequencies: how converters store llama3 scaling


def from_gguf(
    metadata: Mapping[str, Any],
    tensor_shapes: Mapping[str, tuple[int, ...]],
    *,
    dtype: torch.dtype,
    rope_freqs: tuple[float, ...] = (),
) -> ModelConfig:
    """The decoder that a GGUF file describes; `rope_freqs` are the values of that tensor, if the file has it."""
    arch = metadata.get("general.architecture")
    if arch not in ARCHITECTURES:
        raise ValueError(f"general.architecture must be one of {', '.join(ARCHITECTURES)}, was {arch!r}")
    if metadata.get(f"{arch}.expert_count", 0):
        raise ValueError(
            f"{arch}.expert_count must be 0 (no mixture of experts), was {metadata[f'{arch}.expert_count']}"
        )
    values = _Values(metadata, arch)
    num_layers, num_heads = values.integer("block_count", at_most=MAX_LAYERS), values.integer("attention.head_count")
    hidden_size = values.integer("embedding_length")
    head_dim = _head_dim(values, hidden_size, num_heads)
    window = values.integer("attention.sliding_window", 0)

    def has(suffix: str) -> bool:
        return any(name.endswith(suffix) for name in tensor_shapes)

    return ModelConfig(
        family=arch,
        vocab_size=_vocab_size(values, tensor_shapes),
        hidden_size=hidden_size,
        intermediate_size=values.integer("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=values.integer("attention.head_count_kv", num_heads),
        head_dim=head_dim,
        max_position_embeddings=values.integer("context_length"),
        rms_norm_eps=values.number("attention.layer_norm_rms_epsilon"),
        rope=_rope(values, head_dim, rope_freqs),
        tie_word_embeddings="output.weight" not in tensor_shapes,
        qk_norm=arch == "qwen3",
        qkv_bias=arch == "qwen2" or has(".attn_q.bias"),
        o_bias=has(".attn_output.bias"),
        mlp_bias=has(".ffn_down.bias"),
        sliding_windows=(window,) * num_layers,
        dtype=dtype,
        bos_id=_token_id(metadata, "bos"),
        eos_ids=_eos_ids(metadata),
    )


class _Values:
    """Access to one architecture's keys; errors carry the whole key."""

    def __init__(self, metadata: Mapping[str, Any], arch: str) -> None:
        self.metadata, self.arch = metadata, arch

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.arch}.{key}")

    def integer(self, key: str, default: int | None = None, at_most: int = MAX_SIZE) -> int:
        value = self.get(key)
        if isinstance(value, list):  # one entry a layer: fine as long as all layers are alike
            if len(set(value)) != 1:
                raise ValueError(f"{self.arch}.{key} must be the same in all layers, was {value}")
            value = value[0]
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= at_most:
            raise ValueError(f"{self.arch}.{key} must be an integer from 0 to {at_most}, was {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        return number(self.metadata, f"{self.arch}.{key}", default)


def _head_dim(values: _Values, hidden_size: int, num_heads: int) -> int:
    given = values.integer("attention.key_length", 0)
    if values.integer("attention.value_length", given) != given:
        sizes = f"{given} and {values.get('attention.value_length')}"
        raise ValueError(f"{values.arch}.attention key_length and value_length must be the same, were {sizes}")
    if given:
        return given
    if num_heads < 1 or hidden_size % num_heads != 0:
        raise ValueError(
            f"{values.arch}.embedding_length must be a multiple of attention.head_count where attention.key_length "
            f"is not given, were {hidden_size} and {num_heads}"
        )
    return hidden_size // num_heads


def _vocab_size(values: _Values, tensor_shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Rows of the embedding, which may be padded beyond the list of tokens."""
    if len(tensor_shapes.get("token_embd.weight", ())) == 2:
        return tensor_shapes["token_embd.weight"][0]
    tokens = values.metadata.get("tokenizer.ggml.tokens")
    return len(tokens) if isinstance(tokens, list) and tokens else values.integer("vocab_size")


def _eos_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """End of text, of turn and of message: each ends an answer."""
    ids = [_token_id(metadata, kind) for kind in ("eos", "eot", "eom")]
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _token_id(metadata: Mapping[str, Any], kind: str) -> int | None:
    key = f"tokenizer.ggml.{kind}_token_id"
    value = metadata.get(key)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise ValueError(f"{key} must be a token id, was {value!r}")
    return value


def _rope(values: _Values, head_dim: int, rope_freqs: tuple[float, ...]) -> RopeConfig:
    rotary_dim = values.integer("rope.dimension_count", head_dim)
    if values.arch == "llama" and rotary_dim != head_dim:
        # The stored row order pairs dimensions over the whole head, which a partial rotation does not.
        raise ValueError(f"llama.rope.dimension_count must be the head's {head_dim}, was {rotary_dim}")
    theta = values.number("rope.freq_base", DEFAULT_THETA)
    partial = rotary_dim / head_dim
    scaling = values.get("rope.scaling.type") or "none"
    legacy_factor = values.number("rope.scale_linear", 1.0)
    if scaling == "none" and legacy_factor != 1.0:
        return RopeConfig("linear", theta, partial, legacy_factor, frequency_divisors=rope_freqs)
    if scaling == "none":
        return RopeConfig("default", theta, partial, frequency_divisors=rope_freqs)
    factor = values.number("rope.scaling.factor")
    if scaling == "linear":
        return RopeConfig("linear", theta, partial, factor, frequency_divisors=rope_freqs)
    if scaling != "yarn":
        raise ValueError(f"{values.arch}.rope.scaling.type must be none, linear or yarn, was {scaling!r}")
    return RopeConfig(
        "yarn",
        theta,
        partial,
        factor,
        values.integer("rope.scaling.original_context_length", values.integer("context_length")),
        beta_fast=values.number("rope.scaling.yarn_beta_fast", 32.0),
        beta_slow=values.number("rope.scaling.yarn_beta_slow", 1.0),
        attention_factor=_yarn_attention_factor(values, factor),
        frequency_divisors=rope_freqs,
    )


def _yarn_attention_factor(values: _Values, factor: float) -> float:
    """The multiplier of cos and sin. `yarn_attn_factor` is the original model's; `attn_factor` is on top of YaRN's."""
    if values.number("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        was = values.get("rope.scaling.yarn_ext_factor")
        raise ValueError(f"{values.arch}.rope.scaling.yarn_ext_factor must be 1, was {was}")
    if values.get("rope.scaling.yarn_attn_factor") is not None:
        return values.number("rope.scaling.yarn_attn_factor")
    all_dim = values.number("rope.scaling.yarn_log_multiplier", 0.0)
    own = yarn_mscale(factor) / yarn_mscale(factor, all_dim)
    return own * values.number("rope.scaling.attn_factor", 1.0)
