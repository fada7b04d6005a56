"""The tables of providers and parts of a decode step, from results/h200. Used by `generate_docs.py`.

Without its file a table is empty.
"""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

from tables import markdown, medians

from rooflight.bench.decode_parts import BY_RULE, PARTS
from rooflight.ops.contract import PREFERENCE

RESULTS = Path(__file__).resolve().parents[1] / "results/h200"
NOT_RECORDED = "Not recorded yet: `scripts/h200_decode.sh providers` measures it.\n"


def provider_table() -> str:
    """An operator and a step down, providers across."""
    data = _report("step_providers")
    if data is None:
        return NOT_RECORDED
    providers = [name for name in PREFERENCE if any(row["provider"] == name for row in data["rows"])]
    lines = []
    for (operator, phase, batch, context), group in groupby(data["rows"], key=_call):
        rows = {row["provider"]: row for row in group}
        first, *others = sorted(rows.values(), key=lambda row: row["us"]["median"])
        best = first["us"]["median"]
        cells = ["–" if name not in rows else _us(rows[name]["us"]["median"], name == first["provider"], len(rows) > 1)
                 for name in providers]  # fmt: skip
        step = f"{batch} × {context:,}" if phase == "decode" else f"prompt of {context:,}"
        over = f"{others[0]['us']['median'] / best:.2f}" if others else ""
        figures = [f"{first['bytes'] / 1e6:,.2f}", f"{first['limit_us']:.2f}", *cells, over]
        lines.append([f"`{operator}`", step, *figures, f"{first['limit_us'] / best:.0%}"])
    times = [f"{name} µs" for name in providers]
    header = ["operator", "step", "MB", "limit µs", *times, "next over first", "of limit"]
    note = (
        "Step: sequences × tokens in their caches. Bold: the fastest. Next over first: the second's time over its. "
        "Of limit: its. Limit: bytes and operations at the card's ceilings, and an empty kernel; where what is read "
        f"was just written, L2 may beat it. {_origin(data)} Ceilings: {data['ceilings']}.\n"
    )
    missing = "".join(f"- {name}: {why}\n" for name, why in data["missing"].items())
    return markdown(header, lines, right=2) + "\n" + note + (f"\n{missing}" if missing else "")


def parts_table() -> str:
    """Batch and context down, numbers of parts across, the rule's choice bold."""
    data = _report("decode_parts")
    if data is None:
        return NOT_RECORDED
    lines = []
    for row in data["rows"]:
        cells = [_us(row["us"][str(parts)]["median"], parts == row["rule"], True) for parts in PARTS]
        loss = "" if row["rule"] == row["best"] else f"{row['loss']:.1%}"
        lines.append([f"{row['batch']} × {row['context']:,}", str(row["blocks"]), *cells, loss])
    again = max(
        abs(row["us"][str(BY_RULE)]["median"] / row["us"][str(row["rule"])]["median"] - 1) for row in data["rows"]
    )
    header = ["sequences × tokens", "blocks", *(f"{parts} part{'s' * (parts > 1)}" for parts in PARTS), "rule loses"]
    note = (
        "`qk_norm_rope_attention_`, µs by the number of parts that is asked for. Blocks: of a launch without parts. "
        f"Bold: what the rule takes on {data['multiprocessors']} multiprocessors. Rule loses: its time over the "
        "best's, less one; nothing where it takes the best. The same kernel, left to the rule and asked for by number, "
        f"differs by up to {again:.1%}. {_origin(data)}\n"
    )
    return markdown(header, lines, right=1) + "\n" + note


def _report(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _call(row: dict[str, Any]) -> tuple[str, str, int, int]:
    return row["operator"], row["phase"], row["batch"], row["context"]


def _us(time: float, marked: bool, contested: bool) -> str:
    text = f"{time:,.0f}" if time >= 1000 else f"{time:.1f}" if time >= 100 else f"{time:.2f}"
    return f"**{text}**" if marked and contested else text


def _origin(data: dict[str, Any]) -> str:
    where, setup = data["environment"], data["setup"]
    return (
        f"{setup['model']}, {setup['dtype']}; {medians(setup['rounds'])}. {where['device']}, "
        f"driver {where['driver']}; host {where['cpu']}; PyTorch {where['torch']}, Triton {where['triton']}; commit "
        f"{where['commit']}, {where['date']}."
    )


TABLES = {"decode-providers": provider_table, "decode-parts": parts_table}
