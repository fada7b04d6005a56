"""cos and sin of every position, once, in FP32 from FP64 angles.

    angle[p, i] = p * f[i],  f[i] = theta^(-2i / rotary_dim), scaled as the rope type says
    table[p] = attention_factor * [cos(angle[p]) | sin(angle[p])]

FP64 because a half-precision or even FP32 angle loses the fraction that cos needs: at position 40,959 an FP32
angle is off by 2e-3 (reports: gpt-neox#1003, sglang-jax#1472). The scalings follow the published definitions:
position interpolation (arXiv 2306.15595) for linear, NTK-by-parts (arXiv 2309.00071) for YaRN, and Llama 3.1's.
"""

from __future__ import annotations

import math

import torch

from rooflight.models.config import RopeConfig

_ROWS_AT_ONCE = 8192  # keeps the FP64 intermediates small beside the table


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """(rotary_dim / 2) FP64, radians per position, scaled as `rope` says."""
    rotary_dim = rope.rotary_dim(head_dim)
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float64, device="cpu") / rotary_dim
    frequencies = rope.theta**-exponents
    if rope.frequency_divisors:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float64, device="cpu")
    if rope.rope_type == "linear":
        return frequencies / rope.factor
    if rope.rope_type == "llama3":
        return _llama3(rope, frequencies)
    if rope.rope_type == "yarn":
        return _yarn(rope, frequencies, rotary_dim)
    return frequencies


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # in the trained context
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0, 1)
    return keep * frequencies + (1 - keep) * frequencies / rope.factor


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """A ramp over the dimensions from frequencies kept (fast) to frequencies interpolated (slow)."""

    def dimension_with(turns: float) -> float:
        """The pair index at which the trained context makes this many turns."""
        reach = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(reach) / (2 * math.log(rope.theta))

    low, high = dimension_with(rope.beta_fast), dimension_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    ramp = (torch.arange(rotary_dim // 2, dtype=torch.float64, device="cpu") - low) / (high - low)
    ramp = ramp.clamp(0, 1)
    return (1 - ramp) * frequencies + ramp * frequencies / rope.factor


def rope_table(
    rope: RopeConfig, head_dim: int, max_positions: int, device: torch.device | str | None = None
) -> torch.Tensor:
    """(max_positions, rotary_dim) FP32 on `device`: cos in the first half of a row, sin in the second."""
    if max_positions < 1:
        raise ValueError(f"max_positions must be at least 1, was {max_positions}")
    target = torch.device(device if device is not None else "cpu")
    rotary_dim = rope.rotary_dim(head_dim)
    if target.type == "meta":
        return torch.empty(max_positions, rotary_dim, dtype=torch.float32, device=target)
    frequencies = inverse_frequencies(rope, head_dim)
    table = torch.empty(max_positions, rotary_dim, dtype=torch.float32, device="cpu")
    for start in range(0, max_positions, _ROWS_AT_ONCE):
        rows = table[start : start + _ROWS_AT_ONCE]
        positions = torch.arange(start, start + rows.shape[0], dtype=torch.float64, device="cpu")
        angles = torch.outer(positions, frequencies)
        rows[:, : rotary_dim // 2] = torch.cos(angles) * rope.attention_factor
        rows[:, rotary_dim // 2 :] = torch.sin(angles) * rope.attention_factor
    return table.to(target)
