"""`rooflight ladder decode`: what each optimisation of decoding gives, found and predicted, on one model in one run.

All rungs run in one process on the same weights and the same KV memory, one request at a time; they take turns, in
alternating order, for `rounds` rounds, and medians are compared. A rung that makes a context slower is a row like the
others. See `rungs` for what is predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from typing import Any, Protocol

import torch

from rooflight.bench.device import gpu_name
from rooflight.bench.environment import gpu_folder
from rooflight.bench.measurement import Spread
from rooflight.bench.ops import measure_card
from rooflight.bench.request import Progress, check_context, environment_of, random_prompt
from rooflight.bench.request_rows import mean_context
from rooflight.bench.rungs import RUNGS, Estimate, Host, Machine, Rung, estimate, wall_of, work_of
from rooflight.limits.ceilings import ceilings, known
from rooflight.models.config import ModelConfig
from rooflight.models.load import DTYPES, load_config


@dataclass(frozen=True)
class LadderSetup:
    """What is measured. Prompts and max_tokens in tokens."""

    model: str | None = "random:qwen3-0.6b"
    dtype: str = "bf16"
    prompts: tuple[int, ...] = (32, 1024, 8192)
    max_tokens: int = 128
    rounds: int = 3
    device: str = "cuda"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, was {self.rounds}")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be 2 or more to time a token, was {self.max_tokens}")
        if not self.prompts or min(self.prompts) < 1 or len(set(self.prompts)) < len(self.prompts):
            raise ValueError(f"prompts must be lengths of 1 or more, each once, was {self.prompts}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, was {self.dtype!r}")

    @property
    def longest(self) -> int:
        return max(self.prompts) + self.max_tokens


@dataclass(frozen=True)
class LadderRow:
    """One rung at one context. Gains are over the rung before, above 1 where this one is faster; None on the first.

    expected: from costs, as is `predicted_gain`. host_share: of the time in which the host did not wait. same_tokens:
    leading tokens equal to the first rung's; roundings differ, and with random weights tokens soon do.
    """

    rung: str
    prompt_tokens: int
    per_token_us: Spread
    tokens_per_s: Spread
    gain: float | None
    predicted_gain: float | None
    expected: Estimate
    operators: int
    bytes: int
    host_share: float
    wall: str
    same_tokens: int

    @property
    def slower(self) -> bool:
        return self.gain is not None and self.gain < 1.0


@dataclass(frozen=True)
class LadderReport:
    """All rows of one run, with the host and the ceilings that predictions are made from."""

    setup: LadderSetup
    environment: Mapping[str, object]
    machine: Machine
    host: Host
    engine: Mapping[str, object]
    rows: tuple[LadderRow, ...]
    rungs: tuple[Rung, ...] = RUNGS

    def as_data(self) -> dict[str, Any]:
        return {
            "benchmark": "ladder decode",
            "setup": asdict(self.setup),
            "environment": dict(self.environment),
            "machine": asdict(self.machine),
            "host": asdict(self.host),
            "engine": dict(self.engine),
            "rungs": [asdict(rung) for rung in self.rungs],
            "rows": [
                asdict(row) | {"expected": asdict(row.expected) | {"time_us": row.expected.time_us}}
                for row in self.rows
            ],
        }


class Climbed(Protocol):
    """What a climber tells of one request; see `climber.Climb`."""

    @property
    def per_token(self) -> float: ...
    @property
    def waited(self) -> float: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...


class Climbs(Protocol):
    """What runs requests on rungs; see `climber.Climber`."""

    def run(self, rung: Rung, prompt: Sequence[int], max_tokens: int) -> Climbed: ...
    def facts(self) -> dict[str, object]: ...


Start = Callable[[str | None, str, str, Sequence[Rung], int], Climbs]


def start_climber(model: str | None, dtype: str, device: str, rungs: Sequence[Rung], longest: int) -> Climbs:
    from rooflight.bench.climber import Climber  # here: `info` must not import the engine

    return Climber(model, dtype, device, rungs, longest)


def machine_of() -> Machine:
    """The GPU's measured ceilings, which are measured now if we have none."""
    key, count = gpu_folder(gpu_name()), torch.cuda.get_device_properties(0).multi_processor_count
    if key in known() and ceilings(key).measured:
        card = ceilings(key)
        return Machine(f"{card.name}, {card.origin}", card.read, card.node_us, count)
    measured = measure_card()
    return Machine(f"{measured.name}, measured before the run", measured.read, measured.launch_floor_us, count)


