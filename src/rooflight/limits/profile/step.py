"""A step of our own engine as it was recorded: every kernel with its operator, and every operator with its limit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from rooflight.limits.explanation import Explanation, explain, name_of, placed_calls
from rooflight.limits.laws import Key, Law, foretell
from rooflight.limits.profile.families import short_name
from rooflight.limits.profile.owners import ADVANCE, RUNNER, kind_of, owners
from rooflight.limits.profile.timeline import Launch
from rooflight.limits.scenario import Scenario
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import Recipe

AROUND = (ADVANCE, RUNNER)  # what the runner adds to the model's operators; nobody counts their bytes


@dataclass(frozen=True)
class Recorded:
    """Launches of one kind. steps: of each launch. wall_us: of a step for the host, without the profiler, launch after
    launch. host_calls: of the host, for a launch, that put something on the GPU."""

    launches: tuple[Launch, ...]
    steps: int
    wall_us: float
    host_calls: float


@dataclass(frozen=True)
class OperatorRow:
    """One operator, or one product by its weight, in a step. Microseconds.

    measured_us: None where no kernel was found. foretold_us: by laws of operators; None without. Limits are None for
    what the runner adds. error: foretold over measured, less one.
    """

    name: str
    calls: int
    kernels: float
    bytes: int | None
    flops: int | None
    wall: str
    limit_us: float | None
    measured_us: float | None
    share: float
    foretold_us: float | None

    @property
    def at_limit(self) -> float | None:
        return self.limit_us / self.measured_us if self.limit_us and self.measured_us else None

    @property
    def error(self) -> float | None:
        return self.foretold_us / self.measured_us - 1 if self.foretold_us and self.measured_us else None


@dataclass(frozen=True)
class KernelRow:
    """Kernels of one name for one operator, in a step. idle_us: of its time, the gaps in front."""

    name: str
    operator: str
    count: float
    us: float
    idle_us: float
    share: float


@dataclass(frozen=True)
class StepProfile:
    """step_us: of the GPU for a step, from the first start of a launch to its last end; busy_us: in which anything ran.

    kernels_per_step: copies and fills too. foretold_us: the sum of the operators'; None without laws. lawless: those
    of whom only the limit is in it. rows, kernels: the most time first.
    """

    model: str
    dtype: str
    phase: str
    batch: int
    context: int
    card: str
    ceilings: str
    launches: int
    steps: int
    step_us: float
    busy_us: float
    wall_us: float
    kernels_per_step: float
    host_calls_per_step: float
    stream_us: float
    graph_us: float
    foretold_us: float | None
    lawless: tuple[str, ...]
    rows: tuple[OperatorRow, ...]
    kernels: tuple[KernelRow, ...]

    @property
    def busy_of_step(self) -> float:
        return self.busy_us / self.step_us

    @property
    def busy_of_wall(self) -> float:
        return self.busy_us / self.wall_us

    @property
    def error(self) -> float | None:
        """Foretold over measured, less one."""
        return None if self.foretold_us is None else self.foretold_us / self.step_us - 1

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a step that the host's and the GPU's launches are for."""
        return self.batch if self.phase == "decode" else self.batch * self.context

    def row(self, name: str) -> OperatorRow:
        return next(row for row in self.rows if row.name == name)

    def as_data(self) -> dict[str, Any]:
        data = asdict(self)
        for row, full in zip(data["rows"], self.rows, strict=True):
            row |= {"at_limit": full.at_limit, "error": full.error}
        return data | {"busy_of_step": self.busy_of_step, "busy_of_wall": self.busy_of_wall, "error": self.error}


