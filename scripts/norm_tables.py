"""The tables about norms in README and docs/norms.md, from results/h200. Used by `generate_docs.py`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import markdown, medians

from rooflight.bench import summary
from rooflight.bench.contenders import OURS
from rooflight.bench.rows import CALL, COLD, EVENT_COLD, EVENT_HOT, HOT, OpRow, OpsReport, by_shape, by_table, ratio
from rooflight.limits.card import Card

RESULTS = Path(__file__).resolve().parents[1] / "results/h200"
FORWARD = ("rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_")
OTHERS = ("rms_norm_backward", "layer_norm", "fused_add_layer_norm", "layer_norm_backward")
README_SHAPES = ("1x4096", "256x4096", "1024x8192", "16384x4096")


def report(operator: str, folder: Path = RESULTS) -> OpsReport:
    return OpsReport.from_data(json.loads((folder / f"{operator}.json").read_text()))


def origin(*reports: OpsReport) -> str:
    """Where the figures of a table come from. ValueError where they are not of one run."""
    runs = {measured.run for measured in reports}
    if len(runs) != 1:
        raise ValueError(f"the rows of a table must be of one run, were of {', '.join(sorted(runs))}")
    measured = reports[0]
    where, rounds = measured.environment, measured.setup["rounds"]
    return (
        f"{measured.card.name}, driver {where['driver']}, {where['cpu']}, PyTorch {where['torch']}, Triton "
        f"{where['triton']}; {medians(rounds)}; commit {where['commit']}, {where['date']}."
    )


def _times(shape: str) -> str:
    return shape.replace("x", " × ")


def _us(row: OpRow | None, time: str) -> str:
    spread = row.time(time) if row else None
    if spread is None:
        return "–"
    return f"{spread.median:.0f}" if spread.median >= 100 else f"{spread.median:.{1 if spread.median >= 20 else 2}f}"


def _beside(ours: OpRow, best: OpRow | None, time: str) -> list[str]:
    """Ours, the best other by name, ours over it."""
    assert best is not None
    value = f"{ratio(ours, best, time):.2f}"
    mine, its = ours.time(time), best.time(time)
    assert mine is not None
    assert its is not None
    within = summary.Compared(ours.shape, time, mine.median, its.median, best.contender).within
    return [_us(ours, time), f"{_us(best, time)} {best.contender}", value if within else f"**{value}**"]


def readme_table() -> str:
    """BF16 at three shapes: ours, the best other, the limit."""
    rows, reports = [], [report(operator) for operator in (*FORWARD, "rms_norm_backward")]
    for measured in reports:
        for shape, cell in by_shape([row for row in measured.rows if row.dtype == "bf16"]).items():
            if shape in README_SHAPES:
                ours = cell[OURS]
                row = [f"`{ours.operator}`", _times(shape), _us(ours, CALL), _us(cell.get("compiled"), CALL)]
                row += [_us(ours, HOT), *_beside(ours, summary.best_other(cell, COLD), COLD), f"{ours.limit_us:.2f}"]
                rows.append([*row, f"{ours.at_limit_cold:.0%}" if ours.wall == "memory" else "launch"])
    header = ["operator, bf16", "tokens × width", "call µs", "compiled's", "hot µs", "cold µs", "best other", "ratio"]
    note = (
        "Call: host time until the next call can be made. Hot and cold: GPU time with inputs in L2 and in DRAM. Best "
        "other: the fastest, cold, of PyTorch, its compiler, vLLM, FlashInfer, Liger, quack and our other provider. "
        "Limit: the operator's bytes at the copy bandwidth of the same run, or an empty kernel if that takes longer. "
    )
    return markdown([*header, "limit µs", "of limit"], rows, right=2) + "\n" + note + origin(*reports) + "\n"


def grid_tables() -> str:
    """Every forward operator and dtype: ours and the best other at each shape."""
    text, reports = [], [report(operator) for operator in FORWARD]
    for measured in reports:
        for (name, dtype), its in by_table(measured.rows).items():
            rows = []
            for shape, cell in by_shape(its).items():
                ours = cell[OURS]
                row = [_times(shape), f"{ours.limit_us:.2f} {ours.wall}"]
                for time in (HOT, COLD):
                    row += _beside(ours, summary.best_other(cell, time), time)
                rows.append([*row, f"{ours.at_limit_cold:.0%}"])
            header = ["tokens × width", "limit µs", "hot", "best other", "ratio", "cold", "best other", "ratio"]
            text.append(f"**`{name}`, {dtype}**\n\n" + markdown([*header, "cold at limit"], rows, right=1))
            text.append("\n".join(f"- {line.partition('; outside')[0]}" for line in summary.lines(its)) + "\n")
    return "\n".join(text) + "\n" + origin(*reports) + "\n"


def score_table() -> str:
    """In how many cells the aim is met: at most 5 % or 0.15 us (0.5 us for a call) behind the best other."""
    reports = [report(operator) for operator in (*FORWARD, *OTHERS)]
    rows = []
    for measured in reports:
        for (name, dtype), its in by_table(measured.rows).items():
            row = [f"`{name}`", dtype]
            for time in (HOT, COLD, CALL):
                cells = summary.compared(its, time)
                row.append(f"{sum(cell.within for cell in cells)} of {len(cells)}")
            rows.append(row)
    return markdown(["operator", "dtype", "hot", "cold", "call"], rows, right=2) + "\n" + origin(*reports) + "\n"


def backward_tables() -> str:
    """Every contender at the three shapes of the operators that get no whole grid."""
    text, reports = [], [report(operator) for operator in OTHERS]
    for measured in reports:
        for (name, dtype), its in by_table(measured.rows).items():
            rows = []
            for shape, cell in by_shape(its).items():
                for contender, row in cell.items():
                    share = f"{row.at_limit_cold:.0%}" if row.at_limit_cold else row.error or ""
                    rows.append([_times(shape), contender, _us(row, CALL), _us(row, HOT), _us(row, COLD), share])
            text.append(f"**`{name}`, {dtype}**\n")
            text.append(markdown(["tokens × width", "contender", "call µs", "hot", "cold", "at limit"], rows, right=2))
    return "\n".join(text) + "\n" + origin(*reports) + "\n"


def call_table() -> str:
    """Host time and the event protocol, where a kernel of three microseconds is hard to see."""
    rows = []
    for operator, shape in (("fused_add_rms_norm", "256x4096"), ("fused_add_rms_norm_", "256x4096")):
        cell = by_shape([row for row in report(operator).rows if row.dtype == "bf16"])[shape]
        for contender, row in cell.items():
            if row.error is None:
                times = [_us(row, time) for time in (CALL, HOT, COLD, EVENT_HOT, EVENT_COLD)]
                over = [_ratio(row, cell[OURS], time) for time in (CALL, EVENT_HOT, EVENT_COLD)]
                rows.append([f"`{operator}`", contender, *times, " / ".join(over)])
    header = ["256 × 4096, bf16", "contender", "call", "graph hot", "graph cold", "event hot", "event cold"]
    note = origin(report("fused_add_rms_norm"), report("fused_add_rms_norm_"))
    return markdown([*header, "call / event hot / event cold over ours"], rows, right=2) + "\n" + note + "\n"


def _ratio(row: OpRow, ours: OpRow, time: str) -> str:
    value = ratio(row, ours, time)
    return "–" if value is None else f"{value:.2f}"


def version_table() -> str:
    """The kernel's history: cold GPU time of each version at each shape."""
    measured = report("fused_add_rms_norm_", RESULTS / "versions")
    cells = by_shape(measured.rows)
    names = [name for name in next(iter(cells.values())) if name != f"{OURS} again"]
    titles = {
        "version1": "1 scalar", "version2": "2 narrow packs, inputs read again", "version3": "3 shared memory",
        "version4": "4 written residual read again", "version5": "5 registers", OURS: "the operator",
    }  # fmt: skip
    rows = [[titles[name], *(f"{_us(cell.get(name), HOT)} / {_us(cell.get(name), COLD)}" for cell in cells.values())]
            for name in sorted(names, key=lambda name: titles[name])]  # fmt: skip
    limits = ["*limit*", *(f"{next(iter(cell.values())).limit_us:.2f}" for cell in cells.values())]
    header = ["hot / cold µs, bf16", *(_times(shape) for shape in cells)]
    return markdown(header, [*rows, limits], right=1) + "\n" + origin(measured) + "\n"


