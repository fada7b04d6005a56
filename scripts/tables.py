"""What the tables of documents are made of."""

from __future__ import annotations

from collections.abc import Sequence


def medians(rounds: int) -> str:
    """What the figures are, for a note."""
    return f"medians of {rounds} interleaved rounds" if rounds > 1 else "one round"


def spread(value: dict[str, float], digits: int) -> str:
    """The median, and how far the rounds were from it at most; one round tells no spread."""
    median, low, high = value["median"], value["low"], value["high"]
    far = "" if low == high else f" ±{max(high - median, median - low) / median:.0%}"
    return f"{median:,.{digits}f}{far}"


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]], right: int) -> str:
    """A table whose columns from number `right` on are figures."""
    lines = ["| " + " | ".join(header) + " |"]
    lines.append("|" + "|".join("---:" if i >= right else "---" for i in range(len(header))) + "|")
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"
