"""A plot per operator from the data of its results: cold time beside the limit. Needs matplotlib, and no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooflight.bench.contenders import AGAIN, OURS, PROVIDERS, VERSIONS
from rooflight.bench.peers.ops import PEERS
from rooflight.bench.rows import OpRow, OpsReport, by_table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours and three of Tol's, told apart by every kind of eye; each with a marker and a dash of its own.
_COLOURS = (
    "#0072B2",
    "#D55E00",
    "#009E73",
    "#CC79A7",
    "#E69F00",
    "#56B4E9",
    "#000000",
    "#8C510A",
    "#999933",
    "#882255",
)
_MARKERS = "osD^vP*X<>hd"
_DASHES = ("-", "--", "-.", ":")
_ORDER = (OURS, *PROVIDERS, *PEERS, *VERSIONS, AGAIN)


def missing() -> str | None:
    """Why nothing can be drawn here, or None."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return "matplotlib is not installed (pip install 'rooflight[plots]')"
    return None


def draw(data: Mapping[str, Any], path: Path) -> Path:
    """Draw the results of one operator, the data of an `OpsReport`, into a PNG or SVG file by the path's ending.

    A column for each dtype; above, cold time over traffic with the limit as a line, both logarithmic; below, how
    close to the limit that is, where a few per cent can be seen. Raises ImportError without matplotlib.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    report = OpsReport.from_data(data)
    tables = by_table(report.rows)
    operators = {operator for operator, _ in tables}
    if len(operators) != 1:
        raise ValueError(f"rows must be of one operator, were of {', '.join(sorted(operators)) or 'none'}")
    size = (3 + 5.5 * len(tables), 7.5)
    figure, axes = pyplot.subplots(
        2, len(tables), figsize=size, sharex="col", squeeze=False, height_ratios=(3, 2), layout="constrained"
    )
    for column, ((_, dtype), rows) in enumerate(tables.items()):
        _times(axes[0][column], rows, dtype)
        _shares(axes[1][column], rows)
    axes[0][0].set_ylabel("cold GPU time, µs")
    axes[1][0].set_ylabel("limit / cold time")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False)
    environment = report.environment
    figure.suptitle(f"{operators.pop()} on {report.card.name}, {environment.get('date', '')}")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path


def _lines(rows: Sequence[OpRow]) -> dict[str, list[tuple[float, float, float]]]:
    """Contender -> (MB moved, cold µs, share of the limit) by traffic; no second line for the A/A row."""
    lines: dict[str, list[tuple[float, float, float]]] = {}
    for row in sorted(rows, key=lambda row: row.bytes):
        if row.cold_us is not None and row.at_limit_cold is not None and row.contender != AGAIN:
            lines.setdefault(row.contender, []).append((row.bytes / 1e6, row.cold_us.median, row.at_limit_cold))
    return lines


def _style(contender: str) -> dict[str, Any]:
    place = _ORDER.index(contender)
    return {
        "color": _COLOURS[place % len(_COLOURS)],
        "marker": _MARKERS[place % len(_MARKERS)],
        "linestyle": _DASHES[place // len(_COLOURS) % len(_DASHES)],
        "markersize": 4,
        "linewidth": 2.2 if place == 0 else 1.1,
        "zorder": 3 if place == 0 else 2,
    }


def _times(axes: Axes, rows: Sequence[OpRow], dtype: str) -> None:
    for contender, points in _lines(rows).items():
        axes.plot([p[0] for p in points], [p[1] for p in points], label=contender, **_style(contender))
    limits = sorted({(row.bytes / 1e6, row.limit_us) for row in rows})
    axes.plot(*zip(*limits, strict=True), color="#666666", linewidth=1.5, label="limit", zorder=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_title(dtype)
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)


def _shares(axes: Axes, rows: Sequence[OpRow]) -> None:
    for contender, points in _lines(rows).items():
        axes.plot([p[0] for p in points], [p[2] for p in points], **_style(contender))
    axes.axhline(1, color="#666666", linewidth=1.5, zorder=1)
    axes.set_ylim(0, 1.1)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("bytes that the operator must move, MB")
    axes.grid(True, which="major", color="#dddddd", linewidth=0.6)
