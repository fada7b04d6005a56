"""What `rooflight bench request` and the cases of `rooflight bench throughput` print on a GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from rooflight.bench.cases import Case, CaseReport, CaseRow
from rooflight.bench.measurement import Spread
from rooflight.bench.request import RequestReport
from rooflight.bench.request_rows import RequestRow
from rooflight.cli.console import wide_console


def show_requests(report: RequestReport) -> None:
    """A table for each dtype; with the spread it fits 100 characters."""
    console, setup = wide_console(), report.setup
    for line in (
        f"one request, {setup.max_tokens} tokens out, greedy: medians of {setup.rounds} rounds (±: the farthest)",
        f"memory read at {report.read_bandwidth / 1e12:.2f} TB/s ({report.origin})",
        f"host: {report.environment.get('cpu', 'unknown')}",
        "busy: the GPU's own time for it, from a profiled request; over ours: first token / per token",
        "limit: a token's weights, keys and values, read once; request and decode: tokens/s",
    ):
        console.print(line, markup=False, soft_wrap=True)
    for dtype in setup.dtypes:
        console.print(_request_table(dtype, [row for row in report.rows if row.dtype == dtype]))
    for row in report.rows:
        if row.busy_absent is not None:
            line = f"{row.engine}, {row.dtype}, {row.prompt_tokens} tokens: not profiled: {row.busy_absent}"
            console.print(line, markup=False, soft_wrap=True)
    show_engines(console, report.engines)


def show_cases(report: CaseReport) -> None:
    """All cases in one table that fits 80 characters."""
    console, setup = wide_console(), report.setup
    prompts = f"products at {report.flops / 1e12:.0f} TFLOP/s" if report.flops else "prompts not counted"
    for line in (
        f"N requests at once, IN tokens in, OUT out; {setup.dtype}, medians of {setup.rounds} rounds",
        f"limit: memory read at {report.read_bandwidth / 1e9:,.1f} GB/s, {prompts} ({report.origin})",
        f"host: {report.environment.get('cpu', 'unknown')}",
    ):
        console.print(line, markup=False, soft_wrap=True)
    console.print(_case_table(report.rows))
    show_engines(console, report.engines)


def show_engines(console: Console, engines: Mapping[str, Mapping[str, Any]]) -> None:
    """A line for each engine on its context, pool and graphs, as far as it tells."""
    for name, facts in engines.items():
        told = {
            "context {}": facts.get("max_model_len"),
            "{} pages": facts.get("num_pages"),
            "of {} tokens": facts.get("page_size"),
            "at most {} requests": facts.get("max_num_seqs"),
            "{} tokens a step": facts.get("max_num_batched_tokens"),
        }
        name = f"{name} ({facts['version']})" if "version" in facts else name
        words = [words.format(value) for words, value in told.items() if value is not None]
        buckets = facts.get("graph_buckets")
        if buckets:
            words.append(f"graphs for {len(buckets)} sizes up to {max(buckets)}")
        console.print(f"{name}: {', '.join(words) or 'tells nothing of its set-up'}", markup=False, soft_wrap=True)


def _request_table(dtype: str, rows: Iterable[RequestRow]) -> Table:
    table = Table(title=f"{dtype}, ms", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.add_column("prompt", justify="right", no_wrap=True)
    table.add_column("engine", no_wrap=True)
    for head in ("first", "busy", "token", "busy", "limit", "of it", "request", "decode", "over ours"):
        table.add_column(head, justify="right", no_wrap=True)
    before = None
    for row in rows:
        if before is not None and row.prompt_tokens != before:
            table.add_section()
        over = (row.first_token_ratio, row.per_token_ratio)
        table.add_row(
            str(row.prompt_tokens) if row.prompt_tokens != before else "",
            row.engine,
            _far(row.first_token_ms, 1),
            "-" if row.busy_first_token_ms is None else f"{row.busy_first_token_ms:.1f}",
            _far(row.per_token_ms, 3 if row.per_token_ms.median < 10 else 2),
            "-" if row.busy_per_token_ms is None else f"{row.busy_per_token_ms:.3f}",
            f"{row.limit_ms:.3f}",
            f"{row.of_limit:.0%}",
            f"{row.request_tokens_per_s.median:.0f}",
            f"{row.decode_tokens_per_s.median:.0f}",
            "/".join(f"{value:.2f}" for value in over if value is not None),
        )
        before = row.prompt_tokens
    return table


def _case_table(rows: Iterable[CaseRow]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    for head in ("N:IN:OUT", "engine"):
        table.add_column(head, no_wrap=True)
    for head in ("tokens/s", "limit", "of it", "seconds", "ours over its"):
        table.add_column(head, justify="right", no_wrap=True)
    before = None
    for row in rows:
        case = Case(row.requests, row.prompt_tokens, row.max_tokens)
        if before is not None and case != before:
            table.add_section()
        table.add_row(
            case.text if case != before else "",
            row.engine,
            _far(row.tokens_per_s, 0),
            f"{row.limit_tokens_per_s:,.0f}",
            f"{row.of_limit:.0%}",
            f"{row.wall_s.median:.2f}",
            "" if row.ratio is None else f"{row.ratio:.2f}x",
        )
        before = case
    return table


def _far(value: Spread, digits: int) -> str:
    """The median, and how far the rounds were from it at most."""
    far = max(value.high - value.median, value.median - value.low) / value.median
    return f"{value.median:,.{digits}f} ±{far:.0%}"
