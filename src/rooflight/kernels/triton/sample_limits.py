"""Which logits of a row top-k and top-p keep, found by search over the bits of the logits; for the kernel of `sample`.

The integers of `key` are in the order of the floats, so a limit is found as digits of a number are, WAYS limits tried
at a time. A search leaves an interval [low, high) of keys with one key or one logit in it: kept is what lies above and,
by token id, the first `ties` of what lies within. It reads gathered candidates or the row itself, in token-id order.
Weights are FP64, and so are their sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

NAN_KEY = tl.constexpr(2147483647)
INF_KEY = tl.constexpr(2139095040)
LOWEST_KEY = tl.constexpr(-2139095041)  # of -inf
NO_KEY = tl.constexpr(-2147483648)  # of no logit
MOST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(x):
    """Signed integers in the order of the floats. The two zeros are equal; NaN is above all."""
    bits = x.to(tl.int32, bitcast=True)
    key = tl.where(x == 0.0, 0, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    return tl.where(x == x, key, NAN_KEY)


@triton.jit
def logit_of(key):
    """The float of a key."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def weight_of(x, peak, heat):
    """FP64, relative to the best logit."""
    return tl.exp((x.to(tl.float64) - peak.to(tl.float64)) * (1.0 / heat.to(tl.float64)))


@triton.jit
def read(x_ptr, found_x_ptr, found_token_ptr, index, stop, gathered):
    """Logits and tokens at these places of the gathered candidates, or of the row."""
    in_row, in_found = tl.where(gathered == 0, stop, 0), tl.where(gathered == 0, 0, stop)  # where to read up to
    x = tl.load(x_ptr + index, mask=index < in_row, other=float("-inf")).to(tl.float32)
    found_x = tl.load(found_x_ptr + index, mask=index < in_found, other=float("-inf"))
    token = tl.load(found_token_ptr + index, mask=index < in_found, other=0)
    return tl.maximum(x, found_x), tl.where(index < in_row, index, token), index < stop


@triton.jit  # type: ignore[untyped-decorator]
def _search(
    x_ptr, found_x_ptr, found_token_ptr, stop, gathered, peak, heat, low, high, goal,
    BY_COUNT: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """Narrow the keys [low, high): what is at or above low reaches the goal (a count or a weight), from high on not.

    Ends with one key or one logit between. Gives low, high, the counts from low and from high on, their weights.
    """
    low_count, low_mass = stop, tl.zeros([], tl.float64)
    high_count, high_mass = stop * 0, tl.zeros([], tl.float64)
    going = stop > 0
    while going:
        limit = low + (((high - low) * tl.arange(0, WAYS)) // WAYS)  # the first is low itself
        count = tl.zeros([WAYS, TILE], tl.int32)
        mass = tl.zeros([WAYS, TILE], tl.float64)
        for start in range(0, stop, TILE):
            index = start + tl.arange(0, TILE)[None, :]
            x, _token, inside = read(x_ptr, found_x_ptr, found_token_ptr, index, stop, gathered)
            above = (tl.where(inside, key_of(x), NO_KEY) >= limit.to(tl.int32)[:, None]) & inside
            count += above.to(tl.int32)
            mass += tl.where(above, weight_of(x, peak, heat), 0.0)
        counts, masses = tl.sum(count, 1), tl.sum(mass, 1)
        if BY_COUNT:
            reached = (counts.to(tl.float64) >= goal) | (limit == low)
        else:
            reached = (masses >= goal) | (limit == low)
        # Counts and weights fall as the limit rises, so the nearest on each side are a minimum and a maximum.
        low_count, low_mass = tl.min(tl.where(reached, counts, MOST), 0), tl.min(tl.where(reached, masses, 1e300), 0)
        high_count = tl.maximum(high_count, tl.max(tl.where(reached, 0, counts), 0))
        high_mass = tl.maximum(high_mass, tl.max(tl.where(reached, 0.0, masses), 0))
        high = tl.minimum(high, tl.min(tl.where(reached, high, limit), 0))
        low = tl.max(tl.where(reached, limit, low), 0)
        going = (high - low > 1) & (low_count - high_count > 1)
    return low, high, low_count, high_count, low_mass, high_mass


@triton.jit  # type: ignore[untyped-decorator]
def limits(
    x_ptr, found_x_ptr, found_token_ptr, stop, gathered, best_key, heat, k, p, vocab_size, total,
    TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """(low, high, ties) of top-k, then of top-p among what that keeps."""
    peak, low, high = logit_of(best_key), (best_key * 0 + LOWEST_KEY).to(tl.int64), best_key.to(tl.int64) + 1
    ties = (low * 0 + MOST).to(tl.int64)
    within = p < 1.0  # whether a search by weight is needed
    goal = tl.maximum(p, 0.0).to(tl.float64) * total
    if (k > 0) & (k < vocab_size):
        low, high, _low_count, high_count, low_mass, high_mass = _search(
            x_ptr, found_x_ptr, found_token_ptr, stop, gathered, peak, heat, low, high, k.to(tl.float64),
            True, TILE, WAYS,
        )  # fmt: skip
        ties = (k - high_count).to(tl.int64)
        if within:
            one = tl.where(high - low == 1, weight_of(logit_of(low.to(tl.int32)), peak, heat), low_mass - high_mass)
            goal = tl.maximum(p, 0.0).to(tl.float64) * (high_mass + ties.to(tl.float64) * one)
            if (high_mass < goal) | (high_count == 0):  # reached among the equals at the limit of top-k
                ties = tl.minimum(ties, _number_to(goal - high_mass, one))
                within = False
            else:
                low, high = high, best_key.to(tl.int64) + 1
    if within:
        low, high, _low_count, high_count, low_mass, high_mass = _search(
            x_ptr, found_x_ptr, found_token_ptr, stop, gathered, peak, heat, low, high, goal, False, TILE, WAYS,
        )  # fmt: skip
        one = tl.where(high - low == 1, weight_of(logit_of(low.to(tl.int32)), peak, heat), low_mass - high_mass)
        ties = _number_to(goal - high_mass, one)
    return low, high, ties


@triton.jit
def _number_to(missing, one):
    """How many weights of this size make up what is missing; one at least."""
    number = tl.minimum(missing / tl.maximum(one, 1e-300), 2e9).to(tl.int64)
    number += (number.to(tl.float64) * one < missing).to(tl.int64)
    return tl.maximum(number, 1)


@triton.jit
def kept(x, inside, before, low, high, ties, floor, peak, heat):
    """Weights of a tile, 0 for what is dropped, and how many equals at the limit are in it; `before` were earlier."""
    key = key_of(x)
    equal = ((key >= low) & (key < high) & inside).to(tl.int32)
    rank = before + tl.cumsum(equal, 0) - equal
    weight = weight_of(x, peak, heat)
    keep = inside & ((key >= high) | ((equal != 0) & (rank < ties))) & (weight >= floor)
    return tl.where(keep, weight, 0.0), tl.sum(equal, 0)
