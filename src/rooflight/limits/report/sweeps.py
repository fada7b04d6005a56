"""What the report shows over the batch and over the context."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rooflight.limits.explanation import SHARE, Explanation, explain
from rooflight.limits.report.charts import Axis, Series, duration, lines, short
from rooflight.limits.report.parts import fitting, unit_of
from rooflight.models.config import ModelConfig

POINTS = 12  # of a sweep
MOST = 1024  # sequences in the sweep over the batch
Sweep = Sequence[tuple[int, Explanation]]


def sweeps(config: ModelConfig, found: Explanation) -> str:
    batches, contexts = _batches(found), _contexts(config, found)
    figures = _over_batch(found, _swept(config, found, "batch", batches)) if len(batches) > 1 else ""
    colours = " Points over the batch have the colour of their wall." if figures else ""
    more, crossed = _over_context(found, _swept(config, found, "context", contexts)) if len(contexts) > 1 else ("", "")
    return f"<p>{fitting(found)} {crossed}{colours}</p>\n<div class=charts>{figures}{more}</div>"


def _batches(found: Explanation) -> list[int]:
    """1, 2, 4, … up to what fits, that and this step's."""
    batch, most = found.scenario.step.batch, min(found.memory.largest_batch, MOST)
    doubled = [1 << power for power in range(most.bit_length())]
    return sorted({*doubled, *([most] if most else []), *([batch] if batch <= most else [])})


def _contexts(config: ModelConfig, found: Explanation) -> list[int]:
    """From the shortest to the model's longest, and this step's; evenly on the axis that shows them."""
    step, longest = found.scenario.step, config.max_position_embeddings
    if step.phase == "decode":
        least, most = 0, longest - 1
        between = [(256 if longest > 1024 else 16) << power for power in range(24)]
    else:
        least, most = 1, longest
        between = [4**power for power in range(16)]
    contexts = sorted({least, *(context for context in between if context < most), step.context, most})
    while len(contexts) > POINTS:
        del contexts[1]  # the shortest differ least
    return contexts


def _swept(config: ModelConfig, found: Explanation, key: str, values: Iterable[int]) -> Sweep:
    return [(value, explain(found.model, config, found.scenario.with_one(key, str(value)))) for value in values]


def _figure(title: str, text: str, chart: str) -> str:
    return f"<figure>\n<figcaption><b>{title}</b> {text}</figcaption>\n{chart}</figure>\n"


def _over_batch(found: Explanation, sweep: Sweep) -> str:
    xs, batch = [x for x, _ in sweep], found.scenario.step.batch
    ticks = [x for x in xs if x & (x - 1) == 0][:: 2 if xs[-1] > 64 else 1]
    across = Axis("sequences", lambda x: f"{x:,.0f}", ticks=ticks)
    mark = (batch, "this step") if batch in xs else None
    walls, unit = [each.stream_wall for _, each in sweep], unit_of(found)
    speeds, times = [each.tokens_per_s for _, each in sweep], [each.stream_us for _, each in sweep]
    tips = [f"{x:,} sequences: {short(v)} {unit}, {duration(t)}" for x, v, t in zip(xs, speeds, times, strict=True)]
    speed, time = Series(unit, "plain", speeds, tips, walls), Series("step", "plain", times, tips, walls)
    charts = [
        lines(f"{unit} over batch", xs, across, Axis("", short), [speed], mark=mark),
        lines("time over batch", xs, across, Axis("", duration), [time], mark=mark),
    ]
    return _figure(f"At most {unit}", "over the batch", charts[0]) + _figure("Step limit", "over the batch", charts[1])


def _over_context(found: Explanation, sweep: Sweep) -> tuple[str, str]:
    """Decode: what reading weights and KV takes. Prefill: what moving the bytes and what the operations take."""
    xs, steps = [x for x, _ in sweep], [each for _, each in sweep]
    if found.scenario.step.phase == "decode":
        flat, rising = ("weights", "weights"), ("KV", "kv")
        low = [each.weight_bytes / each.card.read_rate(each.bytes) * 1e6 for each in steps]
        high = [each.kv_bytes / each.card.read_rate(each.bytes) * 1e6 for each in steps]
        cross = crossing(xs, [each.weight_bytes for each in steps], [each.kv_bytes for each in steps])
        exact = (found.crossing or 0) / found.scenario.step.batch
        cross = exact if cross is not None and abs(cross - exact) < 2 else cross  # windows of a batch bend the line
        words, never = "KV = weights at {:,.0f}", "KV never passes the weights"
        said = "Reading the KV cache takes longer than reading the weights from about {} tokens a sequence on."
    else:
        flat, rising = ("bytes", "memory"), ("arithmetic", "compute")
        low = [sum(row.memory_us for row in each.rows) for each in steps]
        high = [min(each.stream_us, sum(row.compute_us for row in each.rows)) for each in steps]
        cross = crossing(xs, low, high)
        words, never = "compute-bound from {:,.0f}", "Memory is the wall"
        said = "Arithmetic takes longer than moving the bytes from about {} tokens a sequence on."
    total = [each.stream_us for each in steps]
    tips = [
        f"{x:,} tokens: {duration(t)}; {flat[0]} {duration(a)}, {rising[0]} {duration(b)}"
        for x, t, a, b in zip(xs, total, low, high, strict=True)
    ]
    series = [Series("step", "plain", total, tips), Series(*flat, low, tips), Series(*rising, high, tips)]
    log = found.scenario.step.phase == "prefill"
    chart = lines(
        "step time over context",
        xs,
        Axis("tokens of context", lambda x: f"{x:,.0f}" if x < 1e4 else short(x), log),
        Axis("", duration, log),
        series,
        mark=None if cross is None else (cross, words.format(cross)),
        full=crossing(xs, *zip(*map(_room, steps), strict=True)),
    )
    text = never + " within the model’s context." if cross is None else said.format(f"{cross:,.0f}")
    return _figure("Step limit", "over the context", chart), text


def _room(found: Explanation) -> tuple[float, float]:
    """Bytes that cache and workspace may take, and those that they take."""
    memory = found.memory
    return SHARE * (memory.card - memory.weights - memory.rope_table), memory.kv + memory.workspace


def crossing(xs: Sequence[float], low: Sequence[float], high: Sequence[float]) -> float | None:
    """Where `high` passes `low`, straight lines between the points; None where it does not."""
    gaps = [b - a for a, b in zip(low, high, strict=True)]
    for i, gap in enumerate(gaps):
        if gap >= 0:
            return xs[i] if i == 0 else xs[i] - (xs[i] - xs[i - 1]) * gap / (gap - gaps[i - 1])
    return None
