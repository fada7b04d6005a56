"""One self-contained page about a step: `rooflight explain MODEL --html FILE`. The same input gives the same bytes."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from contextlib import suppress
from html import escape
from pathlib import Path

from rooflight.limits.advice import Advice, Change
from rooflight.limits.explanation import SHARE, Explanation
from rooflight.limits.report.charts import duration, short
from rooflight.limits.report.parts import (
    count_of,
    few,
    fitting,
    microseconds,
    plural,
    segment,
    table_of,
    unit_of,
    wall_legend,
)
from rooflight.limits.report.roofline import roofline
from rooflight.limits.report.sweeps import sweeps
from rooflight.models.config import ModelConfig

ROOT = Path(__file__).parent
CHANGES = ("<change", "step µs", "kernels µs", "tokens/s", "times as fast", "memory GB")
DRAWN = (
    "On the slope memory is the wall, on its roof the arithmetic. A point well below both takes less time than a "
    "kernel needs to start. The larger a point, the more of the step it takes."
)
MADE = (
    "Each operator’s bytes and operations come from its own definition, by tracing the decoder that runs. Every byte "
    "is moved once: read at the card’s rate for a stream of this size, written at what a copy leaves for writing. "
    "Operations run at the rate of a matrix product in their format, and what GPUs send each other at the link’s. A "
    "kernel takes at least as long as an empty one. The longest of these is the operator’s wall; nothing here was "
    "measured on the model itself.",
    "The step limit overlaps everything with everything. Kernel by kernel, each starts when the one before has ended. "
    "The roofline’s slope is what memory gives for this step’s reads and writes together.",
)


def report(config: ModelConfig, found: Explanation, advice: Sequence[Advice], changes: Sequence[Change]) -> str:
    """The page. `advice` and `changes` are what `advise` and `what_if` said about `found`."""
    style, script = ((ROOT / f"report.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    title = escape(f"{found.model} on {found.card.name}: the limit of a step")
    sections = (
        ("", _headline(found)),
        ("Roofline", _roofline(found)),
        ("The step", _step(found)),
        ("Operators", _operators(found)),
        ("Batch and context", sweeps(config, found)),
        ("Memory", _memory(found)),
        ("What if", _changes(changes) if changes else ""),
        ("What would move it", _advice(advice)),
        ("How the limits are made", _made(found)),
    )
    body = "\n".join(
        f"<section>\n{f'<h2>{name}</h2>' if name else ''}\n{text}\n</section>" for name, text in sections if text
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n<link rel="icon" href="data:,">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n"
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _headline(found: Explanation) -> str:
    step, scenario = found.scenario.step, found.scenario
    where = "in the cache" if step.phase == "decode" else "new"
    said = [found.dtype, f"{step.phase} of {step.batch:,} × {step.context:,} tokens {where}", found.card.name]
    formats = {key: getattr(scenario, key) for key in ("weights", "head", "kv", "compute")}
    said += [f"{key} {name}" for key, name in formats.items() if name != "as is"]
    said += [f"one of {scenario.tp} GPUs"] if scenario.tp > 1 else []
    made = plural(step.batch, "prompt" if step.phase == "prefill" else "token")
    intensity = found.flops / max(found.bytes, 1)
    figures = (
        ("Step limit", microseconds(found.stream_us), "µs", f"{found.launches} kernels, all overlapped"),
        ("At most", count_of(found.tokens_per_s), unit_of(found), f"{made} in {duration(found.stream_us)}"),
        ("Wall", found.stream_wall, "", f"{count_of(intensity)} FLOP/byte, ridge {count_of(found.ridge)}"),
    )
    shown = "".join(
        f"<div><dt>{name}</dt><dd>{value} <small>{unit}</small></dd><dd class=more>{more}</dd></div>"
        for name, value, unit, more in figures
    )
    return (
        f"<h1>{escape(found.model)}</h1>\n<p class=lead>{escape(' · '.join(said))}</p>\n"
        f"<p class=muted>Ceilings: {escape(found.card.origin)}.</p>\n<dl class=figures>{shown}</dl>"
    )


def _roofline(found: Explanation) -> str:
    rest = ", ".join(row.name for row in found.rows if not row.flops)
    listed = f"<p class=muted>Not drawn, as they only move data: {escape(rest)}.</p>" if rest else ""
    charts = roofline(found, 1040, 520, 13) + roofline(found, 360, 440, 12, names=False)
    key = "".join(f"<li value={n}>{escape(row.name)}</li>" for n, row in enumerate(found.rows, 1) if row.flops)
    return (
        f"<p>{DRAWN}</p>\n{wall_legend(found)}\n<figure class=both>{charts}<ol class=key>{key}</ol></figure>\n{listed}"
    )


def _step(found: Explanation) -> str:
    longest = max(found.host_us, found.graph_us, found.stream_us)
    pieces = [
        (row.limit_us, row.wall, row.name, f"{row.name}: {duration(row.limit_us)}, {row.share:.1%}, {row.wall}", n)
        for n, row in enumerate(found.rows, 1)
    ]
    small = "".join(segment(us / longest * 100, wall) for us, wall, *_ in pieces)
    large = "".join(segment(us / found.graph_us * 100, wall, name, tip, n) for us, wall, name, tip, n in pieces)
    bars = (
        ("The host alone, launching without a graph", found.host_us, segment(found.host_us / longest * 100, "host")),
        ("Everything overlapped: the limit", found.stream_us, segment(found.stream_us / longest * 100, "whole")),
        ("Kernel by kernel in a graph, each at its limit", found.graph_us, small),
    )
    shown = "".join(
        f"<p class=named><span>{name}</span><b>{microseconds(us)} µs</b></p><div class=bar>{bar}</div>"
        for name, us, bar in bars
    )
    end = found.graph_us / longest * 100
    path = f'<path d="M0 0H{end:.2f}L100 10H0Z"/>' if end < 98 else ""
    zoom = f'<svg class=zoom viewBox="0 0 100 10" preserveAspectRatio=none aria-hidden=true>{path}</svg>'
    ratio = found.graph_us / found.stream_us
    host = found.host_us / found.graph_us
    far = f"{host:,.1f} times as long as its kernels" if host >= 1 else f"{host:.1%} of what its kernels take"
    said = (
        f"As {found.launches} kernels the step takes {ratio:,.2f} times its limit; the host needs {far} to launch them."
    )
    return f"<p>{said}</p>\n{wall_legend(found)}\n{shown}{zoom}<div class='bar tall'>{large}</div>"


def _operators(found: Explanation) -> str:
    widest = max(row.share for row in found.rows) / 100
    size, size_name = (1e9, "GB") if found.bytes > 1e10 else (1e6, "MB")
    work, work_name = (1e12, "TFLOP") if found.flops > 1e13 else (1e9, "GFLOP")
    rows = [
        (
            str(number),
            escape(row.name),
            f"{row.calls:,}",
            few(row.bytes / size, 1),
            few(row.flops / work, 2),
            few(row.intensity, 1),
            f"<span class=wall><i class={row.wall}></i>{row.wall}</span>",
            microseconds(row.limit_us),
            f'<span class=share><i class={row.wall} style="width:{row.share / widest:.1f}%"></i></span>'
            f"<span class=part>{row.share:.1%}</span>",
        )
        for number, row in enumerate(found.rows, 1)
    ]
    total = (f"{found.launches:,}", f"{found.bytes / size:,.1f}", f"{found.flops / work:,.2f}")
    mean = f"{found.flops / max(found.bytes, 1):,.1f}"
    rows.append(("", "the step", *total, mean, found.stream_wall, microseconds(found.graph_us), ""))
    heads = ("#", "<operator", "calls", size_name, work_name, "FLOP/byte", "<wall", "limit µs", "share")
    return table_of(heads, rows, mark=True, last=True)


def _memory(found: Explanation) -> str:
    memory = found.memory
    parts = (
        ("weights", "weights", memory.weights),
        ("kv", "KV cache", memory.kv),
        ("work", "workspace", memory.workspace),
        ("table", "rotary table", memory.rope_table),
    )
    scale, over = max(memory.total, memory.card), memory.total > memory.card
    bar = "".join(segment(size / scale * 100, kind, name, f"{name}: {short(size)}B") for kind, name, size in parts)
    edge = f'<u style="left:{memory.card / scale * 100:.3f}%"></u>' if over else ""
    need = f"{short(memory.total)}B of {short(memory.card)}B{' on each GPU' if found.scenario.tp > 1 else ''}"
    line = f" The line marks the card’s {short(memory.card)}B." if over else ""
    line += f" {1 - SHARE:.0%} of what the weights leave is kept free."
    verdict = f"<b>Fits:</b> {need}." if memory.fits else f"<b class=bad>Does not fit:</b> {need}.{line}"
    rows = [
        (f"<span class=wall><i class={kind}></i>{name}</span>", f"{size / 1e9:,.3f}", f"{size / memory.card:,.1%}")
        for kind, name, size in parts
    ]
    rows.append(("all of it", f"{memory.total / 1e9:,.3f}", f"{memory.total / memory.card:,.1%}"))
    table = table_of(("<part", "GB", "of the card"), rows, last=True)
    return f"<p>{verdict} {fitting(found)}</p>\n<div class='bar tall'>{bar}{edge}</div>\n{table}"


def _changes(changes: Sequence[Change]) -> str:
    before = changes[0].before
    rows = [
        (
            escape(name),
            microseconds(each.stream_us),
            microseconds(each.graph_us),
            f"{each.tokens_per_s:,.0f}",
            f"{gain:.2f}",
            f"{each.memory.total / 1e9:,.2f}" + ("" if each.memory.fits else " <b class=bad>too much</b>"),
        )
        for name, each, gain in [("as it is", before, 1.0), *((c.what, c.after, c.gain) for c in changes)]
    ]
    return table_of(CHANGES, rows)


def _advice(advice: Sequence[Advice]) -> str:
    items = "".join(
        f"<li><b>{escape(piece.step.capitalize())}</b>"
        f"{f' <span class=gain>{piece.gain:.2f}×</span>' if piece.gain > 1.005 else ''}<br>{escape(piece.text)}</li>\n"
        for piece in advice
    )
    return f"<ol class=advice>\n{items}</ol>" if advice else ""


def _made(found: Explanation) -> str:
    card = found.card
    links = ", ".join(
        f'<a href="{escape(s)}" rel="noreferrer">{escape(s.split("//")[-1].split("/")[0])}</a>'
        if s.startswith("https://")
        else escape(s)
        for s in card.sources
    )
    facts = (
        f"{card.name}: reads {short(card.read_rate(found.bytes))}B/s, writes {short(card.write_rate)}B/s, an empty "
        f"kernel {card.node_us:.2f} µs, a launch by the host {card.call_us:.1f} µs. Ceilings: {card.origin}."
    )
    sheet = f"Data sheet: {links}. " if links else ""
    made = "".join(f"<p>{text}</p>\n" for text in (*MADE, escape(facts)))
    return f"{made}<p>{sheet}Made by Rooflight{_version()}.</p>"


def _version() -> str:
    with suppress(importlib.metadata.PackageNotFoundError):
        return " " + escape(importlib.metadata.version("rooflight"))
    return ""  # run from a folder
