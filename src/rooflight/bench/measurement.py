"""What a contender must be able to do, and what one run of a request tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Protocol

OURS = "rooflight"
PAGE_SIZE = 16  # tokens, of our KV cache
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class RequestTiming:
    """One request: seconds to the first token (prompt included) and to the last, and the tokens themselves."""

    first_token: float
    total: float
    tokens: tuple[int, ...]

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.total - self.first_token) / (len(self.tokens) - 1)

    @property
    def request_rate(self) -> float:
        """Tokens a second of the whole request, its prompt included."""
        return len(self.tokens) / self.total


@dataclass(frozen=True)
class Busy:
    """Seconds in which a GPU runs at least one kernel, copy or fill: to the first token, and for each after it."""

    first_token: float
    per_token: float


@dataclass(frozen=True)
class Room:
    """What an engine must have room for; None leaves it to the engine, and a peer may choose more than what is asked.

    max_model_len: tokens of a prompt and its answer. num_pages: of our KV cache. max_num_seqs: of ours.
    max_num_batched_tokens: of a step; ours takes fewer where memory is short.
    """

    max_model_len: int | None = None
    num_pages: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


ANY_ROOM = Room()


class Contender(Protocol):
    """An engine with a model loaded. Greedy, end tokens ignored, exactly `max_tokens` tokens out."""

    def versions(self) -> dict[str, str]: ...

    def facts(self) -> Facts:
        """How it is set up, as plain data: longest context, pool, graphs, as far as it tells."""
        ...

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming: ...

    def complete(self, prompt: Sequence[int], max_tokens: int) -> object:
        """The request once and nothing else, for a profiler."""
        ...


class BatchContender(Contender, Protocol):
    """An engine that takes many requests at once."""

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Seconds from the first submission to the last token of all."""
        ...


@dataclass(frozen=True)
class Spread:
    """Median and extremes of repeated measurements, in one unit."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: Sequence[float], scale: float = 1.0) -> Spread:
        scaled = [value * scale for value in values]
        return Spread(median(scaled), min(scaled), max(scaled))
