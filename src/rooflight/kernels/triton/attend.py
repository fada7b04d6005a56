"""The loop that prefill and decode attention share: tiles of keys, gathered through the block table, online softmax.

    peak' = max(peak, max_j s_j),   total' = total * 2^(peak - peak') + sum_j 2^(s_j - peak'),   acc likewise with v_j

for scores s = q . k * scale * log2(e), scale positive: powers of two are what the hardware has. The three states are
FP32; the products take operands in the dtype of the cache. Key tiles lie at multiples of BLOCK_N whatever the query
tile, so that a row has the same bits whole and in chunks.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import check_dtype, check_last_dimension

LOG2_E = math.log2(math.e)
MOST_HEADS = 128  # of one KV head: a token's heads must fit into a tile


# Sizes of a head and a page are few in a process; the rest of the arguments vary at run time and are no constants.
@triton.jit  # type: ignore[untyped-decorator]
def attend(
    acc, total, peak, q, k_ptr, v_ptr, table_ptr, begin, end, low, high, position, window, scale,
    k_page_stride, k_slot_stride, v_page_stride, v_slot_stride,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add the keys begin … end - 1 (begin a multiple of BLOCK_N) to the states of the rows q (rows, BLOCK_D).

    k_ptr, v_ptr point at the KV head, table_ptr at the sequence's pages. Only keys low … high - 1 are touched, and a
    row at `position` sees keys up to it (the last `window` of them); without MASKED every row sees all of the tile.
    """
    column = tl.arange(0, BLOCK_D)
    for first in range(begin, end, BLOCK_N):
        key = tl.multiple_of(first, BLOCK_N) + tl.arange(0, BLOCK_N)
        if MASKED:
            there = (key >= low) & (key < high)
            page = tl.load(table_ptr + key // PAGE_SIZE, mask=there, other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + key // PAGE_SIZE).to(tl.int64)
        slot = key % PAGE_SIZE
        k_place = k_ptr + (page * k_page_stride + slot * k_slot_stride)[None, :] + column[:, None]
        v_place = v_ptr + (page * v_page_stride + slot * v_slot_stride)[:, None] + column[None, :]
        # A slot beyond the length may hold NaN, which a weight of zero does not remove: it is not loaded.
        if MASKED:
            k = tl.load(k_place, mask=there[None, :] & (column < HEAD_DIM)[:, None], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_place, mask=(column < HEAD_DIM)[:, None], other=0.0)
        else:
            k = tl.load(k_place)
        product = tl.dot(q, k, input_precision="ieee")
        if MASKED:
            visible = there[None, :] & (key[None, :] <= position[:, None])
            if WINDOWED:
                visible &= key[None, :] > position[:, None] - window
            product = tl.where(visible, product, float("-inf"))
        grown = tl.maximum(peak, tl.max(product, 1) * scale)
        shift = grown
        if MASKED:  # a row that has seen nothing yet: 2^(-inf - 0) is 0, 2^(-inf + inf) would be NaN
            shift = tl.where(grown == float("-inf"), 0.0, grown)
        # Written as fma, so that a tile has the same bits with and without a mask whatever the compiler fuses.
        weights = tl.exp2(tl.fma(product, scale, -shift[:, None]))
        fade = tl.exp2(peak - shift)
        peak = grown
        total = tl.fma(total, fade, tl.sum(weights, 1))
        if MASKED:
            v = tl.load(v_place, mask=there[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
        elif HEAD_DIM < BLOCK_D:
            v = tl.load(v_place, mask=(column < HEAD_DIM)[None, :], other=0.0)
        else:
            v = tl.load(v_place)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
    return acc, total, peak


@triton.jit
def finish(acc, total, peak):
    """Attention and its natural LSE from the states: zeros and -inf for a row that has seen nothing."""
    divisor = tl.where(total == 0.0, 1.0, total)
    lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(divisor)) * 0.6931471805599453)
    return acc / divisor[:, None], lse


def checked_group(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor) -> int:
    """Query heads of a KV head; ValueError for what the kernels cannot read."""
    check_dtype("q", q)
    for name, tensor in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("block_table", block_table)):
        check_last_dimension(name, tensor)
    group = q.shape[1] // k_cache.shape[1]
    if group > MOST_HEADS:
        raise ValueError(f"q must have at most {MOST_HEADS} heads a KV head for the triton provider, was {group}")
    return group
