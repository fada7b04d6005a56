"""`rooflight bench start`: how long until the engine is ready."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from rooflight.bench import results, roof
from rooflight.bench.measurement import Spread
from rooflight.bench.start import StartReport, StartRow, StartSetup, run
from rooflight.cli.bar import bar
from rooflight.cli.bench_tables import show_idle
from rooflight.cli.bench_throughput import results_folder
from rooflight.cli.console import wide_console


def start(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Folder, .gguf file, hub name or random:<preset>.")
    ] = "random:qwen3-0.6b",
    device: Annotated[str, typer.Option(metavar="NAME", help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    rounds: Annotated[int, typer.Option(metavar="N", help="Rounds of a cold and a warm start.")] = 3,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="For JSON and CSV.", show_default="build/bench, on a GPU build/bench/<gpu>"
        ),
    ] = None,
) -> None:
    """Seconds from the start of a process to an engine that is ready and to its first token, part by part.

    Cold: with empty caches of compiled kernels and Python modules. Warm: with what the start before has left there.

    Example: rooflight bench start --model random:smollm2-135m --device cpu --rounds 1
    """
    setup = StartSetup(model, roof.chosen_device(device), rounds)
    folder = results_folder(out, setup.device)
    results.prepare(folder)  # a folder that cannot be written should not cost the measurement
    with bar() as progress:
        report = run(setup, progress)
    show(report)
    name = results.file_name(folder, "start", ["auto"], "auto", report.environment.get("device", setup.device))
    for path in results.write(folder, name, report.as_data()):
        typer.echo(f"wrote {path}")


def show(report: StartReport) -> None:
    """Parts down, caches across; it fits 80 characters."""
    console = wide_console()
    for line in (
        report.weights,
        f"host: {report.environment.get('cpu', 'unknown')}",
        f"seconds; ready and first token: median (least-most) of {report.setup.rounds} rounds",
        "parts: of the start in the middle, so that they add up to its ready",
    ):
        console.print(line, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for row in report.rows:
        table.add_column(f"{row.cache} cache", justify="right", no_wrap=True)
    for part in dict.fromkeys(part for row in report.rows for part in row.parts_s):
        cells = (row.parts_s.get(part) for row in report.rows)
        table.add_row(part, *("-" if value is None else f"{value:.3f}" for value in cells))
    table.add_section()
    table.add_row("ready", *(_spread(row.ready_s) for row in report.rows))
    table.add_row("first token", *(_spread(row.first_token_s) for row in report.rows))
    table.add_row("kernels compiled", *(str(row.compiled) for row in report.rows))
    console.print(table)
    for row in report.rows:
        if row.goal_s is not None:
            console.print(_verdict(row), markup=False)
    if report.setup.device == "cuda":
        show_idle(report.environment)


def _spread(value: Spread) -> str:
    return f"{value.median:.2f} ({value.low:.2f}-{value.high:.2f})"


def _verdict(row: StartRow) -> str:
    word = "within" if row.within_goal else "NOT within"
    return f"ready with a {row.cache} cache after {row.ready_s.median:.2f} s: {word} {row.goal_s:g} s"
