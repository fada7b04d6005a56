"""What the charts of the report are made of, and lines over a swept quantity. SVG, as text.

Colours and type are the style sheet's: elements carry classes. What a pointer shows is an element's <title>.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape


def short(value: float) -> str:
    """4.53e12 as "4.53 T"."""
    for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size * 0.9995:
            return f"{value / size:.3g} {prefix}"
    return f"{value:.3g}"


def duration(us: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms")):
        if us >= size * 0.9995:
            return f"{us / size:,.3g} {unit}" if us < size * 999.5 else f"{us / size:,.0f} {unit}"
    return f"{us:.3g} µs"


@dataclass(frozen=True)
class Axis:
    """title: beneath; write: a tick's number; ticks: where, if the scale is not to choose."""

    title: str
    write: Callable[[float], str]
    log: bool = True
    ticks: Sequence[float] = ()


@dataclass(frozen=True)
class Scale:
    """From values low … high to pixels start … end."""

    low: float
    high: float
    start: float
    end: float
    log: bool = True

    def __call__(self, value: float) -> float:
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return self.start + (at - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        if not self.log:
            size = 10 ** math.floor(math.log10(self.high / 4))
            size *= next(times for times in (1, 2, 5, 10) if self.high / (times * size) < 5)
            return [size * i for i in range(int(self.high / size) + 1)]
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        parts = (1, 2, 5) if math.log10(self.high / self.low) < 2.2 else (1,)
        found = [part * 10.0**power for power in powers for part in parts]
        return [value for value in found if self.low <= value <= self.high]


@dataclass(frozen=True)
class Series:
    """A line: its class, a value and what a pointer shows at each point, and classes of points that differ."""

    name: str
    kind: str
    values: Sequence[float]
    tips: Sequence[str]
    kinds: Sequence[str] = ()


def svg_text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def svg_line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def svg_dot(x: float, y: float, r: float, kind: str, tip: str, more: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r:.1f}" class="{kind}"{more}><title>{escape(tip)}</title></circle>'


def svg(width: int, height: int, kind: str, label: str, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {width} {height}" class="{kind}" role="img" aria-label="{escape(label)}">'
    return "\n".join([head, *parts, "</svg>"])


def svg_axes(x: Scale, y: Scale, across: Axis, up: Axis) -> list[str]:
    parts = [svg_text(2, y.end - 14, up.title, "axis")]
    for tick in up.ticks or y.ticks():
        parts.append(svg_line(x.start, y(tick), x.end, y(tick), "grid"))
        parts.append(svg_text(x.start - 6, y(tick) + 4, up.write(tick), "tick", "end"))
    for tick in across.ticks or x.ticks():
        parts.append(svg_line(x(tick), y.start, x(tick), y.start + 4, "rule"))
        parts.append(svg_text(x(tick), y.start + 18, across.write(tick), "tick", "middle"))
    parts.append(svg_line(x.start, y.start, x.end, y.start, "rule"))
    return [*parts, svg_text((x.start + x.end) / 2, y.start + 37, across.title, "axis", "middle")]


def lines(
    about: str,
    xs: Sequence[float],
    across: Axis,
    up: Axis,
    series: Sequence[Series],
    *,
    mark: tuple[float, str] | None = None,
    full: float | None = None,
) -> str:
    """Lines over xs. mark: a place on them and its words; full: from where on memory does not hold it."""
    width, height, values = 360, 260, [value for one in series for value in one.values]
    x = Scale(xs[0], xs[-1], 56, width - (18 if len(series) == 1 else 76), across.log)
    pad = max(1.4, math.sqrt(10 * min(values) / max(values))) if up.log else 1.06  # a decade at least
    y = Scale(min(values) / pad if up.log else 0, max(values) * pad, height - 46, 30, up.log)
    parts, words = [], ""
    if full is not None:
        parts.append(f'<path class="full" d="M{x(full):.1f} {y.end}H{x.end}V{y.start}H{x(full):.1f}Z"/>')
        early = x(full) < (x.start + x.end) / 2  # the lines rise to the right: words above or beneath them
        place = (x(full) + 6, y.end + 14, "start") if early else (x.end - 4, y.start - 8, "end")
        words = svg_text(*place[:2], "does not fit", "note", place[2])
    parts += [*svg_axes(x, y, across, up), words]
    if mark is not None:
        parts.append(svg_line(x(mark[0]), y.end - 8, x(mark[0]), y.start, "ridge"))
        anchor = "start" if x(mark[0]) < (x.start + x.end) / 2 else "end"
        parts.append(svg_text(x(mark[0]), y.end - 13, mark[1], "note", anchor))
    last = -100.0
    for one in sorted(series, key=lambda s: -s.values[-1]):
        places = [(x(a), y(b)) for a, b in zip(xs, one.values, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        parts.append(f'<polyline points="{path}" class="line {one.kind}"/>')
        kinds = one.kinds or [one.kind] * len(xs)
        parts += [svg_dot(*p, 3.5, f"spot {k}", tip) for p, k, tip in zip(places, kinds, one.tips, strict=True)]
        last = max(places[-1][1] + 4, last + 14)
        parts.append(svg_text(x.end + 8, last, one.name if len(series) > 1 else "", "label"))
    return svg(width, height, "lines", about, parts)
