"""Tables of our own steps on a GPU, from results/h200: recorded kernels, what was foretold, what was measured.

Used by `generate_docs.py`. A table whose file is not there is left out: it is empty. The files:

    rooflight profile --model random:qwen3-0.6b --out results/h200
    rooflight explain random:qwen3-0.6b --measure --sweep --out results/h200
"""

from __future__ import annotations

from typing import Any

from decode_tables import load
from tables import markdown

Data = dict[str, Any]
TOP = 5
TITLES = {"decode": "Decode, {batch:,} × {context:,} tokens in the cache", "prefill": "A prompt of {context:,} tokens"}


def origin(data: Data) -> str:
    """Where the figures come from, and whose ceilings the limits are."""
    where, first = data["environment"], data["profiles"][0]
    return (
        f"{data['setup']['model'] or 'SmolLM2-135M-Instruct'}, {first['dtype']}. {where['device']}, driver "
        f"{where['driver']}; host {where['cpu']}; PyTorch {where['torch']}, Triton {where['triton']}; commit "
        f"{where['commit']}, {where['date']}. Ceilings: {first['ceilings']}.\n"
    )


def profile_steps() -> str:
    """What the recorded steps took as a whole."""
    data = load("profile")
    if data is None:
        return ""
    rows = []
    for found in data["profiles"]:
        tokens = found["batch"] * (found["context"] if found["phase"] == "prefill" else 1)
        rows.append(
            [
                _title(found),
                _us(found["step_us"]),
                _us(found["wall_us"]),
                f"{found['busy_of_step']:.1%}",
                f"{min(found['busy_of_wall'], 1):.1%}",
                f"{found['kernels_per_step']:,.1f}",
                f"{found['kernels_per_step'] / tokens:,.3g}",
                f"{found['host_calls_per_step']:,.3g}",
                _us(found["stream_us"]),
                f"{found['graph_us'] / found['step_us']:.0%}",
            ]
        )
    header = ["step", "GPU µs", "host µs", "busy of GPU's", "busy of host's", "kernels", "kernels a token"]
    header += ["host's launches", "limit µs", "of kernels' limits"]
    note = (
        "GPU: from the first start of a launch to its last end, for a step. Host: launch after launch, without the "
        "profiler. Limit: all overlapped; kernels' limits: one operator after the other, each at its own. "
    )
    return markdown(header, rows, right=1) + "\n" + note + origin(data)


def profile_kernels() -> str:
    """Every kernel, the five most expensive in bold."""
    data = load("profile")
    if data is None:
        return ""
    text = []
    for found in data["profiles"]:
        owners = {row["name"]: row for row in found["rows"]}
        rows = []
        for place, kernel in enumerate(found["kernels"]):
            owner, name = owners[kernel["operator"]], f"`{kernel['name']}`"
            figures = [f"{kernel['count']:,.4g}", _us(kernel["us"]), _us(kernel["idle_us"]), f"{kernel['share']:.1%}"]
            work = [_or_dash(owner["bytes"], 1e6, 1), _or_dash(owner["flops"], 1e9, 2), _us(owner["limit_us"])]
            title = f"**{name}**" if place < TOP else name
            rows.append([title, f"`{kernel['operator']}`", owner["wall"], *figures, *work, _share(owner["at_limit"])])
        header = ["kernel", "operator", "wall", "a step", "µs", "gaps", "share", "MB", "GFLOP", "limit µs", "at limit"]
        text.append(f"**{_title(found)}**\n\n" + markdown(header, rows, right=3))
    note = (
        "A kernel's time is from the end of the one before to its own, so that overlap counts once; the gap in front "
        "is a part of it. Bytes, operations and limits are of its operator in a step, whose kernels may be several. "
    )
    return "\n".join([*text, note + origin(data)])


def measured_steps() -> str:
    """Every step of the sweep: limits, what laws of operators foretold, what was measured."""
    data = load("explain_measured")
    if data is None:
        return ""
    rows = []
    for row in data["rows"]:
        figures = [_us(row[name]) for name in ("stream_us", "graph_us", "foretold_us", "step_us")]
        error = "–" if row["error"] is None else f"{row['error']:+.0%}"
        case = f"{row['phase']} {row['batch']:,} × {row['context']:,}"
        rows.append([case, *figures, error, _us(row["wall_us"]), f"{min(row['busy_of_wall'], 1):.0%}"])
    header = ["step", "limit µs", "as kernels", "foretold", "measured", "error", "for the host", "GPU busy of it"]
    errors = [abs(row["error"]) for row in data["rows"] if row["error"] is not None]
    within = f"{sum(error <= 0.2 for error in errors)} of {len(errors)} steps are foretold within 20 %. "
    note = within + "Foretold: the sum of laws that were fitted on operators measured alone, at other sizes. "
    return markdown(header, rows, right=1) + "\n" + note + origin(data)


def measured_operators() -> str:
    """Operators of every step of the sweep: foretold over measured, less one."""
    data = load("explain_measured")
    if data is None:
        return ""
    names = list(dict.fromkeys(row["name"] for found in data["profiles"] for row in found["rows"]))
    rows = []
    for name in names:
        cells = []
        for found in data["profiles"]:
            row = next((row for row in found["rows"] if row["name"] == name), None)
            known = row is not None and row["measured_us"] is not None
            error = "" if row is None or row["error"] is None else f" {row['error']:+.0%}"
            cells.append(f"{_us(row['measured_us'])}{error}" if known and row is not None else "–")
        rows.append([f"`{name}`", *cells])
    header = ["µs a step, error of what was foretold"]
    header += [f"{row['batch']:,} × {row['context']:,}" for row in data["rows"]]
    return markdown(header, rows, right=1) + "\n" + origin(data)


def laws() -> str:
    data = load("explain_measured")
    if data is None:
        return ""
    rows = [
        [
            f"`{law['operator']}`",
            "to 8" if law["few"] else "more",
            str(law["points"]),
            f"{law['overhead_us']:.2f}",
            f"{law['fraction']:.0%}",
            f"{law['compute_fraction']:.0%}",
            f"{law['error']:.0%}",
        ]
        for law in data["laws"]
    ]
    header = [
        "operator",
        "rows",
        "sizes",
        "overhead µs",
        "of the memory rate",
        "of the compute rate",
        "worst of the fit",
    ]
    return markdown(header, rows, right=2) + "\n" + origin(data)


def _title(found: Data) -> str:
    return TITLES[found["phase"]].format(**found)


def _us(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _or_dash(value: float | None, size: float, digits: int) -> str:
    return "–" if value is None else f"{value / size:,.{digits}f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


TABLES = {
    "profile-steps": profile_steps,
    "profile-kernels": profile_kernels,
    "measured-steps": measured_steps,
    "measured-operators": measured_operators,
    "measured-laws": laws,
}
