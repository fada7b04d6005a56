"""Contenders for one call of a step, each in a graph of its own, replayed in turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rooflight.bench.device import Closure, Device
from rooflight.bench.measurement import Spread
from rooflight.bench.step_operators import long_graph
from rooflight.bench.timing import replay_us

ROUNDS = 7
REPLAYS = 1  # of a round, behind one that keeps the GPU busy until it is queued


def interleaved_us(
    device: Device, contenders: Mapping[str, Sequence[Closure]]
) -> tuple[dict[str, Spread], dict[str, str]]:
    """Microseconds of one launch of each; and of those that refuse it, what they say."""
    graphs, refused = {}, {}
    for name, launches in contenders.items():
        try:
            graphs[name] = long_graph(device, launches)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            refused[name] = str(error).partition("\n")[0]
            if not device.healthy():  # no figure behind this one would mean anything
                raise
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for _ in range(ROUNDS):
        for name, (graph, count) in graphs.items():
            times[name].append(replay_us(device, graph, REPLAYS) / count)
    return {name: Spread.of(found) for name, found in times.items()}, refused
