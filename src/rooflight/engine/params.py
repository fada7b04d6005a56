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
    order. seed: a draw depends on it, the logits and the position, not on who shares the batch (whose size may change
    how matrix products round, and so a token between two that are almost even); None draws a seed. stop: strings that
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
        whole("max_tokens", self.max_tokens, 0, None)
        whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        _number("temperature", self.temperature, 0.0, math.inf)
        whole("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        stops = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(stops, Sequence) or not all(isinstance(stop, str) and stop for stop in stops):
            raise ValueError(f"stop must be strings that are not empty, was {self.stop!r}")
        object.__setattr__(self, "stop", tuple(stops))
        if not isinstance(self.stop_token_ids, Sequence):
            raise ValueError(f"stop_token_ids must be a list of token ids, was {self.stop_token_ids!r}")
        for token in self.stop_token_ids:
            whole("stop_token_ids", token, 0, None)
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            raise ValueError(f"ignore_eos must be True or False, was {self.ignore_eos!r}")


def whole(name: str, value: object, low: int, high: int | None) -> None:
    """ValueError naming the argument unless it is an int (no bool) from low to high."""
    wish = f"{low} or more" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be a whole number, {wish}, was {value!r}")


def _number(name: str, value: object, low: float, high: float) -> None:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not low <= value <= high or value == math.inf:  # type: ignore[operator]
        wish = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be a number, {wish}, was {value!r}")
