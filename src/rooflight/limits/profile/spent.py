"""Whose time a trace's time is: which operator launched a kernel, what an operator spent itself, and on which work."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from rooflight.limits.profile.cost import Work, work_of
from rooflight.limits.profile.families import operator_family
from rooflight.limits.profile.intervals import in_order, own_times
from rooflight.limits.profile.reader import NOTHING, Events, Kind


class Spent(NamedTuple):
    """Time of one event, the operator behind it, and the work if this event stands for it."""

    event: int
    time: float
    operator: str
    work: Work | None


def spent_on_gpu(events: Events) -> Iterator[Spent]:
    """Each kernel, copy and fill of the GPUs."""
    kernels = events.of(Kind.KERNEL, Kind.MEMCPY, Kind.MEMSET)
    launched = launchers(events, kernels)
    # An operator may launch several kernels, the parts of a split product say; the longest stands for its work.
    longest: dict[int, int] = {}
    for kernel, operator in launched.items():
        if events.duration[kernel] > events.duration[longest.setdefault(operator, kernel)]:
            longest[operator] = kernel
    works = _Works(events)
    for kernel in kernels:
        operator = launched.get(kernel, NOTHING)
        name = events.name_of(operator) if operator != NOTHING else ""
        if events.kind[kernel] != Kind.KERNEL:
            work = _copied(events, kernel)
        else:
            work = works.of(operator) if operator != NOTHING and longest[operator] == kernel else None
        yield Spent(kernel, events.duration[kernel], name, work)


def spent_on_host(events: Events) -> Iterator[Spent]:
    """Each operator with its own time, without that of the operators within it."""
    operators = events.of(Kind.OPERATOR)
    own, parents = _nested(events, operators)
    families = {place: operator_family(events.names[place]) for place in {events.name[event] for event in operators}}
    passed_on = set()  # matmul is one of those that let another of their family do it
    for operator in operators:
        parent = parents[operator]
        if parent != NOTHING and families[events.name[parent]] == families[events.name[operator]]:
            passed_on.add(parent)
    works = _Works(events)
    for operator in operators:
        itself = operator not in passed_on and own[operator] > 0 and own[operator] >= events.duration[operator] / 2
        yield Spent(operator, own[operator], "", works.of(operator) if itself else None)


def launchers(events: Events, kernels: Iterable[int]) -> dict[int, int]:
    """The operator that launched each kernel, where it can be told; a CUDA graph's kernels have none.

    By the call with its correlation, in whose time an operator ran on that thread; only without such a call by its
    external id, since some versions of the profiler write the correlation there.
    """
    kernels = list(kernels)
    correlations = {events.correlation[kernel] for kernel in kernels} - {NOTHING, 0}
    calls = {events.correlation[call]: call for call in events.of(Kind.RUNTIME)}
    calls = {correlation: call for correlation, call in calls.items() if correlation in correlations}
    around = _operators_around(events, set(calls.values()))
    left = [kernel for kernel in kernels if events.correlation[kernel] not in calls]
    externals = {events.external[kernel] for kernel in left} - {NOTHING, 0}
    operators = {events.external[o]: o for o in events.of(Kind.OPERATOR) if events.external[o] in externals}
    found = {kernel: operators[events.external[kernel]] for kernel in left if events.external[kernel] in operators}
    for kernel in kernels:
        call = calls.get(events.correlation[kernel], NOTHING)
        if call in around and "GraphLaunch" not in events.name_of(call):
            found[kernel] = around[call]
    return found


def _operators_around(events: Events, calls: set[int]) -> dict[int, int]:
    """The innermost operator that was running on the thread of each call when it began."""
    _, parents = _nested(events, [*events.of(Kind.OPERATOR), *calls])
    around = {}
    for call in calls:
        event = parents[call]
        while event != NOTHING and events.kind[event] != Kind.OPERATOR:
            event = parents[event]
        if event != NOTHING:
            around[call] = event
    return around


def _nested(events: Events, chosen: Iterable[int]) -> tuple[array[float], array[int]]:
    """Own times and parents of some host events, in columns as long as those of all."""
    own, parents = array("d", bytes(8 * len(events))), array("q", [NOTHING]) * len(events)
    threads: dict[int, list[int]] = {}
    for event in chosen:
        threads.setdefault(events.lane[event], []).append(event)
    for thread in threads.values():
        own_times(events.start, events.duration, in_order(events.start, events.duration, thread), own, parents)
    return own, parents


def _copied(events: Events, event: int) -> Work | None:
    """Of a copy within the card, or a fill; copies to and from the host do not stand at the memory's wall."""
    size, name = events.size[event], events.name_of(event)
    if size < 0 or (events.kind[event] == Kind.MEMCPY and "DtoD" not in name):
        return None
    return Work(size * (2.0 if events.kind[event] == Kind.MEMCPY else 1.0))


class _Works:
    """The work of operators, computed once for each name and shapes."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._known: dict[tuple[int, int], Work | None] = {}

    def of(self, operator: int) -> Work | None:
        name, inputs = self._events.name[operator], self._events.inputs[operator]
        if inputs == NOTHING:
            return None
        if (name, inputs) not in self._known:
            self._known[name, inputs] = work_of(self._events.names[name], self._events.shapes[inputs])
        return self._known[name, inputs]
