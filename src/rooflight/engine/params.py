"""What a request may ask of sampling and stopping."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

MAX_SEED = 2**63 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request. The default is greedy.

    max_tokens: most tokens to generate; 0 gives an empty completion, and the context's end ends every request.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: 1 is off, 0 is greedy. min_p: 0 is off. They apply in this
    order. seed: same seed, same prompt, same tokens, whoever shares the batch; None draws a seed. stop: strings that
    end the text and are not part of it. stop_token_ids: end tokens besides the model's own. ignore_eos: the model's end
    tokens do not end the request. min_tokens: no end token is drawn and no stop string heeded before.
    Raises ValueError naming the field, its range and the value.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    min_tokens: int = 0

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 0, None)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, math.inf)
        _whole("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop must be strings that are not empty, was {self.stop!r}")
        object.__setattr__(self, "stop", stops)
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, None)


def _whole(name: str, value: object, low: int, high: int | None) -> None:
    wish = f"{low} or more" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be a whole number, {wish}, was {value!r}")


def _number(name: str, value: object, low: float, high: float) -> None:
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high
    if not good or not math.isfinite(value):  # type: ignore[arg-type]
        wish = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be a number, {wish}, was {value!r}")
