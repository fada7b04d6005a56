"""The table of `rooflight ladder decode`, from results/h200/ladder.json. Used by `generate_docs.py`.

Without the file it is empty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tables import markdown, medians, spread

RESULTS = Path(__file__).resolve().parents[1] / "results/h200"


def ladder_table() -> str:
    """Every context with all rungs, and what the rungs are."""
    path = RESULTS / "ladder.json"
    if not path.exists():
        return ""
    data = json.loads(path.read_text())
    header = ["prompt", "rung", "tok/s", "µs per token", "gain", "predicted", "operators", "MB", "wall"]
    table = markdown(header, [_row(row) for row in data["rows"]], right=2)
    rungs = "".join(f"- {rung['name']}: {rung['why']}\n" for rung in data["rungs"])
    return f"{table}\n{_note(data)}\n\n{rungs}"


def _row(row: dict[str, Any]) -> list[str]:
    gain, predicted = row["gain"], row["predicted_gain"]
    return [
        f"{row['prompt_tokens']:,}",
        row["rung"],
        f"{row['tokens_per_s']['median']:,.0f}",
        spread(row["per_token_us"], 0),
        "" if gain is None else f"{gain:.2f}" + (" (slower)" if gain < 1 else ""),
        "" if predicted is None else f"{predicted:.2f}",
        f"{row['operators']:,}",
        f"{row['bytes'] / 1e6:,.0f}",
        row["wall"],
    ]


def _note(data: dict[str, Any]) -> str:
    where, setup, host, machine = data["environment"], data["setup"], data["host"], data["machine"]
    eager = sum(not rung["graphs"] for rung in data["rungs"])
    return (
        f"Gain: over the rung above. Predicted: from operators, bytes, {host['operator_us']:.1f} µs an operator and "
        f"{host['step_us']:.0f} µs a launch of this host, {machine['node_us']:.2f} µs a kernel. Wall: what binds it. "
        f"The first {eager} rungs ask for every operator from the host. "
        f"{setup['model']}, {setup['dtype']}, one request, {setup['max_tokens']} tokens out; "
        f"{medians(setup['rounds'])} in one process. {where['device']}, driver {where['driver']}; host "
        f"{where['cpu']}; PyTorch {where['torch']}, Triton {where['triton']}; commit {where['commit']}, "
        f"{where['date']}. Ceilings: {machine['origin']}."
    )


TABLES = {"ladder-decode": ladder_table}
