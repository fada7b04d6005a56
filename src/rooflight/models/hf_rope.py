"""RoPE settings out of a Hugging Face config, wherever that generation of the format keeps them.

Three places are in use: `rope_theta` at top level with `rope_scaling` (older), both inside `rope_parameters`
(newer), and mixtures. Any of them may be null. What is given twice must agree: a silently dropped base or factor
costs quality without an error (reports: sglang#14745, vllm#48351).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import Any

from rooflight.models.config import ROPE_TYPES, RopeConfig

MAX_FLOAT = sys.float_info.max
DEFAULT_THETA = 10_000.0  # what every supported family means when no base is given

_KEYS = {
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "factor",
    "finetuned",  # says how the model came about, changes nothing
    "high_freq_factor",
    "low_freq_factor",
    "mscale",
    "mscale_all_dim",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "rope_theta",
    "rope_type",
    "truncate",
}
# Keys that also exist outside the rope dictionary.
_TOP_LEVEL = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")


def rope_from_hf(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """The RoPE of a config.json. ValueError for unknown types, unknown keys and contradictions."""
    values = _merged(config)
    rope_type = values.get("rope_type", "default")
    if not isinstance(rope_type, str) or rope_type not in ROPE_TYPES:
        raise ValueError(f"rope_type must be one of {', '.join(ROPE_TYPES)}, was {rope_type!r}")
    theta = number(values, "rope_theta", DEFAULT_THETA)
    partial = number(values, "partial_rotary_factor", 1.0)
    if rope_type == "default":
        return RopeConfig("default", theta, partial)
    if rope_type == "linear":
        return RopeConfig("linear", theta, partial, number(values, "factor"))
    original = int(number(values, "original_max_position_embeddings", max_position_embeddings))
    if rope_type == "llama3":
        return RopeConfig(
            "llama3",
            theta,
            partial,
            number(values, "factor"),
            original,
            low_freq_factor=number(values, "low_freq_factor"),
            high_freq_factor=number(values, "high_freq_factor"),
        )
    factor = number(values, "factor", max_position_embeddings / max(original, 1))
    return RopeConfig(
        "yarn",
        theta,
        partial,
        factor,
        original,
        beta_fast=number(values, "beta_fast", 32.0),
        beta_slow=number(values, "beta_slow", 1.0),
        truncate=bool(values.get("truncate", True)),
        attention_factor=_yarn_attention_factor(values, factor),
    )


def yarn_mscale(factor: float, mscale: float = 1.0) -> float:
    """YaRN's multiplier of cos and sin for a context stretched by `factor` (arXiv 2309.00071, section 3.4)."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _yarn_attention_factor(values: Mapping[str, Any], factor: float) -> float:
    """Given, or the quotient of two mscales where both are given, or the mscale of the factor."""
    if "attention_factor" in values:
        return number(values, "attention_factor")
    mscale, all_dim = number(values, "mscale", 0.0), number(values, "mscale_all_dim", 0.0)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor)


def _merged(config: Mapping[str, Any]) -> dict[str, Any]:
    """One flat dictionary out of all places; nulls are absent; two different values are an error."""
    merged: dict[str, Any] = {}
    origin: dict[str, str] = {}
    sources: list[tuple[str, Mapping[str, Any]]] = [("the config", {key: config.get(key) for key in _TOP_LEVEL})]
    for name in ("rope_parameters", "rope_scaling"):
        sources.extend((name, settings) for settings in _flat_dictionaries(config, name))
    for source, settings in sources:
        for key, value in settings.items():
            key = "rope_type" if key == "type" else key  # the key's name before 2024
            if value is None:
                continue
            if key not in _KEYS:
                raise ValueError(f"{source} has a key that no supported rope type has: {key!r}")
            if key in merged and merged[key] != value:
                raise ValueError(f"{key} is {merged[key]!r} in {origin[key]} but {value!r} in {source}")
            merged[key], origin[key] = value, source
    return merged


def _flat_dictionaries(config: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """The rope dictionary under `name`: none, itself, or (nested by layer type) each of its parts."""
    settings = config.get(name)
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        raise ValueError(f"{name} must be a dictionary or null, was {settings!r}")
    nested = [value for value in settings.values() if isinstance(value, Mapping)]
    return nested if nested and len(nested) == len(settings) else [settings]


def number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The value of `key` as a float; absent and null are the default, or an error without one."""
    value = values.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= MAX_FLOAT:
        raise ValueError(f"{key} must be a finite number, was {value!r}")
    return float(value)
