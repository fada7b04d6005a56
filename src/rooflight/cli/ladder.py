"""`rooflight ladder …`: from naive to final in named steps, each switched on in turn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from rooflight.bench import results
from rooflight.bench.ladder import LadderReport, LadderRow, LadderSetup, run
from rooflight.cli.bar import bar
from rooflight.cli.bench_tables import show_idle
from rooflight.cli.bench_throughput import results_folder
from rooflight.cli.console import wide_console

app = typer.Typer()


@app.callback(invoke_without_command=True)
def ladder(context: typer.Context) -> None:
    """From naive to final in named steps: what each gives, found and predicted."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def decode(
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Folder, .gguf file, hub name or random:<preset>.")
    ] = "random:qwen3-0.6b",
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Prompt lengths; repeat for several.", show_default="32 1024 8192"),
    ] = None,
    max_tokens: Annotated[int, typer.Option(metavar="N", help="Tokens to generate.")] = 128,
    rounds: Annotated[int, typer.Option(metavar="N", help="Interleaved rounds; medians are compared.")] = 3,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="fp32, bf16 or fp16.")] = "bf16",
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Folder for JSON and CSV.", show_default="build/bench/<gpu>"),
    ] = None,
) -> None:
    """Decoding one request on a GPU, from naive operators to graphs of several tokens.

    Example: rooflight ladder decode --prompt-tokens 32 --prompt-tokens 8192
    """
    import torch

    if not torch.cuda.is_available():
        raise ValueError("ladder decode needs a GPU (its rungs are kernels and launches); PyTorch sees none here")
    prompts = tuple(prompt_tokens or LadderSetup.prompts)
    setup = LadderSetup(model, dtype, prompts, max_tokens, rounds)
    folder = results_folder(out, setup.device)
    results.prepare(folder)  # a folder that cannot be written should not cost the measurement
    with bar() as progress:
        report = run(setup, progress)
    show(report)
    show_idle(report.environment)
    name = results.file_name(folder, "ladder", [dtype], LadderSetup.dtype, report.environment.get("device", "cuda"))
    for path in results.write(folder, name, report.as_data()):
        typer.echo(f"wrote {path}")


def show(report: LadderReport) -> None:
    """All rungs at all contexts in a table that fits 100 characters, and where a rung made it slower."""
    console, setup, host = wide_console(), report.setup, report.host
    eager = sum(not rung.graphs for rung in report.rungs)
    for line in (
        f"{setup.model}, {setup.dtype}, one request, {setup.max_tokens} tokens out; medians of {setup.rounds} rounds",
        f"rungs 1 to {eager} run eagerly: the host asks for each operator, and binds them where the wall is host",
        f"predicted: {host.operator_us:.1f} us an operator and {host.step_us:.0f} us a launch of this host;",
        f"  bytes at the card's bandwidth and {report.machine.node_us:.2f} us a kernel ({report.machine.origin})",
        f"host: {report.environment.get('cpu', 'unknown')}",
        "gain: over the rung above; wall: what binds it; ops, MB: of a token",
    ):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_table(report.rows))
    slower = [row for row in report.rows if row.slower]
    for row in slower:
        spread = row.per_token_us
        line = (
            f"slower: {row.rung} at {row.prompt_tokens} tokens, {row.gain:.3f}x "
            f"({spread.median:.0f} us, rounds {spread.low:.0f} to {spread.high:.0f})"
        )
        console.print(line, markup=False, soft_wrap=True)
    if not slower:
        console.print("no rung made a context slower", markup=False, soft_wrap=True)


def _table(rows: Iterable[LadderRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    table.add_column("prompt", justify="right", no_wrap=True)
    table.add_column("rung", no_wrap=True)
    for head in ("tokens/s", "us a token", "gain", "predicted"):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("wall", no_wrap=True)
    for head in ("ops", "MB"):
        table.add_column(head, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before is not None and row.prompt_tokens != before:
            table.add_section()
        far = max(row.per_token_us.high - row.per_token_us.median, row.per_token_us.median - row.per_token_us.low)
        table.add_row(
            f"{row.prompt_tokens}" if row.prompt_tokens != before else "",
            row.rung,
            f"{row.tokens_per_s.median:,.0f}",
            f"{row.per_token_us.median:,.0f} ±{far / row.per_token_us.median:.0%}",
            "" if row.gain is None else f"{row.gain:.2f}x" + (" slower" if row.slower else ""),
            "" if row.predicted_gain is None else f"{row.predicted_gain:.2f}x",
            row.wall,
            str(row.operators),
            f"{row.bytes / 1e6:,.0f}",
        )
        before = row.prompt_tokens
    return table
