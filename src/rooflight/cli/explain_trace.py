"""The page of `rooflight explain --trace FILE`. It fits 80 columns."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rooflight.cli.bar import bar
from rooflight.limits.profile.analysis import Profile, analyse
from rooflight.limits.profile.families import short_name
from rooflight.limits.profile.reader import GPU_KINDS, Events, read_events
from rooflight.limits.profile.rows import Row

TOP = 5
FIGURES = 63  # columns that a name leaves to its figures
COLOURS = {"memory": "cyan", "compute": "magenta", "launch": "yellow", "link": "green", "dispatch": "yellow"}


def explain_trace(path: Path, ceilings: Any, as_json: bool, console: Console) -> None:
    """Read a trace of torch.profiler and print where its time went.

    ceilings: of the card that it was recorded on, with `read_rate` and `flops`; None: without limits. Those of a GPU
    are left out for a trace without one. Raises OSError and ValueError in one line for a file that is no such trace.
    """
    with bar() as show:
        events = read_events(path, lambda read, size: show("reading the trace, MB", read // 10**6, size // 10**6))
        show(f"working out {len(events):,} events", 1, 1)
        profile = analyse(events, ceilings if events.has(*GPU_KINDS) else None)
    if as_json:
        data = {"trace": str(path), **profile.as_data(), "notes": _notes(profile, events, ceilings)}
        console.out(json.dumps(data, indent=1), highlight=False)
        return
    _show(path, profile, _notes(profile, events, ceilings), console)


def _show(path: Path, profile: Profile, notes: list[str], console: Console) -> None:
    console.print(f"[bold]{escape(_plain(str(path)))}[/bold]: {_summary(profile)}", soft_wrap=True)
    if len(profile.devices) > 1:
        console.print(_devices(profile))
    if profile.steps:
        console.print(_steps(profile), soft_wrap=True)
    console.print(_families(profile))
    console.print(_most_expensive(profile, max(console.width - FIGURES, 16)))
    console.print(profile.verdict.text, markup=False)
    for note in notes:
        console.print(note, style="dim", markup=False)


def _summary(profile: Profile) -> str:
    wall = f"wall {duration(profile.wall_us)}"
    busy, host = duration(profile.busy_us), f"{profile.host_share:.1%}"
    if not profile.on_gpu:
        return f"{wall}, in operators {busy}, outside of them {host}, {profile.operators:,} operator calls, no GPU"
    launches = profile.launches
    what = f"{counted(profile.kernels, 'kernel')}, {counted(profile.copies, 'copy', 'copies')}"
    text = f"{wall}, GPU busy {busy}, host share {host}, {what}"
    if not launches.calls:
        return text
    graphs = f", {launches.graphs:,} of them of graphs" if launches.graphs else ""
    return f"{text} from {counted(launches.calls, 'launch', 'launches')}{graphs}"


def _devices(profile: Profile) -> Table:
    table = _table("GPU", "streams", "kernels", "busy", "of wall", "gaps", "longest")
    for device in profile.devices:
        share = device.busy_us / profile.wall_us if profile.wall_us else 0.0
        figures = duration(device.busy_us), f"{share:.1%}", f"{device.gaps:,}", duration(device.longest_gap_us)
        table.add_row(escape(_plain(device.name)), str(device.streams), f"{device.kernels:,}", *figures)
    return table


def _steps(profile: Profile) -> str:
    times = sorted(step.duration_us for step in profile.steps)
    middle = duration(times[len(times) // 2])
    busy = sum(step.busy_us for step in profile.steps) / max(sum(times), 1e-9)
    what = "the GPU was busy" if profile.on_gpu else "operators ran"
    spread = f"{duration(times[0])} to {duration(times[-1])}"
    return f"{counted(len(times), 'step')} of {middle} (median; {spread}), {what} for {busy:.0%}"


def _families(profile: Profile) -> Table:
    table = _table("family", "calls", "time", "share")
    for family in profile.families:
        table.add_row(family.name, f"{family.calls:,}", duration(family.total_us), f"{family.share:.1%}")
    return table


def _most_expensive(profile: Profile, width: int) -> Table:
    """The names that took the most, with limits where the card is known, or else with the rates that they reached."""
    limits = profile.ceilings is not None
    first = "kernel" if profile.on_gpu else "operator, own time"
    table = _table(first, "calls", "total", "mean", "share", "wall", *(("limit", "at limit") if limits else _RATES))
    for row in profile.rows[:TOP]:
        colour = COLOURS.get(row.wall, "default")
        if limits:
            limit = "-" if row.limit_us is None else duration(row.limit_us)
            last = [limit, "-" if row.at_limit is None else _percent(row.at_limit)]
        else:
            last = [_rate(row, row.bytes), _rate(row, row.flops)]
        figures = f"{row.calls:,}", duration(row.total_us), duration(row.mean_us), f"{row.share:.1%}"
        table.add_row(_title(row, width), *figures, f"[{colour}]{row.wall}[/{colour}]", *last)
    return table


_RATES = ("GB/s", "GFLOP/s")


def _rate(row: Row, amount: float | None) -> str:
    rate = row.rate(amount)
    return "-" if not rate else f"{rate / 1e9:,.0f}" if rate >= 1e11 else f"{rate / 1e9:.3g}"


def _title(row: Row, width: int) -> str:
    """A kernel, and below it the operator that launches it most."""
    title = escape(broken(short_name(row.name, 3 * width), width))
    if not row.operators:
        return title
    return f"{title}\n[dim]{escape(broken(short_name(row.operators[0], 2 * width), width))}[/dim]"


def broken(name: str, width: int) -> str:
    """On lines of some width: broken behind what joins words in names, where rich would break anywhere."""
    lines = [""]
    for part in re.findall(r"[^_<: ]+[_<: ]*|[_<: ]+", name):
        if lines[-1] and len(lines[-1] + part.rstrip()) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(line.rstrip() for line in lines)


def _notes(profile: Profile, events: Events, ceilings: Any) -> list[str]:
    notes = []
    if profile.ceilings is not None:
        notes.append(f"Limits are of {profile.ceilings or 'the ceilings given'}; wall and limit as shapes tell them.")
        others = [gpu for gpu in profile.gpus if gpu != profile.ceilings]
        if others and profile.ceilings:
            notes.append(f"But the trace is of {_plain(', '.join(others))}: name its card with --gpu.")
    elif ceilings is not None:
        notes.append("The trace has no GPU, so the card's limits were left out.")
    if profile.launches.calls and not profile.on_gpu:
        notes.append("Its host launches kernels that are not in it: record ProfilerActivity.CUDA too.")
    if not events.shapes:
        notes.append("The trace has no shapes: record_shapes=True adds limits and rates.")
    if profile.unusable:
        notes.append(f"{profile.unusable:,} events were left out: their times are no times.")
    return notes


def _table(first: str, *others: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in others:
        table.add_column(name, justify="left" if name == "wall" else "right", no_wrap=True)
    return table


def duration(us: float) -> str:
    """Microseconds, milliseconds or seconds, in three digits or four."""
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size:
            return f"{us / size:,.{1 if us >= 100 * size else 2}f} {unit}"
    return f"{us:.1f} µs" if us >= 1 or not us else f"{us:.2g} µs"


def counted(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def _percent(share: float | None) -> str:
    return "-" if share is None else "<1%" if 0 < share < 0.005 else f"{share:.0%}"


def _plain(text: str) -> str:
    """Names come from outside: no terminal codes."""
    return "".join(character if character.isprintable() else "?" for character in text)
