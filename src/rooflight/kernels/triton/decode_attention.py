"""Attention of one new token a sequence in Triton: the keys split over programs, the parts merged by a second kernel.

One program has all query heads of one KV head and one part of a sequence's keys, so that each key and value is read
once. How many parts there may be depends on the batch and the card alone, how long a part is on the length, which is
read on the device: a graph serves every length. A part leaves its three FP32 states in scratch; the merge scales them
to the highest peak, adds and divides once. Where the batch alone fills the card there is one part and no merge.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.attend import LOG2_E, attend, checked_group, finish
from rooflight.kernels.triton.rows import multiprocessors
from rooflight.ops.paged_attention import empty_result, no_lse

MOST_SPLITS = 64  # parts of a sequence
PROGRAMS = 2  # that a multiprocessor should have
INTERPRETED_SPLITS, INTERPRETED_KEYS = 2, 32
# What differs from step to step makes no new kernel, the alignment of a part of the runner's buffers included.
VARYING = ["table_ptr", "lens_ptr", "table_stride", "lens_stride", "num_splits", "window", "scale", "sign"]


@triton.jit  # type: ignore[untyped-decorator]
def _part(length, window, num_splits, WINDOWED: tl.constexpr, BLOCK_N: tl.constexpr):
    """First visible key, the start of the first part and the keys in a part, whole tiles that cover all to length."""
    low = 0
    if WINDOWED:
        low = tl.maximum(length - window, 0)
    begin = low // BLOCK_N * BLOCK_N
    tiles = (length - begin + BLOCK_N - 1) // BLOCK_N
    return low, begin, (tiles + num_splits - 1) // num_splits * BLOCK_N


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _decode(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, out_ptr, lse_ptr, acc_ptr, state_ptr,
    q_stride, q_head_stride, k_page_stride, k_head_stride, k_slot_stride, v_page_stride, v_head_stride, v_slot_stride,
    table_stride, lens_stride, num_splits, window, scale, sign,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, LSE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """One part of the keys of one sequence and KV head; scale and sign as in prefill. WHOLE: there are no others.

    Else acc (num_seqs, num_heads, num_splits, HEAD_DIM) and state (…, 2), total and peak, take the result. A part
    without keys writes nothing.
    """
    split = tl.program_id(0) % num_splits
    kv_head = (tl.program_id(0) // num_splits % KV_HEADS).to(tl.int64)
    seq = (tl.program_id(0) // num_splits // KV_HEADS).to(tl.int64)
    length = tl.load(lens_ptr + seq * lens_stride)
    low, begin, keys = _part(length, window, num_splits, WINDOWED, BLOCK_N)
    begin += split * keys
    end = tl.minimum(begin + keys, length)
    if WHOLE or begin < end:
        row = tl.arange(0, BLOCK_M)
        column = tl.arange(0, BLOCK_D)
        head = kv_head * GROUP + row
        mask = (row < GROUP)[:, None] & (column < HEAD_DIM)[None, :]
        q = tl.load(q_ptr + seq * q_stride + head[:, None] * q_head_stride + column[None, :], mask=mask, other=0.0)
        q = (q.to(tl.float32) * sign).to(q.dtype)
        position = length - 1 + row * 0
        # Keys full … last - 1 take no mask: behind the tile with the edge of the window, before an unfinished one.
        full = begin
        if WINDOWED:
            full = tl.minimum(tl.where(begin < low, begin + BLOCK_N, begin), end)
        last = tl.maximum(full, end // BLOCK_N * BLOCK_N)
        k_ptr += kv_head * k_head_stride
        v_ptr += kv_head * v_head_stride
        table_ptr += seq * table_stride
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if WINDOWED:
            acc, total, peak = attend(
                acc, total, peak, q, k_ptr, v_ptr, table_ptr, begin, full, low, end, position, window, scale,
                k_page_stride, k_slot_stride, v_page_stride, v_slot_stride,
                True, True, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        acc, total, peak = attend(
            acc, total, peak, q, k_ptr, v_ptr, table_ptr, full, last, low, end, position, window, scale,
            k_page_stride, k_slot_stride, v_page_stride, v_slot_stride,
            False, WINDOWED, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        acc, total, peak = attend(
            acc, total, peak, q, k_ptr, v_ptr, table_ptr, last, end, low, end, position, window, scale,
            k_page_stride, k_slot_stride, v_page_stride, v_slot_stride,
            True, WINDOWED, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        result = seq * (KV_HEADS * GROUP) + head
        if WHOLE:
            out, lse = finish(acc, total, peak)
            out_place = out_ptr + result[:, None] * HEAD_DIM + column[None, :]
            tl.store(out_place, out.to(out_ptr.dtype.element_ty), mask=mask)
            if LSE:
                tl.store(lse_ptr + result, lse, mask=row < GROUP)
        else:
            part = result * num_splits + split
            tl.store(acc_ptr + part[:, None] * HEAD_DIM + column[None, :], acc, mask=mask)
            tl.store(state_ptr + 2 * part, total, mask=row < GROUP)
            tl.store(state_ptr + 2 * part + 1, peak, mask=row < GROUP)


@triton.jit(do_not_specialize=["lens_ptr", "lens_stride", "num_splits", "window"])  # type: ignore[untyped-decorator]
def _merge(
    acc_ptr, state_ptr, lens_ptr, out_ptr, lse_ptr, lens_stride, num_splits, window,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr, WINDOWED: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """The parts of one sequence and head, those that hold keys."""
    result = tl.program_id(0).to(tl.int64)
    length = tl.load(lens_ptr + result // NUM_HEADS * lens_stride)
    _, begin, keys = _part(length, window, num_splits, WINDOWED, BLOCK_N)
    split = tl.arange(0, BLOCK_S)
    column = tl.arange(0, BLOCK_D)
    there = (split < num_splits) & (begin + split * keys < length)
    part = result * num_splits + split
    total = tl.load(state_ptr + 2 * part, mask=there, other=0.0)
    peak = tl.load(state_ptr + 2 * part + 1, mask=there, other=float("-inf"))
    mask = there[:, None] & (column < HEAD_DIM)[None, :]
    acc = tl.load(acc_ptr + part[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    highest = tl.max(peak, 0)
    weight = tl.exp2(peak - tl.where(highest == float("-inf"), 0.0, highest))
    sums = tl.sum(acc * weight[:, None], 0)[None, :]
    total = tl.sum(total * weight, 0)[None]
    out, lse = finish(sums, total, highest)
    place = out_ptr + result * HEAD_DIM + column[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=(column < HEAD_DIM)[None, :])
    if LSE:
        tl.store(lse_ptr + result + tl.arange(0, 1), lse)


def _splits(q: torch.Tensor, num_kv_heads: int) -> int:
    """From the batch and the card, never from a bound."""
    if not q.is_cuda:
        return INTERPRETED_SPLITS
    wanted = PROGRAMS * multiprocessors(q.device.index) // (q.shape[0] * num_kv_heads)
    return max(1, min(MOST_SPLITS, wanted))


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    return_lse: bool,
    splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = checked_group(q, k_cache, v_cache, block_table)
    num_seqs, num_heads, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1:3]
    if q.numel() == 0:  # an empty grid is a launch error
        return empty_result(q, return_lse)
    out = q.new_empty(q.shape)
    lse = no_lse(q).new_empty(q.shape[:2] if return_lse else 0)
    splits = min(_splits(q, num_kv_heads), splits or MOST_SPLITS)
    keys = INTERPRETED_KEYS
    if q.is_cuda:
        keys = 64 if q.element_size() == 2 and head_dim <= 128 else 32
    block = max(16, triton.next_power_of_2(head_dim))
    most = MOST_SPLITS if q.is_cuda else triton.next_power_of_2(splits)  # on a GPU one kernel for all batches
    acc, state = out, lse
    if splits > 1:
        acc = out.new_empty((num_seqs, num_heads, splits, head_dim), dtype=torch.float32)
        state = acc.new_empty((num_seqs, num_heads, splits, 2))
    with torch.cuda.device_of(q):  # Triton launches on the current device, whatever the tensors say
        _decode[(num_seqs * num_kv_heads * splits,)](
            q, k_cache, v_cache, block_table, seq_lens, out, lse, acc, state,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            block_table.stride(0), seq_lens.stride(0), splits, window,
            (abs(scale) or 1.0) * LOG2_E, float((scale > 0) - (scale < 0)),
            KV_HEADS=num_kv_heads, GROUP=group, PAGE_SIZE=page_size, HEAD_DIM=head_dim, BLOCK_D=block,
            BLOCK_M=max(16, triton.next_power_of_2(group)), BLOCK_N=keys,
            WINDOWED=window > 0, LSE=return_lse, WHOLE=splits == 1, num_warps=4, num_stages=3,
        )  # fmt: skip
        if splits > 1:
            _merge[(num_seqs * num_heads,)](
                acc, state, seq_lens, out, lse, seq_lens.stride(0), splits, window,
                NUM_HEADS=num_heads, HEAD_DIM=head_dim, BLOCK_D=block, BLOCK_S=most, BLOCK_N=keys,
                WINDOWED=window > 0, LSE=return_lse, num_warps=4,
            )  # fmt: skip
    return out, lse
