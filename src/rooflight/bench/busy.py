"""How long the GPU works for a request, beside how long the request takes: where the host is slow, they differ."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from rooflight.bench.measurement import Busy
from rooflight.limits.profile.intervals import Union
from rooflight.limits.profile.reader import GPU_KINDS, read_events

MICROSECONDS = 1e-6
NOTHING = "the profiler saw no work of a GPU in the engine's process"


def measure_busy(run: Callable[[int], object], tokens: int) -> Busy:
    """run(n): one request with n tokens out. It is profiled with one token and with `tokens` more.

    What the second has beyond the first is the decode part, wherever an engine draws the line itself. The profiler
    makes launches slower for the rest of the process, so nothing may be timed there afterwards.
    ValueError where no GPU work is seen: there is none, or it is another process's.
    """
    run(1)  # whatever is loaded or captured at its first use
    run(1 + tokens)
    first = _busy_seconds(lambda: run(1))
    whole = _busy_seconds(lambda: run(1 + tokens))
    return Busy(first, max(whole - first, 0.0) / tokens)


def _busy_seconds(work: Callable[[], object]) -> float:
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            work()
            torch.cuda.synchronize()
        profiler.export_chrome_trace(str(trace))
        return busy_seconds(trace)


def busy_seconds(trace: Path) -> float:
    """Seconds of a trace in which a GPU has something to do: the union of its kernels, copies and fills."""
    try:
        events = read_events(trace)
    except ValueError as error:  # it would name a file that is gone when somebody reads this
        raise ValueError(NOTHING) from error
    spans = sorted((events.start[event], events.end(event)) for event in events.of(*GPU_KINDS))
    if not spans:
        raise ValueError(NOTHING)
    return Union(spans).length * MICROSECONDS
