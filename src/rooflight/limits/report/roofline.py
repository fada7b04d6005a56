"""The roofline of the report: a card's roofs, a step's operators beneath them, and labels that keep apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rooflight.limits.explanation import Explanation, Row
from rooflight.limits.report.charts import Axis, Scale, duration, short, svg, svg_axes, svg_dot, svg_line, svg_text

NEAR = 10  # px: points nearer than this share a label
LETTER = 0.55  # width of a letter in font sizes, rather too wide
GAPS = (5, 16, 30, 46, 64, 84)  # px between a point and its label
SIDES = tuple((right, down) for down in (0, 1, -1, 0.5, -0.5) for right in (1, -1, 0) if right or abs(down) == 1)
Box = tuple[float, float, float, float]


def roofline(found: Explanation, width: int, height: int, font: float, *, names: bool = True) -> str:
    """Operations a second over operations a byte: the roofs of the card, and each row that computes as a point.

    Points are labelled with their names, or with their rows' numbers.
    """
    rows = [(number, row) for number, row in enumerate(found.rows, 1) if row.flops]
    strong = found.card.unit("tensor", found.dtype if found.scenario.compute == "as is" else found.scenario.compute)
    memory, top = found.card.flops[strong] / found.ridge, max(found.card.flops.values())  # with this step's writes
    reached, intensities = [_rate(row) for _, row in rows], [row.intensity for _, row in rows]
    right = max([top / memory, *intensities]) * 1.7
    x = Scale(min([0.5, *intensities]) / 1.7, right, font * 4, width - font * 8)
    y = Scale(min([x.low * memory, *reached]) / 3, top * 1.6, height - 44, 32)
    axes = svg_axes(x, y, Axis("operations a byte, FLOP/byte", lambda v: f"{v:,.4g}"), Axis("attainable FLOP/s", short))
    points, heaps = _points(rows, x, y, font, names)
    roofs, taken = _roofs(found, x, y, strong, [heap[0] for heap in heaps], font)
    bubbles = [(at - r, up - r, at + r, up + r) for at, up, r, _ in heaps]
    frame = (x.start, y.end, x.end, y.start)
    labels = [_label(*heap, font, bubbles, taken, frame) for heap in sorted(heaps, key=lambda h: -h[2])]
    about = f"Roofline of {found.model} on {found.card.name} with {len(rows)} groups of operator calls"
    return svg(width, height, "roofline", about, [*axes, *roofs, *points, *labels])


def _rate(row: Row) -> float:
    return row.flops / row.limit_us * 1e6


def _roofs(
    found: Explanation, x: Scale, y: Scale, strong: str, points: Sequence[float], font: float
) -> tuple[list[str], list[Box]]:
    """Ceilings, slope and ridge; and boxes along those that a label should not cross."""
    flops, memory = found.card.flops, found.card.flops[strong] / found.ridge
    parts, boxes, last = [], [], -100.0
    for rate in sorted(set(flops.values()), reverse=True):
        names = [name for name, other in flops.items() if other == rate]
        kind = "roof" if strong in names else "second" if "fp32" in names else "faint"
        last = max(y(rate) + 4, last + font * 1.1)  # of two names that would touch, the lower one moves down
        parts.append(svg_line(x(rate / memory), y(rate), x.end, y(rate), kind))
        parts.append(svg_text(x.end + 6, last, f"{', '.join(names)} {short(rate)}", f"{kind} name"))
        boxes += _along(x(rate / memory), y(rate), x.end, y(rate)) if kind != "faint" else []
    best, peak = max(flops.values()), flops[strong]
    ridge, foot = (x(peak / memory), y(peak)), (x.start, y(x.low * memory))
    parts.append(svg_line(*ridge, x(best / memory), y(best), "faint"))
    parts.append(svg_line(*foot, *ridge, "roof"))
    parts.append(svg_line(*ridge, ridge[0], y.start, "ridge"))
    parts.append(svg_dot(*ridge, 4, "ridge-mark", f"Ridge: from {found.ridge:,.0f} FLOP/byte arithmetic is the wall"))
    parts.append(svg_text(ridge[0] + 6, y.start - 8, f"ridge {found.ridge:,.0f}", "note"))
    stops = sorted([foot[0], *(at for at in points if foot[0] < at < ridge[0]), ridge[0]])
    _, middle = max((b - a, (a + b) / 2) for a, b in pairwise(stops))  # the widest gap holds the slope's name
    tilt = (ridge[1] - foot[1]) / (ridge[0] - foot[0])
    at, half = (middle, foot[1] + tilt * (middle - foot[0]) - 9 * math.hypot(1, tilt)), font * 4.5 / math.hypot(1, tilt)
    turned = f'transform="translate({at[0]:.1f} {at[1]:.1f}) rotate({math.degrees(math.atan(tilt)):.1f})"'
    parts.append(f'<text {turned} class="roof name" text-anchor="middle">memory {short(memory)}B/s</text>')
    boxes += _along(*foot, *ridge) + _along(
        middle - half, at[1] - half * tilt - 4, middle + half, at[1] + half * tilt - 4
    )
    at_ridge = (ridge[0] - 6, ridge[1] - 6, ridge[0] + 6, ridge[1] + 6)
    return parts, [*boxes, at_ridge, at_ridge, (ridge[0] - 4, y.start - 22, ridge[0] + 74, y.start)]


def _along(x1: float, y1: float, x2: float, y2: float) -> list[Box]:
    """Small boxes that cover a line."""
    steps = max(1, round(math.hypot(x2 - x1, y2 - y1) / 6))
    points = [(x1 + (x2 - x1) * i / steps, y1 + (y2 - y1) * i / steps) for i in range(steps + 1)]
    return [(px - 3, py - 3, px + 3, py + 3) for px, py in points]


def _points(
    rows: Sequence[tuple[int, Row]], x: Scale, y: Scale, font: float, names: bool
) -> tuple[list[str], list[tuple[float, float, float, list[str]]]]:
    """A circle a row, the large ones beneath; and their heaps: middle, radius, labels."""
    parts: list[str] = []
    heaps: list[tuple[float, float, float, list[str]]] = []
    for number, row in sorted(rows, key=lambda item: -item[1].share):
        at, up, r = x(row.intensity), y(_rate(row)), 3 + 1.2 * font * math.sqrt(row.share)
        tip = (
            f"{row.name}: {row.intensity:,.2f} FLOP/byte, {short(_rate(row))}FLOP/s, {duration(row.limit_us)} "
            f"({row.share:.1%}), {row.wall}"
        )
        parts.append(svg_dot(at, up, r, f"point {row.wall}", tip, f' data-row="{number}"'))
        name = row.name if names else str(number)
        near = [heap for heap in heaps if math.hypot(heap[0] - at, heap[1] - up) < NEAR]
        if near:
            near[0][3].append(name)
        else:
            heaps.append((at, up, r, [name]))
    return parts, heaps


def _label(
    at: float, up: float, r: float, names: Sequence[str], font: float, bubbles: list[Box], taken: list[Box], frame: Box
) -> str:
    """The names of a heap where they cover least of what is `taken`; their own box is taken then."""
    written = _written(names)
    wide, high, step = max(map(len, written)) * font * LETTER, len(written) * font * 1.2, r * 0.8
    own = (at - r, up - r, at + r, up + r)
    tried: list[tuple[float, Box, int, int]] = []
    for gap in GAPS:
        for order, (right, down) in enumerate(SIDES):
            far = (step if right and down else r) + gap
            cx, cy = at + right * (far + wide / 2), up + down * (far + high / 2)
            box = (cx - wide / 2, cy - high / 2, cx + wide / 2, cy + high / 2)
            cost = 5 * (wide * high - _covered(box, frame)) + sum(_covered(box, other) for other in bubbles + taken)
            if gap > GAPS[0]:  # a line leads there, past the other points
                path = _along(at, up, cx - right * wide / 2, min(max(up, box[1]), box[3]))
                cost += 5 * sum(
                    _covered(piece, other) for piece in path for other in bubbles if not _covered(other, own)
                )
            tried.append((cost + gap / 2 + order / 2, box, right, gap))
    _, box, right, gap = min(tried)
    taken.append(box)
    left, anchor = (
        (box[0], "start") if right > 0 else (box[2], "end") if right < 0 else ((box[0] + box[2]) / 2, "middle")
    )
    parts = [svg_text(left, box[1] + font * (0.95 + i * 1.2), line, "label", anchor) for i, line in enumerate(written)]
    if gap > GAPS[0]:
        parts.insert(0, svg_line(at, up, left, min(max(up, box[1]), box[3]), "leader"))
    return "".join(parts)


def _written(names: Sequence[str]) -> list[str]:
    """Lines of a label: an operator's name once, then what it is of; or numbers."""
    groups: dict[str, list[str]] = {}
    for name in names:
        operator, _, label = name.partition(" ")
        groups.setdefault(operator, []).append(label)
    words = [
        word for name, labels in groups.items() for word in (f"{name} {labels[0]}".strip(), *filter(None, labels[1:]))
    ]
    written = words[:1]
    for word in words[1:]:
        fits = len(written[-1]) + len(word) < (10 if word.isdigit() else 24) or len(word) == 1
        written = [*written[:-1], f"{written[-1]}, {word}"] if fits else [*written[:-1], written[-1] + ",", word]
    return written


def _covered(one: Box, other: Box) -> float:
    wide, high = min(one[2], other[2]) - max(one[0], other[0]), min(one[3], other[3]) - max(one[1], other[1])
    return wide * high if wide > 0 and high > 0 else 0.0
