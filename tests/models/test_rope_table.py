"""The RoPE table against transformers' frequencies and against FP64."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from rooflight.models.config import RopeConfig
from rooflight.models.hf_config import from_hf_config
from rooflight.models.rope_table import inverse_frequencies, rope_table
from tests.models import tiny

POSITIONS = 128  # beyond that transformers' own FP32 frequencies are off by more than the bound


def config_of(rope: dict[str, Any], **overrides: Any) -> Any:
    settings = tiny.SHAPE | {"head_dim": 64, "max_position_embeddings": 4096} | overrides
    return transformers.LlamaConfig(**settings, rope_parameters=dict(rope))


def reference_table(config: Any) -> torch.Tensor:
    """transformers' frequencies and factor, multiplied out in FP64."""
    function = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
    frequencies, factor = function(config, device="cpu")
    angles = torch.outer(torch.arange(POSITIONS).double(), frequencies.double())
    return torch.cat([angles.cos(), angles.sin()], dim=1) * factor


def our_rope(config: Any) -> RopeConfig:
    return from_hf_config(config.to_dict() | {"architectures": ["LlamaForCausalLM"]}).rope


CASES: dict[str, tuple[dict[str, Any], float]] = {
    "linear": ({"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}, 1.0),
    "llama3": (
        {
            "rope_type": "llama3",
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 2048,
            "rope_theta": 5e5,
        },
        1.0,
    ),
    "yarn, factor 64, attention_factor 1": ({"rope_type": "yarn", "factor": 64.0, "attention_factor": 1.0}, 1.0),
    "yarn, mscale = mscale_all_dim": ({"rope_type": "yarn", "factor": 16.0, "mscale": 1, "mscale_all_dim": 1}, 1.0),
    "yarn": ({"rope_type": "yarn", "factor": 4.0}, 0.1 * math.log(4) + 1),
    "yarn, only mscale": ({"rope_type": "yarn", "factor": 4.0, "mscale": 2.0}, 0.1 * math.log(4) + 1),
    "yarn, both mscales": (
        {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 1.2},
        (0.0707 * math.log(40) + 1) / (0.12 * math.log(40) + 1),
    ),
    "yarn, betas, untruncated": (
        {"rope_type": "yarn", "factor": 8.0, "beta_fast": 20, "beta_slow": 3, "truncate": False},
        0.1 * math.log(8) + 1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_br_037_table_equals_transformers(name: str) -> None:
    settings, factor = CASES[name]
    if settings["rope_type"] == "yarn":
        settings = settings | {"original_max_position_embeddings": 1024, "rope_theta": 1e6}
    config = config_of(settings)
    rope = our_rope(config)
    assert rope.attention_factor == pytest.approx(factor, abs=1e-12)
    table = rope_table(rope, 64, POSITIONS)
    assert table.dtype == torch.float32
    assert (table.double() - reference_table(config)).abs().max() < 1e-5
    assert torch.equal(table[0, :32], torch.full((32,), rope.attention_factor))
    assert torch.equal(table[0, 32:], torch.zeros(32))


@pytest.mark.parametrize("theta", [1e4, 1e6])
def test_default_table_is_exact_to_fp32_rounding_at_every_position(theta: float) -> None:
    table = rope_table(RopeConfig(theta=theta), 128, 40_960)
    angles = torch.outer(torch.arange(40_960).double(), theta ** -(torch.arange(0, 128, 2).double() / 128))
    assert (table.double() - torch.cat([angles.cos(), angles.sin()], dim=1)).abs().max() < 6.1e-8


@given(
    factor=st.floats(1.0, 128.0),
    theta=st.sampled_from([1e4, 5e5, 1e6]),
    original=st.sampled_from([64, 1024, 8192, 32_768]),
    betas=st.tuples(st.integers(8, 64), st.integers(1, 7)),
    truncate=st.booleans(),
    head_dim=st.sampled_from([16, 64, 80, 128]),
)
def test_yarn_frequencies_equal_transformers(
    factor: float, theta: float, original: int, betas: tuple[int, int], truncate: bool, head_dim: int
) -> None:
    config = config_of(
        {
            "rope_type": "yarn",
            "factor": factor,
            "rope_theta": theta,
            "original_max_position_embeddings": original,
            "beta_fast": betas[0],
            "beta_slow": betas[1],
            "truncate": truncate,
        },
        head_dim=head_dim,
    )
    expected, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    rope = our_rope(config)
    assert rope.attention_factor == pytest.approx(attention_factor, rel=1e-12)
    # transformers blends in FP32, with an error relative to the frequency before scaling: it is the larger part.
    unscaled = theta ** -(torch.arange(0, head_dim, 2).double() / head_dim)
    assert bool(((inverse_frequencies(rope, head_dim) - expected.double()).abs() <= 1e-5 * unscaled).all())


@given(
    factor=st.floats(1.0, 64.0),
    low=st.floats(0.5, 2.0),
    width=st.floats(0.5, 6.0),
    original=st.sampled_from([128, 8192]),
)
def test_llama3_frequencies_equal_transformers(factor: float, low: float, width: float, original: int) -> None:
    config = config_of(
        {
            "rope_type": "llama3",
            "factor": factor,
            "rope_theta": 5e5,
            "low_freq_factor": low,
            "high_freq_factor": low + width,
            "original_max_position_embeddings": original,
        }
    )
    expected, _ = ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    unscaled = 5e5 ** -(torch.arange(0, 64, 2).double() / 64)
    assert bool(((inverse_frequencies(our_rope(config), 64) - expected.double()).abs() <= 1e-5 * unscaled).all())


def test_frequency_divisors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(), 8)
    divided = inverse_frequencies(RopeConfig(frequency_divisors=(1.0, 2.0, 4.0, 8.0)), 8)
    assert torch.equal(divided * torch.tensor([1.0, 2.0, 4.0, 8.0]), plain)


def test_meta_table_has_a_shape_and_no_memory() -> None:
    table = rope_table(RopeConfig(partial_rotary_factor=0.25), 80, 1 << 40, "meta")
    assert (table.is_meta, table.shape, table.dtype) == (True, (1 << 40, 20), torch.float32)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope_type": "dynamic"}, r"rope type must be one of default, linear, llama3, yarn, was 'dynamic'"),
        ({"theta": 0.0}, r"rope theta must be finite and greater than 0, was 0.0"),
        ({"rope_type": "yarn", "theta": 1.0}, r"rope theta must be greater than 1 for yarn, was 1.0"),
        ({"factor": math.inf}, r"rope factor must be finite"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor must be in \(0, 1\], was 1.5"),
        ({"rope_type": "yarn"}, r"original_max_position_embeddings must be at least 1, was 0"),
        (
            {"rope_type": "llama3", "original_max_position_embeddings": 8, "high_freq_factor": 1.0},
            r"low_freq_factor must be positive and below high_freq_factor, were 1.0 and 1.0",
        ),
    ],
)
def test_senseless_rope_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeConfig(**settings)


def test_zero_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="max_positions must be at least 1, was 0"):
        rope_table(RopeConfig(), 64, 0)