def counter_table() -> str:
    data: dict[str, Any] = json.loads((RESULTS / "counters.json").read_text())
    rows = []
    for row in data["rows"]:
        logical = (row["logical_read"] + row["logical_written"]) / 1e9
        dram = [f"{row['dram_read'] / 1e9:.3f}", f"{row['dram_written'] / 1e9:.3f}"]
        rows.append([row["case"], str(row["kernels"]), f"{logical:.3f}", *dram, f"{row['ratio']:.3f}"])
    header = ["65,536 × 8192, bf16", "kernels", "logical GB", "DRAM read GB", "DRAM written GB", "DRAM / logical"]
    where = data["environment"]
    return markdown(header, rows, right=1) + f"\nCommit {where['commit']}, {where['date']}.\n"


def card_table() -> str:
    card = Card.load(RESULTS / "card.json")
    rows = [
        ["copy, best", f"{card.copy_bandwidth / 1e12:.2f} TB/s"],
        ["read, best", f"{card.read_bandwidth / 1e12:.2f} TB/s"],
    ]
    rows += [[f"matrix product {dtype}, 8192³", f"{rate / 1e12:.0f} TFLOP/s"] for dtype, rate in card.matmul.items()]
    rows += [[f"host: {kind}", f"{time:.2f} µs"] for kind, time in card.call_us.items()]
    rows += [[f"graph node: {kind}", f"{time:.2f} µs"] for kind, time in card.node_us.items()]
    rows += [[f"a load that another waits for, {place}", f"{time:.0f} ns"] for place, time in card.latency_ns.items()]
    where = card.environment
    return markdown([card.name, "measured"], rows, right=1) + f"\nCommit {where['commit']}, {where['date']}.\n"


TABLES = {
    "norms": readme_table,
    "norm-grid": grid_tables,
    "norm-score": score_table,
    "norm-backward": backward_tables,
    "norm-calls": call_table,
    "norm-versions": version_table,
    "norm-counters": counter_table,
    "card": card_table,
}
