"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True)
class Timing:
    """Wall times of one request in seconds, from its submission."""

    first_token: float  # until the first token was known; the prompt is part of it
    total: float

    def seconds_per_token(self, num_tokens: int) -> float:
        """Mean time between tokens after the first; 0 for fewer than two tokens."""
        return (self.total - self.first_token) / (num_tokens - 1) if num_tokens > 1 else 0.0


@dataclass(frozen=True)
class TokenLogprobs:
    """A token's natural log-probability and the best tokens at its place, as the model gave them.

    No value is NaN or infinite, so that JSON can carry all of them. logprob: 0 or less; the lowest FP32 number stands
    for a token that the model ruled out. top: (token id, logprob) in falling order, without tokens that the model
    ruled out, so it may be shorter than asked for. It need not hold the token itself.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Completion:
    """A finished request.

    token_ids: every generated token, the end token included. text: what they decode to, without end tokens, special
    tokens and the stop string. finish_reason: "stop" (end token or stop string), "length" (max_tokens or the end of
    the context), "error" (see `error`), "abort" (the request was dropped before its end). logprobs: one for each of
    token_ids, if asked for. prompt_logprobs: one for each of prompt_token_ids, if asked for; None for the first, which
    follows nothing, and for one whose logits were not finite. cached_tokens: how many tokens of the prompt were
    taken from the prefix cache. index: which of the prompt's n completions this is, from 0.
    """

    text: str
    token_ids: tuple[int, ...]
    prompt_token_ids: tuple[int, ...]
    finish_reason: FinishReason
    timing: Timing
    error: str | None = None
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    cached_tokens: int = 0
    index: int = 0


@dataclass(frozen=True)
class Chunk:
    """A piece of a streamed completion; the texts of all chunks joined are the completion's text.

    The last chunk has a finish_reason and the whole completion. logprobs: one for each of token_ids, if asked for.
    index: which of the prompt's n completions this belongs to.
    """

    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    completion: Completion | None = field(default=None, repr=False)
    logprobs: tuple[TokenLogprobs, ...] | None = None
    index: int = 0
