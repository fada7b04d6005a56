"""Tables of docs/roofline.md: what `rooflight explain` says, so that no figure there is typed."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tables import markdown

from rooflight.limits.accuracy import accuracy
from rooflight.limits.advice import what_if
from rooflight.limits.ceilings import ceilings, known
from rooflight.limits.explanation import Explanation, explain
from rooflight.limits.profile.analysis import Profile, read_profile
from rooflight.limits.profile.families import short_name
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.load import load_config

ROOT = Path(__file__).resolve().parents[1]
MODEL, GPU = "random:qwen3-0.6b", "h200"
CONFIG = load_config(MODEL)
# Tokens in the cache before the first step that scripts/record_trace.py records: the prompt, taken in by the first of 8
# steps that warm up; one of each of the other 7, of 32 that are timed and of one that warms up the profiler.
TRACED_CONTEXT = 32 + 7 + 32 + 1
METADATA = ("unprofiled_step_us", "environment")  # that it writes into the trace


def step(phase: str = "decode", batch: int = 1, context: int = 1024, gpu: str = GPU) -> Explanation:
    return explain(MODEL, CONFIG, Scenario(Step(phase, batch, context), gpu))


def time(microseconds: float) -> str:
    if microseconds >= 10_000:
        return f"{microseconds / 1e3:,.1f} ms"
    return f"{microseconds:,.2f}" if microseconds < 10 else f"{microseconds:,.0f}"


def origin(found: Explanation) -> str:
    return f"\nQwen3-0.6B, BF16, {found.card.name}; ceilings {found.card.origin}.\n"


def operators() -> str:
    found = step()
    rows = [
        [
            f"`{row.operator}` {row.label}".strip(),
            str(row.calls),
            f"{row.bytes / 1e6:,.1f}",
            f"{row.flops / 1e9:,.2f}",
            f"{row.intensity:.1f}",
            row.wall,
            time(row.limit_us),
            f"{row.share:.0%}",
        ]
        for row in found.rows
    ]
    total = [str(found.launches), f"{found.bytes / 1e6:,.1f}", f"{found.flops / 1e9:,.2f}", ""]
    rows.append(["one after the other", *total, "", time(found.graph_us), ""])
    rows.append(["all overlapped", *total, found.stream_wall, time(found.stream_us), ""])
    rows.append(["launched one by one by the host", str(found.launches), "", "", "", "launch", time(found.host_us), ""])
    header = ["decode of one sequence, 1024 tokens in the cache", "calls", "MB", "GFLOP", "FLOP/B", "wall", "limit µs"]
    return markdown([*header, "share"], rows, right=1) + origin(found)


def batches() -> str:
    rows = []
    for batch in (1, 8, 32, 128, 512):
        found = step(batch=batch)
        rows.append(
            [
                f"{batch}",
                f"{found.flops / found.bytes:.1f}",
                time(found.stream_us),
                f"{found.tokens_per_s:,.0f}",
                f"{found.kv_bytes / found.bytes:.0%}",
                f"{found.memory.total / 1e9:,.1f}",
            ]
        )
    rows.append(_prefill_row())
    header = ["sequences", "FLOP/B", "step limit µs", "tokens/s", "KV, of the bytes", "memory GB"]
    return markdown(header, rows, right=1) + origin(step())


def _prefill_row() -> list[str]:
    found = step("prefill", 1, 8192)
    figures = [f"{found.flops / found.bytes:.0f}", time(found.stream_us), f"{found.tokens_per_s:,.0f}"]
    share = f"{found.kv_bytes / found.bytes:.0%}"
    return ["prefill of 8192 tokens", *figures, share, f"{found.memory.total / 1e9:,.1f}"]


def formats() -> str:
    scenario = Scenario(Step("decode", 1, 8192), GPU)
    changes = what_if(MODEL, CONFIG, scenario, "head=w8,weights=w8,kv=fp8,tp=2")
    found = [("as it is", changes[0].before, 1.0), *((f"`{c.what}`", c.after, c.gain) for c in changes)]
    rows = [
        [name, f"{e.bytes / 1e6:,.0f}", time(e.stream_us), time(e.graph_us), f"{gain:.2f}"] for name, e, gain in found
    ]
    header = ["what if, at 8192 tokens", "MB", "step limit µs", "as kernels µs", "times as fast"]
    return markdown(header, rows, right=1) + origin(changes[0].before)


def cards() -> str:
    rows = []
    for key in known():
        found, card = step(context=0, gpu=key), ceilings(key)
        read, product = f"{card.read_rate(1e12) / 1e12:.2f}", f"{card.flops['bf16'] / 1e12:,.0f}"
        kind = "measured" if card.measured else "data sheet"
        rows.append([f"`{key}`", kind, read, product, f"{found.ridge:,.0f}", time(found.stream_us)])
    header = ["card", "ceilings", "read TB/s", "BF16 TFLOP/s", "ridge FLOP/B", "decode limit µs"]
    sheet = ceilings(GPU).fractions
    note = (
        f"\nQwen3-0.6B, one sequence, empty cache. Data sheets are multiplied by what the H200 reached of its own: "
        f"{sheet['read']:.0%} of the bandwidth in reading, {sheet['bf16']:.0%} of the BF16 rate.\n"
    )
    return markdown(header, rows, right=2) + note


def judged() -> str:
    rows: list[Sequence[str]] = []
    missing: dict[str, dict[str, None]] = {}  # operators by reason
    for fit in accuracy(CONFIG, ceilings(GPU), ROOT / "results" / GPU):
        if fit.overhead_us is None or fit.median_error is None or fit.worst_error is None or fit.fraction is None:
            missing.setdefault(fit.reason, {})[f"`{fit.operator}`"] = None
            continue
        figures = [f"{fit.overhead_us:.2f}", f"{fit.fraction:.0%}", str(fit.judged_rows)]
        errors = [f"{fit.median_error:.0%}", f"{fit.worst_error:.0%}"]
        rows.append([f"`{fit.operator}`", fit.protocol.removesuffix("_us"), str(fit.fitted_rows), *figures, *errors])
    header = ["operator", "caches", "rows", "start µs", "of copy", "judged on", "median error", "worst"]
    notes = [f"\n{reason.capitalize()}: {', '.join(operators)}.\n" for reason, operators in missing.items()]
    return markdown(header, rows, right=2) + "".join(notes)


@cache
def traced() -> tuple[Profile, dict[str, Any]]:
    """transformers' decode on the H200, and its trace's metadata; "environment" is beside it where it says none."""
    path = ROOT / "results" / GPU / "transformers_decode.json.gz"
    with gzip.open(path) as file:
        data = json.load(file)
    beside = json.loads(path.with_name("transformers_decode.environment.json").read_text())
    metadata = {"environment": beside["environment"]} | {key: data[key] for key in METADATA if key in data}
    return read_profile(path, ceilings(GPU)), metadata


def traced_origin() -> str:
    where = traced()[1]["environment"]
    transformers = where["transformers"] or "of a version that was not noted"
    return (
        f"Recorded on {where['device']}, driver {where['driver']}, {where['cpu']}, {where['cores']} cores, PyTorch "
        f"{where['torch']}, transformers {transformers}; commit {where['commit']}, {where['date']}."
    )


def traced_limits() -> str:
    return f"\n{traced_origin()} Limits: ceilings {ceilings(GPU).origin}.\n"


def trace_host() -> str:
    found, metadata = traced()
    unprofiled = float(metadata["unprofiled_step_us"])
    busy = sum(step.busy_us for step in found.steps) / len(found.steps)
    profiled = sum(step.duration_us for step in found.steps) / len(found.steps)
    limit = step(context=TRACED_CONTEXT)
    ours = f"limit of our step, {TRACED_CONTEXT} tokens in the cache"
    assert found.launches.call_us is not None
    kernels, launches = found.kernels // len(found.steps), found.launches.calls // len(found.steps)
    rows = [
        ["step, without the profiler", time(unprofiled)],
        ["step, recorded", time(profiled)],
        ["GPU busy in it", time(busy)],
        ["host share, without the profiler", f"{1 - busy / unprofiled:.0%}"],
        ["kernels", f"{kernels:,}"],
        ["launches by the host", f"{launches:,}"],
        ["host's time for one launch, recorded, median", time(found.launches.call_us)],
        [f"{ours}: as kernels, in a graph", time(limit.graph_us)],
        [f"{ours}: all overlapped", time(limit.stream_us)],
    ]
    return markdown(["transformers, Qwen3-0.6B's shapes, one sequence, µs", "a step"], rows, right=1) + traced_limits()


def trace_families() -> str:
    found, _ = traced()
    rows = [[f.name, f"{f.calls // len(found.steps):,}", f"{f.share:.0%}"] for f in found.families if f.share >= 0.01]
    return markdown(["family", "kernels a step", "of GPU time"], rows, right=1) + f"\n{traced_origin()}\n"


def trace_kernels() -> str:
    found, _ = traced()
    rows = [
        [
            f"`{short_name(row.name, 60)}`",
            f"`{row.operators[0]}`",
            f"{row.calls // len(found.steps):,}",
            time(row.mean_us),
            f"{row.share:.0%}",
            row.wall,
            "-" if row.limit_us is None else time(row.limit_us),
            "-" if row.at_limit is None else f"{row.at_limit:.0%}",
        ]
        for row in found.rows[:5]
    ]
    header = ["kernel", "operator", "a step", "mean µs", "of GPU time", "wall", "limit µs", "at limit"]
    return markdown(header, rows, right=2) + traced_limits()


TABLES: dict[str, Callable[[], str]] = {
    "roofline-operators": operators,
    "roofline-batches": batches,
    "roofline-formats": formats,
    "roofline-cards": cards,
    "roofline-accuracy": judged,
    "trace-host": trace_host,
    "trace-families": trace_families,
    "trace-kernels": trace_kernels,
}
