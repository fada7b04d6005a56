"""One draw a row in Triton, wholly on the device: four launches, whatever the rows ask for.

A row is cut into chunks; the cut hangs on the vocabulary alone, and sums are made in one order, so a row has the same
bits in any batch. What a row needs is known on the device only: a launch that it does not need returns at once.

    _best_of_chunks   the best logit of each chunk: the only pass over the vocabulary that a greedy row makes
    _weigh_chunks     greedy rows are done here; of the others the sum of the weights of each chunk and, with top-k or
                      top-p, how many logits and about which weight lie in each of BINS distances from the best
    _gather           with top-k or top-p: the logits that can be kept, in token-id order, where they are few
    _draw             with top-k or top-p: the exact limits (sample_limits.py); then the draw

Nothing is sorted. Weights are FP64, and so are their sums: with FP32 a flat row of 150,000 tokens would now and then
draw a neighbour, and a top-p that is reached exactly would keep a token too many. Rows with more than CAPACITY
candidates are walked whole at each step of the search, by one program: right, but slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import as_rows, check_vector
from rooflight.kernels.triton.sample_limits import (
    INF_KEY,
    LOWEST_KEY,
    MOST,
    NAN_KEY,
    NO_KEY,
    kept,
    key_of,
    limits,
    logit_of,
    read,
    weight_of,
)  # fmt: skip

MOST_CHUNKS = 256  # of a row: what one program adds up at once
LEAST_CHUNK, TILE = 1024, 1024  # elements; a chunk is a power of two
CAPACITY = 4096  # candidates of a row that are gathered
DRAW_TILE, DRAW_WARPS = 1024, 8  # of the last kernel, of which a row has one program; larger ones spill
BEST_WARPS = 2  # of the first kernel: two warps meet sooner than four
WAYS, INTERPRETED_WAYS = 8, 64  # limits that a step of the search tries; in the interpreter steps are what costs
PROGRAMS = 2048  # that fill a large GPU; with more rows a program takes several chunks
MOST_TOKENS = 1 << 30  # of a vocabulary: token ids and the ends of chunks are 32 bits

BINS = tl.constexpr(32)
REACH = tl.constexpr(32.0)  # the farthest bin, in logits, times the temperature where that is above 1
SLICE = tl.constexpr(128)  # elements that are put into bins at once
SLACK = tl.constexpr(1.0001)  # FP32 weights of bins choose candidates: some more than needed
NO_TOKEN = tl.constexpr(-1)
NOTHING = tl.constexpr(float("-inf"))


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_chunks(
    logits_ptr, heat_ptr, best_ptr, least_ptr, stride, vocab_size, num_chunks, CHUNK: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """best: key and token in one integer whose maximum is the first of the largest; least: above -inf, if one draws."""
    row = tl.program_id(0).to(tl.int64)  # 64 bits: times a stride it passes 2^31
    chunk = tl.program_id(1)
    drawn = tl.load(heat_ptr + row) > 0.0
    best = chunk * 0 + NO_KEY
    token = chunk * 0
    least = tl.full([TILE], float("inf"), tl.float32)
    for start in range(0, CHUNK, TILE):
        index = chunk * CHUNK + start + tl.arange(0, TILE)
        x = tl.load(logits_ptr + row * stride + index, mask=index < vocab_size, other=NOTHING).to(tl.float32)
        key = key_of(x)
        highest = tl.max(key, 0)  # 32 bits twice are faster than 64 bits once
        first = tl.min(tl.where(key == highest, index, MOST), 0)
        token = tl.where(highest > best, first, token)
        best = tl.maximum(best, highest)
        if drawn:
            least = tl.minimum(least, tl.where(x > float("-inf"), x, float("inf")))
    tl.store(best_ptr + row * num_chunks + chunk, (best.to(tl.int64) << 32) + (MOST - token))
    if drawn:
        tl.store(least_ptr + row * num_chunks + chunk, tl.min(least, 0))


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_row(best_ptr, row, num_chunks, CHUNKS: tl.constexpr):
    """Key and token of the best logit."""
    index = tl.arange(0, CHUNKS)
    best = tl.max(tl.load(best_ptr + row * num_chunks + index, mask=index < num_chunks, other=-(1 << 63)), 0)
    return (best >> 32).to(tl.int32), (0x7FFFFFFF - (best & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _is_drawn(heat, best_key):
    return (heat > 0.0) & (best_key > LOWEST_KEY) & (best_key < INF_KEY)


@triton.jit
def _is_filtered(k, p, vocab_size):
    return ((k > 0) & (k < vocab_size)) | (p < 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def _bins_per_logit(least_ptr, row, num_chunks, peak, heat, CHUNKS: tl.constexpr):
    """Of BINS equal bins from the best logit to the least or, if that is nearer, to REACH. 0: all in one."""
    index = tl.arange(0, CHUNKS)
    least = tl.load(least_ptr + row * num_chunks + index, mask=index < num_chunks, other=float("inf"))
    span = tl.minimum(peak - tl.min(least, 0), tl.minimum(tl.maximum(heat, 1.0) * REACH, 1e30))
    return tl.where(span > 1e-30, 1.0 / tl.maximum(span, 1e-30), 0.0) * BINS


@triton.jit
def _bin(x, peak, bins_per_logit):
    """Every step keeps the order, so a better logit is never in a farther bin. Not for NaN."""
    return tl.minimum(tl.minimum(peak - x, 1e35) * bins_per_logit, BINS - 1).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _fill_bins(
    logits_ptr, counts_ptr, masses_ptr, vocab_size, begin, peak, heat, bins_per_logit, CHUNK: tl.constexpr
):  # fmt: skip
    """How many logits of a chunk are in each bin, and their weight in FP32."""
    bins = tl.arange(0, BINS)
    count = tl.zeros([BINS, SLICE], tl.int32)
    mass = tl.zeros([BINS, SLICE], tl.float32)
    for start in range(0, CHUNK, SLICE):
        token = begin + start + tl.arange(0, SLICE)[None, :]
        x = tl.load(logits_ptr + token, mask=token < vocab_size, other=NOTHING).to(tl.float32)
        hit = (_bin(x, peak, bins_per_logit) == bins[:, None]) & (token < vocab_size)
        count += hit.to(tl.int32)
        mass += tl.where(hit, tl.exp((x - peak) / heat), 0.0)
    tl.store(counts_ptr + bins, tl.sum(count, 1))
    tl.store(masses_ptr + bins, tl.sum(mass, 1))


@triton.jit(do_not_specialize=["per"])  # type: ignore[untyped-decorator]
def _weigh_chunks(
    logits_ptr, heat_ptr, k_ptr, p_ptr, floor_ptr, best_ptr, least_ptr, total_ptr, counts_ptr, masses_ptr, out_ptr,
    stride, vocab_size, num_chunks, per, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * per
    heat = tl.load(heat_ptr + row)
    best_key, best_token = _best_of_row(best_ptr, row, num_chunks, CHUNKS)
    if _is_drawn(heat, best_key):
        peak = logit_of(best_key)
        filtered = _is_filtered(tl.load(k_ptr + row), tl.load(p_ptr + row), vocab_size)
        floor = tl.load(floor_ptr + row).to(tl.float64)
        floor = tl.where(filtered | (floor != floor), 0.0, floor)  # min-p comes last
        bins_per_logit = _bins_per_logit(least_ptr, row, num_chunks, peak, heat, CHUNKS)
        for chunk in range(first, tl.minimum(first + per, num_chunks)):
            total = tl.zeros([TILE], tl.float64)
            for start in range(0, CHUNK, TILE):
                token = chunk * CHUNK + start + tl.arange(0, TILE)
                x = tl.load(logits_ptr + row * stride + token, mask=token < vocab_size, other=NOTHING).to(tl.float32)
                weight = weight_of(x, peak, heat)
                total += tl.where(weight >= tl.minimum(floor, 1.0), weight, 0.0)
            place = row * num_chunks + chunk
            tl.store(total_ptr + place, tl.sum(total, 0))
            if filtered:
                _fill_bins(
                    logits_ptr + row * stride, counts_ptr + place * BINS, masses_ptr + place * BINS, vocab_size,
                    chunk * CHUNK, peak, heat, bins_per_logit, CHUNK,
                )  # fmt: skip
    elif first == 0:
        nothing = (best_key == NAN_KEY) | (best_key == LOWEST_KEY)
        tl.store(out_ptr + row, tl.where(nothing, NO_TOKEN, best_token).to(tl.int64))


@triton.jit(do_not_specialize=["per"])  # type: ignore[untyped-decorator]
def _gather(
    logits_ptr, heat_ptr, k_ptr, p_ptr, best_ptr, least_ptr, counts_ptr, masses_ptr,
    found_ptr, found_x_ptr, found_token_ptr,
    stride, vocab_size, num_chunks, per, capacity, CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """found: how many candidates there are, or -1 where they are too many to gather."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * per
    heat = tl.load(heat_ptr + row)
    k, p = tl.load(k_ptr + row), tl.load(p_ptr + row)
    best_key, _token = _best_of_row(best_ptr, row, num_chunks, CHUNKS)
    if _is_drawn(heat, best_key) & _is_filtered(k, p, vocab_size):
        index, bins = tl.arange(0, CHUNKS), tl.arange(0, BINS)
        cell = (row * num_chunks + index[:, None]) * BINS + bins[None, :]
        counts = tl.load(counts_ptr + cell, mask=index[:, None] < num_chunks, other=0)
        nearer = tl.cumsum(tl.sum(counts, 0), 0)
        if (k > 0) & (k < vocab_size):
            last = tl.sum((nearer < k).to(tl.int32), 0)
        else:
            masses = tl.load(masses_ptr + cell, mask=index[:, None] < num_chunks, other=0.0)
            mass = tl.cumsum(tl.sum(masses, 0), 0)
            last = tl.sum((mass < p * tl.max(mass, 0) * SLACK).to(tl.int32), 0)
        last = tl.minimum(last, BINS - 1)
        of_chunk = tl.sum(tl.where(bins[None, :] <= last, counts, 0), 1)
        found = tl.sum(of_chunk, 0)
        if first == 0:
            tl.store(found_ptr + row, tl.where(found <= capacity, found, -1))
        if found <= capacity:
            peak = logit_of(best_key)
            bins_per_logit = _bins_per_logit(least_ptr, row, num_chunks, peak, heat, CHUNKS)
            for chunk in range(first, tl.minimum(first + per, num_chunks)):
                if tl.sum(tl.where(index == chunk, of_chunk, 0), 0) > 0:  # most have none
                    place = tl.sum(tl.where(index < chunk, of_chunk, 0), 0)
                    for start in range(0, CHUNK, TILE):
                        token = chunk * CHUNK + start + tl.arange(0, TILE)
                        x = tl.load(logits_ptr + row * stride + token, mask=token < vocab_size, other=NOTHING).to(
                            tl.float32
                        )
                        hit = (_bin(x, peak, bins_per_logit) <= last) & (token < vocab_size)
                        target = row * capacity + place + tl.cumsum(hit.to(tl.int32), 0) - 1
                        tl.store(found_x_ptr + target, x, mask=hit)
                        tl.store(found_token_ptr + target, token, mask=hit)
                        place += tl.sum(hit.to(tl.int32), 0)


