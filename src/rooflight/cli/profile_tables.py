"""The pages of `rooflight profile` and `rooflight explain --measure`. Their tables fit 80 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rooflight.bench.step_report import StepsReport, described_errors
from rooflight.cli.explain_tables import COLOURS, microseconds
from rooflight.cli.explain_trace import broken
from rooflight.limits.profile.step import KernelRow, OperatorRow, StepProfile

TOP = 5
FIGURES = 57  # columns that a kernel's name leaves to its figures
NOTE = (
    "A kernel's time is from the end of the one before to its own end: kernels of a graph overlap, and their durations "
    "would count waiting twice. The gap in front of it is part of it. Limits are of its operator, wherever its kernels "
    "are more than one."
)


def show_profile(found: StepProfile) -> None:
    console = Console(highlight=False)
    console.print(f"[bold]{escape(found.model)}[/bold], {found.dtype}, {_title(found)}, on {found.card}")
    console.print(f"Ceilings: {found.ceilings}.", soft_wrap=True)
    for line in summary(found):
        console.print(line, soft_wrap=True)
    console.print(f"[bold]The {min(TOP, len(found.kernels))} most expensive of {len(found.kernels)} kernels[/bold]")
    width = max(console.width - FIGURES, 16)
    console.print(_kernels(found, found.kernels[:TOP], width))
    if len(found.kernels) > TOP:
        console.print("[bold]The others[/bold]")
        console.print(_kernels(found, found.kernels[TOP:], width))
    console.print("[bold]By operator[/bold]")
    console.print(_operators(found))
    console.print(NOTE, style="dim")


def summary(found: StepProfile) -> list[str]:
    """What the step took, how busy the GPU was, and how many launches it was."""
    each = found.kernels_per_step / found.sequence_tokens
    lines = [
        f"{microseconds(found.step_us)} µs a step on the GPU, {microseconds(found.wall_us)} for the host without the "
        f"profiler; medians of {found.launches} launches of {found.steps} steps",
        f"GPU busy {found.busy_of_step:.1%} of the step, {min(found.busy_of_wall, 1):.1%} of the host's time",
        f"{found.kernels_per_step:,.1f} kernels and copies a step, {each:,.4g} a token; the host launches "
        f"{found.host_calls_per_step:,.3g} times a step",
        f"Limit {microseconds(found.stream_us)} µs all overlapped, {microseconds(found.graph_us)} kernel by kernel: "
        f"{found.graph_us / found.step_us:.0%} of it reached",
    ]
    if found.foretold_us is not None and found.error is not None:
        text = f"Foretold from operators alone {microseconds(found.foretold_us)} µs, off by {found.error:+.1%}"
        without = f"; only limits known of {', '.join(found.lawless)}" if found.lawless else ""
        lines.append(text + without)
    return lines


def show_measured(report: StepsReport) -> None:
    """Every step, foretold and measured; of a single one the operators too."""
    console = Console(highlight=False)
    if len(report.profiles) == 1:
        found = report.profiles[0]
        console.print(f"[bold]Measured[/bold]: {_title(found)}", soft_wrap=True)
        for line in summary(found):
            console.print(line, soft_wrap=True)
        console.print(_operators(found))
        return
    table = _table("µs a step", "limit", "kernels", "foretold", "measured", "error", "host", "busy")
    for step, found in zip(report.asked, report.profiles, strict=True):
        figures = (found.stream_us, found.graph_us, found.foretold_us, found.step_us)
        table.add_row(
            f"{step.phase} {step.batch:,} × {step.context:,}",
            *(_us(value) for value in figures),
            percent(found.error, signed=True),
            microseconds(found.wall_us),
            f"{min(found.busy_of_wall, 1):.0%}",
        )
    console.print(table)
    console.print(described_errors(report.profiles))


def _title(found: StepProfile) -> str:
    if found.phase == "decode":
        return f"decode of {found.batch:,} × {found.context:,} tokens in the cache"
    return f"a prompt of {found.context:,} tokens"


def _kernels(found: StepProfile, rows: Sequence[KernelRow], width: int) -> Table:
    """Below each kernel its operator, whose bytes and operations, limit and wall these are."""
    table = _table("kernel", "a step", "µs", "gaps", "share", "work", "limit", "at it", left=("wall",))
    for row in rows:
        owner = found.row(row.operator)
        title = escape(broken(row.name, width)) + f"\n[dim]{escape(broken(row.operator, width))}[/dim]"
        table.add_row(
            title,
            _wall(owner),
            f"{row.count:,.4g}",
            microseconds(row.us),
            microseconds(row.idle_us),
            f"{row.share:.1%}",
            "–" if owner.bytes is None else f"{owner.bytes / 1e6:,.1f} MB\n{(owner.flops or 0) / 1e9:,.2f} GF",
            _us(owner.limit_us),
            percent(owner.at_limit),
        )
    return table


def _operators(found: StepProfile) -> Table:
    names = ("µs", "share", "limit", "at limit", "foretold", "error")
    table = _table("operator", *names, left=("wall",))
    for row in found.rows:
        figures = f"{row.share:.1%}", _us(row.limit_us), percent(row.at_limit), _us(row.foretold_us)
        table.add_row(row.name, _wall(row), _us(row.measured_us), *figures, percent(row.error, signed=True))
    return table


def _wall(row: OperatorRow) -> str:
    return f"[{COLOURS[row.wall]}]{row.wall}[/{COLOURS[row.wall]}]"


def _us(value: float | None) -> str:
    return "–" if value is None else microseconds(value)


def percent(value: float | None, signed: bool = False) -> str:
    return "–" if value is None else f"{value:+.0%}" if signed else f"{value:.0%}"


def _table(first: str, *others: str, left: Sequence[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column(first, overflow="fold")
    for name in left:
        table.add_column(name, no_wrap=True)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table
