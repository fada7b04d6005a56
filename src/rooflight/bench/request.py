"""`rooflight bench request`: one request at a time, ours and peers side by side.

One request is a prompt of random token ids plus `max_tokens` greedy tokens, without loading and tokenising. Every
contender runs in its own process with the same threads; they take turns, in alternating order, for `rounds` rounds,
and medians are compared. The limit of a token is the time to read the weights once, on a GPU with the keys and values
of the mean context (`roof`). After all rounds of a dtype, on a GPU, each engine runs short requests under the profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from rooflight.bench.contest import Contest, Start
from rooflight.bench.environment import describe, describe_gpu
from rooflight.bench.measurement import OURS, RequestTiming, Room
from rooflight.bench.process import PEERS, ContenderProcess, missing
from rooflight.bench.request_rows import RequestRow, mean_context, rows_of, with_busy
from rooflight.bench.roof import MILLISECONDS, Roof, roof_of
from rooflight.models.config import ModelConfig
from rooflight.models.load import DTYPES, load_config

PROFILED_TOKENS = 16  # after the first; a trace of more would say the same and take longer to read
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class RequestSetup:
    """What is measured. Prompts and max_tokens in tokens; device "cpu" or "cuda".

    max_num_batched_tokens: most tokens of a step of ours; None is the engine's default.
    """

    model: str | None
    peers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("fp32",)
    prompts: tuple[int, ...] = (32, 128, 512)
    max_tokens: int = 64
    rounds: int = 7
    threads: int = 1
    device: str = "cpu"
    seed: int = 0
    max_num_batched_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("rounds", "threads", "max_num_batched_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, was {value}")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be 2 or more to time a token, was {self.max_tokens}")
        if not self.prompts or min(self.prompts) < 1:
            raise ValueError(f"prompts must be lengths of 1 or more, was {self.prompts}")
        for dtype in self.dtypes:
            if dtype not in DTYPES:
                raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, was {dtype!r}")
        for peer in self.peers:
            if peer not in PEERS or self.peers.count(peer) > 1:
                raise ValueError(f"peer must be one of {', '.join(PEERS)}, each once, was {', '.join(self.peers)}")

    @property
    def longest(self) -> int:
        return max(self.prompts) + self.max_tokens


@dataclass(frozen=True)
class RequestReport:
    """All rows of one run with the setup and the environment they belong to; `absent` names what was not run.

    origin: whose the read bandwidth is. engines: how each was set up, by "<engine> <dtype>".
    """

    setup: RequestSetup
    environment: dict[str, object]
    read_bandwidth: float  # bytes per second
    rows: tuple[RequestRow, ...]
    absent: dict[str, str]
    origin: str = ""
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def as_data(self) -> dict[str, object]:
        return {
            "benchmark": "request",
            "setup": asdict(self.setup),
            "environment": self.environment,
            "read_bandwidth_bytes_per_s": self.read_bandwidth,
            "ceilings": self.origin,
            "engines": dict(self.engines),
            "absent": self.absent,
            "rows": [asdict(row) for row in self.rows],
        }


def run(setup: RequestSetup, progress: Progress = lambda *_: None, start: Start = ContenderProcess) -> RequestReport:
    """Measure everything in the setup; `progress` gets (what, done, of)."""
    absent = {peer: reason for peer in setup.peers if (reason := missing(peer, setup.device))}
    config = load_config(setup.model)
    check_context(config, setup.longest, f"{max(setup.prompts)} and {setup.max_tokens}", setup.device)
    environment = environment_of(setup.device, setup.threads)
    roof = roof_of(setup.device, setup.threads)
    race = _Race(setup, config, roof, progress, start, [OURS, *(p for p in setup.peers if p not in absent)], absent)
    for dtype in setup.dtypes:
        race.run(dtype)
    progress("done", race.total, race.total)
    rows = tuple(race.rows)
    return RequestReport(setup, environment, roof.read_bandwidth, rows, absent, roof.origin, race.facts)


def check_context(config: ModelConfig, longest: int, words: str, device: str) -> None:
    """ValueError for a request beyond what the engine takes by itself."""
    from rooflight.engine.memory import CPU_CONTEXT  # here: `info` must not import the engine

    context = config.max_position_embeddings if device == "cuda" else min(config.max_position_embeddings, CPU_CONTEXT)
    if longest > context:
        raise ValueError(f"the longest prompt and max_tokens must fit the context of {context} tokens, were {words}")


def environment_of(device: str, threads: int) -> dict[str, object]:
    """To be called before the measurement's own processes use the GPU."""
    return describe(threads) | (describe_gpu() if device == "cuda" else {"device": "cpu"})


