"""What would move a step's limit, in the order in which it pays to look: phase, parallelism, precision, own kernel."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rooflight.limits.explanation import Explanation, explain
from rooflight.limits.scenario import Scenario
from rooflight.models.config import ModelConfig

STEPS = ("phase", "parallelism", "precision", "own kernel")
MORE = 8  # sequences, in the example for a larger batch


@dataclass(frozen=True)
class Advice:
    """step: one of STEPS. gain: how many times as fast the limit would be; 1.0 where the advice is to leave it."""

    step: str
    text: str
    gain: float = 1.0


@dataclass(frozen=True)
class Change:
    """What one change, or all of them, would do to a scenario."""

    what: str
    before: Explanation
    after: Explanation

    @property
    def gain(self) -> float:
        """Tokens a second after, over those before; both at their limits."""
        return self.after.tokens_per_s / self.before.tokens_per_s


def what_if(model: str, config: ModelConfig, scenario: Scenario, text: str) -> list[Change]:
    """Each change of "kv=fp8,head=w8,batch=8" alone, then all together. ValueError as in `Scenario.changed`."""
    before = explain(model, config, scenario)
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > 1:
        parts.append(text)
    return [Change(part, before, explain(model, config, scenario.changed(part))) for part in parts]


def advise(config: ModelConfig, found: Explanation) -> list[Advice]:
    """One piece of advice a step, with the figures that it rests on."""
    return [_phase(config, found), _parallelism(config, found), _precision(config, found), _own_kernel(found)]


def _phase(config: ModelConfig, found: Explanation) -> Advice:
    step, intensity = found.scenario.step, found.flops / max(found.bytes, 1)
    if found.stream_wall == "compute":
        text = (
            f"The step is compute-bound: {intensity:,.0f} operations a byte, the card's ridge is at "
            f"{found.ridge:,.0f}. Nothing that saves bytes will help; fewer or cheaper operations will."
        )
        return Advice("phase", text)
    if step.phase == "prefill":
        text = (
            f"{step.context:,} tokens reuse each weight too little: {intensity:,.0f} operations a byte, the ridge is "
            f"at {found.ridge:,.0f}. Prefill more tokens at a time."
        )
        return Advice("phase", text)
    larger = found.scenario.with_one("batch", str(step.batch * MORE))
    after = explain(found.model, config, larger)
    longer = after.stream_us / found.stream_us
    text = (
        f"The step is memory-bound: {intensity:,.1f} operations a byte, the card's ridge is at {found.ridge:,.0f}. "
        f"{step.batch * MORE} sequences instead of {step.batch} take {longer:.2f} times as long for {MORE} times the "
        f"tokens: {after.tokens_per_s:,.0f} tokens/s for {found.tokens_per_s:,.0f}."
    )
    if not after.memory.fits:
        text += f" But they do not fit: {after.memory.total / 1e9:,.1f} GB of {after.memory.card / 1e9:,.0f}."
    return Advice("phase", text, MORE / longer)


def _parallelism(config: ModelConfig, found: Explanation) -> Advice:
    tp = found.scenario.tp * 2
    try:
        after = explain(found.model, config, replace(found.scenario, tp=tp))
    except ValueError:
        return Advice("parallelism", f"The model's {config.num_kv_heads} KV heads cannot be cut over {tp} GPUs.")
    gain = found.stream_us / after.stream_us
    kernels = found.graph_us / after.graph_us
    memory = ""
    if not found.memory.fits:
        memory = f" It has to be cut: {found.memory.total / 1e9:,.1f} GB do not fit {found.memory.card / 1e9:,.0f}."
    text = (
        f"Cut over {tp} GPUs the limit falls from {found.stream_us:,.0f} to {after.stream_us:,.0f} µs ({gain:.2f} "
        f"times), kernel by kernel from {found.graph_us:,.0f} to {after.graph_us:,.0f} ({kernels:.2f} times), for {tp} "
        f"times the cards.{memory}"
    )
    return Advice("parallelism", text, gain)


def _precision(config: ModelConfig, found: Explanation) -> Advice:
    """The best of the formats that are not in use; memory-bound steps only."""
    candidates = []
    for key, value in (("weights", "w8"), ("weights", "w4"), ("head", "w8"), ("kv", "fp8")):
        if getattr(found.scenario, key) == "as is":
            after = explain(found.model, config, found.scenario.with_one(key, value))
            candidates.append((found.stream_us / after.stream_us, f"{key}={value}"))
    if not candidates or found.stream_wall != "memory":
        return Advice("precision", "Smaller formats do not move this limit.")
    best = max(candidates)
    listed = ", ".join(f"{name} {gain:.2f}" for gain, name in candidates)
    text = f"Times as fast, by what is stored smaller: {listed}. Quality has to be checked before any of it is kept."
    return Advice("precision", text, best[0])


def _own_kernel(found: Explanation) -> Advice:
    gain = found.graph_us / found.stream_us
    launched = sum(row.limit_us for row in found.rows if row.wall == "launch")
    hidden = found.host_us / found.graph_us
    text = (
        f"As {found.launches} kernels in a graph the step takes {found.graph_us:,.0f} µs at best, {launched:,.0f} of "
        f"them in kernels that do little but start; as one kernel {found.stream_us:,.0f}. Without a graph the host "
        f"needs {found.host_us:,.0f} µs to launch them, {hidden:.1f} times as long."
    )
    return Advice("own kernel", text, gain)
