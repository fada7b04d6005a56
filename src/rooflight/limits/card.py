"""The measured ceilings of one GPU: what costs are compared with. `rooflight bench card` measures and writes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Bandwidth:
    """A stream through memory: `bytes` moved in all by one kernel (a copy reads and writes), at bytes per second."""

    bytes: int
    rate: float


@dataclass(frozen=True)
class Card:
    """Ceilings of one GPU.

    copy, read: bandwidths by size. matmul: FLOP/s of a square product of random numbers, by dtype. call_us: host
    microseconds to launch something that does nothing, by kind. node_us: GPU microseconds of an empty kernel in a
    graph, by kind. latency_ns: of a load that another waits for, from "L2" and from "DRAM". methods: which kernel
    stood for what. Whatever could not be measured is missing from its mapping and named with the reason in `missing`.
    """

    name: str
    l2_bytes: int
    copy: tuple[Bandwidth, ...]
    read: tuple[Bandwidth, ...] = ()
    matmul: Mapping[str, float] = field(default_factory=dict)
    call_us: Mapping[str, float] = field(default_factory=dict)
    node_us: Mapping[str, float] = field(default_factory=dict)
    latency_ns: Mapping[str, float] = field(default_factory=dict)
    methods: Mapping[str, str] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def copy_bandwidth(self) -> float:
        """Bytes per second of the best copy, read and written bytes both counted."""
        return max(point.rate for point in self.copy)

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second of the best stream that only reads."""
        return max(point.rate for point in self.read)

    @property
    def launch_floor_us(self) -> float:
        """GPU microseconds that a kernel in a graph takes even if it does nothing: the best of its kinds."""
        return min(self.node_us.values())

    def as_data(self) -> dict[str, Any]:
        return {"benchmark": "card", **asdict(self)}

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> Card:
        """The inverse of `as_data`; ValueError for something else."""
        if data.get("benchmark") != "card":
            raise ValueError(f"benchmark must be card, was {data.get('benchmark')!r}")
        fields = {name: value for name, value in data.items() if name != "benchmark"}
        for name in ("copy", "read"):
            fields[name] = tuple(Bandwidth(**point) for point in fields[name])
        return Card(**fields)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.as_data(), indent=1) + "\n")

    @staticmethod
    def load(path: Path) -> Card:
        """Read what `save` wrote; OSError or ValueError naming the file."""
        try:
            return Card.from_data(json.loads(path.read_text()))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"{path} holds no card ceilings: {error}") from error