def profile_step(
    model: str,
    config: ModelConfig,
    scenario: Scenario,
    recorded: Recorded,
    laws: Mapping[Key, Law] | None = None,
    recipe: Recipe | None = None,
) -> StepProfile:
    """Join what was recorded to what `explain` says of the scenario. ValueError where no launch is a whole one.

    recipe: of the decoder that ran; None: what serves on such a card.
    """
    found = explain(model, config, scenario, recipe)
    placed = placed_calls(config, scenario, recipe)
    whole = _whole(recorded.launches, recorded.steps)
    steps = recorded.steps * len(whole)
    names = [name_of(item.call) for item in placed]
    kernels = _kernels(whole, recorded.steps, names, [item.call.operator for item in placed], found)
    foretold, lawless = (None, ()) if laws is None else foretell(placed, laws, found.card)
    if foretold is not None and found.scenario.step.phase == "decode":
        foretold[ADVANCE] = found.card.node_us
    return StepProfile(
        model=model,
        dtype=found.dtype,
        phase=scenario.step.phase,
        batch=scenario.step.batch,
        context=scenario.step.context,
        card=found.card.name,
        ceilings=found.card.origin,
        launches=len(whole),
        steps=recorded.steps,
        step_us=median(launch.span_us for launch in whole) / recorded.steps,
        busy_us=median(launch.busy_us for launch in whole) / recorded.steps,
        wall_us=recorded.wall_us,
        kernels_per_step=sum(len(launch.spans) for launch in whole) / steps,
        host_calls_per_step=recorded.host_calls / recorded.steps,
        stream_us=found.stream_us,
        graph_us=found.graph_us,
        foretold_us=None if foretold is None else sum(foretold.values()),
        lawless=lawless,
        rows=_operators(found, kernels, foretold),
        kernels=kernels,
    )


def _whole(launches: Sequence[Launch], steps: int) -> list[Launch]:
    """Those of so many steps. Where no step ends with a kernel that is known to, all are believed to be."""
    counts = [sum(kind_of(span.name) == "advance" for span in launch.spans) for launch in launches]
    wanted = steps if any(counts) else 0
    whole = [launch for launch, count in zip(launches, counts, strict=True) if count == wanted]
    if not whole:
        raise ValueError(f"the recording must hold a launch of {steps} steps, had {sorted(set(counts))}")
    return whole


def _kernels(
    launches: Sequence[Launch], steps: int, names: Sequence[str], operators: Sequence[str], found: Explanation
) -> tuple[KernelRow, ...]:
    """By name and operator, the mean over all steps; the most time first."""
    ends = [ADVANCE] if found.scenario.step.phase == "decode" else []
    calls = [RUNNER, *([*operators, *ends] * steps), RUNNER]
    titles = [RUNNER, *([*names, *ends] * steps), RUNNER]
    sums: dict[tuple[str, str], list[float]] = {}
    for launch in launches:
        places = owners([span.name for span in launch.spans], calls)
        for spent, place in zip(launch.spent(), places, strict=True):
            own = sums.setdefault((short_name(spent.span.name), titles[place]), [0, 0.0, 0.0])
            for index, value in enumerate((1, spent.us, spent.idle_us)):
                own[index] += value
    count, total = steps * len(launches), sum(us for _, us, _ in sums.values())
    rows = [
        KernelRow(name, operator, many / count, us / count, idle / count, us / total)
        for (name, operator), (many, us, idle) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: -row.us))


def _operators(
    found: Explanation, kernels: Sequence[KernelRow], foretold: Mapping[str, float] | None
) -> tuple[OperatorRow, ...]:
    """Every operator of the explanation, and what the runner adds where it was seen; the most measured time first."""
    rows = []
    for name in dict.fromkeys([*(row.name for row in found.rows), *AROUND]):
        own = [row for row in found.rows if row.name == name]
        seen = [kernel for kernel in kernels if kernel.operator == name]
        if not own and not seen:
            continue
        rows.append(
            OperatorRow(
                name=name,
                calls=sum(row.calls for row in own) or 1,
                kernels=sum(kernel.count for kernel in seen),
                bytes=sum(row.bytes for row in own) if own else None,
                flops=sum(row.flops for row in own) if own else None,
                wall=max(own, key=lambda row: row.limit_us).wall if own else "launch",
                limit_us=sum(row.limit_us for row in own) if own else None,
                measured_us=sum(kernel.us for kernel in seen) if seen else None,
                share=sum(kernel.share for kernel in seen),
                foretold_us=None if foretold is None else foretold.get(name),
            )
        )
    return tuple(sorted(rows, key=lambda row: -(row.measured_us or 0.0)))
