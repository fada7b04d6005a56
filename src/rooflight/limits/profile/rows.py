"""Kernels, or operators on a CPU, by name: their time, the work behind it where shapes are known, and their wall.

The wall of a name, by the first rule that fits:
1. launch: the mean kernel is shorter than 3 us, or than the launch that it needed; no wall of the card is near.
   dispatch: the same of an operator on a CPU, whose own time is then mostly PyTorch's.
2. memory or compute: the shapes are known and so are the card's ceilings; whichever takes longer at its ceiling.
   launch again where both take less than a kernel that does nothing.
3. link: copies to and from the host, and collectives.
4. unknown.
A name's limit is the mean of its calls with known work, and so is how close it comes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rooflight.limits.profile.cost import Peaks
from rooflight.limits.profile.families import COLLECTIVE, MEMCPY, kernel_family, operator_family
from rooflight.limits.profile.reader import Events, Kind
from rooflight.limits.profile.spent import Spent, spent_on_gpu, spent_on_host

LAUNCH_US = 3.0
WALLS = ("memory", "compute", "link", "launch", "dispatch", "unknown")


@dataclass(frozen=True)
class Row:
    """What was spent under one name. Microseconds; bytes and FLOPs are those of the mean call whose work is known.

    share: of the time of all names. operators: that launched the kernel, the most frequent first. known: calls with
    known work. limit_us, at_limit: of the mean known call, the time that it must take and the fraction that this is
    of the time that it took; above 1 where data came out of a cache.
    """

    name: str
    family: str
    calls: int
    total_us: float
    share: float
    wall: str
    operators: tuple[str, ...] = ()
    known: int = 0
    known_us: float = 0.0
    bytes: float | None = None
    flops: float | None = None
    limit_us: float | None = None
    at_limit: float | None = None

    @property
    def mean_us(self) -> float:
        return self.total_us / self.calls

    def rate(self, amount: float | None) -> float | None:
        """Bytes or FLOPs per second of the calls whose work is known."""
        return None if amount is None or not self.known_us else amount * self.known / self.known_us * 1e6


@dataclass
class _Group:
    family: str
    calls: int = 0
    total: float = 0.0
    known: int = 0
    known_us: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    memory: float = 0.0
    compute: float = 0.0
    launch: float = 0.0
    limit: float = 0.0
    operators: Counter[str] = field(default_factory=Counter)

    def add(self, spent: Spent, peaks: Peaks | None) -> None:
        self.calls += 1
        self.total += spent.time
        if spent.operator:
            self.operators[spent.operator] += 1
        if spent.work is None:
            return
        self.known += 1
        self.known_us += spent.time
        self.bytes += spent.work.bytes
        self.flops += spent.work.flops
        if peaks is not None:
            memory, compute = peaks.times(spent.work)
            self.memory += memory
            self.compute += compute
            self.launch += peaks.node_us
            self.limit += max(memory, compute, peaks.node_us)


def kernel_rows(events: Events, peaks: Peaks | None, launch_us: float = LAUNCH_US) -> list[Row]:
    """GPU kernels, copies and fills by name, the most time first. launch_us: kernels below it stand at no wall."""
    return _rows(events, spent_on_gpu(events), peaks, "launch", launch_us)


def operator_rows(events: Events, peaks: Peaks | None) -> list[Row]:
    """Operators of the host by name with their own time, without that of the operators within them."""
    return _rows(events, spent_on_host(events), peaks, "dispatch", LAUNCH_US)


def _rows(events: Events, spent: Iterable[Spent], peaks: Peaks | None, shortest: str, least_us: float) -> list[Row]:
    """shortest: the wall of a name whose mean event takes less than least_us."""
    groups: dict[int, _Group] = {}
    for one in spent:
        place = events.name[one.event]
        if place not in groups:
            name = events.names[place]
            on_host = events.kind[one.event] == Kind.OPERATOR
            groups[place] = _Group(operator_family(name) if on_host else kernel_family(name, one.operator or None))
        groups[place].add(one, peaks)
    total = sum(group.total for group in groups.values())
    rows = []
    for place, group in groups.items():
        wall = shortest if group.total / group.calls < least_us else _wall(group, events.names[place])
        rows.append(_row(events.names[place], group, wall, total))
    return sorted(rows, key=lambda row: -row.total_us)


def _wall(group: _Group, name: str) -> str:
    if group.limit > 0:
        asked = {"memory": group.memory, "compute": group.compute, "launch": group.launch}
        return max(asked, key=asked.__getitem__)
    between_host_and_card = group.family == MEMCPY and name.startswith("Memcpy") and "DtoD" not in name
    return "link" if between_host_and_card or group.family == COLLECTIVE else "unknown"


def _row(name: str, group: _Group, wall: str, total: float) -> Row:
    known = group.known
    return Row(
        name=name,
        family=group.family,
        calls=group.calls,
        total_us=group.total,
        share=group.total / total if total else 0.0,
        wall=wall,
        operators=tuple(operator for operator, _ in group.operators.most_common()),
        known=known,
        known_us=group.known_us,
        bytes=group.bytes / known if known else None,
        flops=group.flops / known if known else None,
        limit_us=group.limit / known if group.limit else None,
        at_limit=group.limit / group.known_us if group.limit and group.known_us else None,
    )
