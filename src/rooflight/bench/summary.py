"""What a table of one operator and dtype says, in a few lines: the tie band, and where another is faster than ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rooflight.bench.contenders import OURS, PROVIDERS
from rooflight.bench.peers.ops import PEERS
from rooflight.bench.rows import CALL, COLD, EVENT_COLD, EVENT_HOT, HOT, OpRow, by_shape, ratio, tie_bands

WITHIN = 1.05  # of the best other
OR_US = {HOT: 0.15, COLD: 0.15, CALL: 0.5}  # microseconds that count as equal whatever the ratio
NAMES = {CALL: "call", HOT: "hot", COLD: "cold", EVENT_HOT: "event hot", EVENT_COLD: "event cold"}


@dataclass(frozen=True)
class Compared:
    """Ours beside the best other, in one cell of a table."""

    shape: str
    time: str
    ours: float
    best: float
    contender: str

    @property
    def within(self) -> bool:
        return self.ours <= max(WITHIN * self.best, self.best + OR_US[self.time])

    def __str__(self) -> str:
        return f"{self.shape} {NAMES[self.time]} {self.ours:.2f} against {self.best:.2f} ({self.contender})"


def best_other(cell: Mapping[str, OpRow], time: str) -> OpRow | None:
    """The fastest of a cell beside what "rooflight" runs: peers, and our other provider."""
    others = [
        row
        for name, row in cell.items()
        if name in (*PEERS, *PROVIDERS) and row.time(time) and _alike(row, cell.get(OURS), time)
    ]
    return min(others, key=lambda row: row.time(time).median, default=None)  # type: ignore[union-attr]


def _alike(row: OpRow, ours: OpRow | None, time: str) -> bool:
    """Whether caches were emptied in the same way, where that matters."""
    return ours is None or time != COLD or row.cold_method == ours.cold_method


def compared(rows: Sequence[OpRow], time: str) -> list[Compared]:
    """Every shape of one operator and dtype where ours and another were both measured."""
    found = []
    for shape, cell in by_shape(rows).items():
        ours = cell.get(OURS)
        mine = ours.time(time) if ours else None
        best = best_other(cell, time)
        its = best.time(time) if best else None
        if mine is not None and best is not None and its is not None:
            found.append(Compared(shape, time, mine.median, its.median, best.contender))
    return found


def lines(rows: Sequence[OpRow]) -> list[str]:
    """The end of a table, in words. Rows of one operator and dtype."""
    said = []
    for bands in tie_bands(rows).values():
        parts = ", ".join(f"{NAMES[name]} {band:.1%}" for name, band in bands.items())
        said.append(f"tie band (ours against itself, at worst): {parts}")
    for times in ((HOT, COLD), (CALL,)):
        cells = [cell for time in times for cell in compared(rows, time)]
        outside = [cell for cell in cells if not cell.within]
        if cells:
            what = " and ".join(NAMES[time] for time in times)
            count = f"{len(cells) - len(outside)} of {len(cells)}"
            text = f"{what}: ours within {WITHIN}x or {OR_US[times[0]]} us of the best other in {count}"
            said.append(text + ("; outside: " + ", ".join(map(str, outside)) if outside else ""))
    return said


def failures(rows: Sequence[OpRow]) -> list[str]:
    """Who gave no figures, where and why; equal reasons said once."""
    shapes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row.error is not None:
            shapes.setdefault((row.contender, row.error), []).append(row.shape)
    return [f"{name} at {', '.join(where)}: {reason}" for (name, reason), where in shapes.items()]


def against_ours(row: OpRow, ours: OpRow | None) -> str:
    """Call, hot and cold time over ours: above 1 ours is faster. Empty for ours and where nothing is to compare."""
    if ours is None or row is ours or row.error is not None:
        return ""
    ratios = (ratio(row, ours, name) if _alike(row, ours, name) else None for name in (CALL, HOT, COLD))
    return " / ".join("-" if value is None else f"{value:.2f}" for value in ratios)
