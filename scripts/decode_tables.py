"""Tables of single requests and of throughput on a GPU, from results/h200. Used by `generate_docs.py`.

A table whose file is not there is left out: it is empty.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tables import markdown, medians, spread

from rooflight.models.load import load_config

MILLISECONDS = 1e3
RESULTS = Path(__file__).resolve().parents[1] / "results/h200"
SMALL_STEPS = "small_steps/throughput"
Data = dict[str, Any]


NO_PEER = "No other engine was measured beside it. "


def load(name: str) -> Data | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def origin(data: Data) -> str:
    """Where the figures come from, and whose ceilings the limits are."""
    where, setup = data["environment"], data["setup"]
    return (
        f"{setup['model'] or 'SmolLM2-135M-Instruct'}; {medians(setup['rounds'])}, every engine "
        f"in its own process. {where['device']}, driver {where['driver']}; host {where['cpu']}, {where['threads']} "
        f"threads; PyTorch {where['torch']}, Triton {where['triton']}; commit {where['commit']}, {where['date']}. "
        f"Ceilings: {data['ceilings']}."
    )


def set_up(data: Data) -> str:
    """A line for each engine: version, context, pool and graphs, as far as it tells; and who was not there."""
    lines = []
    for name, facts in data["engines"].items():
        engine, _, dtype = name.partition(" ")
        words = [f"{engine} {facts['version']}, {dtype}"]
        for key, text in (
            ("max_model_len", "context {:,}"),
            ("num_pages", "{:,} pages"),
            ("page_size", "of {} tokens"),
            ("max_num_seqs", "at most {:,} requests"),
            ("max_num_batched_tokens", "{:,} tokens a step"),
        ):
            if isinstance(facts.get(key), int):
                words.append(text.format(facts[key]))
        if facts.get("graph_buckets"):
            words.append(f"graphs for {len(facts['graph_buckets'])} sizes up to {max(facts['graph_buckets'])}")
        lines.append("- " + ", ".join(words))
    lines += [f"- {name}: {reason}" for name, reason in data["absent"].items()]
    return "\n".join(lines) + "\n"


def request_tables() -> str:
    """Every dtype: each prompt with all engines."""
    data = load("request")
    if data is None:
        return ""
    header = ["prompt", "engine", "first token ms", "GPU busy", "per token ms", "GPU busy", "limit ms", "of limit"]
    peers = any(row["per_token_ratio"] is not None for row in data["rows"])
    header += ["request tok/s", "decode tok/s"] + ["over ours"] * peers
    text = []
    for dtype in dict.fromkeys(row["dtype"] for row in data["rows"]):
        rows = [_request_row(row)[: len(header)] for row in data["rows"] if row["dtype"] == dtype]
        text.append(f"**{dtype}, {data['setup']['max_tokens']} tokens out**\n\n" + markdown(header, rows, right=2))
    note = (
        "GPU busy: the time in which the GPU worked on it, from a request under the profiler. Limit: a token's "
        "weights, and the keys and values of the mean context, read once. "
    )
    note += "Over ours: a peer's time over ours, first token / per token. " if peers else NO_PEER
    return "\n".join([*text, note + origin(data) + "\n", set_up(data)])


def _request_row(row: Data) -> list[str]:
    first, token = row["first_token_ms"], row["per_token_ms"]
    ratio = "" if row["per_token_ratio"] is None else f"{row['first_token_ratio']:.2f} / {row['per_token_ratio']:.2f}"
    return [
        f"{row['prompt_tokens']:,}",
        row["engine"],
        spread(first, 1),
        _or_dash(row["busy_first_token_ms"], 1),
        spread(token, 3),
        _or_dash(row["busy_per_token_ms"], 3),
        f"{row['limit_ms']:.3f}",
        f"{row['limit_ms'] / token['median']:.0%}",
        f"{row['request_tokens_per_s']['median']:,.0f}",
        f"{row['decode_tokens_per_s']['median']:,.0f}",
        ratio,
    ]


def _small_steps(beside: Data) -> Data | None:
    """Throughput with small steps, if it was recorded by the same run as what it stands beside."""
    data = load(SMALL_STEPS)
    if data is None or any(data["setup"][name] != beside["setup"][name] for name in ("model", "dtype")):
        return None
    same = all(data["environment"][name] == beside["environment"][name] for name in ("commit", "device", "date"))
    return data if same else None


def _case_of(row: Data) -> tuple[str, int, int, int]:
    return row["engine"], row["requests"], row["prompt_tokens"], row["max_tokens"]


def throughput_table() -> str:
    """Every case with all engines."""
    data = load("throughput")
    if data is None:
        return ""
    rows = []
    small = _small_steps(data)
    others = {_case_of(row): spread(row["tokens_per_s"], 0) for row in small["rows"]} if small else {}
    for row in data["rows"]:
        case = f"{row['requests']:,} × ({row['prompt_tokens']:,} in, {row['max_tokens']:,} out)"
        figures = [spread(row["tokens_per_s"], 0), f"{row['limit_tokens_per_s']:,.0f}", f"{row['of_limit']:.0%}"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        figures += [others.get(_case_of(row), "")] * (small is not None)
        rows.append([case, row["engine"], *figures, f"{row['wall_s']['median']:.2f}", ratio])
    header = ["requests", f"engine, {data['setup']['dtype']}", "output tok/s", "limit", "of limit"]
    header += ["in small steps"] * (small is not None) + ["seconds"]
    prompts = "" if data["flops"] is None else f", and the prompts' operations at {data['flops'] / 1e12:.0f} TFLOP/s"
    note = (
        "All requests given at once; from the first submission to the last token. Limit: every sequence decodes in "
        f"every step, which reads weights, keys and values once{prompts}. "
    )
    peers = any(row["ratio"] is not None for row in data["rows"])
    header += ["ours over its"] * peers
    if small is not None:
        tokens = small["setup"]["max_num_batched_tokens"]
        note += f"In small steps: output tok/s with {tokens:,} tokens a step, where prompts take several. "
    note += "" if peers else NO_PEER
    rows = [row[: len(header)] for row in rows]
    return markdown(header, rows, right=2) + "\n" + note + origin(data) + "\n\n" + set_up(data)


def wall_table() -> str:
    """What a token of one request has to read, and what half a head would save, at each prompt that was measured."""
    data = load("request")
    if data is None:
        return ""
    config, rate = load_config(data["setup"]["model"]), data["read_bandwidth_bytes_per_s"]
    weights = config.weight_bytes_per_token(torch.bfloat16)
    per_token = config.kv_bytes_per_token(torch.bfloat16)
    head = 2 * config.vocab_size * config.hidden_size
    rows = []
    for row in data["rows"]:
        if row["engine"] != "rooflight" or row["dtype"] != "bf16":
            continue
        context = row["prompt_tokens"] + (row["new_tokens"] + 1) / 2
        keys, token = context * per_token, row["per_token_ms"]["median"]
        saved = head / 2 / rate * MILLISECONDS
        rows.append(
            [
                f"{row['prompt_tokens']:,}",
                f"{weights / rate * MILLISECONDS:.3f}",
                f"{keys / rate * MILLISECONDS:.3f}",
                f"{keys / (weights + keys):.0%}",
                f"{token:.3f}",
                f"{(weights + keys) / rate * MILLISECONDS / token:.0%}",
                f"{token / (token - saved):.2f}x",
            ]
        )
    header = ["prompt", "weights ms", "keys, values ms", "of all bytes", "a token ms", "of limit", "half a head"]
    note = (
        f"Weights: {weights / 1e6:,.1f} MB a token, the head {head / 1e6:.1f} of them. Keys and values: {per_token:,} "
        f"bytes for each token of the context; they pass the weights at {weights / per_token:,.0f} tokens. Read at "
        f"{rate / 1e12:.2f} TB/s. Half a head: how much faster a token would be if the head had half its bytes and "
        "the time of the rest stayed. "
    )
    return markdown(header, rows, right=1) + "\n" + note + origin(data) + "\n"


def _or_dash(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


TABLES = {"decode-requests": request_tables, "decode-throughput": throughput_table, "decode-walls": wall_table}
