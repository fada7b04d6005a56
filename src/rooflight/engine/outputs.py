"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error"]


@dataclass(frozen=True)
class Timing:
    """Wall times of one request in seconds, from its submission."""

    first_token: float  # until the first token was known; the prompt is part of it
    total: float

    def seconds_per_token(self, num_tokens: int) -> float:
        """Mean time between tokens after the first; 0 for fewer than two tokens."""
        return (self.total - self.first_token) / (num_tokens - 1) if num_tokens > 1 else 0.0


@dataclass(frozen=True)
class Completion:
    """A finished request.

    token_ids: every generated token, the end token included. text: what they decode to, without end tokens, special
    tokens and the stop string. finish_reason: "stop" (end token or stop string), "length" (max_tokens or the end of
    the context), "error" (see `error`).
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timing: Timing
    error: str | None = None


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed completion; the texts of all chunks joined are the completion's text.

    The last chunk has a finish_reason and the whole completion.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    completion: Completion | None = field(default=None, repr=False)
