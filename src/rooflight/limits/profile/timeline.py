"""A GPU's events one behind the other: launches told apart, and each instant given to one event only.

Kernels of a graph overlap: one that was launched as dependent starts while the one before it still runs, loads what it
may, and waits. Its duration counts that waiting, and durations add up to more than the time that passed. So an event
here takes the time from the end of all before it to its own end: what it adds. That holds the gap in front of it too
(`idle`): starting is a part of what a kernel costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rooflight.limits.profile.intervals import Union
from rooflight.limits.profile.reader import GPU_KINDS, Events, Kind

UPLOAD = "Memcpy HtoD"  # every launch of our runner begins with the numbers that the host sends, and has no other
FROM_AND_TO_HOST = (UPLOAD, "Memcpy DtoH")


@dataclass(frozen=True)
class Span:
    """A kernel, copy or fill on a GPU; microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class Spent:
    """What a span took of the time that passed, and how much of it was a gap in front of it."""

    span: Span
    us: float
    idle_us: float


@dataclass(frozen=True)
class Launch:
    """Spans in the order of their starts, at least one.

    It lasts from the start of its first kernel to the end of its last one: between the host's copy and the first
    kernel the GPU waits for the host, and the copy back is nobody's hurry.
    """

    spans: tuple[Span, ...]

    @property
    def _ends(self) -> tuple[float, float]:
        kernels = [span for span in self.spans if not span.name.startswith(FROM_AND_TO_HOST)] or self.spans
        return kernels[0].start, max(span.end for span in kernels)

    @property
    def span_us(self) -> float:
        begin, end = self._ends
        return end - begin

    @property
    def busy_us(self) -> float:
        """In which anything ran."""
        return Union((span.start, span.end) for span in self.spans).between(*self._ends)

    def spent(self) -> list[Spent]:
        """In order; the times add up to `span_us`."""
        until, last = self._ends
        found = []
        for span in self.spans:
            idle = max(min(span.start, last) - until, 0.0)
            found.append(Spent(span, max(min(span.end, last) - until, 0.0), idle))
            until = max(until, min(span.end, last))
        return found


def spans_of(events: Events) -> list[Span]:
    """Everything that ran on GPUs, by its start."""
    found = [Span(events.name_of(event), events.start[event], events.end(event)) for event in events.of(*GPU_KINDS)]
    return sorted(found, key=lambda span: (span.start, span.end))


def host_calls(events: Events) -> int:
    """Calls of the host that put something on a GPU: launches of kernels and graphs, copies and fills."""
    wanted = ("Launch", "Memcpy", "Memset")
    return sum(any(word in events.name_of(event) for word in wanted) for event in events.of(Kind.RUNTIME))


def launches(spans: Sequence[Span]) -> list[Launch]:
    """One from each upload to the next; what runs before the first belongs to none."""
    found: list[list[Span]] = []
    for span in spans:
        if span.name.startswith(UPLOAD):
            found.append([])
        if found:
            found[-1].append(span)
    return [Launch(tuple(own)) for own in found]