def run(
    setup: LadderSetup,
    progress: Progress = lambda *_: None,
    start: Start = start_climber,
    machine: Machine | None = None,
) -> LadderReport:
    """Climb every rung at every context; `progress` gets (what, done, of). machine: the GPU's by default."""
    config = replace(load_config(setup.model), dtype=DTYPES[setup.dtype])
    check_context(config, setup.longest, f"{max(setup.prompts)} and {setup.max_tokens}", setup.device)
    environment = environment_of(setup.device, torch.get_num_threads())
    machine = machine_of() if machine is None else machine
    total = len(setup.prompts) * (setup.rounds + 1)
    progress("loading the model and capturing graphs", 0, total)
    climber = start(setup.model, setup.dtype, setup.device, RUNGS, setup.longest)
    found: dict[int, dict[str, list[Climbed]]] = {}
    for place, length in enumerate(setup.prompts):
        prompt = random_prompt(config.vocab_size, length, setup.seed)
        found[length] = {rung.name: [] for rung in RUNGS}
        for turn in range(setup.rounds + 1):
            what = f"{length} tokens, round {turn} of {setup.rounds}"
            progress(what, place * (setup.rounds + 1) + turn, total)
            for rung in RUNGS if turn % 2 else reversed(RUNGS):
                found[length][rung.name].append(climber.run(rung, prompt, setup.max_tokens))
    progress("done", total, total)
    host = _host(config, setup, found[min(setup.prompts)])
    rows = tuple(
        row for length in setup.prompts for row in rows_of(config, setup, length, found[length], machine, host)
    )
    return LadderReport(setup, environment, machine, host, climber.facts(), rows)


def _host(config: ModelConfig, setup: LadderSetup, climbs: Mapping[str, Sequence[Climbed]]) -> Host:
    """From the round that warmed up, at the shortest prompt."""
    naive = RUNGS[0]
    graph = next(rung for rung in RUNGS if rung.graphs and rung.steps == 1)
    times = [(climb.per_token - climb.waited) * 1e6 for climb in (climbs[naive.name][0], climbs[graph.name][0])]
    operators = work_of(config, naive.recipe, _context(min(setup.prompts), setup)).operators
    return Host.of(times[0], operators, times[1])


def _context(length: int, setup: LadderSetup) -> int:
    return int(mean_context(length, setup.max_tokens))


def rows_of(
    config: ModelConfig,
    setup: LadderSetup,
    length: int,
    climbs: Mapping[str, Sequence[Climbed]],
    machine: Machine,
    host: Host,
) -> list[LadderRow]:
    """A row for each rung at one context, from all rounds but the first."""
    rows: list[LadderRow] = []
    context, first = _context(length, setup), climbs[RUNGS[0].name][-1].tokens
    for rung in RUNGS:
        timed = climbs[rung.name][1:]
        token = Spread.of([climb.per_token for climb in timed], 1e6)
        share = 1 - sum(climb.waited for climb in timed) / sum(climb.per_token for climb in timed)
        expected, work = estimate(config, rung, context, machine, host), work_of(config, rung.recipe, context)
        pairs = zip(first, climbs[rung.name][-1].tokens, strict=True)
        before = rows[-1] if rows else None
        rows.append(
            LadderRow(
                rung=rung.name,
                prompt_tokens=length,
                per_token_us=token,
                tokens_per_s=Spread(1e6 / token.median, 1e6 / token.high, 1e6 / token.low),
                gain=before.per_token_us.median / token.median if before else None,
                predicted_gain=before.expected.time_us / expected.time_us if before else None,
                expected=expected,
                operators=work.operators,
                bytes=work.bytes,
                host_share=share,
                wall=wall_of(token.median, share, expected),
                same_tokens=len(list(takewhile(lambda pair: pair[0] == pair[1], pairs))),
            )
        )
    return rows
