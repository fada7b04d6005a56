"""What timing needs of a device, and a CUDA device that has it. Tests bring one with a clock of their own."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Protocol

import torch

from rooflight.bench import library

Closure = Callable[[], object]
FLUSH_FACTOR = 3  # a flush or a rotation moves more than this many times the L2 cache


class Graph(Protocol):
    """Launches recorded once; `replay` queues them all."""

    def replay(self) -> None: ...


class Device(Protocol):
    """`name` is where PyTorch makes tensors; times are microseconds."""

    name: str
    l2_bytes: int
    flush_method: str

    def capture(self, launches: Iterable[Closure], keep: int = 0) -> Graph: ...

    def laps_us(self, runs: Sequence[Closure]) -> list[float]: ...

    def now_us(self) -> float: ...

    def synchronize(self) -> None: ...

    def flush(self) -> None: ...

    def flushed(self) -> None: ...

    def healthy(self) -> bool: ...


def launch_all(launches: Iterable[Closure], keep: int) -> None:
    """Launch one after the other; of their results the last `keep` stay alive while the next is made.

    So results rotate through keep + 1 places in memory; with 0 each takes the place of the one before.
    """
    results: deque[object] = deque(maxlen=keep)
    for launch in launches:
        results.append(launch())


def gpu_name() -> str:
    """Of the GPU that is measured; ValueError without one. Leaves it untouched."""
    if not torch.cuda.is_available():
        raise ValueError("this needs a GPU, and PyTorch sees none here")
    return torch.cuda.get_device_name()


class CudaDevice:
    """PyTorch's current CUDA device. ValueError without one."""

    name = "cuda"

    def __init__(self) -> None:
        gpu_name()
        self.l2_bytes = int(torch.cuda.get_device_properties().L2_cache_size)
        self._stream = torch.cuda.Stream()
        self._events: list[torch.cuda.Event] = []
        self._clean = torch.ones((FLUSH_FACTOR * self.l2_bytes // 4 // 1024 + 1) * 1024, device=self.name)
        self._scratch = torch.zeros((), device=self.name)
        self._library, _ = library.load()
        self.read_method = "torch.sum" if self._library is None else "read kernel"
        self.flush_method = "torch.sum" if self._library is None else "read kernel, evict last"
        self.flush()  # whatever is loaded at a first launch cannot be captured
        self.flushed()

    def capture(self, launches: Iterable[Closure], keep: int = 0) -> Graph:
        """Record the launches one after the other.

        Results are kept as in `launch_all`. Not `torch.cuda.graph`, which empties the allocator's cache each time.
        """
        graph = torch.cuda.CUDAGraph()
        self.synchronize()
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch_all(launches, keep)
            except BaseException:
                with suppress(RuntimeError):  # it would hide what went wrong
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def laps_us(self, runs: Sequence[Closure]) -> list[float]:
        """GPU time of each of several runs in a row, between events around them.

        Where the GPU waits for the host, so do the events. Work queued before the first lap keeps it from waiting.
        """
        while len(self._events) <= len(runs):
            self._events.append(torch.cuda.Event(enable_timing=True))
        events = self._events[: len(runs) + 1]
        events[0].record()
        for run, event in zip(runs, events[1:], strict=True):
            run()
            event.record()
        events[-1].synchronize()
        return [start.elapsed_time(end) * 1e3 for start, end in pairwise(events)]

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def flush(self) -> None:
        """Queue one kernel that reads a clean buffer of more than three times L2.

        What it evicts of an operator's output is written back at the operator's expense; its own lines are clean and
        cost nothing to evict. Call `flushed` before anything is measured with hot caches.
        """
        if self._library is None:
            self.read(self._clean)
        else:
            self._library.read(self._clean, self._scratch, flush=True)

    def flushed(self) -> None:
        """After flushes: queue what lets their lines leave L2 as easily as others."""
        if self._library is not None:
            self._library.unmark(self._clean)

    def read(self, data: torch.Tensor) -> None:
        """Queue one kernel that reads all of an FP32 vector once."""
        if self._library is None:
            torch.sum(data, 0, out=self._scratch)
        else:
            self._library.read(data, self._scratch)

    def warm_clocks(self, milliseconds: float = 500.0) -> None:
        """Matrix products until the clocks are up."""
        matrix = torch.randn(4096, 4096, device=self.name, dtype=torch.float16)
        end = self.now_us() + milliseconds * 1e3
        while self.now_us() < end:
            for _ in range(10):
                matrix @ matrix
            self.synchronize()

    def healthy(self) -> bool:
        """Whether kernels still run and graphs can still be captured after something failed."""
        try:
            self.synchronize()
            value = torch.zeros((), device=self.name)
            self.capture([lambda: value.add_(1), lambda: value + 1]).replay()
            return value.item() == 1
        except RuntimeError:
            return False
