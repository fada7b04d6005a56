"""Arithmetic of intervals: what many of them cover together, and which of nested ones each instant belongs to."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, MutableSequence, Sequence


class Union:
    """The time that at least one of many intervals (start, end) covers. They come sorted by their starts."""

    def __init__(self, intervals: Iterable[tuple[float, float]]) -> None:
        self.starts, self.ends = array("d"), array("d")
        self._before = array("d", [0.0])  # time covered before each of them, and at last in all
        for start, end in intervals:
            if self.ends and start <= self.ends[-1]:
                self.ends[-1] = max(self.ends[-1], end)
            else:
                self.starts.append(start)
                self.ends.append(end)
        for start, end in zip(self.starts, self.ends, strict=True):
            self._before.append(self._before[-1] + end - start)

    @property
    def length(self) -> float:
        return self._before[-1]

    def until(self, time: float) -> float:
        """Time covered before `time`."""
        place = bisect_right(self.starts, time) - 1
        if place < 0:
            return 0.0
        return self._before[place] + min(time, self.ends[place]) - self.starts[place]

    def between(self, start: float, end: float) -> float:
        return max(self.until(end) - self.until(start), 0.0)

    def gaps(self, start: float, end: float) -> Iterator[float]:
        """Lengths of the uncovered pieces of [start, end], which must hold the whole union."""
        for low, high in zip([start, *self.ends], [*self.starts, end], strict=True):
            if high > low:
                yield high - low


def in_order(starts: Sequence[float], durations: Sequence[float], events: Iterable[int]) -> list[int]:
    """Events by their starts; of those that start together the longest first, since it holds the others."""
    order = sorted(events, key=durations.__getitem__, reverse=True)
    order.sort(key=starts.__getitem__)
    return order


def own_times(
    starts: Sequence[float],
    durations: Sequence[float],
    order: Sequence[int],
    own: MutableSequence[float],
    parents: MutableSequence[int],
) -> None:
    """Add to `own` the time in which an event is the innermost one, and write into `parents` the event it started in.

    order: the events of one thread from `in_order`. An instant belongs to the event that started last of those that
    are still open, so the own times of a thread add up to the time that its events cover, nested neatly or not.
    """
    open_events: list[int] = []
    now = 0.0

    def close_until(time: float) -> None:
        nonlocal now
        while open_events:
            event = open_events[-1]
            end = starts[event] + durations[event]
            own[event] += max(min(end, time) - now, 0.0)
            now = max(now, min(end, time))
            if end > time:
                return
            open_events.pop()

    for event in order:
        close_until(starts[event])
        now = starts[event]
        parents[event] = open_events[-1] if open_events else -1
        open_events.append(event)
    close_until(float("inf"))
