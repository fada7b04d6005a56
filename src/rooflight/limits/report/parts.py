"""Pieces of HTML and ways to write figures that the sections of the report share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from rooflight.limits.bounds import WALLS
from rooflight.limits.explanation import Explanation


def microseconds(value: float) -> str:
    return f"{value:,.2f}" if value < 10 else f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def plural(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def count_of(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def few(value: float, digits: int) -> str:
    least = 10.0**-digits
    return "–" if value == 0 else f"&lt;{least:g}" if value < least / 2 else f"{value:,.{digits}f}"


def table_of(heads: Sequence[str], rows: Iterable[Sequence[str]], *, mark: bool = False, last: bool = False) -> str:
    """Cells are HTML. Heads with "<" in front are of text. mark: rows carry their numbers; last: the last is a sum."""
    text = [head.startswith("<") for head in heads]
    first = "".join(
        f'<th scope="col"{" class=text" if left else ""}>{head.lstrip("<")}</th>'
        for head, left in zip(heads, text, strict=True)
    )
    parts, listed = [], list(rows)
    for number, row in enumerate(listed, 1):
        cells = "".join(f"<td{' class=text' if left else ''}>{cell}</td>" for cell, left in zip(row, text, strict=True))
        kind = " class=sum" if last and number == len(listed) else f' data-row="{number}"' if mark else ""
        parts.append(f"<tr{kind}>{cells}</tr>")
    table = f"<table>\n<thead><tr>{first}</tr></thead>\n<tbody>{''.join(parts)}</tbody></table>"
    return f'<div class="scroll" role="region" aria-label="table" tabindex="0">{table}</div>'


def legend(entries: Iterable[tuple[str, str]]) -> str:
    return f'<p class="legend">{"".join(f"<span><i class={kind}></i>{text}</span>" for kind, text in entries)}</p>'


def wall_legend(found: Explanation) -> str:
    there = {row.wall for row in found.rows}
    return legend((wall, wall) for wall in WALLS if wall in there)


def segment(width: float, kind: str, label: str = "", tip: str = "", number: int | None = None) -> str:
    row = "" if number is None else f' data-row="{number}"'
    name = f"{f'<em>{number}</em>' if number else ''}<b>{escape(label)}</b>" if label else ""
    return f'<i class="{kind}" style="width:{width:.3f}%" title="{escape(tip)}"{row}>{name}</i>'


def unit_of(found: Explanation) -> str:
    return "prompt tokens/s" if found.scenario.step.phase == "prefill" else "tokens/s"


def fitting(found: Explanation) -> str:
    most, each = found.memory.largest_batch, plural(found.scenario.step.length, "token")
    return f"At most {plural(most, 'sequence')} of {each} fit." if most else f"Not even one sequence of {each} fits."
