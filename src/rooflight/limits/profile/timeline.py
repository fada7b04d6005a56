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
    """Spans in the order of their starts, at least one."""

    spans: tuple[Span, ...]

    @property
    def span_us(self) -> float:
        """From the first start to the last end."""
        return max(span.end for span in self.spans) - self.spans[0].start

    @property
    def busy_us(self) -> float:
        """In which anything ran."""
        return Union((span.start, span.end) for span in self.spans).length

    def spent(self) -> list[Spent]:
        """In order; the times add up to `span_us`."""
        found, until = [], self.spans[0].start
        for span in self.spans:
            idle = max(span.start - until, 0.0)
            found.append(Spent(span, max(span.end - until, 0.0), idle))
            until = max(until, span.end)
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
