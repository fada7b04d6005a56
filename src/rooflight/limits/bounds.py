"""From a cost and a card's ceilings to a limit, and the wall it stands at.

No implementation beats it whose tensors come from memory; what stays on the chip between operators may.
"""

from __future__ import annotations

from dataclasses import dataclass

from rooflight.limits.ceilings import Ceilings
from rooflight.ops import Cost

WALLS = ("memory", "compute", "launch", "link")


@dataclass(frozen=True)
class Bound:
    """Microseconds that each wall asks for. All may be hidden behind the longest, and no more."""

    memory_us: float
    compute_us: float
    launch_us: float
    link_us: float = 0.0

    @property
    def limit_us(self) -> float:
        return max(self.memory_us, self.compute_us, self.launch_us, self.link_us)

    @property
    def wall(self) -> str:
        times = (self.memory_us, self.compute_us, self.launch_us, self.link_us)
        return WALLS[times.index(max(times))]


def memory_us(read: float, written: float, card: Ceilings, stream: float) -> float:
    """Time of bytes that are part of a stream of `stream` bytes, which decides how fast memory is read."""
    return (read / card.read_rate(stream) + written / card.write_rate) * 1e6


def bound(cost: Cost, dtype: str, card: Ceilings, *, stream: float | None = None) -> Bound:
    """The bound of one call on values of `dtype` ("bf16", …), in a graph of kernels.

    stream: bytes of the whole step that the call is part of; the call's own by default.
    """
    rate = card.flops[card.unit(cost.unit, dtype)]
    moved = memory_us(cost.bytes_read, cost.bytes_written, card, cost.bytes if stream is None else stream)
    return Bound(moved, cost.flops / rate * 1e6, card.node_us)
