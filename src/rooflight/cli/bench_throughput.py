"""`rooflight bench throughput`: many requests, batched continuously."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rooflight.bench import results
from rooflight.bench.measurement import Spread
from rooflight.bench.throughput import Quantiles, ThroughputReport, ThroughputRow, ThroughputSetup, run
from rooflight.cli import loading
from rooflight.cli.bar import bar

_LENGTHS = "N, fixed:N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA."


def throughput(
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="Folder, .gguf file or hub name.", show_default="the embedded one"),
    ] = None,
    dtype: Annotated[str, typer.Option(metavar="TYPE", help="fp32, bf16 or fp16.")] = "fp32",
    requests: Annotated[int, typer.Option(metavar="N", help="Requests of a round.")] = 64,
    prompt_tokens: Annotated[
        str, typer.Option(metavar="LENGTHS", help=f"Prompt lengths: {_LENGTHS}")
    ] = "uniform:16-256",
    max_tokens: Annotated[str, typer.Option(metavar="LENGTHS", help=f"Tokens to generate: {_LENGTHS}")] = "64",
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="Poisson arrivals, R a second on average.", show_default="all at once"),
    ] = None,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Also one request after the other, for the ratio.")
    ] = False,
    max_num_seqs: Annotated[int, typer.Option(metavar="N", help="Most requests that run together.")] = 64,
    max_num_batched_tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of a step.")] = 512,
    num_pages: Annotated[
        int | None,
        typer.Option(metavar="N", help="Pages of the KV cache.", show_default="what those together may need"),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="CPU threads; 0 means all cores.")] = 0,
    rounds: Annotated[int, typer.Option(metavar="N", help="Interleaved rounds; medians are compared.")] = 3,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same requests.")] = 0,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="For JSON and CSV.")] = Path("build/bench"),
) -> None:
    """Tokens a second and latencies of many requests: random prompts, all at once or as they arrive.

    Example: rooflight bench throughput --requests 16 --one-by-one --dtype bf16
    """
    threads = threads or os.cpu_count() or 1
    loading.check_threads(threads)
    setup = ThroughputSetup(
        model=model,
        dtype=dtype,
        requests=requests,
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        rate=rate,
        one_by_one=one_by_one,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_pages=num_pages,
        seed=seed,
        threads=threads,
        rounds=rounds,
    )
    results.prepare(out)  # a folder that cannot be written should not cost the measurement
    with bar() as progress:
        report = run(setup, progress)
    _show(report)
    for path in results.write(out, "throughput", report.as_data()):
        typer.echo(f"wrote {path}")


def _show(report: ThroughputReport) -> None:
    """A column for each way to serve the requests: with the spread over rounds, it fits 80 characters."""
    setup, first = report.setup, report.rows[0]
    arriving = "all at once" if setup.rate is None else f"{setup.rate:g} a second"
    console = Console(highlight=False)
    for line in (
        f"{setup.requests} requests, {arriving}: {first.prompt_tokens:,} tokens in, {first.output_tokens:,} out",
        f"{setup.dtype}, {setup.threads} threads, memory read at {report.read_bandwidth / 1e9:.1f} GB/s",
        f"medians (least-most) of {setup.rounds} rounds; times: p50 / p90 / p99 of the requests",
    ):
        console.print(line, markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for row in report.rows:
        table.add_column(row.mode, justify="right", no_wrap=True)
    for name, cell in _LINES.items():
        table.add_row(name, *map(cell, report.rows))
    console.print(table)
    for row in report.rows:
        if row.over_one_by_one is not None:
            console.print(f"{row.mode} over one by one: {row.over_one_by_one:.2f}x")


def _spread(value: Spread) -> str:
    return f"{_number(value.median)} ({_number(value.low)}-{_number(value.high)})"


def _number(value: float) -> str:
    """Three digits that count, or more where the number has them."""
    return f"{value:,.{0 if value >= 100 or value == int(value) else 1 if value >= 10 else 2}f}"


def _quantiles(value: Quantiles) -> str:
    return " / ".join(_number(each.median) for each in (value.p50, value.p90, value.p99))


_LINES: dict[str, Callable[[ThroughputRow], str]] = {
    "output tokens/s": lambda row: _spread(row.tokens_per_s),
    "requests/s": lambda row: _spread(row.requests_per_s),
    "limit tokens/s": lambda row: _number(row.limit_tokens_per_s),
    "of limit, while busy": lambda row: f"{row.of_limit:.0%}",
    "busy": lambda row: f"{row.busy.median:.0%}",
    "tokens a step": lambda row: _spread(row.mean_batch),
    "steps": lambda row: _number(row.steps.median),
    "preemptions": lambda row: _number(row.preemptions.median),
    "most KV pages": lambda row: _number(row.peak_pages.median),
    "first token ms": lambda row: _quantiles(row.first_token_ms),
    "per token ms": lambda row: _quantiles(row.per_token_ms),
    "latency ms": lambda row: _quantiles(row.latency_ms),
}
