"""The page of `rooflight explain MODEL`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rooflight.limits.accuracy import Fit
from rooflight.limits.advice import Advice, Change
from rooflight.limits.explanation import Explanation

COLOURS = {"memory": "cyan", "compute": "magenta", "launch": "yellow", "link": "green"}


def show(found: Explanation, advice: Sequence[Advice], changes: Sequence[Change], html: Path | None) -> None:
    console = Console(highlight=False)
    step = found.scenario.step
    what = "in the cache" if step.phase == "decode" else "new"
    console.print(
        f"[bold]{escape(found.model)}[/bold], {found.dtype}, {step.phase} of {step.batch:,} × {step.context:,} tokens "
        f"{what}, on one {found.card.name}",
        soft_wrap=True,
    )
    console.print(f"Ceilings: {found.card.origin}.", soft_wrap=True)
    console.print(_operators(found))
    console.print(_step(found))
    if changes:
        console.print("[bold]What if[/bold]")
        console.print(_changes(changes))
    console.print("[bold]What would move it[/bold]")
    for number, piece in enumerate(advice, 1):
        console.print(f"{number}. [bold]{piece.step.capitalize()}.[/bold] {piece.text}")
    if html is not None:
        console.print(f"\nWrote {escape(str(html))}", soft_wrap=True)


def show_accuracy(model: str, width: int, fits: Sequence[Fit]) -> None:
    """What `--accuracy` found: a line for each operator and protocol, those without measurements too."""
    console = Console(highlight=False)
    missing: dict[str, dict[str, None]] = {}  # operators by reason, in order
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("operator", no_wrap=True)
    table.add_column("caches")
    for name in ("rows", "start µs", "of copy", "judged on", "median", "worst"):
        table.add_column(name, justify="right")
    for fit in fits:
        if fit.overhead_us is None or fit.fraction is None:
            missing.setdefault(fit.reason, {})[fit.operator] = None
            continue
        errors = (fit.median_error, fit.worst_error)
        table.add_row(
            fit.operator,
            fit.protocol.removesuffix("_us"),
            str(fit.fitted_rows),
            microseconds(fit.overhead_us),
            f"{fit.fraction:.0%}",
            str(fit.judged_rows),
            *("" if error is None else f"{error:.0%}" for error in errors),
        )
    console.print(f"Fitted on width {width} ([bold]{escape(model)}[/bold]), judged on all others.", soft_wrap=True)
    console.print(table)
    if not table.rows:
        console.print("Nothing there has that width: name a model, as in explain random:qwen3-0.6b --accuracy FOLDER.")
    for reason, operators in missing.items():
        console.print(f"{reason.capitalize()}: {', '.join(operators)}")


def microseconds(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _operators(found: Explanation) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    size, size_name = (1e9, "GB") if found.bytes > 1e10 else (1e6, "MB")
    work, work_name = (1e12, "TFLOP") if found.flops > 1e13 else (1e9, "GFLOP")
    table.add_column("operator", no_wrap=True)
    for name in ("calls", size_name, work_name, "FLOP/B"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("wall", no_wrap=True)
    for name in ("limit µs", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in found.rows:
        colour = COLOURS[row.wall]
        table.add_row(
            row.name,
            str(row.calls),
            f"{row.bytes / size:,.1f}",
            f"{row.flops / work:,.2f}",
            f"{row.intensity:,.1f}",
            f"[{colour}]{row.wall}[/{colour}]",
            microseconds(row.limit_us),
            f"{row.share:.1%}",
        )
    table.add_section()
    table.add_row(
        "[bold]the step[/bold]",
        str(found.launches),
        f"{found.bytes / size:,.1f}",
        f"{found.flops / work:,.2f}",
        f"{found.flops / max(found.bytes, 1):,.1f}",
        "",
        microseconds(found.graph_us),
        "",
    )
    return table


def _step(found: Explanation) -> Table:
    memory, step = found.memory, found.scenario.step
    page = Table(box=None, show_header=False, padding=(0, 2), pad_edge=True)
    limit = f"{microseconds(found.stream_us)} µs at the {found.stream_wall} wall, all overlapped"
    page.add_row("Step limit", f"{limit}: {found.tokens_per_s:,.0f} tokens/s")
    page.add_row("As kernels", f"{microseconds(found.graph_us)} µs for {found.launches} in a graph, each at its limit")
    page.add_row(
        "Launch wall",
        f"{microseconds(found.host_us)} µs for a host that launches each, {found.card.call_us:.1f} µs a call",
    )
    page.add_row("Weights read", f"{found.weight_bytes / 1e6:,.1f} MB")
    kv = f"{found.kv_bytes / 1e6:,.1f} MB read; {found.kv_bytes_per_token / 1024:,.4g} KiB a token of context"
    if step.phase == "decode":
        kv += f"; {_crossing(found)}"
    page.add_row("KV cache", kv)
    parts = {"weights": memory.weights, "KV": memory.kv, "work": memory.workspace}
    listed = ", ".join(f"{name} {size / 1e9:,.2f}" for name, size in parts.items())
    verdict = f"{memory.total / 1e9:,.2f} GB of {memory.card / 1e9:,.0f} ({listed}); "
    verdict += f"at most {memory.largest_batch:,} such sequences fit"
    page.add_row("Memory", verdict if memory.fits else f"[bold red]does not fit[/bold red]: {verdict}")
    return page


def _crossing(found: Explanation) -> str:
    batch = found.scenario.step.batch
    if found.crossing is None:
        return "never passes the weights: windows bound it"
    return f"passes the weights at {found.crossing / batch:,.0f} tokens" + (" in each" if batch > 1 else "")


def _changes(changes: Sequence[Change]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("change")
    for name in ("step µs", "kernels µs", "tokens/s", "times", "memory GB"):
        table.add_column(name, justify="right")
    before = changes[0].before
    for name, found, gain in [("as it is", before, 1.0), *((c.what, c.after, c.gain) for c in changes)]:
        memory = f"{found.memory.total / 1e9:,.2f}" + ("" if found.memory.fits else " [red]too much[/red]")
        table.add_row(
            escape(name),
            microseconds(found.stream_us),
            microseconds(found.graph_us),
            f"{found.tokens_per_s:,.0f}",
            f"{gain:.2f}",
            memory,
        )
    return table
