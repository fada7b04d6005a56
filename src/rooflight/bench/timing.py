"""The protocols: how long one call of a closure takes, on the host and on the GPU, with full and with empty caches.

call        host time of a call in steady state: batches of calls with nothing waited for inside the timed part.
hot         GPU time of a launch among many on the same buffers in one CUDA graph.
cold        GPU time with inputs and outputs in DRAM. Where at most 64 sets of arguments exceed three times L2, a graph
            rotates through them and one more. Smaller ones: a graph of pairs (flush, launch) minus a graph of flushes.
event       the second protocol, of tutorials: events around single eager calls, 50 warm-ups, rounds of 50 samples.
            For small shapes its figures are those of the host.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

from rooflight.bench.device import FLUSH_FACTOR, Closure, Device, Graph

MOST_SETS = 64  # of arguments that a rotation needs to exceed FLUSH_FACTOR times L2; one more is taken
HOT_US = 600.0  # a replay is at least this long where MOST_LAUNCHES allows, to make the gap between replays small
COLD_US = 500.0
PROBE, PROBES, MOST_LAUNCHES = 20, 5, 1000
OFF = 2  # times that a graph may be shorter than it should be
WARM_REPLAYS = 5
FLUSHED_LAUNCHES = 20
REPLAYS = 3
CALL_BATCHES, CALLS, FEWEST_CALLS, CALL_WARM_UPS = 3, 50, 20, 10
CALL_GPU_US = 5000.0  # GPU work of one batch of calls: the launch queue must never be full
EVENT_WARM_UPS, EVENT_SAMPLES, EVENT_ROUNDS = 50, 50, 5


@dataclass(frozen=True)
class ColdPlan:
    """How caches are emptied for a working set: by rotating through `sets` argument sets, or by a flush (1 set)."""

    sets: int

    @staticmethod
    def of(working_set: int, l2_bytes: int) -> ColdPlan:
        """working_set: bytes of the tensors that one call reads and writes."""
        exceeding = FLUSH_FACTOR * l2_bytes // max(working_set, 1) + 1
        return ColdPlan(exceeding + 1 if exceeding <= MOST_SETS else 1)

    @property
    def flushes(self) -> bool:
        return self.sets == 1

    def method(self, device: Device) -> str:
        return f"flush by {device.flush_method}" if self.flushes else f"rotation of {self.sets} sets"

    def launches(self, hot_us: float) -> int:
        """Of the cold graph: whole turns of the rotation that take COLD_US or more even if they were hot."""
        if self.flushes:
            return FLUSHED_LAUNCHES
        turns = math.ceil(COLD_US / max(hot_us, 1e-3) / self.sets)
        return self.sets * max(1, min(turns, MOST_LAUNCHES // self.sets))


def hot_launches(probe_us: float) -> int:
    """How many launches of `probe_us` a hot graph gets."""
    return max(PROBE, min(MOST_LAUNCHES, math.ceil(HOT_US / max(probe_us, 1e-3))))


def calls_of(hot_us: float) -> int:
    """How many calls make a batch: about 50, fewer if the GPU needs long for each."""
    return int(max(FEWEST_CALLS, min(CALLS, CALL_GPU_US / max(hot_us, 1e-3))))


def replay_us(device: Device, graph: Graph, replays: int = REPLAYS) -> float:
    """GPU time of one replay. The first one, untimed, keeps the GPU busy until the timed ones are queued."""

    def run() -> None:
        for _ in range(replays):
            graph.replay()

    graph.replay()
    return device.laps_us([run])[0] / replays


def difference_us(device: Device, with_op: Graph, without: Graph, launches: int, pairs: int = REPLAYS) -> float:
    """GPU time that a launch adds to a flush: medians of alternating replays of both graphs."""
    without.replay()  # keeps the GPU busy, as in `replay_us`
    laps = device.laps_us([with_op.replay, without.replay] * pairs)
    return (median(laps[0::2]) - median(laps[1::2])) / launches


def call_us(device: Device, call: Closure, calls: int) -> float:
    """Host time of one call: the median of a few batches. The GPU catches up between batches, outside the clock."""
    for _ in range(CALL_WARM_UPS):
        call()
    times = []
    with _without_collector():
        for _ in range(CALL_BATCHES):
            device.synchronize()
            start = device.now_us()
            for _ in range(calls):
                call()
            times.append((device.now_us() - start) / calls)
    device.synchronize()
    return median(times)


def event_us(device: Device, call: Closure, cold: bool) -> list[float]:
    """One round of samples: events around one eager call, each waited for; cold: a flush before each."""
    times = []
    with _without_collector():
        for _ in range(EVENT_SAMPLES):
            if cold:
                device.flush()
            times += device.laps_us([call])
    if cold:
        device.flushed()
    return times


class Timer:
    """One contender on one case: its graphs, captured once, and its rounds.

    closures: one for each argument set of the plan, all called at least once before. refresh: puts fresh values into
    arguments that the closures write into.
    """

    def __init__(self, device: Device, plan: ColdPlan, closures: Sequence[Closure], refresh: Closure) -> None:
        self.device, self.plan, self.closures, self.refresh = device, plan, list(closures), refresh
        probe = device.capture([self.closures[0]] * PROBE)
        self._size(min(replay_us(device, probe, 1) for _ in range(PROBES)) / PROBE)
        self._settled = self._warm = False

    def _size(self, launch_us: float) -> None:
        """Capture graphs whose replays are long enough, where a hot launch takes `launch_us`."""
        device, plan = self.device, self.plan
        self.hot_launches, self.calls = hot_launches(launch_us), calls_of(launch_us)
        self.cold_launches = plan.launches(launch_us)
        self._hot = device.capture([self.closures[0]] * self.hot_launches)
        if plan.flushes:
            self._cold = device.capture([device.flush, self.closures[0]] * self.cold_launches)
            self._flush = device.capture([device.flush] * self.cold_launches)
        else:
            self._cold = device.capture(self.closures * (self.cold_launches // plan.sets), keep=plan.sets - 1)

    def _settle(self) -> None:
        """Size anew if the first look, while other processes were using the GPU, was far off."""
        found = replay_us(self.device, self._hot) / self.hot_launches
        if hot_launches(found) > OFF * self.hot_launches:
            self._size(found)
        self._settled = True

    def round(self) -> dict[str, float]:
        """Microseconds: call, hot, cold."""
        self._get_ready()
        return {"call_us": call_us(self.device, self.closures[0], self.calls), **self._gpu_times()}

    def gpu_round(self) -> dict[str, float]:
        """Microseconds: hot, cold."""
        self._get_ready()
        return self._gpu_times()

    def _get_ready(self) -> None:
        self.refresh()
        for _ in range(WARM_REPLAYS):  # another process had the GPU, or nobody for a while
            self._hot.replay()
        if not self._settled:
            self._settle()

    def _gpu_times(self) -> dict[str, float]:
        self.refresh()
        times = {"hot_us": replay_us(self.device, self._hot) / self.hot_launches}
        if self.plan.flushes:
            times["cold_us"] = difference_us(self.device, self._cold, self._flush, self.cold_launches)
            self.device.flushed()
        else:
            times["cold_us"] = replay_us(self.device, self._cold) / self.cold_launches
        return times

    def event_round(self) -> dict[str, list[float]]:
        """Microseconds of each sample, hot and cold; warm-ups before the first round."""
        self.refresh()
        call = self.closures[0]
        for _ in range(0 if self._warm else EVENT_WARM_UPS):
            call()
        self._warm = True
        self.device.synchronize()
        return {f"event_{name}_us": event_us(self.device, call, name == "cold") for name in ("hot", "cold")}


@contextmanager
def _without_collector() -> Iterator[None]:
    """Python's collector would run in the middle of a batch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
