"""What an operator will take, from a law that was fitted on operators measured alone; never on a step.

    time = overhead + max(memory time / fraction of the memory rate, compute time / fraction of the compute rate)

Memory and compute times are those of the operator's cost at the card's measured ceilings. An operator has a law for up
to FEW rows and one for more, since other kernels serve there; the latter's first two figures are of tens of rows, which
memory binds, and its third of prompts. A step is foretold as the sum over its calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from rooflight.limits.accuracy import least_squares
from rooflight.limits.bounds import Bound, bound
from rooflight.limits.ceilings import Ceilings
from rooflight.limits.explanation import name_of
from rooflight.limits.scenario import COLLECTIVES, NAMES, Placed
from rooflight.limits.trace import Call
from rooflight.ops import Cost

FEW = 8  # rows: what the kernels for decoding a few sequences take
ENDLESS = 1e12  # bytes of a stream so long that its start does not matter
APART = 1.5  # times: memory times nearer to each other tell no rate
LEAST = 1e-3  # microseconds

Key = tuple[str, bool]  # operator, whether it has few rows


@dataclass(frozen=True)
class Point:
    """One operator alone: its times at the ceilings, and what it took. Microseconds. shape: as in `Call`."""

    operator: str
    label: str
    shape: tuple[int, ...]
    memory_us: float
    compute_us: float
    us: float

    @property
    def key(self) -> Key:
        return key_of(self.operator, self.shape)


@dataclass(frozen=True)
class Law:
    """See the module text. error: the worst, relative, of the points that it was fitted on."""

    operator: str
    few: bool
    points: int
    overhead_us: float
    fraction: float
    compute_fraction: float
    error: float = 0.0

    def us(self, memory_us: float, compute_us: float) -> float:
        return self.overhead_us + max(memory_us / self.fraction, compute_us / self.compute_fraction)


def key_of(operator: str, shape: Sequence[int]) -> Key:
    return operator, shape[0] <= FEW


def bound_of(call: Call, cost: Cost, format_: str, card: Ceilings) -> Bound:
    """As part of an endless stream; what laws are about."""
    return bound(cost, format_ or NAMES.get(call.dtype, "fp32"), card, stream=ENDLESS)


def fit(points: Iterable[Point]) -> dict[Key, Law]:
    """A law for each operator, with few rows and with many, that has points."""
    groups: dict[Key, list[Point]] = {}
    for point in points:
        groups.setdefault(point.key, []).append(point)
    return {key: _law(key, own) for key, own in groups.items()}


def _law(key: Key, points: Sequence[Point]) -> Law:
    streams = [p for p in points if p.memory_us >= p.compute_us]
    products = [p for p in points if p.memory_us < p.compute_us]
    overhead, slope = _line([(p.memory_us, p.us) for p in streams]) if streams else (0.0, 1.0)
    reached = [p.compute_us / max(p.us - overhead, LEAST) for p in products]
    law = Law(*key, len(points), overhead, 1 / slope, median(reached) if reached else 1.0)
    worst = max(abs(law.us(p.memory_us, p.compute_us) / p.us - 1) for p in points)
    return Law(*key, len(points), overhead, law.fraction, law.compute_fraction, worst)


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(overhead, microseconds for one at the memory rate). Times too near to each other are all overhead, at the rate
    itself, or no overhead where they are shorter than that."""
    sizes = [memory for memory, _ in points]
    if max(sizes) < APART * max(min(sizes), LEAST) or len(points) < 3:
        overhead = median(us - memory for memory, us in points)
        return (overhead, 1.0) if overhead >= 0 else (0.0, median(us / max(memory, LEAST) for memory, us in points))
    return least_squares(points)


def foretell(
    placed: Sequence[Placed], laws: Mapping[Key, Law], card: Ceilings
) -> tuple[dict[str, float], tuple[str, ...]]:
    """Microseconds of a step by operator, as tables name it, and names of those without a law: their limit counts."""
    found: dict[str, float] = {}
    lawless: dict[str, None] = {}
    for item in placed:
        name, law = name_of(item.call), laws.get(key_of(item.call.operator, item.call.shape))
        limit = bound_of(item.call, item.cost, item.format, card)
        if law is None and item.call.operator not in COLLECTIVES:
            lawless[name] = None
        us = limit.limit_us if law is None else law.us(limit.memory_us, limit.compute_us)
        found[name] = found.get(name, 0.0) + us
    return found, tuple(lawless)
