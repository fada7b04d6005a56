"""The step between the QKV projection and attention in Triton: the kernel of `rope`, which also normalises and writes
K and V to their slots."""

from __future__ import annotations

import torch

from rooflight.kernels.triton.rope import launch


def qk_norm_rope_cache_(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    eps: float = 1e-6,
    interleaved: bool = False,
) -> None:
    weights = None if q_weight is None or k_weight is None else (q_weight, k_weight)
    launch(q, k, q, k_cache, cos_sin, positions, interleaved, v, v_cache, slots, weights, eps)
