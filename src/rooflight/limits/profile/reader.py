"""The events of a profiler trace in columns: some fifty bytes an event, names and shapes stored once."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

from rooflight.limits.profile.stream import Progress, stream_events

NOTHING = -1  # in a column of numbers or places: there is none


class Kind(IntEnum):
    """What an event is. The first three happen on the host, the others on a GPU."""

    OPERATOR = 0
    RUNTIME = 1  # a call of CUDA's runtime or driver
    ANNOTATION = 2
    KERNEL = 3
    MEMCPY = 4
    MEMSET = 5


GPU_KINDS = (Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
_LATEST = 1e18  # microseconds, thousands of years; beyond it clocks are wrong, and sums no numbers
STEP = "ProfilerStep#"
# By the category, in lower case; the last four are those of PyTorch before 1.12. Annotations on the GPU's own tracks
# repeat those of the host, and Python frames hold everything else: neither is kept.
_KINDS = {
    "cpu_op": Kind.OPERATOR,
    "cuda_runtime": Kind.RUNTIME,
    "cuda_driver": Kind.RUNTIME,
    "hip_runtime": Kind.RUNTIME,
    "xpu_runtime": Kind.RUNTIME,
    "user_annotation": Kind.ANNOTATION,
    "kernel": Kind.KERNEL,
    "gpu_memcpy": Kind.MEMCPY,
    "gpu_memset": Kind.MEMSET,
    "operator": Kind.OPERATOR,
    "runtime": Kind.RUNTIME,
    "memcpy": Kind.MEMCPY,
    "memset": Kind.MEMSET,
}


@dataclass(frozen=True)
class Inputs:
    """Arguments of an operator as the profiler wrote them down; not checked yet."""

    dims: Any
    types: Any
    strides: Any


class Events:
    """Columns: an event has the same place in all of them. Times are microseconds.

    lane: place in `lanes`, of (process, thread) on the host and of (device, stream) on a GPU. inputs: place in
    `shapes`. correlation: what a kernel shares with the call that launched it; external: what it shares with the
    operator. size: bytes that a copy moves. unusable: events left out because their times are no times. gpus: names of
    the GPUs of the machine.
    """

    def __init__(self) -> None:
        self.kind = bytearray()
        self.start, self.duration = array("d"), array("d")
        self.name, self.lane, self.inputs = array("i"), array("i"), array("i")
        self.correlation, self.external, self.size = array("q"), array("q"), array("q")
        self.names: list[str] = []
        self.lanes: list[tuple[str, str]] = []
        self.shapes: list[Inputs] = []
        self.unusable = 0
        self.gpus: list[str] = []
        self._places: dict[Any, int] = {}

    def __len__(self) -> int:
        return len(self.kind)

    def end(self, event: int) -> float:
        return self.start[event] + self.duration[event]

    def name_of(self, event: int) -> str:
        return self.names[self.name[event]]

    def of(self, *kinds: Kind) -> list[int]:
        """Places of the events of some kinds, in the file's order."""
        return [event for event, kind in enumerate(self.kind) if kind in kinds]

    def has(self, *kinds: Kind) -> bool:
        return any(kind in self.kind for kind in kinds)

    def note(self, key: str, value: Any) -> None:
        """Keep what is wanted of the file's head."""
        if key == "deviceProperties" and isinstance(value, list):
            self.gpus = [str(gpu["name"]) for gpu in value if isinstance(gpu, dict) and "name" in gpu]

    def add(self, event: Any) -> None:
        """Keep an event of the trace if it has a duration and is of a known kind."""
        if not isinstance(event, dict):
            self.unusable += 1
            return
        kind = _KINDS.get(str(event.get("cat")).lower())
        if kind is None or event.get("ph") != "X":
            return
        start, duration = _number(event.get("ts")), _number(event.get("dur"))
        if not (abs(start) <= _LATEST and 0 <= duration <= _LATEST):  # NaN is not either
            self.unusable += 1
            return
        name, args = str(event.get("name")), event.get("args")
        args = args if isinstance(args, dict) else {}
        self.kind.append(Kind.ANNOTATION if name.startswith(STEP) else kind)
        self.start.append(start)
        self.duration.append(duration)
        self.name.append(self._place(self.names, name, name))
        lane = _lane(event, args, kind in GPU_KINDS)
        self.lane.append(self._place(self.lanes, lane, lane))
        self.inputs.append(self._shapes(args) if kind == Kind.OPERATOR else NOTHING)
        self.correlation.append(_integer(args.get("correlation")))
        self.external.append(_integer(args.get("External id", args.get("external id"))))
        self.size.append(_integer(args.get("bytes", args.get("Bytes"))))

    def _shapes(self, args: Mapping[str, Any]) -> int:
        dims = args.get("Input Dims", args.get("Input dims"))
        if not dims:
            return NOTHING
        inputs = Inputs(dims, args.get("Input type"), args.get("Input Strides"))
        return self._place(self.shapes, repr(inputs), inputs)  # lists have no hash

    def _place(self, values: list[Any], key: Any, value: Any) -> int:
        """Where `value` stands in `values`, at the end if it is new."""
        place = self._places.setdefault((id(values), key), len(values))
        if place == len(values):
            values.append(value)
        return place


def read_events(path: Path, progress: Progress | None = None) -> Events:
    """The events of a trace that `torch.profiler` exported, as .json or .json.gz, with a duration and a known kind.

    progress: called as progress(bytes read, bytes in all). Raises OSError where the file cannot be opened, and
    ValueError in one line that names it where it is empty, no JSON, cut, damaged, no trace, or has nothing to show.
    """
    events = Events()
    for event in stream_events(path, progress, events.note):
        events.add(event)
    if not events.has(Kind.OPERATOR, *GPU_KINDS):
        unusable = f" ({events.unusable:,} without usable times)" if events.unusable else ""
        raise ValueError(f"{path} has no operators or kernels with durations{unusable}")
    return events


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _integer(value: Any) -> int:
    return value if type(value) is int and 0 <= value < 1 << 63 else NOTHING


def _lane(event: Mapping[str, Any], args: Mapping[str, Any], on_gpu: bool) -> tuple[str, str]:
    if on_gpu:
        return str(args.get("device", event.get("pid"))), str(args.get("stream", event.get("tid")))
    return str(event.get("pid")), str(event.get("tid"))
