"""`rooflight bench …`: measure and record."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from rooflight.bench import results
from rooflight.bench.request import RequestReport, RequestSetup, run
from rooflight.cli import bench_ops, bench_throughput, loading
from rooflight.cli.bar import bar

app = typer.Typer()
app.command()(bench_ops.ops)
app.command()(bench_ops.card)
app.command("all")(bench_ops.everything)
app.command("self-test")(bench_ops.check_itself)
app.command()(bench_throughput.throughput)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure operators and engines, each figure next to its limit."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def request(
    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file or hub name; default: the embedded one.")
    ] = None,
    peer: Annotated[list[str] | None, typer.Option(help="An engine to run beside ours: transformers.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="fp32, bf16 or fp16; repeat for several.")] = None,
    prompt_tokens: Annotated[list[int] | None, typer.Option(help="Prompt lengths; repeat for several.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate.")] = 64,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are compared.")] = 7,
    threads: Annotated[int, typer.Option(help="CPU threads of every engine; 0 means all cores.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for JSON and CSV.")] = Path("build/bench"),
) -> None:
    """Time to first token and per token of single requests, ours and peers interleaved.

    Example: rooflight bench request --peer transformers --dtype fp32 --dtype bf16
    """
    threads = threads or os.cpu_count() or 1
    loading.check_threads(threads)
    setup = RequestSetup(
        model=model,
        peers=tuple(peer or ()),
        dtypes=tuple(dtype or ("fp32",)),
        prompts=tuple(prompt_tokens or (32, 128, 512)),
        max_tokens=max_tokens,
        rounds=rounds,
        threads=threads,
    )
    results.prepare(out)  # a folder that cannot be written should not cost the measurement
    with bar() as progress:
        report = run(setup, progress)
    Console().print(_table(report))
    for name, reason in report.absent.items():
        typer.echo(f"{name}: {reason}")
    for path in results.write(out, "request", report.as_data()):
        typer.echo(f"wrote {path}")


def _table(report: RequestReport) -> Table:
    bandwidth = report.read_bandwidth / 1e9
    table = Table(title=f"one request, {report.setup.threads} threads, memory read at {bandwidth:.1f} GB/s")
    for column in ("engine", "dtype", "prompt", "first token ms", "per token ms", "limit ms", "of limit", "tok/s"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    table.add_column("ours faster by", justify="right")
    for row in report.rows:
        first, token = row.first_token_ms, row.per_token_ms
        faster = "" if row.per_token_ratio is None else f"{row.first_token_ratio:.2f}x / {row.per_token_ratio:.2f}x"
        table.add_row(
            f"{row.engine} {row.version}",
            row.dtype,
            str(row.prompt_tokens),
            f"{first.median:.0f} ({first.low:.0f}-{first.high:.0f})",
            f"{token.median:.1f} ({token.low:.1f}-{token.high:.1f})",
            f"{row.limit_ms:.1f}",
            f"{row.limit_ms / token.median:.0%}",
            f"{row.tokens_per_second:.1f}",
            faster,
        )
    return table
