"""`rooflight profile` and `rooflight explain --measure`: our steps, recorded on a GPU, beside what they should take.

Operators are measured first, alone, and laws are fitted to them; then the engine is loaded, steps are timed without the
profiler, and recorded with it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from rooflight.bench import recording, step_operators
from rooflight.bench.device import gpu_name
from rooflight.bench.environment import describe, describe_gpu, gpu_folder
from rooflight.bench.recording import Record, record
from rooflight.engine import LLM
from rooflight.engine.graph_runner import MOST_STEPS, served
from rooflight.limits.ceilings import Ceilings, ceilings, known
from rooflight.limits.laws import Key, Law, Point, fit
from rooflight.limits.profile.step import Recorded, StepProfile, profile_step
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import PAGE_SIZE, Step
from rooflight.models.config import ModelConfig
from rooflight.models.load import load_config

SWEEP = tuple((batch, context) for batch in (1, 8, 64) for context in (128, 1024, 8192))
STEPS = 32  # that are recorded
AIM = 0.2  # of the measured step: how far what was foretold may be off
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class StepsSetup:
    """model: by name. steps: what is looked at. recorded: decode steps of each, at least. foretells: measure the
    operators alone, for laws."""

    model: str | None
    steps: tuple[Step, ...]
    recorded: int = STEPS
    foretells: bool = True
    dtype: str = "auto"

    def check(self, config: ModelConfig) -> None:
        """ValueError naming what is wrong, before anything is loaded."""
        if self.recorded < 1:
            raise ValueError(f"steps must be 1 or more, was {self.recorded}")
        if not self.steps:
            raise ValueError("steps must name at least one step, were none")
        for step in self.steps:
            step.check(config)
            if step.phase == "prefill" and step.batch != 1:
                raise ValueError(f"batch must be 1 for a prompt that is recorded, was {step.batch}")
            least = recording.least_context(MOST_STEPS, self.recorded)
            if step.phase == "decode" and step.context < least:
                raise ValueError(
                    f"context must be {least} tokens or more to record {self.recorded} steps around it, "
                    f"was {step.context:,}"
                )

    @property
    def phases(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(step.phase for step in self.steps))


@dataclass(frozen=True)
class StepsReport:
    """asked: the step of each profile as the setup names it; decode steps are recorded around its context."""

    setup: StepsSetup
    environment: dict[str, object]
    engine: Mapping[str, Any]
    asked: tuple[Step, ...]
    profiles: tuple[StepProfile, ...]
    points: tuple[Point, ...] = ()
    laws: tuple[Law, ...] = ()

    def as_data(self, benchmark: str) -> dict[str, Any]:
        """rows: of "explain" the steps with their errors, else every kernel with what is known of its operator."""
        rows = self._steps() if benchmark == "explain" else self._kernels()
        return {
            "benchmark": benchmark,
            "setup": asdict(self.setup),
            "environment": self.environment,
            "engine": dict(self.engine),
            "laws": [asdict(law) for law in self.laws],
            "points": [asdict(point) for point in self.points],
            "profiles": [profile.as_data() for profile in self.profiles],
            "rows": rows,
        }

    def _steps(self) -> list[dict[str, Any]]:
        names = ("stream_us", "graph_us", "foretold_us", "step_us", "wall_us", "error", "busy_of_step", "busy_of_wall")
        return [
            {**asdict(step), **{name: getattr(profile, name) for name in names}}
            for step, profile in zip(self.asked, self.profiles, strict=True)
        ]

    def _kernels(self) -> list[dict[str, Any]]:
        rows = []
        for step, profile in zip(self.asked, self.profiles, strict=True):
            for kernel in profile.kernels:
                row = profile.row(kernel.operator)
                about = {"bytes": row.bytes, "flops": row.flops, "limit_us": row.limit_us, "at_limit": row.at_limit}
                rows.append({**asdict(step), **asdict(kernel), **about, "wall": row.wall})
        return rows


def card_here() -> Ceilings:
    """Ceilings of the GPU at hand; ValueError without one, or without its ceilings."""
    name = gpu_name()
    key = gpu_folder(name)
    if key not in known():
        raise ValueError(f"the GPU must be one of {', '.join(known())}, whose ceilings are known, was {name}")
    return ceilings(key)


def run(setup: StepsSetup, progress: Progress, recorder: Record = record) -> StepsReport:
    """Measure on the GPU. ValueError without one, and for steps that cannot be."""
    card = card_here()
    config = load_config(setup.model)
    setup.check(config)
    environment = {**describe(torch.get_num_threads()), **describe_gpu()}
    points: list[Point] = []
    laws: dict[Key, Law] = {}
    if setup.foretells:
        kept = replace(config, dtype=torch.bfloat16 if config.dtype == torch.float32 else config.dtype)
        recipe = served(kept.dtype, torch.device("cuda"))
        points = step_operators.measure(kept, card, setup.phases, progress, recipe)
        laws = fit(points)
        gc.collect()
        torch.cuda.empty_cache()
    progress("loading the model", 0, 1)
    llm = load(setup)
    found = watch(llm, setup, card.key, laws if setup.foretells else None, progress, recorder)
    facts = {"graph_buckets": list(llm.graph_buckets), "max_model_len": llm.max_model_len}
    return StepsReport(setup, environment, facts, setup.steps, tuple(found), tuple(points), tuple(laws.values()))


def load(setup: StepsSetup, **options: Any) -> LLM:
    """The engine with room for the largest step, and no prefix cache, which would leave nothing of prompts to run."""
    margin = 1024  # tokens that a sequence gets while it is watched
    config = load_config(setup.model)
    longest = min(max(step.length for step in setup.steps) + margin, config.max_position_embeddings)
    batch = max(step.batch for step in setup.steps)
    pages = max(step.batch * -(-(step.length + margin) // PAGE_SIZE) for step in setup.steps)
    given = {"max_model_len": longest, "num_pages": pages, "max_num_seqs": batch, "page_size": PAGE_SIZE, **options}
    dtype = setup.dtype
    if dtype == "auto" and config.dtype == torch.float32 and torch.cuda.is_available():
        dtype = "bf16"
    return LLM(setup.model, dtype=dtype, skip_tokenizer=True, prefix_cache=False, **given)


def watch(
    llm: LLM,
    setup: StepsSetup,
    gpu: str,
    laws: Mapping[Key, Law] | None,
    progress: Progress = lambda *_: None,
    recorder: Record = record,
) -> list[StepProfile]:
    """Time every step, then record every step, then join each to its explanation."""
    walls = []
    for index, step in enumerate(setup.steps):
        progress(f"timing {_described(step)}", index, len(setup.steps))
        decode = step.phase == "decode"
        walls.append(
            recording.time_decode(llm, step.batch, step.context) if decode else recording.time_prompt(llm, step.context)
        )
    config = replace(llm.config, dtype=llm.decoder.embed.dtype)
    profiles = []
    for index, (step, wall) in enumerate(zip(setup.steps, walls, strict=True)):
        progress(f"recording {_described(step)}", index, len(setup.steps))
        profiles.append(_one(llm, config, setup, step, wall, gpu, laws, recorder))
    return profiles


def _one(
    llm: LLM,
    config: ModelConfig,
    setup: StepsSetup,
    step: Step,
    wall: float,
    gpu: str,
    laws: Mapping[Key, Law] | None,
    recorder: Record,
) -> StepProfile:
    steps = llm.engine.runner.most_steps if step.phase == "decode" else 1
    if step.phase == "decode":
        seen = recording.record_decode(llm, step.batch, step.context, setup.recorded, recorder)
    else:
        seen = recording.record_prompt(llm, step.context, recorder)
    scenario = Scenario(replace(step, context=seen.context), gpu)
    recorded = Recorded(seen.launches, steps, wall, seen.host_calls)
    return profile_step(setup.model or "the embedded default", config, scenario, recorded, laws, llm.decoder.recipe)


def _described(step: Step) -> str:
    return f"{step.phase} of {step.batch} x {step.context}"


def described_errors(profiles: Sequence[StepProfile]) -> str:
    """How many steps were foretold within the aim, in a line."""
    errors = [abs(profile.error) for profile in profiles if profile.error is not None]
    good = sum(error <= AIM for error in errors)
    return f"{good} of {len(errors)} steps foretold within {AIM:.0%}, the worst off by {max(errors):.0%}"
