"""What a run of operators gives: rows, the limit beside each figure, ratios between rows that may be compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rooflight.bench.cell import Case
from rooflight.bench.contenders import AGAIN, OURS
from rooflight.bench.measurement import Spread
from rooflight.limits.card import Card

CALL, HOT, COLD, EVENT_HOT, EVENT_COLD = TIMES = ("call_us", "hot_us", "cold_us", "event_hot_us", "event_cold_us")
_EMPTY = {"median": None, "low": None, "high": None}


@dataclass(frozen=True)
class OpRow:
    """One contender on one case, microseconds. `run` names the run; a row with `error` has no times.

    bytes: what the operator must move. limit_us: the time for that at the card's copy bandwidth, or the launch floor
    where that is longer (`wall` says which). at_limit_hot and at_limit_cold: limit over time, 1 is the limit itself.
    """

    run: str
    operator: str
    dtype: str
    num_tokens: int
    hidden_size: int
    contender: str
    version: str
    bytes: int
    limit_us: float
    wall: str
    cold_method: str
    call_us: Spread | None = None
    hot_us: Spread | None = None
    cold_us: Spread | None = None
    event_hot_us: Spread | None = None
    event_cold_us: Spread | None = None
    at_limit_hot: float | None = None
    at_limit_cold: float | None = None
    error: str | None = None

    @property
    def shape(self) -> str:
        return f"{self.num_tokens}x{self.hidden_size}"

    def time(self, name: str) -> Spread | None:
        """One of `TIMES`."""
        value: Spread | None = getattr(self, name)
        return value

    def as_data(self) -> dict[str, Any]:
        """Every column, also for what was not measured."""
        return {key: _EMPTY if key in TIMES and value is None else value for key, value in asdict(self).items()}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> OpRow:
        spreads = {name: _spread(data[name]) for name in TIMES}
        return OpRow(**{**data, **spreads})


def _spread(data: Mapping[str, Any]) -> Spread | None:
    return None if data["median"] is None else Spread(**data)


def limit(card: Card, traffic: int) -> tuple[float, str]:
    """Microseconds that `traffic` bytes take at least on this card, and the wall: "memory" or "launch"."""
    memory = traffic / card.copy_bandwidth * 1e6
    launch = card.launch_floor_us
    return (memory, "memory") if memory >= launch else (launch, "launch")


def make_row(
    run: str,
    case: Case,
    card: Card,
    contender: str,
    facts: Mapping[str, Any],
    times: Mapping[str, Sequence[float]],
    error: str | None,
) -> OpRow:
    """A row from the samples of its rounds. facts: `version`, `bytes`, `cold_method`."""
    limit_us, wall = limit(card, facts["bytes"])
    measured: dict[str, Any] = {}
    if error is None:
        measured = {name: Spread.of(values) for name, values in times.items()}
        if any(its.median <= 0 for its in measured.values()):
            measured, error = {}, "the noise of the measurement is larger than the operator"
        for name, at_limit in ((HOT, "at_limit_hot"), (COLD, "at_limit_cold")):
            if name in measured:
                measured[at_limit] = limit_us / measured[name].median
    return OpRow(
        run=run,
        operator=case.operator,
        dtype=case.dtype,
        num_tokens=case.num_tokens,
        hidden_size=case.hidden_size,
        contender=contender,
        version=facts["version"],
        bytes=facts["bytes"],
        limit_us=limit_us,
        wall=wall,
        cold_method=facts["cold_method"],
        error=error,
        **measured,
    )


def ratio(row: OpRow, other: OpRow, name: str) -> float | None:
    """`row`'s median over `other`'s, for one of `TIMES`; None where one of them was not measured.

    ValueError unless both come from one run and are about the same operator, dtype and shape, emptied caches in the
    same way where that matters.
    """
    for field in ("run", "operator", "dtype", "shape", *(["cold_method"] if name == COLD else [])):
        mine, its = getattr(row, field), getattr(other, field)
        if mine != its:
            raise ValueError(f"{field} must be the same for a ratio of {name}, was {mine} and {its}")
    mine, its = row.time(name), other.time(name)
    return None if mine is None or its is None else mine.median / its.median


@dataclass(frozen=True)
class OpsReport:
    """All rows of one run, with the setup, card and environment they belong to; `absent` names what was not run."""

    run: str
    setup: Mapping[str, Any]
    environment: Mapping[str, Any]
    card: Card
    rows: tuple[OpRow, ...]
    absent: Mapping[str, str]

    def of(self, operator: str) -> OpsReport:
        return replace(self, rows=tuple(row for row in self.rows if row.operator == operator))

    def as_data(self) -> dict[str, Any]:
        return {
            "benchmark": "ops",
            "run": self.run,
            "setup": dict(self.setup),
            "environment": dict(self.environment),
            "card": self.card.as_data(),
            "tie_bands": {f"{operator} {dtype}": band for (operator, dtype), band in tie_bands(self.rows).items()},
            "absent": dict(self.absent),
            "rows": [row.as_data() for row in self.rows],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> OpsReport:
        """The inverse of `as_data`; ValueError for something else."""
        if data.get("benchmark") != "ops":
            raise ValueError(f"benchmark must be ops, was {data.get('benchmark')!r}")
        rows = tuple(OpRow.from_data(row) for row in data["rows"])
        card = Card.from_data(data["card"])
        return OpsReport(data["run"], data["setup"], data["environment"], card, rows, data["absent"])


def by_shape(rows: Sequence[OpRow]) -> dict[str, dict[str, OpRow]]:
    """Rows of one operator and dtype: shape -> contender -> row, in the order they came."""
    shapes: dict[str, dict[str, OpRow]] = {}
    for row in rows:
        shapes.setdefault(row.shape, {})[row.contender] = row
    return shapes


def by_table(rows: Sequence[OpRow]) -> dict[tuple[str, str], list[OpRow]]:
    """(operator, dtype) -> rows, in the order they came."""
    tables: dict[tuple[str, str], list[OpRow]] = {}
    for row in rows:
        tables.setdefault((row.operator, row.dtype), []).append(row)
    return tables


def tie_bands(rows: Sequence[OpRow]) -> dict[tuple[str, str], dict[str, float]]:
    """By (operator, dtype) and time: how far apart ours and ours again were at worst, as a fraction.

    Contenders closer than this cannot be told apart.
    """
    bands: dict[tuple[str, str], dict[str, float]] = {}
    for table, its in by_table(rows).items():
        pairs = [(cell[OURS], cell[AGAIN]) for cell in by_shape(its).values() if OURS in cell and AGAIN in cell]
        for name in TIMES:
            apart = [abs(value - 1) for ours, again in pairs if (value := ratio(again, ours, name)) is not None]
            if apart:
                bands.setdefault(table, {})[name] = max(apart)
    return bands
