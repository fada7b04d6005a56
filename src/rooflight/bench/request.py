"""`rooflight bench request`: one request at a time, ours and peers side by side.

One request is a prompt of random token ids plus `max_tokens` greedy tokens, without loading and tokenising. Every
contender runs in its own process with the same threads; they take turns, in alternating order, for `rounds` rounds,
and medians are compared. The limit of a token is the time to read the weights once at the bandwidth measured here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass

import torch

from rooflight.bench.ceiling import cpu_read_bandwidth
from rooflight.bench.environment import describe
from rooflight.bench.measurement import RequestTiming, Spread
from rooflight.bench.process import PEERS, ContenderProcess, missing
from rooflight.models.load import DTYPES, load_config

MILLISECONDS = 1e3


@dataclass(frozen=True)
class RequestSetup:
    """What is measured. Prompts and max_tokens in tokens; device "cpu" or "cuda"."""

    model: str | None
    peers: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ("fp32",)
    prompts: tuple[int, ...] = (32, 128, 512)
    max_tokens: int = 64
    rounds: int = 7
    threads: int = 1
    device: str = "cpu"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, was {getattr(self, name)}")
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


@dataclass(frozen=True)
class RequestRow:
    """One engine at one dtype and prompt: milliseconds as median, least and most over the rounds."""

    engine: str
    version: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    first_token_ms: Spread
    per_token_ms: Spread
    limit_ms: float  # reading the weights once
    first_token_ratio: float | None  # peer's median over ours; None on our own row
    per_token_ratio: float | None
    same_tokens: int | None  # leading tokens equal to ours; None on our own row

    @property
    def tokens_per_second(self) -> float:
        return MILLISECONDS / self.per_token_ms.median


@dataclass(frozen=True)
class RequestReport:
    """All rows of one run with the setup and the environment they belong to; `absent` names what was not run."""

    setup: RequestSetup
    environment: dict[str, object]
    read_bandwidth: float  # bytes per second, measured before the first contender
    rows: tuple[RequestRow, ...]
    absent: dict[str, str]

    def as_data(self) -> dict[str, object]:
        return {
            "benchmark": "request",
            "setup": asdict(self.setup),
            "environment": self.environment,
            "read_bandwidth_bytes_per_s": self.read_bandwidth,
            "absent": self.absent,
            "rows": [asdict(row) for row in self.rows],
        }


def run(setup: RequestSetup, progress: Callable[[str, int, int], None] = lambda *_: None) -> RequestReport:
    """Measure everything in the setup; `progress` gets (what, done, of)."""
    from rooflight.engine.memory import CPU_CONTEXT  # here: `info` must not import the engine

    absent = {peer: reason for peer in setup.peers if (reason := missing(peer))}
    engines = ["rooflight", *(peer for peer in setup.peers if peer not in absent)]
    config = load_config(setup.model)
    context = min(config.max_position_embeddings, CPU_CONTEXT)  # what the engine takes on a CPU by itself
    if max(setup.prompts) + setup.max_tokens > context:
        longest = f"{max(setup.prompts)} and {setup.max_tokens}"
        raise ValueError(f"the longest prompt and max_tokens must fit the context of {context} tokens, were {longest}")
    bandwidth = cpu_read_bandwidth(setup.threads)
    rows: list[RequestRow] = []
    total = len(setup.dtypes) * len(setup.prompts) * (setup.rounds + 1)
    done = 0
    for dtype in setup.dtypes:
        limit = config.weight_bytes_per_token(DTYPES[dtype]) / bandwidth * MILLISECONDS
        with ExitStack() as stack:
            processes: list[ContenderProcess] = []
            for engine in engines:
                progress(f"loading {engine} {dtype}", done, total)
                process = ContenderProcess(engine, setup.model, dtype, setup.device, setup.threads)
                processes.append(stack.enter_context(process))
            for prompt_tokens in setup.prompts:
                prompt = _prompt(config.vocab_size, prompt_tokens, setup.seed)
                timings: dict[str, list[RequestTiming]] = {engine: [] for engine in engines}
                for turn in range(setup.rounds + 1):
                    progress(f"{dtype}, {prompt_tokens} tokens, round {turn} of {setup.rounds}", done, total)
                    for process in processes if turn % 2 else processes[::-1]:
                        timing = process.run(prompt, setup.max_tokens)
                        if turn:  # the first turn warms caches and clocks
                            timings[process.engine].append(timing)
                    done += 1
                rows += _rows(processes, timings, dtype, prompt_tokens, limit)
    progress("done", total, total)
    return RequestReport(setup, describe(setup.threads), bandwidth, tuple(rows), absent)


def _prompt(vocab_size: int, length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(vocab_size, (length,), generator=generator).tolist()


def _rows(
    processes: Sequence[ContenderProcess],
    timings: dict[str, list[RequestTiming]],
    dtype: str,
    prompt_tokens: int,
    limit: float,
) -> list[RequestRow]:
    ours = timings["rooflight"]
    our_first, our_token = (Spread.of(v, MILLISECONDS) for v in _values(ours))
    rows = []
    for process in processes:
        runs = timings[process.engine]
        first, token = (Spread.of(v, MILLISECONDS) for v in _values(runs))
        is_peer = process.engine != "rooflight"
        rows.append(
            RequestRow(
                engine=process.engine,
                version=process.versions[process.engine],
                dtype=dtype,
                prompt_tokens=prompt_tokens,
                new_tokens=len(runs[0].tokens),
                first_token_ms=first,
                per_token_ms=token,
                limit_ms=limit,
                first_token_ratio=first.median / our_first.median if is_peer else None,
                per_token_ratio=token.median / our_token.median if is_peer else None,
                same_tokens=_leading_equal(runs[0].tokens, ours[0].tokens) if is_peer else None,
            )
        )
    return rows


def _values(runs: Sequence[RequestTiming]) -> tuple[list[float], list[float]]:
    return [run.first_token for run in runs], [run.per_token for run in runs]


def _leading_equal(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(a, b, strict=True)):
        if left != right:
            return index
    return len(a)
