"""`rooflight bench …`: measure and record."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from rooflight.bench import results, roof
from rooflight.bench.request import RequestReport, RequestSetup, run
from rooflight.cli import bench_ops, bench_start, bench_throughput, loading
from rooflight.cli.bar import bar
from rooflight.cli.bench_request_tables import show_requests
from rooflight.cli.bench_tables import show_idle
from rooflight.cli.bench_throughput import results_folder
from rooflight.cli.console import wide_console


@dataclass(frozen=True)
class Usual:
    """What is measured where nothing else is asked for."""

    dtype: str
    prompts: tuple[int, ...]
    max_tokens: int


USUAL = {"cpu": Usual("fp32", (32, 128, 512), 64), "cuda": Usual("bf16", (32, 128, 1024, 4096, 8192), 128)}

app = typer.Typer()
app.command()(bench_ops.ops)
app.command()(bench_ops.card)
app.command("all")(bench_ops.everything)
app.command("self-test")(bench_ops.check_itself)
app.command()(bench_throughput.throughput)
app.command()(bench_start.start)


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure operators and engines, each figure next to its limit."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def request(
    model: Annotated[
        str | None, typer.Option(help="Folder, .gguf file, hub name or random:<preset>; default: the embedded one.")
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(help="An engine to run beside ours: transformers or vllm; repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto (a GPU if there is one), cpu or cuda.")] = "auto",
    dtype: Annotated[
        list[str] | None,
        typer.Option(help="fp32, bf16 or fp16; repeat for several.", show_default="fp32, on a GPU bf16"),
    ] = None,
    prompt_tokens: Annotated[
        list[int] | None,
        typer.Option(
            help="Prompt lengths; repeat for several.", show_default="32 128 512, on a GPU 32 128 1024 4096 8192"
        ),
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Tokens to generate.", show_default="64, on a GPU 128")] = None,
    rounds: Annotated[int, typer.Option(help="Interleaved rounds; medians are compared.")] = 7,
    threads: Annotated[int, typer.Option(help="CPU threads of every engine; 0 means all cores.")] = 0,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Most tokens of a step of ours.", show_default="the engine's")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for JSON and CSV.", show_default="build/bench, on a GPU build/bench/<gpu>"),
    ] = None,
) -> None:
    """Time to first token and per token of single requests, ours and peers interleaved.

    Example: rooflight bench request --peer transformers --dtype fp32 --dtype bf16
    """
    threads = threads or os.cpu_count() or 1
    loading.check_threads(threads)
    place = roof.chosen_device(device)
    usual = USUAL[place]
    setup = RequestSetup(
        model=model,
        peers=tuple(peer or ()),
        dtypes=tuple(dtype or (usual.dtype,)),
        prompts=tuple(prompt_tokens or usual.prompts),
        max_tokens=usual.max_tokens if max_tokens is None else max_tokens,
        rounds=rounds,
        threads=threads,
        device=place,
        max_num_batched_tokens=max_num_batched_tokens,
    )
    folder = results_folder(out, place)
    results.prepare(folder)  # a folder that cannot be written should not cost the measurement
    with bar() as progress:
        report = run(setup, progress)
    if place == "cuda":
        show_requests(report)
        show_idle(report.environment)
    else:
        wide_console().print(_table(report))
    for name, reason in report.absent.items():
        typer.echo(f"{name}: {reason}")
    device_name = report.environment.get("device", place)
    name = results.file_name(folder, "request", setup.dtypes, usual.dtype, device_name)
    for path in results.write(folder, name, report.as_data()):
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