@triton.jit
def _uniform(seed, position):
    """Philox4x32-10 with key = seed and counter = position: 53 random bits as FP64 in [0, 1)."""
    low, high = position.to(tl.int32), (position >> 32).to(tl.int32)
    a, b, _, _ = tl.philox(seed, low, high, low * 0, low * 0)
    return ((a >> 5).to(tl.float64) * 67108864.0 + (b >> 6).to(tl.float64)) * (1.0 / 9007199254740992.0)


@triton.jit  # type: ignore[untyped-decorator]
def _draw(
    logits_ptr, heat_ptr, k_ptr, p_ptr, floor_ptr, seed_ptr, position_ptr,
    best_ptr, total_ptr, found_ptr, found_x_ptr, found_token_ptr, out_ptr,
    stride, vocab_size, num_chunks, capacity,
    CHUNK: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    heat = tl.load(heat_ptr + row)
    best_key, _best_token = _best_of_row(best_ptr, row, num_chunks, CHUNKS)
    if _is_drawn(heat, best_key):
        x_ptr, found_x_ptr, found_token_ptr = (
            logits_ptr + row * stride, found_x_ptr + row * capacity, found_token_ptr + row * capacity
        )  # fmt: skip
        k, p, floor = tl.load(k_ptr + row), tl.load(p_ptr + row), tl.load(floor_ptr + row).to(tl.float64)
        floor = tl.where(floor > 0.0, tl.minimum(floor, 1.0), 0.0)
        peak = logit_of(best_key)
        index = tl.arange(0, CHUNKS)
        totals = tl.load(total_ptr + row * num_chunks + index, mask=index < num_chunks, other=0.0)
        total = tl.sum(totals, 0)
        draw = _uniform(tl.load(seed_ptr + row), tl.load(position_ptr + row))
        low, high, ties = (best_key * 0 + LOWEST_KEY).to(tl.int64), (best_key * 0 + LOWEST_KEY).to(tl.int64), row * 0
        begin, stop, gathered, mass = best_key * 0, best_key * 0 + vocab_size, best_key * 0, total * 0.0
        if _is_filtered(k, p, vocab_size):
            found = tl.load(found_ptr + row)
            gathered = (found >= 0).to(tl.int32)
            stop = tl.where(found >= 0, found, vocab_size)
            low, high, ties = limits(
                x_ptr, found_x_ptr, found_token_ptr, stop, gathered, best_key, heat, k, p, vocab_size, total,
                TILE, WAYS,
            )  # fmt: skip
            total, before = total * 0.0, begin
            for start in range(0, stop, TILE):
                place = start + tl.arange(0, TILE)
                x, _token, inside = read(x_ptr, found_x_ptr, found_token_ptr, place, stop, gathered)
                weight, equals = kept(x, inside, before, low, high, ties, floor, peak, heat)
                total += tl.sum(weight, 0)
                before += equals
        else:
            # The chunk that the draw falls into; rounding may put it behind the last one with a weight.
            summed = tl.cumsum(totals, 0)
            chunk = tl.sum((summed <= draw * total).to(tl.int32), 0)
            chunk = tl.minimum(chunk, tl.max(tl.where(totals > 0.0, index, 0), 0))
            mass = tl.sum(tl.where(index < chunk, totals, 0.0), 0)
            begin = chunk * CHUNK
            stop = tl.minimum(begin + CHUNK, vocab_size)
        picked = _walk(
            x_ptr, found_x_ptr, found_token_ptr, begin, stop, gathered, low, high, ties, floor, peak, heat,
            mass, draw * total, TILE,
        )  # fmt: skip
        tl.store(out_ptr + row, picked.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _walk(
    x_ptr, found_x_ptr, found_token_ptr, begin, stop, gathered, low, high, ties, floor, peak, heat, mass, target,
    TILE: tl.constexpr,
):  # fmt: skip
    """The first token at which the mass passes the target; the last one with a weight if rounding keeps it below."""
    picked, last, before = begin * 0 + MOST, begin * 0, begin * 0
    while (picked == MOST) & (begin < stop):
        index = begin + tl.arange(0, TILE)
        x, token, inside = read(x_ptr, found_x_ptr, found_token_ptr, index, stop, gathered)
        weight, equals = kept(x, inside, before, low, high, ties, floor, peak, heat)
        passed = (mass + tl.cumsum(weight, 0) > target) & (weight > 0.0)
        picked = tl.min(tl.where(passed, token, MOST), 0)
        last = tl.maximum(last, tl.max(tl.where(weight > 0.0, token, 0), 0))
        mass += tl.sum(weight, 0)
        before += equals
        begin += TILE
    return tl.where(picked == MOST, last, picked)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "position")
    for name, vector in zip(names, (temperature, top_k, top_p, min_p, seed, position), strict=True):
        check_vector(name, vector)
    logits = as_rows("logits", logits)
    rows, vocab_size = logits.shape
    if vocab_size > MOST_TOKENS:
        raise ValueError(f"logits must have at most {MOST_TOKENS} columns, was {vocab_size}")
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:  # an empty grid is a launch error
        return out
    least = min(LEAST_CHUNK, max(SLICE.value, int(triton.next_power_of_2(vocab_size))))
    chunk = max(least, int(triton.next_power_of_2(triton.cdiv(vocab_size, MOST_CHUNKS))))
    chunks = triton.cdiv(vocab_size, chunk)
    per = triton.cdiv(chunks, max(1, PROGRAMS // rows))
    grid = rows, triton.cdiv(chunks, per)
    sizes = {"CHUNK": chunk, "TILE": min(TILE, chunk), "num_warps": 4}
    whole = int(triton.next_power_of_2(chunks))

    def scratch(dtype: torch.dtype, *shape: int) -> torch.Tensor:
        return torch.empty(rows, *shape, dtype=dtype, device=logits.device)

    best, total, lowest = (scratch(dtype, chunks) for dtype in (torch.int64, torch.float64, torch.float32))
    counts, masses = (scratch(dtype, chunks, BINS.value) for dtype in (torch.int32, torch.float32))
    found, found_x = scratch(torch.int32), scratch(torch.float32, CAPACITY)
    found_token = scratch(torch.int32, CAPACITY)
    with torch.cuda.device_of(logits):  # Triton launches on the current device, whatever the tensors say
        _best_of_chunks[(rows, chunks)](
            logits, temperature, best, lowest, logits.stride(0), vocab_size, chunks, CHUNK=chunk, TILE=min(TILE, chunk),
            num_warps=BEST_WARPS,
        )  # fmt: skip
        _weigh_chunks[grid](
            logits, temperature, top_k, top_p, min_p, best, lowest, total, counts, masses, out,
            logits.stride(0), vocab_size, chunks, per, CHUNKS=whole, **sizes,
        )  # fmt: skip
        _gather[grid](
            logits, temperature, top_k, top_p, best, lowest, counts, masses, found, found_x, found_token,
            logits.stride(0), vocab_size, chunks, per, CAPACITY, CHUNKS=whole, **sizes,
        )  # fmt: skip
        _draw[(rows,)](
            logits, temperature, top_k, top_p, min_p, seed, position, best, total, found, found_x, found_token, out,
            logits.stride(0), vocab_size, chunks, CAPACITY, CHUNK=chunk, TILE=min(DRAW_TILE, chunk), CHUNKS=whole,
            WAYS=WAYS if logits.is_cuda else INTERPRETED_WAYS, num_warps=DRAW_WARPS,
        )  # fmt: skip
    return out