class _Race:
    """One run: what all its parts need, and what they have found."""

    def __init__(
        self,
        setup: RequestSetup,
        config: ModelConfig,
        roof: Roof,
        progress: Progress,
        start: Start,
        engines: Sequence[str],
        absent: dict[str, str],
    ) -> None:
        self._setup, self._config, self._roof, self._progress = setup, config, roof, progress
        self._start, self._engines, self._absent = start, engines, absent
        self.rows: list[RequestRow] = []
        self.facts: dict[str, Mapping[str, Any]] = {}
        self.done, self.total = 0, len(setup.dtypes) * len(setup.prompts) * (setup.rounds + 1)

    def run(self, dtype: str) -> None:
        """Load everybody, time all prompts, then profile."""
        with Contest(self._engines, partial(self._launch, dtype), self._absent, dtype) as contest:
            rows = [row for length in self._setup.prompts for row in self._prompt(contest, dtype, length)]
            if self._setup.device == "cuda":
                rows = self._busy(contest, dtype, rows)
        self.rows += rows

    def _launch(self, dtype: str, engine: str) -> ContenderProcess:
        self._progress(f"loading {engine} {dtype}", self.done, self.total)
        setup = self._setup
        longest = setup.longest if setup.device == "cuda" else None
        room = Room(max_model_len=longest, max_num_batched_tokens=setup.max_num_batched_tokens)
        process = self._start(engine, setup.model, dtype, setup.device, setup.threads, room)
        self.facts[f"{engine} {dtype}"] = {"version": process.versions[engine], **process.facts}
        return process

    def _prompt(self, contest: Contest, dtype: str, length: int) -> list[RequestRow]:
        setup = self._setup
        prompt = random_prompt(self._config.vocab_size, length, setup.seed)
        timings: dict[str, list[RequestTiming]] = {process.engine: [] for process in contest.running}
        for turn in range(setup.rounds + 1):
            what = f"{dtype}, {length} tokens, round {turn} of {setup.rounds}"
            self._progress(what, self.done, self.total)
            for process in contest.turn(turn):
                timing = contest.ask(process, lambda process: process.run(prompt, setup.max_tokens))
                if turn and timing is not None:  # the first turn warms caches and clocks
                    timings[process.engine].append(timing)
            self.done += 1
        context = mean_context(length, setup.max_tokens)
        limit = self._roof.step_seconds(self._config, DTYPES[dtype], context) * MILLISECONDS
        versions = {process.engine: process.versions[process.engine] for process in contest.running}
        return rows_of(timings, versions, dtype, length, limit, same_weights=not _random(setup.model))

    def _busy(self, contest: Contest, dtype: str, rows: Sequence[RequestRow]) -> list[RequestRow]:
        """The rows with the GPU-busy times of those that still run."""
        found = []
        tokens = min(PROFILED_TOKENS, self._setup.max_tokens - 1)
        for row in rows:
            process = next((each for each in contest.running if each.engine == row.engine), None)
            self._progress(f"{dtype}, {row.prompt_tokens} tokens, profiling {row.engine}", self.done, self.total)
            prompt = random_prompt(self._config.vocab_size, row.prompt_tokens, self._setup.seed)
            busy = None if process is None else contest.ask(process, lambda process: process.busy(prompt, tokens))  # noqa: B023
            found.append(with_busy(row, busy or "the engine ended before it was profiled"))
        return found


def _random(model: str | None) -> bool:
    """Whether every engine makes up its own weights."""
    return model is not None and model.startswith("random:")


def random_prompt(vocab_size: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()
