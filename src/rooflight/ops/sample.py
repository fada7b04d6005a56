"""From logits to a token: one draw a row.

`sample` applies, in this order: temperature, top-k, top-p, min-p, then draws by inverting the cumulative
distribution of what is left, in token-id order, at one uniform number made from (seed, position) by Philox4x32-10
(Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011). There is no generator state: the draw of a row
depends on nothing but that row, so neighbours, batch size and preemption cannot change it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define

NO_TOKEN = -1  # what `sample` returns for a row that has no distribution


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """One token id a row, (num_seqs,) int64.

    logits: (num_seqs, vocab_size) FP32, FP16 or BF16. Per row: temperature FP32 (0 or less: the largest logit, the
    first of equals); top_k int32 (keep exactly the k best, equals by token id; 0 or less, or vocab_size or more: off);
    top_p FP32 (keep the fewest best whose probability after top-k reaches top_p, at least one; 1 or more: off); min_p
    FP32 (drop what is below min_p times the best probability; 0 or less: off); seed and position int64. A row with NaN,
    or with nothing above -inf, gives -1; a row with +inf gives its first +inf. Raises ValueError for shapes, dtypes,
    devices.
    """
    args = (logits, temperature, top_k, top_p, min_p, seed, position)
    return SAMPLE.overload(logits, backend)(*args)  # type: ignore[no-any-return]


def uniform(seed: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
    """Philox4x32-10 with key = seed and counter = position: one FP64 number in [0, 1) of 53 random bits each."""
    mask = 0xFFFFFFFF
    zero = torch.zeros_like(position)
    c0, c1, c2, c3 = position & mask, (position >> 32) & mask, zero, zero
    k0, k1 = seed & mask, (seed >> 32) & mask
    for _ in range(10):
        # The product wraps in int64, but its 64 bits are those of the unsigned product.
        left, right = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((right >> 32) & mask) ^ c1 ^ k0,
            right & mask,
            ((left >> 32) & mask) ^ c3 ^ k1,
            left & mask,
        )
        k0, k1 = (k0 + 0x9E3779B9) & mask, (k1 + 0xBB67AE85) & mask
    return ((c0 >> 5).double() * 2.0**26 + (c1 >> 6).double()) * 2.0**-53


def kept_weights(row: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> torch.Tensor:
    """Unnormalised FP64 weights of one row (vocab_size,) after every filter; dropped tokens have weight 0."""
    scaled = row.double() / temperature
    weights = torch.exp(scaled - scaled.max())
    if 0 < top_k < row.numel() or top_p < 1:
        order = torch.sort(row, descending=True, stable=True).indices  # equals by token id
        if 0 < top_k < row.numel():
            weights[order[top_k:]] = 0
        if top_p < 1:
            ordered = weights[order]
            before = ordered.cumsum(0) - ordered  # the mass of better tokens
            beyond = before >= max(top_p, 0.0) * ordered.sum()
            beyond[0] = False
            weights[order[beyond]] = 0
    if min_p > 0:
        weights[weights < min(min_p, 1.0) * weights.max()] = 0
    return weights


def _sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> torch.Tensor:
    if logits.shape[0] == 0:
        return torch.empty(0, dtype=torch.int64, device=logits.device)
    logits = logits.float()
    best, ids = logits.max(-1)
    ids = torch.where((best == best) & (best > float("-inf")), ids, NO_TOKEN)  # max of a row with NaN is NaN
    heats = temperature.tolist()
    if max(heats) <= 0:  # all greedy: no draw is needed
        return ids
    draws = uniform(seed, position)
    options = zip(heats, *(t.tolist() for t in (top_k, top_p, min_p, best, draws)), strict=True)
    for index, (heat, k, p, floor, peak, draw) in enumerate(options):
        if heat > 0 and float("-inf") < peak < float("inf"):
            cumulative = kept_weights(logits[index], heat, k, p, floor).cumsum(0)
            pick = torch.searchsorted(cumulative, cumulative[-1:] * draw, right=True)
            # Rounding may put the draw at the very end: take the last token with a weight.
            last = torch.searchsorted(cumulative, cumulative[-1:])
            ids[index] = torch.minimum(pick, last)[0]
    return ids


def _check_sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seed: torch.Tensor,
    position: torch.Tensor,
) -> None:
    checks.logit_rows(
        logits,
        halves=True,
        temperature=(temperature, torch.float32),
        top_k=(top_k, torch.int32),
        top_p=(top_p, torch.float32),
        min_p=(min_p, torch.float32),
        seed=(seed, torch.int64),
        position=(position, torch.int64),
    )


def _composition(logits: torch.Tensor, *rest: torch.Tensor, compute: torch.dtype) -> torch.Tensor:
    """Token ids are exact: the composition walks the candidates one by one in Python floats."""
    picks = []
    for row, heat, k, p, floor, seed, position in zip(
        logits.double().tolist(), *(t.tolist() for t in rest), strict=True
    ):
        picks.append(_walk(row, heat, k, p, floor, _draw(seed, position)))
    return torch.tensor(picks, dtype=torch.int64, device=logits.device)


def _draw(seed: int, position: int) -> float:
    return float(uniform(torch.tensor([seed]), torch.tensor([position]))[0])


def _walk(row: list[float], heat: float, k: int, p: float, floor: float, draw: float) -> int:
    peak = max(row, key=lambda value: (value != value, value))
    if peak != peak or peak == float("-inf"):
        return NO_TOKEN
    if heat <= 0 or peak == float("inf"):
        return row.index(peak)
    best_first = sorted(range(len(row)), key=lambda token: (-row[token], token))
    if 0 < k < len(row):
        best_first = best_first[:k]
    weight = {token: math.exp((row[token] - peak) / heat) for token in best_first}
    goal, mass = p * math.fsum(weight.values()), 0.0
    kept: list[int] = []
    for token in best_first:
        if kept and p < 1 and mass >= goal:
            break
        kept.append(token)
        mass += weight[token]
    if floor > 0:
        kept = [token for token in kept if weight[token] >= min(floor, 1.0)]
    target, mass = draw * math.fsum(weight[token] for token in kept), 0.0
    for token in sorted(kept):
        mass += weight[token]
        if mass > target:
            return token
    return max(token for token in kept if weight[token] > 0)


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    logits = args["logits"]
    return Cost(logits.numel() * 4 + logits.shape[0] * 32, logits.shape[0] * 8, 4 * logits.numel())


def _inputs(make: Make, num_seqs: int, vocab_size: int) -> Args:
    """Rows that take turns through greedy, plain temperature, top-k, top-p, min-p and all of them."""
    turns = (
        (0.0, 0, 1.0, 0.0),
        (0.8, 0, 1.0, 0.0),
        (1.5, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (1.0, 0, 1.0, 0.1),
        (0.9, 9, 0.9, 0.05),
    )
    heat, k, p, floor = zip(*(turns[i % len(turns)] for i in range(num_seqs)), strict=True) if num_seqs else ((),) * 4
    logits = make.randn(num_seqs, vocab_size, scale=3).float()
    columns = (heat, torch.float32), (k, torch.int32), (p, torch.float32), (floor, torch.float32)
    parameters = [torch.tensor(values, dtype=dtype, device=make.device) for values, dtype in columns]
    seeds = torch.arange(num_seqs, device=make.device) * 7919 - 3
    return logits, *parameters, seeds, torch.arange(num_seqs, device=make.device) + (1 << 33)


def _broken(make: Make) -> Args:
    """Rows without a distribution, with one, with +inf: beside a good one."""
    args = _inputs(make, 6, 1000)
    logits = args[0]
    logits[1] = float("nan")
    logits[2, 17] = float("nan")
    logits[3] = float("-inf")
    logits[4, 5], logits[4, 9] = float("inf"), float("inf")
    return args


SAMPLE = define(
    "sample",
    "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position) "
    "-> Tensor",
    reference=_sample_reference,
    fake=lambda logits, *rest: logits.new_empty(logits.shape[:1], dtype=torch.int64),
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check_sample,
    dtypes=(torch.float32,),
    capturable_reference=False,
    sweep=[{"num_seqs": n, "vocab_size": 1003} for n in (0, 1, 33)]
    + [{"num_seqs": 6, "vocab_size": size} for size in (1, 7, 255)],
    workloads={f"qwen3-0.6b {n}": {"num_seqs": n, "vocab_size": 151936} for n in (1, 8, 64)},
    awkward={"broken_rows": _broken},
)
