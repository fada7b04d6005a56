"""Where the time of a profiler trace went: host or GPU, which family, which kernels, and what their limits are.

Uses no PyTorch, and nothing of the machine that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rooflight.limits.profile.cost import Peaks
from rooflight.limits.profile.intervals import Union, in_order
from rooflight.limits.profile.reader import GPU_KINDS, STEP, Events, Kind, read_events
from rooflight.limits.profile.rows import LAUNCH_US, Row, kernel_rows, operator_rows
from rooflight.limits.profile.stream import Progress
from rooflight.limits.profile.verdict import Verdict, verdict


@dataclass(frozen=True)
class Family:
    """Kernels, or operators of a CPU, of one kind; share is of the time of all of them."""

    name: str
    calls: int
    total_us: float
    share: float


@dataclass(frozen=True)
class Device:
    """A GPU: the time in which anything ran on it, and the gaps of the wall time in which nothing did."""

    name: str
    streams: int
    kernels: int
    busy_us: float
    gaps: int
    longest_gap_us: float


@dataclass(frozen=True)
class Launches:
    """Calls of the host: that launch something, CUDA graphs among them, and the time of those that wait for a GPU.

    call_us: the median of the launches that are no graphs; None where there are none.
    """

    calls: int
    graphs: int
    call_us: float | None
    waiting_us: float


@dataclass(frozen=True)
class Step:
    """What `profiler.step()` marks off on the host; kernels may run later. busy_us is the busiest GPU's meanwhile."""

    name: str
    duration_us: float
    busy_us: float


@dataclass(frozen=True)
class Profile:
    """A trace, explained.

    wall_us: from the first event to the last. busy_us: of the busiest GPU; without one, the time in which any thread
    was in an operator. kernels, copies: on GPUs; operators: calls on the host, nested ones too. unusable: events
    left out because they have no usable times. gpus: as the trace names them; ceilings: the card that limits are of,
    None without limits. rows: by name, the most time first.
    """

    on_gpu: bool
    wall_us: float
    busy_us: float
    kernels: int
    copies: int
    operators: int
    unusable: int
    gpus: tuple[str, ...]
    ceilings: str | None
    launches: Launches
    devices: tuple[Device, ...]
    steps: tuple[Step, ...]
    families: tuple[Family, ...]
    rows: tuple[Row, ...]

    @property
    def host_share(self) -> float:
        """Of the wall time, that without anything on the GPU; without a GPU, that outside of operators."""
        return max(1 - self.busy_us / self.wall_us, 0.0) if self.wall_us else 0.0

    @property
    def verdict(self) -> Verdict:
        return verdict(self)

    def as_data(self) -> dict[str, Any]:
        data = asdict(self)
        for row, full in zip(data["rows"], self.rows, strict=True):
            row["mean_us"] = full.mean_us
        return data | {"host_share": self.host_share, "verdict": asdict(self.verdict)}


def read_profile(path: Path, ceilings: Any = None, progress: Progress | None = None) -> Profile:
    """Read a trace and explain it; the errors of `read_events`, the ceilings of `analyse`."""
    return analyse(read_events(path, progress), ceilings)


def analyse(events: Events, ceilings: Any = None) -> Profile:
    """Explain a trace. ceilings: of the card that it was recorded on, see `Peaks.of`; None: without limits."""
    peaks = Peaks.of(ceilings)
    on_gpu = events.has(*GPU_KINDS)
    start, end = min(events.start), max(events.end(event) for event in range(len(events)))
    launches = _launches(events)
    if on_gpu:
        devices, busy = _devices(events, start, end)
        rows = kernel_rows(events, peaks, _worth_a_launch(events, peaks, launches))
    else:
        devices, busy = (), _union(events, events.of(Kind.OPERATOR))
        rows = operator_rows(events, peaks)
    return Profile(
        on_gpu=on_gpu,
        wall_us=end - start,
        busy_us=busy.length,
        kernels=events.kind.count(Kind.KERNEL),
        copies=events.kind.count(Kind.MEMCPY) + events.kind.count(Kind.MEMSET),
        operators=events.kind.count(Kind.OPERATOR),
        unusable=events.unusable,
        gpus=tuple(dict.fromkeys(events.gpus)),
        ceilings=peaks.name if peaks is not None else None,
        launches=launches,
        devices=devices,
        steps=tuple(_steps(events, busy)),
        families=_families(rows),
        rows=tuple(rows),
    )


def _launches(events: Events) -> Launches:
    graphs, single, waiting = 0, [], 0.0
    for event in events.of(Kind.RUNTIME):
        name = events.name_of(event)
        if "GraphLaunch" in name:
            graphs += 1
        elif "Launch" in name and "HostFunc" not in name:
            single.append(events.duration[event])
        elif "Synchronize" in name:
            waiting += events.duration[event]
    return Launches(graphs + len(single), graphs, median(single) if single else None, waiting)


def _worth_a_launch(events: Events, peaks: Peaks | None, launches: Launches) -> float:
    """Microseconds: what a kernel should last. In the trace of a CUDA graph the few single launches say nothing."""
    single = launches.calls - launches.graphs
    seen = launches.call_us or 0.0 if 2 * single >= events.kind.count(Kind.KERNEL) else 0.0
    return max(LAUNCH_US, seen, peaks.launch_us if peaks is not None else 0.0)


def _union(events: Events, chosen: Iterable[int]) -> Union:
    order = in_order(events.start, events.duration, chosen)
    return Union((events.start[event], events.end(event)) for event in order)


def _devices(events: Events, start: float, end: float) -> tuple[tuple[Device, ...], Union]:
    """The GPUs of the trace, and when the busiest was busy."""
    by_device: dict[str, list[int]] = {}
    for event in events.of(*GPU_KINDS):
        by_device.setdefault(events.lanes[events.lane[event]][0], []).append(event)
    devices, unions = [], []
    for name, chosen in sorted(by_device.items()):
        union = _union(events, chosen)
        gaps = list(union.gaps(start, end))
        streams = len({events.lane[event] for event in chosen})
        kernels = sum(events.kind[event] == Kind.KERNEL for event in chosen)
        devices.append(Device(name, streams, kernels, union.length, len(gaps), max(gaps, default=0.0)))
        unions.append(union)
    return tuple(devices), max(unions, key=lambda union: union.length)


def _steps(events: Events, busy: Union) -> Iterator[Step]:
    for event in events.of(Kind.ANNOTATION):
        if events.name_of(event).startswith(STEP):
            meanwhile = busy.between(events.start[event], events.end(event))
            yield Step(events.name_of(event), events.duration[event], meanwhile)


def _families(rows: Sequence[Row]) -> tuple[Family, ...]:
    """The most time first."""
    names = dict.fromkeys(row.family for row in rows)
    families = []
    for name in names:
        its = [row for row in rows if row.family == name]
        calls, total = sum(row.calls for row in its), sum(row.total_us for row in its)
        families.append(Family(name, calls, total, sum(row.share for row in its)))
    return tuple(sorted(families, key=lambda family: -family.total_us))
