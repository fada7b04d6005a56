"""Decode attention with the step before it in Triton: the two kernels, one after the other."""

from __future__ import annotations

from typing import Any

import torch

from rooflight.kernels.triton.attend import checked_group
from rooflight.kernels.triton.decode_attention import decode_attention
from rooflight.kernels.triton.qk_norm_rope_cache import qk_norm_rope_cache_
from rooflight.ops.qk_norm_rope_attention import QK_NORM_ROPE_ATTENTION_, in_two


def qk_norm_rope_attention_(out: torch.Tensor, *rest: Any) -> None:
    # What the second kernel cannot read is refused before the first has written.
    given = QK_NORM_ROPE_ATTENTION_.bind(out, *rest)
    checked_group(*(given[name] for name in ("q", "k_cache", "v_cache", "block_table")))
    in_two(qk_norm_rope_cache_, decode_attention, out, *rest)
