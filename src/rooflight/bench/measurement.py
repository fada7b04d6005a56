"""What a contender must be able to do, and what one run of a request tells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol


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


class Contender(Protocol):
    """An engine with a model loaded. Greedy, end tokens ignored, exactly `max_tokens` tokens out."""

    def versions(self) -> dict[str, str]: ...

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming: ...


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
