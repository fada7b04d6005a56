"""What a GPU can do at most, for every GPU that we know: measured, or from its data sheet.

`measured/<key>.json` is what `rooflight bench card` found; `datasheets/<key>.json` what the vendor prints, with its
sources. Nobody reaches a data sheet: for a card that was not measured, every figure is multiplied by the fraction of
its data sheet that the H200 reached, and says so.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from rooflight.limits.card import Bandwidth, Card

ROOT = Path(__file__).parent
YARDSTICK = "h200"  # the card whose fractions stand for those of cards that were not measured
NOT_MEASURED_LIKE = {"int8": "fp8"}  # formats whose product was not measured: the fraction of the other one


@dataclass(frozen=True)
class Ceilings:
    """Ceilings of one GPU, in bytes, operations and microseconds.

    read: rates of streams that only read, by their bytes. write_rate: what a written byte adds, so that reading and
    writing together give the measured copy. flops: dense, by format ("fp32" are the CUDA cores). node_us: a kernel of
    a graph that does nothing. call_us: the host, for one operator outside of a graph; another machine's may be half.
    link_rate: to a neighbour, one direction. fractions: of the data sheet that these figures are.
    """

    key: str
    name: str
    origin: str
    memory_bytes: int
    read: tuple[Bandwidth, ...]
    write_rate: float
    flops: Mapping[str, float]
    node_us: float
    call_us: float
    link: str
    link_rate: float
    measured: bool
    fractions: Mapping[str, float] = field(default_factory=dict)
    sources: tuple[str, ...] = ()
    architecture: str = ""

    @property
    def scales(self) -> bool:
        """Whether norms can be shared between products there: csrc/skinny_linear.cu is Hopper's."""
        return self.architecture == "sm_90"

    def read_rate(self, size: float) -> float:
        """Bytes per second of a stream of `size` bytes; see `stream_rate`."""
        return stream_rate(self.read, size)

    def unit(self, unit: str, dtype: str) -> str:
        """The format whose rate counts for a cost's unit on values of `dtype` (fp32, bf16, …)."""
        return "fp32" if unit != "tensor" or dtype not in self.flops else dtype


def stream_rate(measured: Sequence[Bandwidth], size: float) -> float:
    """Bytes per second of a stream of `size` bytes: between measured sizes by the logarithm, no better beyond."""
    points = sorted(measured, key=lambda point: point.bytes)
    if size <= points[0].bytes:
        return points[0].rate
    for low, high in pairwise(points):
        if size <= high.bytes:
            share = math.log(size / low.bytes) / math.log(high.bytes / low.bytes)
            return low.rate + share * (high.rate - low.rate)
    return points[-1].rate


def known() -> list[str]:
    """Keys of all cards, as a user types them."""
    return sorted(path.stem for path in (ROOT / "datasheets").glob("*.json"))


@cache
def ceilings(key: str) -> Ceilings:
    """The ceilings of a card by its key; ValueError naming the known ones."""
    if key.lower() not in known():
        raise ValueError(f"gpu must be one of {', '.join(known())}, was {key!r}")
    sheet = _sheet(key.lower())
    card = _measured(sheet["key"])
    return _from_measured(sheet, card) if card is not None else _from_sheet(sheet)


def _sheet(key: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / "datasheets" / f"{key}.json").read_text())
    return found


def _measured(key: str) -> Card | None:
    path = ROOT / "measured" / f"{key}.json"
    return Card.load(path) if path.exists() else None


def _from_measured(sheet: Mapping[str, Any], card: Card) -> Ceilings:
    environment = card.environment
    fractions = _fractions() if sheet["key"] == YARDSTICK else {}
    flops = dict(card.matmul)
    for name, like in NOT_MEASURED_LIKE.items():
        if name not in flops and name in sheet["flops"] and like in flops:
            flops[name] = sheet["flops"][name] * flops[like] / sheet["flops"][like]
    return Ceilings(
        **_common(sheet),
        origin=f"measured, commit {environment['commit']}, {environment['date']}",
        read=card.read,
        write_rate=_write_rate(card.read_bandwidth, card.copy_bandwidth),
        flops=flops,
        node_us=card.node_us["dependent launch"],
        call_us=card.call_us["PyTorch operator"],
        measured=True,
        fractions=fractions,
    )


def _from_sheet(sheet: Mapping[str, Any]) -> Ceilings:
    yardstick, fractions = ceilings(YARDSTICK), _fractions()
    best = max(point.rate for point in yardstick.read)
    rate = sheet["memory_rate"] * fractions["read"]
    return Ceilings(
        **_common(sheet),
        origin=f"data sheet, times the fraction of it that the {yardstick.name} reached",
        read=tuple(Bandwidth(point.bytes, rate * point.rate / best) for point in yardstick.read),
        write_rate=_write_rate(rate, sheet["memory_rate"] * fractions["copy"]),
        flops={name: value * fractions[name] for name, value in sheet["flops"].items()},
        node_us=yardstick.node_us,
        call_us=yardstick.call_us,
        measured=False,
        fractions=fractions,
    )


def _common(sheet: Mapping[str, Any]) -> dict[str, Any]:
    fields: Sequence[str] = ("key", "name", "architecture", "memory_bytes", "link", "link_rate")
    return {name: sheet[name] for name in fields} | {"sources": tuple(sheet["source"])}


def _write_rate(read: float, copy: float) -> float:
    """A copied pair of bytes takes 2 / copy; what reading one takes off leaves the written one."""
    return 1 / max(2 / copy - 1 / read, 1e-30)


@cache
def _fractions() -> dict[str, float]:
    """What the yardstick reached of its data sheet, by ceiling."""
    sheet, card = _sheet(YARDSTICK), _measured(YARDSTICK)
    assert card is not None
    fractions = {name: value / sheet["flops"][name] for name, value in card.matmul.items() if name in sheet["flops"]}
    fractions |= {
        "read": card.read_bandwidth / sheet["memory_rate"],
        "copy": card.copy_bandwidth / sheet["memory_rate"],
    }
    for name, like in NOT_MEASURED_LIKE.items():
        fractions.setdefault(name, fractions[like])
    return fractions
