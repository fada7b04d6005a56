"""The step between the QKV projection and attention, as one operator.

For every token: Q and K heads are normalised (RMSNorm over head_dim; optional, Qwen3 has it), turned by RoPE, K and V
go straight to their physical slot in the paged cache and Q stays in the packed buffer for attention. FP32 from load
to store, so Q and K are rounded once, not three times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rooflight.ops import checks
from rooflight.ops.checks import wide
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.rope import ROPE, check_table, look_up, packed_heads, rotate, table


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
    *,
    interleaved: bool = False,
    backend: str | None = None,
) -> None:
    """Normalise and rotate q in place; write k (normalised, rotated) and v to their cache slots.

    q: (num_tokens, num_heads, head_dim); k, v: (num_tokens, num_kv_heads, head_dim), usually views of one qkv buffer.
    q_weight, k_weight: (head_dim,) or both None for models without Q/K norm. cos_sin, positions: as in `rope`.
    slots: (num_tokens,) int64, page * page_size + offset, each at most once; -1 writes nothing (a padded row).
    k_cache, v_cache: (num_pages, num_kv_heads, page_size, head_dim). k and v are not changed. No gradient.
    """
    operator = QK_NORM_ROPE_CACHE_.overload(q, backend)
    operator(q, k, v, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache, eps, interleaved)


def check_step(
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
) -> None:
    """Everything but that q can be written."""
    checks.is_float("q", q)
    checks.has_shape("q", q, None, None, None)
    tokens, _, head_dim = q.shape
    checks.has_shape("k", k, tokens, None, head_dim)
    checks.same_shape("v", v, k)
    if (q_weight is None) != (k_weight is None):
        checks.fail("k_weight", "be given together with q_weight or not at all", "only one of the two")
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is not None:
            checks.is_float(name, weight)
            checks.has_shape(name, weight, head_dim)
            checks.same_device(name, weight, q)
    check_table(q, cos_sin, positions)
    checks.has_dtype("slots", slots, torch.int64)
    checks.has_shape("slots", slots, tokens)
    checks.has_shape("k_cache", k_cache, None, k.shape[1], None, head_dim)
    checks.same_shape("v_cache", v_cache, k_cache)
    for name, tensor in (("k", k), ("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        checks.same_dtype(name, tensor, q)
        checks.same_device(name, tensor, q)
    for name, tensor in (("cos_sin", cos_sin), ("positions", positions), ("slots", slots)):
        checks.same_device(name, tensor, q)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.no_overlap(name, tensor)


def _check(q: torch.Tensor, *rest: Any) -> None:
    check_step(q, *rest[:9])
    checks.no_overlap("q", q)


def _head_norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    if weight is None:
        return x
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(x.dtype)


def _reference(
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
    # Q and K turn by the same angles: one rotation of (num_tokens, num_heads + num_kv_heads, head_dim).
    heads = torch.cat((_head_norm(wide(q), q_weight, eps), _head_norm(wide(k), k_weight, eps)), 1)
    heads = rotate(heads, *look_up(cos_sin, positions, heads.dtype), interleaved)
    q.copy_(heads[:, : q.shape[1]])
    write_slots(k_cache, v_cache, slots, heads[:, q.shape[1] :].to(k.dtype), v)


def write_slots(
    k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> None:
    """Write k, v (num_tokens, num_kv_heads, head_dim) to their slots; -1 is left out, never the last slot."""
    page_size = k_cache.shape[2]
    where = slots.tolist()
    if len(where) == 1 and where[0] >= 0:  # batch-1 decode: two plain copies instead of two scatters
        page, offset = divmod(where[0], page_size)
        k_cache[page, :, offset].copy_(k[0])
        v_cache[page, :, offset].copy_(v[0])
        return
    if where and min(where) < 0:
        used = slots >= 0
        k, v, slots = k[used], v[used], slots[used]
    pages, offsets = slots // page_size, slots % page_size
    k_cache[pages, :, offsets] = k
    v_cache[pages, :, offsets] = v


def _composition(
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
    eps: float,
    interleaved: bool,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The parts one after the other: F.rms_norm, complex rotation, a loop of single writes."""
    if q_weight is not None and k_weight is not None:
        q = F.rms_norm(q.to(compute), q.shape[-1:], q_weight.to(compute), eps)
        k = F.rms_norm(k.to(compute), k.shape[-1:], k_weight.to(compute), eps)
    q, k = ROPE.composition(q, k, cos_sin, positions, interleaved, compute=compute)
    caches = k_cache.to(compute, copy=True), v_cache.to(compute, copy=True)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            page, offset = divmod(slot, k_cache.shape[2])
            for cache, rows in zip(caches, (k, v), strict=True):
                cache[page, :, offset] = rows[token].to(compute)
    return q, *caches


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    q, k, cos_sin, positions = args["q"], args["k"], args["cos_sin"], args["positions"]
    heads = (q.numel() + 2 * k.numel()) * q.element_size()
    weights = 0 if args["q_weight"] is None else 2 * args["q_weight"].numel() * args["q_weight"].element_size()
    per_token = cos_sin.shape[1] * 4 + positions.element_size() + 8
    rotation = 3 * (q.shape[1] + k.shape[1]) * q.shape[0] * cos_sin.shape[1]
    norm = 0 if args["q_weight"] is None else 4 * (q.numel() + k.numel())
    return Cost(heads + weights + q.shape[0] * per_token, heads, rotation + norm)


def _inputs(
    make: Make,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    norm: bool = True,
    rotary_dim: int | None = None,
    interleaved: bool = False,
    page_size: int = 16,
) -> Args:
    generator = make.generator()
    num_pages = num_tokens // page_size + 2
    slots = torch.randperm(num_pages * page_size, generator=generator)[:num_tokens]
    slots[1::5] = -1  # padded rows
    positions = torch.randint(50, (num_tokens,), generator=generator)
    q_weight, k_weight = (make.randn(head_dim, salt=salt) if norm else None for salt in (4, 5))
    k_cache, v_cache = (make.randn(num_pages, num_kv_heads, page_size, head_dim, salt=salt) for salt in (6, 7))
    q, k, v = packed_heads(make, num_tokens, num_heads, num_kv_heads, head_dim)
    cos_sin = table(make, 50, rotary_dim or head_dim)
    positions, slots = positions.to(make.device), slots.to(make.device)
    return q, k, v, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache, 1e-6, interleaved


QK_NORM_ROPE_CACHE_ = define(
    "qk_norm_rope_cache_",
    "(Tensor(a!) q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, Tensor cos_sin, Tensor positions, "
    "Tensor slots, Tensor(b!) k_cache, Tensor(c!) v_cache, float eps=1e-6, bool interleaved=False) -> ()",
    reference=_reference,
    fake=lambda *args: None,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    capturable_reference=False,
    sweep=[{"num_tokens": n, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64} for n in (0, 1, 33)]
    + [
        {"num_tokens": 7, "num_heads": h, "num_kv_heads": kv, "head_dim": d, "norm": norm, "rotary_dim": r}
        for h, kv, d, norm, r in (
            (3, 1, 80, True, 32),
            (2, 2, 128, False, 128),
            (4, 1, 256, True, 256),
            (14, 2, 64, False, 64),
        )
    ],
    workloads={
        f"qwen3-0.6b {n}": {"num_tokens": n, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128} for n in (1, 32, 1024)
    },
)
