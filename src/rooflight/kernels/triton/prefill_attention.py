"""Attention over the paged cache in Triton for several new tokens a sequence: prompts, whole or as a chunk.

One program has one tile of queries: some tokens of one sequence times all query heads of one KV head, so that keys and
values are loaded once for the whole group. The grid knows no lengths. T tokens a tile make at most num_tokens // T +
num_seqs tiles, and tile number query_starts[s] // T + s is the first of sequence s: a search finds a tile's sequence.
One more "sequence", the tokens behind the last one, sees nothing and gives the zeros that a padded graph expects.

The keys that every row of a tile sees take no mask; those at the diagonal and at the edge of a window do.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.attend import LOG2_E, attend, checked_group, finish
from rooflight.kernels.triton.rows import multiprocessors
from rooflight.ops.paged_attention import empty_result, no_lse

# What differs from step to step makes no new kernel, the alignment of a part of the runner's buffers included.
SCALARS = ["num_tokens", "num_seqs", "window", "scale", "sign"]
SEARCH = tl.constexpr(128)  # sequences looked at together
VARYING = [*SCALARS, "table_ptr", "starts_ptr", "lens_ptr", "table_stride", "starts_stride", "lens_stride"]


@triton.jit(do_not_specialize=VARYING)  # type: ignore[untyped-decorator]
def _prefill(
    q_ptr, k_ptr, v_ptr, table_ptr, lens_ptr, starts_ptr, out_ptr, lse_ptr,
    q_stride, q_head_stride, k_page_stride, k_head_stride, k_slot_stride, v_page_stride, v_head_stride, v_slot_stride,
    table_stride, lens_stride, starts_stride, num_tokens, num_seqs, window, scale, sign,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, TOKENS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """One tile of TOKENS tokens times GROUP heads. scale, positive, times sign is the scale times log2(e)."""
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # the last tiles of a prompt, which see most keys, go first
    tile = program // KV_HEADS
    kv_head = (program % KV_HEADS).to(tl.int64)
    # The last sequence whose first tile is not behind this one; number num_seqs stands for the tokens after all. They
    # are counted: in a search by halves seven loads would wait for each other.
    seq = -1
    for begin in range(0, num_seqs + 1, SEARCH):
        index = begin + tl.arange(0, SEARCH)
        tiles = tl.load(starts_ptr + index * starts_stride, mask=index <= num_seqs, other=1 << 30) // TOKENS + index
        seq += tl.sum((tiles <= tile).to(tl.int32), 0)
    start = tl.load(starts_ptr + seq * starts_stride)
    stop = tl.load(starts_ptr + (seq + 1) * starts_stride, mask=seq < num_seqs, other=num_tokens)
    first = (tile - start // TOKENS - seq) * TOKENS  # token of the sequence's new ones
    if first < stop - start:
        length = tl.load(lens_ptr + seq * lens_stride, mask=seq < num_seqs, other=0)
        row = tl.arange(0, BLOCK_M)
        token = first + row // GROUP
        inside = (row < TOKENS * GROUP) & (token < stop - start)
        column = tl.arange(0, BLOCK_D)
        mask = inside[:, None] & (column < HEAD_DIM)[None, :]
        global_token = (start + token).to(tl.int64)  # 64 bits: times a stride it passes 2^31
        head = kv_head * GROUP + row % GROUP
        q_place = q_ptr + (global_token * q_stride + head * q_head_stride)[:, None] + column[None, :]
        q = tl.load(q_place, mask=mask, other=0.0)
        q = (q.to(tl.float32) * sign).to(q.dtype)
        position = token + length - (stop - start)  # the last new token is the last of all; below 0 nothing is seen
        lowest = length - (stop - start) + first
        highest = length - (stop - start) + tl.minimum(first + TOKENS, stop - start) - 1
        low = 0
        full = 0  # keys full … last - 1 are seen by every row of the tile
        last = tl.maximum(lowest + 1, 0) // BLOCK_N * BLOCK_N
        if WINDOWED:
            low = tl.maximum(lowest - window + 1, 0)
            full = tl.minimum((tl.maximum(highest - window + 1, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N, last)
        k_ptr += kv_head * k_head_stride
        v_ptr += kv_head * v_head_stride
        table_ptr += tl.cast(seq, tl.int64) * table_stride
        acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        if WINDOWED:
            acc, total, peak = attend(
                acc, total, peak, q, k_ptr, v_ptr, table_ptr, low // BLOCK_N * BLOCK_N, full, low, highest + 1,
                position, window, scale, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride,
                True, True, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
            )  # fmt: skip
        acc, total, peak = attend(
            acc, total, peak, q, k_ptr, v_ptr, table_ptr, full, last, low, highest + 1,
            position, window, scale, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride,
            False, WINDOWED, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        acc, total, peak = attend(
            acc, total, peak, q, k_ptr, v_ptr, table_ptr, last, highest + 1, low, highest + 1,
            position, window, scale, k_page_stride, k_slot_stride, v_page_stride, v_slot_stride,
            True, WINDOWED, PAGE_SIZE, HEAD_DIM, BLOCK_D, BLOCK_N,
        )  # fmt: skip
        out, lse = finish(acc, total, peak)
        result = global_token * (KV_HEADS * GROUP) + head
        out_place = out_ptr + result[:, None] * HEAD_DIM + column[None, :]
        tl.store(out_place, out.to(out_ptr.dtype.element_ty), mask=mask)
        if LSE:
            tl.store(lse_ptr + result, lse, mask=inside)


class Tile(NamedTuple):
    """Rows (tokens times heads) and keys of a program's tile, and how it runs."""

    rows: int
    keys: int
    warps: int
    stages: int


