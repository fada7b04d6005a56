"""`rooflight bench ops`, `card`, `all` and `self-test`: what is measured on a GPU without a model."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from rooflight.bench import plots, results, self_test
from rooflight.bench.device import gpu_name
from rooflight.bench.environment import gpu_folder
from rooflight.bench.ops import measure_card, run
from rooflight.bench.ops_setup import FEWEST_ROUNDS, OpsSetup
from rooflight.bench.rows import OpsReport
from rooflight.cli.bar import bar
from rooflight.cli.bench_tables import show_card, show_idle, show_ops
from rooflight.cli.errors import Failure

BUILD = Path("build/bench")

Out = Annotated[
    Path | None, typer.Option(help="Folder for the results.", show_default="build/bench/<gpu>", metavar="FOLDER")
]


def ops(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", show_default="all norm operators")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="fp32, fp16 or bf16; repeatable.", show_default="bf16 and fp16")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(metavar="TOKENSxWIDTH", help="Repeatable.", show_default="the operator's workloads"),
    ] = None,
    contender: Annotated[
        list[str] | None,
        typer.Option(help="Repeatable; `versions` are the older kernels.", show_default="all but the older kernels"),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are compared.")] = FEWEST_ROUNDS,
    protocol: Annotated[str, typer.Option(help="graph, event or both.")] = "both",
    whole_grid: Annotated[
        bool, typer.Option("--whole-grid", help="Every workload, also of the operators that get a few by default.")
    ] = False,
    out: Out = None,
) -> None:
    """Time operators, ours and peers interleaved: per call, on the GPU hot and cold, beside the limit.

    Example: rooflight bench ops fused_add_rms_norm --dtype bf16 --shape 256x4096
    """
    setup = OpsSetup(
        operators=tuple(names or ()),
        dtypes=tuple(dtype or OpsSetup.dtypes),
        shapes=tuple(_shape(text) for text in shape or ()),
        contenders=tuple(contender or ()),
        rounds=rounds,
        protocol=protocol,
        whole_grid=whole_grid,
    )
    folder = _folder(out)
    with bar() as progress:
        report = run(setup, progress, _keep(folder))
    show_ops(report)
    show_idle(report.environment)
    _write(report, folder)


def card(out: Out = None) -> None:
    """The ceilings of this GPU: copy, read, matrix products by dtype, what a launch costs."""
    folder = _folder(out)
    measured = measure_card()
    show_card(measured)
    show_idle(measured.environment)
    measured.save(folder / "card.json")
    typer.echo(f"wrote {folder / 'card.json'}")


def everything(
    out: Annotated[
        Path | None, typer.Option(help="Folder for the results.", show_default="results/<gpu>", metavar="FOLDER")
    ] = None,
    whole_grid: Annotated[bool, typer.Option("--whole-grid", help="Every workload of every operator.")] = False,
) -> None:
    """The card's ceilings and all operators with their defaults, into the folder of this card's results."""
    folder = _folder(out, Path("results"))
    with bar() as progress:
        report = run(OpsSetup(whole_grid=whole_grid), progress, _keep(folder), full_card=True)
    show_card(report.card)
    show_ops(report)
    show_idle(report.environment)
    report.card.save(folder / "card.json")
    typer.echo(f"wrote {folder / 'card.json'}")
    _write(report, folder)


def check_itself() -> None:
    """Does the harness measure what it says? Exit code 1 if it does not."""
    gpu_name()
    with bar() as progress:
        verdicts = self_test.run(lambda what: progress(what, 0, 1))
    for verdict in verdicts:
        typer.echo(f"{'passed' if verdict.passed else 'FAILED'}  {verdict.name}: {verdict.detail}")
    failed = [verdict.name for verdict in verdicts if not verdict.passed]
    if failed:
        raise Failure(f"the harness does not measure what it says: {', '.join(failed)}")


def _folder(out: Path | None, parent: Path = BUILD) -> Path:
    """Made now: a folder that cannot be written should not cost the measurement. ValueError without a GPU."""
    name = gpu_name()
    folder = out or parent / gpu_folder(name)
    results.prepare(folder)
    return folder


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None:
        raise ValueError(f"shape must be TOKENSxWIDTH such as 256x4096, was {text!r}")
    return int(match[1]), int(match[2])


def _keep(folder: Path) -> Callable[[OpsReport], None]:
    """Writes an operator's rows as soon as they are there."""

    def keep(report: OpsReport) -> None:
        for operator in dict.fromkeys(row.operator for row in report.rows):
            results.write(folder, operator, report.as_data())

    return keep


def _write(report: OpsReport, folder: Path) -> None:
    """JSON, CSV and a plot for each operator."""
    no_plots = plots.missing()
    for operator in dict.fromkeys(row.operator for row in report.rows):
        data = report.of(operator).as_data()
        paths = list(results.write(folder, operator, data))
        if no_plots is None and any(row.cold_us for row in report.of(operator).rows):
            paths.append(plots.draw(data, folder / f"{operator}.png"))
        for path in paths:
            typer.echo(f"wrote {path}")
    if no_plots is not None:
        typer.echo(f"no plots: {no_plots}")
