"""What a profile says, in a sentence or two: first whether the host or the GPU is the matter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rooflight.limits.profile.families import short_name

if TYPE_CHECKING:
    from rooflight.limits.profile.analysis import Profile
    from rooflight.limits.profile.rows import Row

HOST = "host"
IDLE = 0.5  # of the wall time; above it nothing on the GPU is worth making faster


@dataclass(frozen=True)
class Verdict:
    """kind: "host", or the wall at which the most time is spent. text: one or two sentences."""

    kind: str
    text: str


def verdict(profile: Profile) -> Verdict:
    """The host where more than half of the wall time passed without it being on the GPU, or in an operator."""
    walls: dict[str, float] = {}
    for row in profile.rows:
        walls[row.wall] = walls.get(row.wall, 0.0) + row.share
    kind = HOST if profile.host_share > IDLE else max(walls, key=walls.__getitem__)
    if kind == HOST:
        return Verdict(kind, _host_of_gpu(profile) if profile.on_gpu else _host_alone(profile))
    return Verdict(kind, _most(profile) + ("" if profile.ceilings is None else f" {_walls(walls)}"))


def _host_of_gpu(profile: Profile) -> str:
    device = max(profile.devices, key=lambda device: device.busy_us)
    launches = profile.launches
    text = f"Host: the GPU was idle for {profile.host_share:.0%} of the wall time, in {_count(device.gaps, 'gap')} "
    text += f"of up to {_time(device.longest_gap_us)}. "
    if launches.graphs and 2 * launches.graphs > launches.calls:
        return text + "Kernels come in graphs already: look at what the host does between their launches."
    if launches.call_us is None:
        return text + "Give a step more work, or the host less, before any kernel is made faster."
    how = f"{_count(launches.calls, 'launch', 'launches')} (median {_time(launches.call_us)})"
    return text + f"It made {how}: capture the step in a CUDA graph, or give it more work, before tuning a kernel."


def _host_alone(profile: Profile) -> str:
    first = profile.rows[0]
    text = f"Host: {profile.host_share:.0%} of the wall time passed outside of operators, in Python or waiting. "
    return text + f"Of the operators, {short_name(first.name)} takes the most, {first.share:.0%}."


def _most(profile: Profile) -> str:
    """Which family and which name take the most."""
    family, first = profile.families[0], profile.rows[0]
    if profile.on_gpu:
        text = f"GPU: it was busy for {1 - profile.host_share:.0%} of the wall time, and {family.name} took "
        text += f"{family.share:.0%} of its time."
    else:
        text = f"No GPU: {family.name} took {family.share:.0%} of the time in operators, "
        text += f"which were {1 - profile.host_share:.0%} of the wall time."
    return f"{text} {short_name(first.name)} alone took {first.share:.0%}{_standing(first)}"


def _standing(row: Row) -> str:
    if row.at_limit is None or row.wall not in ("memory", "compute"):
        return "."
    if row.at_limit > 1:
        why = "its data came out of a cache" if row.wall == "memory" else "it computed in a faster format"
        return f", in less time than its {row.wall} limit: {why}."
    return f", at {row.at_limit:.0%} of its {row.wall} limit."


def _walls(walls: dict[str, float]) -> str:
    ordered = sorted(walls.items(), key=lambda wall: -wall[1])
    return "By wall: " + ", ".join(f"{name} {share:.0%}" for name, share in ordered if share >= 0.005) + "."


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _time(us: float) -> str:
    return f"{us:.1f} µs" if us < 1e3 else f"{us / 1e3:.1f} ms" if us < 1e6 else f"{us / 1e6:.2f} s"