INTERPRETED = Tile(32, 32, 4, 1)  # small, so that small inputs have several tiles


def _tile(q: torch.Tensor, num_kv_heads: int, num_seqs: int) -> Tile:
    """From the head and, between tiles of the same bits, from tokens and sequences; never from a bound."""
    if not q.is_cuda:
        return INTERPRETED
    num_tokens, num_heads, head_dim = q.shape
    if q.element_size() == 4:  # products in FP32 take no matrix unit: correct, not fast
        return Tile(16, 16, 4, 1)
    keys, count = 64 if head_dim <= 128 else 32, multiprocessors(q.device.index)
    tiles = num_tokens * num_heads // 128
    # The largest tile reads keys least often, where prompts are long enough for it. All take the same instructions, row
    # by row. Two stages and few warps: two or three programs on a multiprocessor hide what one waits for.
    if head_dim <= 128 and num_seqs <= 8 and tiles // 2 >= 15 * count // 8:
        return Tile(256, keys, 8, 2)
    if 2 * tiles < 9 * count:
        return Tile(64, keys, 4, 2)
    return Tile(128, keys, 4 if head_dim <= 128 else 8, 2)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    group = checked_group(q, k_cache, v_cache, block_table)
    num_tokens, _, head_dim = q.shape
    num_kv_heads, page_size = k_cache.shape[1:3]
    if q.numel() == 0:  # an empty grid is a launch error
        return empty_result(q, return_lse)
    out = q.new_empty(q.shape)
    lse = no_lse(q).new_empty(q.shape[:2] if return_lse else 0)
    tile = _tile(q, num_kv_heads, seq_lens.shape[0])
    rows = max(tile.rows, triton.next_power_of_2(group))
    tokens, num_seqs = rows // group, seq_lens.shape[0]
    sign = (scale > 0) - (scale < 0)
    with torch.cuda.device_of(q):  # Triton launches on the current device, whatever the tensors say
        _prefill[((num_tokens // tokens + num_seqs + 1) * num_kv_heads,)](
            q, k_cache, v_cache, block_table, seq_lens, query_starts, out, lse,
            q.stride(0), q.stride(1), *k_cache.stride()[:3], *v_cache.stride()[:3],
            block_table.stride(0), seq_lens.stride(0), query_starts.stride(0), num_tokens, num_seqs,
            window, (abs(scale) or 1.0) * LOG2_E, float(sign),
            KV_HEADS=num_kv_heads, GROUP=group, TOKENS=tokens, PAGE_SIZE=page_size, HEAD_DIM=head_dim,
            BLOCK_D=max(16, triton.next_power_of_2(head_dim)), BLOCK_M=rows, BLOCK_N=tile.keys,
            WINDOWED=window > 0, LSE=return_lse, num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out, lse
