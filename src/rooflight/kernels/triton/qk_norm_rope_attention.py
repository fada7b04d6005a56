"""Decode attention with the step before it in Triton: the two kernels, one after the other."""

from __future__ import annotations

from typing import Any

from rooflight.kernels.triton.decode_attention import decode_attention
from rooflight.kernels.triton.qk_norm_rope_cache import qk_norm_rope_cache_
from rooflight.ops.qk_norm_rope_attention import in_two


def qk_norm_rope_attention_(*args: Any) -> None:
    in_two(qk_norm_rope_cache_, decode_attention, *args)
