"""`rooflight bench throughput` by cases: N requests of one length, all given at once, ours and peers side by side.

A round of a case takes from its first submission to the last token of all. Every engine runs in its own process; they
take turns, in alternating order, and medians are compared. The limit is one for all engines: every sequence decodes in
every step, which reads the weights once and all keys and values at their mean context, and before that the prompts'
operations, at the rate of a large product. Prompts are random token ids, answers greedy and exactly as long as asked.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch

from rooflight.bench.contest import Contest, Start
from rooflight.bench.measurement import OURS, PAGE_SIZE, Room, Spread
from rooflight.bench.process import ContenderProcess, missing
from rooflight.bench.request import check_context, environment_of
from rooflight.bench.request_rows import mean_context
from rooflight.bench.roof import Roof, roof_of
from rooflight.models.config import ModelConfig
from rooflight.models.load import DTYPES, load_config

Progress = Callable[[str, int, int], None]
PEERS = ("vllm",)  # those that batch
_CASE = re.compile(r"(\d{1,6}):(\d{1,7}):(\d{1,7})", re.ASCII)
# Most tokens of a step on a GPU. The fewer steps prompts take, the fewer take the last answers; our first step is
# smaller (`engine.llm.EARLY_STEP`).
GPU_STEP = 131_072


@dataclass(frozen=True)
class Case:
    """So many requests, each with so many tokens in and out (`max_tokens`)."""

    requests: int
    prompt_tokens: int
    max_tokens: int

    @staticmethod
    def parse(text: str) -> Case:
        match = _CASE.fullmatch(text)
        case = Case(*map(int, match.groups())) if match else None
        if case is None or min(case.requests, case.prompt_tokens) < 1 or case.max_tokens < 2:
            raise ValueError(f"case must be N:IN:OUT such as 8:128:128, OUT 2 or more, was {text!r}")
        return case

    @property
    def text(self) -> str:
        """As `parse` takes it."""
        return f"{self.requests}:{self.prompt_tokens}:{self.max_tokens}"

    @property
    def longest(self) -> int:
        return self.prompt_tokens + self.max_tokens

    @property
    def pages(self) -> int:
        """For all together; to begin one, the scheduler wants a page to spare for each that runs."""
        return self.requests * (-(-self.longest // PAGE_SIZE) + 1)


GPU_CASES = (Case(8, 128, 128), Case(64, 128, 128), Case(256, 512, 128), Case(1024, 128, 128))


@dataclass(frozen=True)
class CaseSetup:
    """What is measured.

    max_num_seqs, num_pages: of ours; None is what the cases need. max_num_batched_tokens: of a step; None is on a GPU
    what the prompts of the largest case take, up to GPU_STEP.
    """

    model: str | None
    cases: tuple[Case, ...] = GPU_CASES
    peers: tuple[str, ...] = ()
    dtype: str = "bf16"
    rounds: int = 3
    device: str = "cuda"
    threads: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    num_pages: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, was {self.dtype!r}")
        for name in ("rounds", "threads", "max_num_seqs", "max_num_batched_tokens", "num_pages"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, was {value}")
        if not self.cases:
            raise ValueError("case must be given at least once")
        for peer in self.peers:
            if peer not in PEERS or self.peers.count(peer) > 1:
                raise ValueError(f"peer must be one of {', '.join(PEERS)}, each once, was {', '.join(self.peers)}")

    @property
    def _step(self) -> int:
        return min(GPU_STEP, max(case.requests * case.prompt_tokens for case in self.cases))

    @property
    def room(self) -> Room:
        """For the largest of the cases."""
        return Room(
            max_model_len=max(case.longest for case in self.cases),
            num_pages=self.num_pages or max(case.pages for case in self.cases),
            max_num_seqs=self.max_num_seqs or max(case.requests for case in self.cases),
            max_num_batched_tokens=self.max_num_batched_tokens or (self._step if self.device == "cuda" else None),
        )


@dataclass(frozen=True)
class CaseRow:
    """One engine and one case; spreads over the rounds. tokens: those that came out."""

    engine: str
    version: str
    dtype: str
    requests: int
    prompt_tokens: int
    max_tokens: int
    wall_s: Spread
    tokens_per_s: Spread
    limit_tokens_per_s: float
    of_limit: float
    ratio: float | None  # our median over the peer's; None on our own row


@dataclass(frozen=True)
class CaseReport:
    """All rows of one run with the setup and the environment they belong to; `absent` names what was not run.

    origin: whose the ceilings are. engines: how each was set up.
    """

    setup: CaseSetup
    environment: dict[str, object]
    read_bandwidth: float  # bytes per second
    flops: float | None  # of the dtype's product; None where prompts are not part of the limit
    origin: str
    rows: tuple[CaseRow, ...]
    absent: dict[str, str] = field(default_factory=dict)
    engines: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def as_data(self) -> dict[str, object]:
        return {
            "benchmark": "throughput cases",
            "setup": asdict(self.setup),
            "environment": self.environment,
            "read_bandwidth_bytes_per_s": self.read_bandwidth,
            "flops": self.flops,
            "ceilings": self.origin,
            "engines": dict(self.engines),
            "absent": self.absent,
            "rows": [asdict(row) for row in self.rows],
        }


def run(setup: CaseSetup, progress: Progress = lambda *_: None, start: Start = ContenderProcess) -> CaseReport:
    """Measure everything in the setup; `progress` gets (what, rounds done, of)."""
    absent = {peer: reason for peer in setup.peers if (reason := missing(peer, setup.device))}
    config = load_config(setup.model)
    longest = max(setup.cases, key=lambda case: case.longest)
    check_context(config, longest.longest, f"{longest.prompt_tokens} and {longest.max_tokens}", setup.device)
    environment = environment_of(setup.device, setup.threads)
    roof = roof_of(setup.device, setup.threads)
    total, done = len(setup.cases) * (setup.rounds + 1), 0
    facts: dict[str, Mapping[str, Any]] = {}

    def launch(engine: str) -> ContenderProcess:
        progress(f"loading {engine}", done, total)
        process = start(engine, setup.model, setup.dtype, setup.device, setup.threads, setup.room)
        facts[f"{engine} {setup.dtype}"] = {"version": process.versions[engine], **process.facts}
        return process

    rows: list[CaseRow] = []
    with Contest([OURS, *(p for p in setup.peers if p not in absent)], launch, absent, setup.dtype) as contest:
        for case in setup.cases:
            rows += _case(setup, case, config, roof, contest, _counted(progress, done, total))
            done += setup.rounds + 1
    progress("done", total, total)
    flops = roof.flops.get(setup.dtype)
    return CaseReport(setup, environment, roof.read_bandwidth, flops, roof.origin, tuple(rows), absent, facts)


def limit_seconds(config: ModelConfig, dtype: str, case: Case, roof: Roof) -> float:
    """Of a whole case: the prompts' operations, then a step for each token after the first."""
    context = mean_context(case.prompt_tokens, case.max_tokens)
    step = roof.step_seconds(config, DTYPES[dtype], context, case.requests)
    return roof.prompt_seconds(config, dtype, case.prompt_tokens, case.requests) + (case.max_tokens - 1) * step


