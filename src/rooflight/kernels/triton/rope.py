"""Rotary position embedding in Triton, alone and as one step with Q/K norm and the write into the paged cache.

A program has some heads of one token, whose elements it has all read before it writes one, so that q may be turned in
place. FP32 between load and store, one rounding. Every element moves once; the token's cosines and sines are read again
for each group of heads, from L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import check_dtype, check_last_dimension, check_vector
from rooflight.ops import checks

HEADS = 8  # of a program, at most: each thread then has one load of 16 bytes of each half at 2 bytes an element
INTERPRETED_HEADS = 16  # in the interpreter a program costs milliseconds


@triton.jit  # type: ignore[untyped-decorator]
def _turn(
    x_ptr, out_ptr, weight_ptr, x_head_stride, out_head_stride, head, written, cos, sin, eps,
    NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
):  # fmt: skip
    """Norm and rotation of the heads `head` (heads, 1) of one token, stored where `written`. cos, sin: (1, half)."""
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    first, second = lane, lane + HALF
    if INTERLEAVED:
        first, second = 2 * lane, 2 * lane + 1
    inside = lane < HALF
    x_ptr += head * x_head_stride
    out_ptr += head * out_head_stride
    a = tl.load(x_ptr + first, mask=written & inside, other=0.0).to(tl.float32)
    b = tl.load(x_ptr + second, mask=written & inside, other=0.0).to(tl.float32)
    if HEAD_DIM > 2 * HALF:
        last = 2 * HALF + tl.arange(0, BLOCK_REST)[None, :]
        rest = tl.load(x_ptr + last, mask=written & (last < HEAD_DIM), other=0.0)
    if NORM:
        squares = tl.sum(a * a, 1) + tl.sum(b * b, 1)
        if HEAD_DIM > 2 * HALF:
            squares += tl.sum(rest.to(tl.float32) * rest.to(tl.float32), 1)
        inverse = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        a *= inverse * tl.load(weight_ptr + first, mask=inside, other=0.0).to(tl.float32)
        b *= inverse * tl.load(weight_ptr + second, mask=inside, other=0.0).to(tl.float32)
    tl.debug_barrier()  # in place: other threads may have read what this one overwrites
    tl.store(out_ptr + first, (a * cos - b * sin).to(out_ptr.dtype.element_ty), mask=written & inside)
    tl.store(out_ptr + second, (b * cos + a * sin).to(out_ptr.dtype.element_ty), mask=written & inside)
    if HEAD_DIM > 2 * HALF:
        if NORM:
            weight = tl.load(weight_ptr + last, mask=last < HEAD_DIM, other=0.0).to(tl.float32)
            rest = (rest.to(tl.float32) * (inverse * weight)).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + last, rest, mask=written & (last < HEAD_DIM))


# Parts of the runner's buffers come at any alignment, which makes no new kernel.
VARYING = ["positions_ptr", "slots_ptr", "positions_stride", "slots_stride"]


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _rope(
    q_ptr, k_ptr, v_ptr, q_out_ptr, k_out_ptr, v_out_ptr, q_weight_ptr, k_weight_ptr,
    table_ptr, positions_ptr, slots_ptr,
    q_stride, q_head_stride, k_stride, k_head_stride, v_stride, v_head_stride,
    q_out_stride, q_out_head_stride, k_out_stride, k_out_head_stride, k_slot_stride,
    v_out_stride, v_out_head_stride, v_slot_stride, table_stride, positions_stride, slots_stride, eps,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr,
    PAGE_SIZE: tl.constexpr, NORM: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """HEADS heads of one token, of q or of k. With PAGE_SIZE k_out and v_out are the caches, their stride that of a
    page, and v is copied beside k; with 0 they are rows like q_out and v is not touched."""
    token = tl.program_id(0).to(tl.int64)  # 64 bits: times a stride it passes 2^31
    position = tl.load(positions_ptr + token * positions_stride).to(tl.int64)
    lane = tl.arange(0, BLOCK_HALF)[None, :]
    table_ptr += position * table_stride
    cos = tl.load(table_ptr + lane, mask=lane < HALF, other=0.0)
    sin = tl.load(table_ptr + HALF + lane, mask=lane < HALF, other=0.0)
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    block = tl.program_id(1)
    head = tl.arange(0, HEADS)[:, None]
    if block < q_blocks:
        head += block * HEADS
        _turn(
            q_ptr + token * q_stride, q_out_ptr + token * q_out_stride, q_weight_ptr, q_head_stride, q_out_head_stride,
            head, head < Q_HEADS, cos, sin, eps, NORM, INTERLEAVED, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip
    else:
        head += (block - q_blocks) * HEADS
        written = head < KV_HEADS
        place = token
        if PAGE_SIZE:
            slot = tl.load(slots_ptr + token * slots_stride)
            written = head < tl.where(slot >= 0, KV_HEADS, 0)  # no head of a padded row
            place = slot // PAGE_SIZE
            k_out_ptr += slot % PAGE_SIZE * k_slot_stride
            v_out_ptr += place * v_out_stride + slot % PAGE_SIZE * v_slot_stride
            column = tl.arange(0, BLOCK_D)[None, :]
            inside = written & (column < HEAD_DIM)
            v = tl.load(v_ptr + token * v_stride + head * v_head_stride + column, mask=inside)
            tl.store(v_out_ptr + head * v_out_head_stride + column, v, mask=inside)
        _turn(
            k_ptr + token * k_stride, k_out_ptr + place * k_out_stride, k_weight_ptr, k_head_stride, k_out_head_stride,
            head, written, cos, sin, eps, NORM, INTERLEAVED, HEAD_DIM, HALF, BLOCK_HALF, BLOCK_REST,
        )  # fmt: skip


def rope(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    q_out, k_out = q.new_empty(q.shape), k.new_empty(k.shape)
    launch(q, k, q_out, k_out, cos_sin, positions, interleaved)
    return q_out, k_out


def rope_(
    q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor, interleaved: bool = False
) -> None:
    if q.data_ptr() == k.data_ptr() and q.shape == k.shape and q.stride() == k.stride():
        k = k[:, :0]  # the very same heads, to be turned once
    checks.not_the_same("k", k, "q", q)
    launch(q, k, q, k, cos_sin, positions, interleaved)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    q_out: torch.Tensor,
    k_out: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    v: torch.Tensor | None = None,
    v_out: torch.Tensor | None = None,
    slots: torch.Tensor | None = None,
    weights: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> None:
    """With v, v_out and slots, all or none, k_out and v_out are caches."""
    check_dtype("q", q)
    named = {"q": q, "k": k, "cos_sin": cos_sin} | ({} if v is None else {"v": v})
    named |= {} if v_out is None else {"k_cache": k_out, "v_cache": v_out}
    for name, tensor in named.items():
        check_last_dimension(name, tensor)
    for name, weight in zip(("q_weight", "k_weight"), weights or (), strict=False):
        check_vector(name, weight)
    num_tokens, num_heads, head_dim = q.shape
    if num_tokens == 0 or head_dim == 0:  # an empty grid is a launch error
        return
    num_kv_heads, half = k.shape[1], cos_sin.shape[1] // 2
    most = HEADS if q.is_cuda else INTERPRETED_HEADS
    heads = min(most, triton.next_power_of_2(max(num_heads, num_kv_heads, 1)))
    blocks = triton.cdiv(num_heads, heads) + triton.cdiv(num_kv_heads, heads)
    block_half, block_d = triton.next_power_of_2(max(half, 1)), triton.next_power_of_2(head_dim)
    k_places = k_out.stride() if v_out is not None else (*k_out.stride()[:2], 0)
    v_places = v_out.stride()[:3] if v_out is not None else (0, 0, 0)
    q_weight, k_weight = weights or (q, q)
    with torch.cuda.device_of(q):  # Triton launches on the current device, whatever the tensors say
        _rope[(num_tokens, blocks)](
            q, k, k if v is None else v, q_out, k_out, k_out if v_out is None else v_out, q_weight, k_weight,
            cos_sin, positions, positions if slots is None else slots,
            *q.stride()[:2], *k.stride()[:2], *(k if v is None else v).stride()[:2], *q_out.stride()[:2],
            *k_places[:3], *v_places, cos_sin.stride(0), positions.stride(0), 0 if slots is None else slots.stride(0),
            eps, Q_HEADS=num_heads, KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, HALF=half,
            PAGE_SIZE=0 if slots is None else k_out.shape[2], NORM=weights is not None, INTERLEAVED=interleaved,
            HEADS=heads, BLOCK_HALF=block_half, BLOCK_REST=triton.next_power_of_2(max(head_dim - 2 * half, 1)),
            BLOCK_D=block_d, num_warps=max(1, min(8, heads * block_half // 256)),
        )  # fmt: skip
