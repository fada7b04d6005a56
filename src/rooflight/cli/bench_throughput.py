"""`rooflight bench throughput`: many requests, batched continuously."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from rooflight.bench import results, roof
from rooflight.bench.cases import GPU_CASES, Case, CaseSetup
from rooflight.bench.cases import run as run_cases
from rooflight.bench.device import gpu_name
from rooflight.bench.environment import gpu_folder
from rooflight.bench.measurement import Spread
from rooflight.bench.throughput import Quantiles, ThroughputReport, ThroughputRow, ThroughputSetup, run
from rooflight.cli import loading
from rooflight.cli.bar import bar
from rooflight.cli.bench_request_tables import show_cases
from rooflight.cli.bench_tables import show_idle

BUILD = Path("build/bench")
USUAL_DTYPE = {"cpu": "fp32", "cuda": "bf16"}
_LENGTHS = "N, fixed:N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA."


def throughput(
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Folder, .gguf file, hub name or random:<preset>.", show_default="the embedded one"
        ),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="NAME", help="auto (a GPU for cases, if there is one), cpu or cuda.")
    ] = "auto",
    case: Annotated[
        list[str] | None,
        typer.Option(
            metavar="N:IN:OUT",
            help="N requests at once, each with IN tokens in and OUT out; repeatable.",
            show_default="on a GPU 8:128:128 64:128:128 256:512:128 1024:128:128",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="An engine to run the cases beside ours: vllm.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(metavar="TYPE", help="fp32, bf16 or fp16.", show_default="fp32, on a GPU bf16")
    ] = None,
    requests: Annotated[int | None, typer.Option(metavar="N", help="Requests of a round.", show_default="64")] = None,
    prompt_tokens: Annotated[
        str | None,
        typer.Option(metavar="LENGTHS", help=f"Prompt lengths: {_LENGTHS}", show_default="uniform:16-256"),
    ] = None,
    max_tokens: Annotated[
        str | None, typer.Option(metavar="LENGTHS", help=f"Tokens to generate: {_LENGTHS}", show_default="64")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="Poisson arrivals, R a second on average.", show_default="all at once"),
    ] = None,
    one_by_one: Annotated[
        bool, typer.Option("--one-by-one", help="Also one request after the other, for the ratio.")
    ] = False,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(metavar="N", help="Most requests that run together.", show_default="64, of cases the largest"),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Most tokens of a step; on a GPU fewer where memory is short.",
            show_default="512, on a GPU the largest case's prompts, up to 131072",
        ),
    ] = None,
    num_pages: Annotated[
        int | None,
        typer.Option(metavar="N", help="Pages of the KV cache.", show_default="what those together may need"),
    ] = None,
    threads: Annotated[int, typer.Option(metavar="N", help="CPU threads; 0 means all cores.")] = 0,
    rounds: Annotated[int, typer.Option(metavar="N", help="Interleaved rounds; medians are compared.")] = 3,
    seed: Annotated[int, typer.Option(metavar="N", help="Same seed, same requests.")] = 0,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="For JSON and CSV.", show_default="build/bench, on a GPU build/bench/<gpu>"
        ),
    ] = None,
) -> None:
    """Tokens a second of many requests: cases of one length, or random lengths, all at once or as they arrive.

    A GPU runs cases, its own where none are given. Random lengths and arrivals run on the CPU.

    Example: rooflight bench throughput --requests 16 --one-by-one --dtype bf16
    """
    threads = threads or os.cpu_count() or 1
    loading.check_threads(threads)
    given: dict[str, Any] = {
        "requests": requests,
        "prompt_tokens": prompt_tokens,
        "max_tokens": max_tokens,
        "rate": rate,
        "one_by_one": one_by_one or None,
    }
    given = {name: value for name, value in given.items() if value is not None}
    place = "cpu" if device == "auto" and given and not case else roof.chosen_device(device)
    sizes = {
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        "num_pages": num_pages,
    }
    sizes = {name: value for name, value in sizes.items() if value is not None}
    common: dict[str, Any] = {"model": model, "threads": threads, "rounds": rounds, "seed": seed, **sizes}
    common["dtype"] = USUAL_DTYPE[place] if dtype is None else dtype
    if case or place == "cuda":
        if given:
            where = "cases" if case else "a GPU, which runs cases (--case N:IN:OUT)"
            raise ValueError(f"{next(iter(given))} cannot be combined with {where}")
        chosen = tuple(Case.parse(text) for text in case or ()) or GPU_CASES
        _run_cases(CaseSetup(cases=chosen, peers=tuple(peer or ()), device=place, **common), out)
        return
    if peer:
        raise ValueError("peer needs cases to run beside ours: --case N:IN:OUT")
    _run_workload(ThroughputSetup(**given, **common), out)


def results_folder(out: Path | None, device: str) -> Path:
    """As asked for, or one for each device."""
    if out is not None:
        return out
    return BUILD / gpu_folder(gpu_name()) if device == "cuda" else BUILD


def _run_cases(setup: CaseSetup, out: Path | None) -> None:
    folder = results_folder(out, setup.device)
    results.prepare(folder)  # a folder that cannot be written should not cost the measurement
    with bar() as progress:
        report = run_cases(setup, progress)
    show_cases(report)
    if setup.device == "cuda":
        show_idle(report.environment)
    for name, reason in report.absent.items():
        typer.echo(f"{name}: {reason}")
    kind = "throughput" if setup.device == "cuda" else "throughput-cases"  # the CPU's other kind has the plain name
    _write(folder, kind, setup.dtype, setup.device, report.environment, report.as_data())


def _run_workload(setup: ThroughputSetup, out: Path | None) -> None:
    folder = results_folder(out, "cpu")
    results.prepare(folder)
    with bar() as progress:
        report = run(setup, progress)
    _show(report)
    _write(folder, "throughput", setup.dtype, "cpu", report.environment, report.as_data())


def _write(
    folder: Path, kind: str, dtype: str, device: str, environment: Mapping[str, object], data: Mapping[str, Any]
) -> None:
    name = results.file_name(folder, kind, [dtype], USUAL_DTYPE[device], environment.get("device", device))
    for path in results.write(folder, name, data):
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
