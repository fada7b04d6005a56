"""The table of starts on a GPU, from results/h200. Used by `generate_docs.py`. Without its file it is empty."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import markdown

RESULTS = Path(__file__).resolve().parents[1] / "results/h200"


def start_table() -> str:
    """Parts down, caches across."""
    path = RESULTS / "start.json"
    if not path.exists():
        return ""
    data: dict[str, Any] = json.loads(path.read_text())
    rows = data["rows"]
    parts = dict.fromkeys(part for row in rows for part in row["parts_s"])
    lines = [[part, *(_seconds(row["parts_s"].get(part)) for row in rows)] for part in parts]
    lines.append(["**ready**", *(_spread(row["ready_s"]) for row in rows)])
    lines.append(["goal", *("–" if row["goal_s"] is None else f"{row['goal_s']:g}" for row in rows)])
    lines.append(["first token", *(_spread(row["first_token_s"]) for row in rows)])
    lines.append(["kernels compiled", *(str(row["compiled"]) for row in rows)])
    header = ["seconds", *(f"{row['cache']} caches" for row in rows)]
    where, setup = data["environment"], data["setup"]
    rounds = setup["rounds"]
    middle = f"medians (least–most) of {rounds} rounds, parts of the start in the middle"
    note = (
        f"From the start of the process. {data['weights']}; {middle if rounds > 1 else 'one start each'}. "
        f"{where['device']}, driver {where['driver']}; host {where['cpu']}; PyTorch {where['torch']}, Triton "
        f"{where['triton']}; commit {where['commit']}, {where['date']}.\n"
    )
    return markdown(header, lines, right=1) + "\n" + note


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _spread(spread: dict[str, float]) -> str:
    median = f"{spread['median']:.2f}"
    return median if spread["low"] == spread["high"] else f"{median} ({spread['low']:.2f}–{spread['high']:.2f})"


TABLES = {"decode-start": start_table}
