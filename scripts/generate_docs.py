"""Write the generated tables of README and docs from `results/` and the operator registry.

    python scripts/generate_docs.py           rewrite what stands between the markers
    python scripts/generate_docs.py --check   exit 1 if a file would change

A table stands between `<!-- generated: NAME -->` and `<!-- end -->`; NAME is one of TABLES.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import decode_tables
import ladder_tables
import norm_tables
import provider_tables
import roofline_tables
import start_tables
import step_tables
from tables import markdown, medians

import rooflight
from rooflight.kernels.providers import CUDA, TRITON
from rooflight.models.load import load_config

ROOT = Path(__file__).resolve().parents[1]
FILES = ("README.md", "docs/decode.md", "docs/engine.md", "docs/norms.md", "docs/profile.md", "docs/roofline.md")
PROVIDERS = {"ref": (), "triton": TRITON, "cuda": CUDA}
MARKER = re.compile(r"(<!-- generated: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def request_table() -> str:
    data = json.loads((ROOT / "results/cpu/request.json").read_text())
    rows = [_request_row(row) for row in data["rows"]]
    header = ["engine", "dtype", "prompt", "first token ms", "per token ms", "limit ms", "of limit", "tok/s", "ratio"]
    where, setup = data["environment"], data["setup"]
    model = "SmolLM2-135M-Instruct" if setup["model"] is None else setup["model"]
    bandwidth = data["read_bandwidth_bytes_per_s"] / 1e9
    note = (
        f"{model}, {setup['max_tokens']} tokens out, {medians(setup['rounds'])}, every engine in "
        f"its own process with {where['threads']} threads. {where['cpu']}, {where['cores']} cores, memory read at "
        f"{bandwidth:.1f} GB/s; PyTorch {where['torch']}; commit {where['commit']}, {where['date']}. Limit: the time "
        "to read the weights once at that bandwidth. Ratio: transformers' median over ours, first token / per token.\n"
    )
    return markdown(header, rows, right=2) + "\n" + note


def _request_row(row: dict[str, Any]) -> list[str]:
    first, token = row["first_token_ms"]["median"], row["per_token_ms"]["median"]
    ratio = "" if row["per_token_ratio"] is None else f"{row['first_token_ratio']:.2f} / {row['per_token_ratio']:.2f}"
    share = f"{row['limit_ms'] / token:.0%}"
    figures = [f"{first:.0f}", f"{token:.1f}", f"{row['limit_ms']:.1f}", share, f"{1e3 / token:.1f}", ratio]
    return [f"{row['engine']} {row['version']}", row["dtype"], str(row["prompt_tokens"]), *figures]


def throughput_table() -> str:
    rows, notes = [], []
    for name in ("throughput", "throughput-bf16"):
        data = json.loads((ROOT / f"results/cpu/{name}.json").read_text())
        where, setup = data["environment"], data["setup"]
        for row in data["rows"]:
            ratio = row.get("over_one_by_one")
            figures = [
                f"{row['tokens_per_s']['median']:.1f}",
                f"{row['limit_tokens_per_s']:.0f}",
                f"{row['of_limit']:.0%}",
                f"{row['mean_batch']['median']:.1f}",
                f"{row['per_token_ms']['p50']['median']:.0f}",
                "" if ratio is None else f"{ratio:.2f}",
            ]
            rows.append([row["mode"], row["dtype"], *figures])
        bandwidth = data["read_bandwidth_bytes_per_s"] / 1e9
        notes.append(
            f"{setup['dtype']}: memory read at {bandwidth:.1f} GB/s, commit {where['commit']}, {where['date']}"
        )
    header = ["requests", "dtype", "tok/s", "limit", "of limit", "batch", "per token ms", "times one by one"]
    first = data["rows"][0]
    note = (
        f"SmolLM2-135M-Instruct, {first['requests']} requests, {first['prompt_tokens']:,} tokens in, "
        f"{first['output_tokens']:,} out, {medians(setup['rounds'])}, {where['threads']} threads "
        f"of {where['cpu']}, {where['cores']} cores, PyTorch {where['torch']}. {'; '.join(notes)}.\n"
    )
    return markdown(header, rows, right=2) + "\n" + note


def operator_table() -> str:
    rows = []
    for name, operator in rooflight.ops.REGISTRY.items():
        summary = sys.modules[operator.reference.__module__].__doc__ or ""
        gradient = "yes" if operator.backward is not None else ""
        # Not what this machine has, but what there is.
        providers = [provider for provider, there in PROVIDERS.items() if provider == "ref" or name in there]
        rows.append([f"`{name}`", summary.strip().splitlines()[0], ", ".join(providers), gradient])
    return markdown(["operator", "family", "providers", "gradient"], rows, right=9)


def model_table() -> str:
    rows = []
    for preset in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama-3.2-1b", "smollm2-135m"):
        config = load_config(f"random:{preset}")
        weights, kv = config.weight_bytes_per_token(config.dtype), config.kv_bytes_per_token(config.dtype)
        figures = [f"{config.num_parameters():,}", f"{weights / 1e6:,.1f}", f"{kv / 1024:g}"]
        rows.append([f"`random:{preset}`", *figures])
    return markdown(["model", "parameters", "weights read per token, MB", "KV per context token, KiB"], rows, right=1)


TABLES: dict[str, Callable[[], str]] = {
    "request": request_table,
    "throughput": throughput_table,
    "operators": operator_table,
    "models": model_table,
    **norm_tables.TABLES,
    **roofline_tables.TABLES,
    **decode_tables.TABLES,
    **start_tables.TABLES,
    **step_tables.TABLES,
    **ladder_tables.TABLES,
    **provider_tables.TABLES,
}


def render(text: str) -> str:
    return MARKER.sub(lambda match: match[1] + TABLES[match[2]]() + match[3], text)


def main() -> int:
    stale = []
    for name in FILES:
        path = ROOT / name
        if not path.exists():  # a page that is still to be written
            continue
        before = path.read_text()
        after = render(before)
        if after != before:
            stale.append(name)
            if "--check" not in sys.argv:
                path.write_text(after)
    if stale and "--check" in sys.argv:
        print("out of date: " + ", ".join(stale) + "; run scripts/generate_docs.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