def _case(
    setup: CaseSetup, case: Case, config: ModelConfig, roof: Roof, contest: Contest, tell: Callable[[str, int], None]
) -> list[CaseRow]:
    """All rounds of a case, after one that is not timed."""
    prompts = _prompts(config.vocab_size, case, setup.seed)
    walls: dict[str, list[float]] = {process.engine: [] for process in contest.running}
    for turn in range(setup.rounds + 1):
        for process in contest.turn(turn):
            tell(f"{case.text}, round {turn} of {setup.rounds}, {process.engine}", turn)
            seconds = contest.ask(process, partial(_serve, prompts, case.max_tokens))
            if turn and seconds is not None:
                walls[process.engine].append(seconds)
    tokens = case.requests * case.max_tokens
    limit = tokens / limit_seconds(config, setup.dtype, case, roof)
    rates = {
        process.engine: Spread.of([tokens / wall for wall in walls[process.engine]]) for process in contest.running
    }
    return [
        CaseRow(
            engine=process.engine,
            version=process.versions[process.engine],
            dtype=setup.dtype,
            **asdict(case),
            wall_s=Spread.of(walls[process.engine]),
            tokens_per_s=rates[process.engine],
            limit_tokens_per_s=limit,
            of_limit=rates[process.engine].median / limit,
            ratio=None if process.engine == OURS else rates[OURS].median / rates[process.engine].median,
        )
        for process in contest.running
    ]


def _counted(progress: Progress, done: int, total: int) -> Callable[[str, int], None]:
    """Tells what happens in the rounds of one case."""
    return lambda what, turn: progress(what, done + turn, total)


def _serve(prompts: list[list[int]], max_tokens: int, process: ContenderProcess) -> float:
    return process.serve(prompts, max_tokens)


def _prompts(vocab_size: int, case: Case, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (case.requests, case.prompt_tokens), generator=generator).tolist()
