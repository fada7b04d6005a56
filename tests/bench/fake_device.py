"""A device with clocks and a cache of its own, so that the protocols can be checked against known times."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rooflight.bench.device import Closure, launch_all

NODE_US, HOT_RATE, COLD_RATE = 1.0, 1000.0, 100.0  # a kernel that does nothing; bytes per microsecond from L2, DRAM
CLEAN = "clean buffer of the flush"


@dataclass
class FakeResult:
    """Memory that returns to the device when the last reference goes, as tensors do."""

    place: str
    free: list[str] = field(repr=False)

    def __del__(self) -> None:
        self.free.append(self.place)


class FakeGraph:
    def __init__(self, device: FakeDevice, kernels: list[Callable[[], float]]) -> None:
        self.device, self.kernels = device, kernels

    def replay(self) -> None:
        self.device.host_us += 5.0
        for kernel in self.kernels:
            self.device.execute(kernel)


class FakeDevice:
    """The host queues kernels, the GPU runs them later; buffers are names with a number of bytes, LRU in the cache.

    From a flush until `flushed` nothing stays there: its lines are the last to be evicted.
    """

    name = "cpu"
    flush_method = "fake"
    read_method = "fake read"

    def __init__(self, l2_bytes: int = 10_000) -> None:
        self.l2_bytes = l2_bytes
        self.host_us = self.gpu_us = 0.0
        self.launches = 0
        self.working = True
        self._marked = False
        self._cached: OrderedDict[str, int] = OrderedDict()
        self._recording: list[Callable[[], float]] | None = None
        self._free: list[str] = []
        self._places = 0

    def kernel(self, buffers: Mapping[str, int], out: int = 0, host_us: float = 10.0, fixed_us: float = 0.0) -> Closure:
        """A closure that touches these buffers and a result of `out` bytes that it allocates."""

        def launch() -> FakeResult | None:
            result = self._allocate() if out else None
            touched = {**buffers, **({result.place: out} if result else {})}
            self.launch(touched, host_us, fixed_us)
            return result

        return launch

    def launch(self, buffers: Mapping[str, int], host_us: float = 10.0, fixed_us: float = 0.0) -> None:
        def run() -> float:
            return NODE_US + fixed_us + sum(self._touch(name, size) for name, size in buffers.items())

        if self._recording is not None:
            self._recording.append(run)
        else:
            self.host_us += host_us
            self.launches += 1
            self.execute(run)

    def execute(self, kernel: Callable[[], float]) -> None:
        self.gpu_us = max(self.gpu_us, self.host_us) + kernel()

    def capture(self, launches: Iterable[Closure], keep: int = 0) -> FakeGraph:
        self._recording = []
        try:
            launch_all(launches, keep)
            return FakeGraph(self, self._recording)
        finally:
            self._recording = None

    def laps_us(self, runs: Sequence[Closure]) -> list[float]:
        times = [max(self.gpu_us, self.host_us)]
        for run in runs:
            run()
            times.append(max(self.gpu_us, self.host_us))
        self.synchronize()
        return [end - start for start, end in itertools.pairwise(times)]

    def now_us(self) -> float:
        return self.host_us

    def synchronize(self) -> None:
        self.host_us = max(self.host_us, self.gpu_us)

    def read(self, data: torch.Tensor) -> None:
        self.launch({str(data.data_ptr()): data.numel() * 4})

    def warm_clocks(self) -> None:
        self.host_us += 1e6

    def flush(self) -> None:
        self.launch({CLEAN: 3 * self.l2_bytes + 1}, host_us=5.0)

    def flushed(self) -> None:
        self._marked = False

    def healthy(self) -> bool:
        return self.working

    def _allocate(self) -> FakeResult:
        if not self._free:
            self._places += 1
            self._free.append(f"result {self._places}")
        return FakeResult(self._free.pop(), self._free)

    def _touch(self, name: str, size: int) -> float:
        hit = name in self._cached
        self._cached[name] = size
        self._cached.move_to_end(name)
        while sum(self._cached.values()) > self.l2_bytes:
            self._cached.popitem(last=False)
        self._marked = self._marked or name == CLEAN
        if self._marked:
            self._cached.clear()
        return size / (HOT_RATE if hit else COLD_RATE)
