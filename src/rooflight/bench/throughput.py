"""`rooflight bench throughput`: many requests at once, or as they arrive.

Prompts are random token ids; answers are greedy and exactly as long as asked for; nothing is tokenised. The same
requests are served in one process and with one loaded model by continuous batching ("together") and, if asked, with at
most one open at a time ("one by one"). After a warm-up the two take turns, in alternating order, for `rounds` rounds,
and medians are compared. The limit: every step reads the weights once, at the bandwidth measured here; what attention
reads of the KV cache is not part of it. Runs on the CPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch

from rooflight.bench.ceiling import cpu_read_bandwidth
from rooflight.bench.environment import describe
from rooflight.bench.measurement import PAGE_SIZE, Spread
from rooflight.bench.workload import Ask, Lengths, make
from rooflight.models.config import ModelConfig
from rooflight.models.load import DTYPES, load_config

if TYPE_CHECKING:
    from rooflight.bench.drive import Round
    from rooflight.engine import LLM
    from rooflight.engine.metrics import Percentiles

Progress = Callable[[str, int, int], None]
TOGETHER, ONE_BY_ONE = "together", "one by one"
MOST_OPEN = {TOGETHER: None, ONE_BY_ONE: 1}
MILLISECONDS = 1e3
MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class ThroughputSetup:
    """What is measured. Lengths as `workload.CHOICES` says; rate: requests a second, None for all at once.

    num_pages: of the KV cache; None: what all sequences that run together may need, if the memory has it.
    prefix_cache: the warm-up fills it, so that every round finds all prompts there.
    """

    model: str | None
    dtype: str = "fp32"
    requests: int = 64
    prompt_tokens: str | int = "uniform:16-256"
    max_tokens: str | int = "64"
    rate: float | None = None
    one_by_one: bool = False
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    num_pages: int | None = None
    prefix_cache: bool = False
    seed: int = 0
    threads: int = 1
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, was {self.dtype!r}")
        for name in ("requests", "max_num_seqs", "max_num_batched_tokens", "num_pages", "threads", "rounds"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, was {value}")
        if not 0 <= self.seed <= MAX_SEED:
            raise ValueError(f"seed must be from 0 to {MAX_SEED}, was {self.seed}")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ValueError(f"rate must be a number of requests a second, above 0, was {self.rate:g}")
        self.lengths()

    def lengths(self) -> tuple[Lengths, Lengths]:
        """Of prompts and of answers, which have two tokens at least: one alone has no time per token."""
        prompts = Lengths.parse("prompt_tokens", str(self.prompt_tokens))
        return prompts, Lengths.parse("max_tokens", str(self.max_tokens), least=2)

    @property
    def modes(self) -> tuple[str, ...]:
        return (TOGETHER, ONE_BY_ONE) if self.one_by_one else (TOGETHER,)


@dataclass(frozen=True)
class Quantiles:
    """Percentiles over the requests of a round, each as median, least and most over the rounds; milliseconds."""

    p50: Spread
    p90: Spread
    p99: Spread

    @staticmethod
    def of(rounds: Sequence[Percentiles]) -> Quantiles:
        return Quantiles(*(Spread.of([getattr(r, p) for r in rounds], MILLISECONDS) for p in ("p50", "p90", "p99")))


@dataclass(frozen=True)
class ThroughputRow:
    """One way to serve the requests. Spreads are over the rounds. first_token_ms and latency_ms: from arrival."""

    mode: str
    dtype: str
    requests: int
    prompt_tokens: int
    output_tokens: int
    wall_s: Spread
    busy: Spread  # share of the time that was spent in steps, not waiting for an arrival
    tokens_per_s: Spread  # output tokens
    requests_per_s: Spread
    steps: Spread
    mean_batch: Spread  # output tokens a step
    preemptions: Spread
    peak_pages: Spread
    first_token_ms: Quantiles
    per_token_ms: Quantiles
    latency_ms: Quantiles
    limit_tokens_per_s: float  # mean_batch over the time to read the weights once
    of_limit: float  # tokens of a busy second over the limit
    over_one_by_one: float | None  # ratio of tokens_per_s; None where it was not run, and on its own row


@dataclass(frozen=True)
class ThroughputReport:
    """All rows of one run with the setup and the environment they belong to."""

    setup: ThroughputSetup
    environment: dict[str, object]
    read_bandwidth: float  # bytes per second, measured before the model was loaded
    rows: tuple[ThroughputRow, ...]

    def as_data(self) -> dict[str, object]:
        return {
            "benchmark": "throughput",
            "setup": asdict(self.setup),
            "environment": self.environment,
            "read_bandwidth_bytes_per_s": self.read_bandwidth,
            "rows": [asdict(row) for row in self.rows],
        }


def run(setup: ThroughputSetup, progress: Progress = lambda *_: None) -> ThroughputReport:
    """Measure everything in the setup; `progress` gets (what, requests done, of)."""
    from rooflight.engine import LLM  # here and below: `info` must not import the engine
    from rooflight.engine.memory import CPU_CONTEXT

    config = load_config(setup.model)
    context = min(config.max_position_embeddings, CPU_CONTEXT)  # what the engine takes on a CPU by itself
    prompts, answers = setup.lengths()
    asks = make(
        prompts,
        answers,
        requests=setup.requests,
        vocab_size=config.vocab_size,
        context=context,
        rate=setup.rate,
        seed=setup.seed,
    )
    num_pages = setup.num_pages or _pages(setup, config, asks)
    before = torch.get_num_threads()
    torch.set_num_threads(setup.threads)
    try:
        progress("measuring the memory", 0, 1)
        bandwidth = cpu_read_bandwidth(setup.threads)
        progress("loading", 0, 1)
        llm = LLM(
            setup.model,
            dtype=setup.dtype,
            device="cpu",
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            max_num_seqs=setup.max_num_seqs,
            max_num_batched_tokens=setup.max_num_batched_tokens,
            prefix_cache=setup.prefix_cache,
            skip_tokenizer=True,
        )
        rounds = _measure(setup, llm, asks, progress)
    finally:
        torch.set_num_threads(before)
    pool = {"max_model_len": llm.max_model_len, "num_pages": num_pages, "page_size": PAGE_SIZE}
    environment = describe(setup.threads) | {"device": "cpu"} | pool
    weights = config.weight_bytes_per_token(DTYPES[setup.dtype]) / bandwidth
    return ThroughputReport(setup, environment, bandwidth, _rows(setup, asks, rounds, weights))


def _pages(setup: ThroughputSetup, config: ModelConfig, asks: Sequence[Ask]) -> int:
    """Pages for the largest requests that may run together, as far as there is memory beside the weights."""
    from rooflight.engine.memory import SHARE, free_bytes

    dtype = DTYPES[setup.dtype]
    each = sorted((-(-ask.most_cached // PAGE_SIZE) for ask in asks), reverse=True)
    together = min(setup.max_num_seqs, setup.max_num_batched_tokens, len(asks))
    wanted = sum(each[:together]) + together  # to begin one, the scheduler wants a page to spare for each that runs
    free = SHARE * free_bytes(torch.device("cpu")) - config.num_parameters() * dtype.itemsize
    return max(each[0], min(wanted, int(free) // (PAGE_SIZE * config.kv_bytes_per_token(dtype))))


def _measure(setup: ThroughputSetup, llm: LLM, asks: Sequence[Ask], progress: Progress) -> dict[str, list[Round]]:
    """All rounds of every mode, after a warm-up: everything at once, and the first request alone."""
    from rooflight.bench.drive import drive

    total = 1 + len(asks) * (1 + setup.rounds * len(setup.modes))
    done, what = 0, "warming up"

    def ended() -> None:
        nonlocal done
        done += 1
        progress(what, done, total)

    progress(what, done, total)
    at_once = [Ask(ask.prompt, ask.max_tokens, 0.0) for ask in asks]
    drive(llm.engine, at_once, ended=ended)
    drive(llm.engine, at_once[:1], ended=ended)
    rounds: dict[str, list[Round]] = {mode: [] for mode in setup.modes}
    for turn in range(1, setup.rounds + 1):
        for mode in setup.modes if turn % 2 else setup.modes[::-1]:
            what = f"{mode}, round {turn} of {setup.rounds}"
            rounds[mode].append(drive(llm.engine, asks, MOST_OPEN[mode], ended))
    return rounds


def _rows(
    setup: ThroughputSetup, asks: Sequence[Ask], rounds: dict[str, list[Round]], weights: float
) -> tuple[ThroughputRow, ...]:
    """weights: seconds to read them once."""
    alone = _tokens_per_s(rounds[ONE_BY_ONE]).median if setup.one_by_one else None
    rows = []
    for mode, runs in rounds.items():
        tokens, batch = _tokens_per_s(runs), Spread.of([r.mean_batch for r in runs])
        limit = batch.median / weights
        row = ThroughputRow(
            mode=mode,
            dtype=setup.dtype,
            requests=len(asks),
            prompt_tokens=sum(len(ask.prompt) for ask in asks),
            output_tokens=runs[0].output_tokens,
            wall_s=Spread.of([r.wall for r in runs]),
            busy=Spread.of([r.busy / r.wall for r in runs]),
            tokens_per_s=tokens,
            requests_per_s=Spread.of([len(asks) / r.wall for r in runs]),
            steps=Spread.of([r.steps for r in runs]),
            mean_batch=batch,
            preemptions=Spread.of([r.preemptions for r in runs]),
            peak_pages=Spread.of([r.peak_pages for r in runs]),
            first_token_ms=Quantiles.of([r.first_token for r in runs]),
            per_token_ms=Quantiles.of([r.per_token for r in runs]),
            latency_ms=Quantiles.of([r.latency for r in runs]),
            limit_tokens_per_s=limit,
            of_limit=Spread.of([r.output_tokens / r.busy for r in runs]).median / limit,
            over_one_by_one=tokens.median / alone if alone is not None and mode == TOGETHER else None,
        )
        rows.append(row)
    return tuple(rows)


def _tokens_per_s(rounds: Sequence[Round]) -> Spread:
    return Spread.of([each.output_tokens / each.wall for each in rounds])
