"""What would move a step's limit, in the order in which it pays to look: phase, parallelism, precision, own kernel."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from rooflight.limits.explanation import Explanation, explain
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import MAX_BATCH
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
    """Each change of "kv=fp8,head=w8,batch=8" alone, where it can be alone, then all together.

    ValueError as in `Scenario.changed`, or if what they are together cannot be.
    """
    before, after = explain(model, config, scenario), explain(model, config, scenario.changed(text))
    parts = [part.strip() for part in text.split(",")]
    changes = []
    for part in parts if len(parts) > 1 else []:
        with suppress(ValueError):  # "phase=prefill" of no tokens: only "context=512" beside it makes sense of it
            changes.append(Change(part, before, explain(model, config, scenario.changed(part))))
    return [*changes, Change(text, before, after)]


def advise(config: ModelConfig, found: Explanation) -> list[Advice]:
    """One piece of advice a step, with the figures that it rests on."""
    return [_phase(config, found), _parallelism(config, found), _precision(config, found), _own_kernel(found)]


def _phase(config: ModelConfig, found: Explanation) -> Advice:
    step, intensity = found.scenario.step, found.flops / max(found.bytes, 1)
    where = f"{intensity:,.1f} operations a byte, where {found.ridge:,.0f} would keep the card busy"
    if found.stream_wall == "compute":
        text = f"The step is compute-bound: {intensity:,.0f} operations a byte, more than the {found.ridge:,.0f} that "
        text += "memory can feed. Bytes saved will not help; fewer or cheaper operations will."
        return Advice("phase", text)
    text = f"The step is {found.stream_wall}-bound: {where}."
    if step.batch * MORE > MAX_BATCH:
        return Advice("phase", text)
    after = explain(found.model, config, found.scenario.with_one("batch", str(step.batch * MORE)))
    longer = after.stream_us / found.stream_us
    text += (
        f" {step.batch * MORE:,} sequences instead of {step.batch:,} take {longer:.2f} times as long for {MORE} times "
        f"the tokens: {after.tokens_per_s:,.0f} a second for {found.tokens_per_s:,.0f}."
    )
    if not after.memory.fits:
        text += f" But they do not fit: at most {after.memory.largest_batch:,} do."
    return Advice("phase", text, max(1.0, MORE / longer))


def _parallelism(config: ModelConfig, found: Explanation) -> Advice:
    tp, memory = found.scenario.tp * 2, found.memory
    text = ""
    if memory.largest_batch == 0:
        text = f"It has to be cut: {memory.total / 1e9:,.1f} GB do not fit {memory.card / 1e9:,.0f}. "
    try:
        after = explain(found.model, config, replace(found.scenario, tp=tp))
    except ValueError as error:
        return Advice("parallelism", f"{text}Over {tp} GPUs it cannot be cut: {error}.")
    gain, kernels = found.stream_us / after.stream_us, found.graph_us / after.graph_us
    text += (
        f"Cut over {tp} GPUs the limit is {after.stream_us:,.0f} µs instead of {found.stream_us:,.0f} ({gain:.2f} "
        f"times as fast), kernel by kernel {after.graph_us:,.0f} instead of {found.graph_us:,.0f} ({kernels:.2f} "
        f"times), for {tp // found.scenario.tp} times the cards."
    )
    if not after.memory.fits:
        text += f" Even then it does not fit: at most {after.memory.largest_batch:,} such sequences do."
    return Advice("parallelism", text, max(1.0, gain))


def _precision(config: ModelConfig, found: Explanation) -> Advice:
    """Every format that is not in use, by itself."""
    gains = []
    for key, value in (("weights", "w8"), ("weights", "w4"), ("head", "w8"), ("kv", "fp8"), ("compute", "fp8")):
        if getattr(found.scenario, key) == "as is" and (key != "compute" or value in found.card.flops):
            after = explain(found.model, config, found.scenario.with_one(key, value))
            gains.append((found.stream_us / after.stream_us, f"{key}={value}"))
    if max(gains, default=(1.0, ""))[0] < 1.01:
        return Advice("precision", "Smaller formats do not move this limit.")
    listed = ", ".join(f"{name} {gain:.2f}" for gain, name in gains)
    text = f"Times as fast, by what is made smaller: {listed}. Quality has to be checked before any of it is kept."
    return Advice("precision", text, max(gains)[0])


def _own_kernel(found: Explanation) -> Advice:
    gain = found.graph_us / found.stream_us
    launched = sum(row.limit_us for row in found.rows if row.wall == "launch")
    text = (
        f"As {found.launches} kernels in a graph the step takes {found.graph_us:,.0f} µs at best, {launched:,.0f} of "
        f"them in kernels that do little but start; as one kernel {found.stream_us:,.0f}. "
    )
    if found.host_us > found.graph_us:
        times = found.host_us / found.graph_us
        text += f"Without a graph the host needs {found.host_us:,.0f} µs to launch them, {times:.1f} times as long."
    else:
        text += f"A host that launches each needs {found.host_us:,.0f} µs: it is not in the way."
    return Advice("own kernel", text, gain)
