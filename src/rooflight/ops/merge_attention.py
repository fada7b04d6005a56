"""The exact merge of two attention results over disjoint keys: split decode, prefix + chunk, ring attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.checks import wide
from rooflight.ops.contract import Args, Cost, Make, define


def merge_attention(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The exact attention over the union of two disjoint sets of keys, from the results over each.

    out: (num_tokens, num_heads, head_dim), lse: (num_tokens, num_heads) FP32. A part with LSE -inf leaves the other
    unchanged, bit for bit. Returns (out, lse). No gradient.
    """
    return MERGE_ATTENTION.overload(out_a, backend)(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]


def _check(out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor) -> None:
    checks.is_float("out_a", out_a)
    checks.has_shape("out_a", out_a, None, None, None)
    checks.same_shape("out_b", out_b, out_a)
    checks.same_dtype("out_b", out_b, out_a)
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        checks.has_dtype(name, lse, torch.float64 if out_a.dtype == torch.float64 else torch.float32)
        checks.has_shape(name, lse, *out_a.shape[:2])
    for name, tensor in (("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        checks.same_device(name, tensor, out_a)


def _reference(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    peak = torch.maximum(lse_a, lse_b)
    peak = peak.masked_fill(peak == float("-inf"), 0)
    share_a, share_b = (torch.exp(part - peak) for part in (lse_a, lse_b))
    total = share_a + share_b
    lse = peak + total.log()
    parts = wide(out_a) * share_a.unsqueeze(-1) + wide(out_b) * share_b.unsqueeze(-1)
    out = (parts / total.unsqueeze(-1)).to(out_a.dtype)
    # Chosen, not multiplied by zero: the empty part may hold anything.
    empty_a, empty_b = ((part == float("-inf")).unsqueeze(-1) for part in (lse_a, lse_b))
    out = torch.where(empty_a, out_b.masked_fill(empty_b, 0), torch.where(empty_b, out_a, out))
    return out.contiguous(), lse.contiguous()


def _composition(
    out_a: torch.Tensor,
    lse_a: torch.Tensor,
    out_b: torch.Tensor,
    lse_b: torch.Tensor,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    lse = torch.stack((lse_a, lse_b)).to(compute)
    parts = torch.stack((out_a, out_b)).to(compute)
    shares = torch.nan_to_num(torch.softmax(lse, 0)).unsqueeze(-1)  # both empty: 0 and 0
    parts = torch.where(lse.unsqueeze(-1) == float("-inf"), 0, parts)
    return (parts * shares).sum(0), torch.logsumexp(lse, 0)


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    out, lse = args["out_a"], args["lse_a"]
    one = out.numel() * out.element_size() + lse.numel() * lse.element_size()
    return Cost(2 * one, one, 3 * out.numel())


def _inputs(make: Make, num_tokens: int, num_heads: int, head_dim: int) -> Args:
    accumulate = torch.float64 if make.dtype == torch.float64 else torch.float32
    args: list[torch.Tensor] = []
    for salt in (1, 3):
        out = make.randn(num_tokens, num_heads, head_dim, salt=salt)
        lse = make.randn(num_tokens, num_heads, scale=3, salt=salt + 1).to(accumulate)
        empty = slice(salt % 2, None, 3)
        out[empty], lse[empty] = 0, float("-inf")
        args += [out, lse]
    return tuple(args)


MERGE_ATTENTION = define(
    "merge_attention",
    "(Tensor out_a, Tensor lse_a, Tensor out_b, Tensor lse_b) -> (Tensor, Tensor)",
    reference=_reference,
    fake=lambda out_a, lse_a, out_b, lse_b: (out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)),
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    sweep=[{"num_tokens": n, "num_heads": 4, "head_dim": 64} for n in (0, 1, 33)]
    + [{"num_tokens": 7, "num_heads": 3, "head_dim": d} for d in (1, 7, 80, 256)],
    workloads={f"qwen3-0.6b {n}": {"num_tokens": n, "num_heads": 16, "head_dim": 128} for n in (1, 32, 1024)},
)
