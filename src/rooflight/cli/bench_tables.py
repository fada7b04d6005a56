"""What `rooflight bench ops` and `rooflight bench card` print."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich import box
from rich.table import Table

from rooflight.bench import summary
from rooflight.bench.contenders import OURS
from rooflight.bench.measurement import Spread
from rooflight.bench.rows import EVENT_COLD, EVENT_HOT, OpRow, OpsReport, by_shape, by_table
from rooflight.cli.console import wide_console
from rooflight.limits.card import Card


def show_ops(report: OpsReport) -> None:
    """A table for each operator and dtype, what it says, and who was not there."""
    console = wide_console()
    for (operator, dtype), rows in by_table(report.rows).items():
        console.print(_ops_table(f"{operator} {dtype}", rows, report.card))
        for line in (*summary.lines(rows), *summary.failures(rows)):
            console.print(line, soft_wrap=True, markup=False)
        console.print()
    for name, reason in report.absent.items():
        console.print(f"{name}: {reason}", soft_wrap=True, markup=False)


def show_card(card: Card) -> None:
    """Every ceiling with what it was measured with."""
    console = wide_console()
    table = Table(title=f"{card.name}, L2 {card.l2_bytes / 2**20:.0f} MiB", box=box.SIMPLE_HEAD)
    table.add_column("ceiling")
    table.add_column("measured", justify="right")
    for kind, points in (("copy", card.copy), ("read", card.read)):
        for point in points:
            name = f"{kind}, {point.bytes / 2**20:,.0f} MiB moved ({card.methods[kind]})"
            table.add_row(name, f"{point.rate / 1e12:.2f} TB/s")
    for dtype, rate in card.matmul.items():
        table.add_row(f"matrix product {dtype}", f"{rate / 1e12:.0f} TFLOP/s")
    for kind, time in card.call_us.items():
        table.add_row(f"host, launch of {kind}", f"{time:.2f} us")
    for kind, time in card.node_us.items():
        table.add_row(f"graph node, {kind} ({card.methods['node']})", f"{time:.2f} us")
    for place, time in card.latency_ns.items():
        table.add_row(f"load from {place} that another waits for", f"{time:.0f} ns")
    console.print(table)
    for name, reason in card.missing.items():
        console.print(f"{name}: {reason}", soft_wrap=True, markup=False)


def show_idle(environment: Mapping[str, object]) -> None:
    """One line on whether something else uses the card."""
    words = {True: "idle", False: "NOT idle", None: "in use or not, nvidia-smi does not tell"}
    idle = environment.get("idle")
    line = f"before the run the card was {words[idle if isinstance(idle, bool) else None]}"
    if idle is False:
        line += f": {environment.get('other_processes')} processes, {environment.get('utilization_percent')} % busy"
    wide_console().print(line, soft_wrap=True, markup=False)


def _ops_table(title: str, rows: Sequence[OpRow], card: Card) -> Table:
    """Microseconds. Columns of a protocol that did not run are left out."""
    graph, event = (any(row.time(name) for row in rows) for name in ("hot_us", EVENT_HOT))
    limits = f"limit: copy at {card.copy_bandwidth / 1e12:.2f} TB/s, launch {card.launch_floor_us:.2f} us"
    table = Table(
        title=f"{title}, us; {limits}; over ours: call / hot / cold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    for head in ("shape", "limit", "contender"):
        table.add_column(head, no_wrap=True)
    heads = ["call", "hot", "cold", "at limit"] if graph else []
    heads += ["ev. hot", "ev. cold"] if event else []
    heads += ["over ours"] if graph else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for shape, cell in by_shape(rows).items():
        measured = [row for row in cell.values() if row.error is None]
        for place, row in enumerate(measured):
            about = [shape, f"{row.limit_us:.2f} {row.wall}"] if place == 0 else ["", ""]
            table.add_row(*about, row.contender, *_figures(row, cell.get(OURS), card, graph, event))
        table.add_section()
    return table


def _figures(row: OpRow, ours: OpRow | None, card: Card, graph: bool, event: bool) -> list[str]:
    cells = []
    if graph:
        cells += [_time(row.call_us), _time(row.hot_us), _time(row.cold_us), _at_limit(row, card)]
    if event:
        cells += [_time(row.time(EVENT_HOT), spread=False), _time(row.time(EVENT_COLD), spread=False)]
    if graph:
        cells.append(summary.against_ours(row, ours))
    return cells


def _time(value: Spread | None, spread: bool = True) -> str:
    """Median, and how far the rounds were from it at most."""
    if value is None:
        return "-"
    far = max(value.high - value.median, value.median - value.low) / value.median if value.median > 0 else 0.0
    digits = 2 if value.median < 100 else 1
    return f"{value.median:.{digits}f}" + (f" ±{far:.0%}" if spread else "")


def _at_limit(row: OpRow, card: Card) -> str:
    """Cold; hot too where the traffic is more than the cache could have kept."""
    if row.at_limit_cold is None or row.at_limit_hot is None:
        return "-"
    hot = f", hot {row.at_limit_hot:.0%}" if row.bytes > card.l2_bytes else ""
    return f"{row.at_limit_cold:.0%}{hot}"
