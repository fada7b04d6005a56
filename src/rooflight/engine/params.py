"""What a request may ask of sampling and stopping."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

MAX_SEED = 2**63 - 1
MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_BIAS = 100.0
FLOAT32_MAX = (2 - 2**-23) * 2.0**127
FLOAT32_TINY = 2.0**-126  # the smallest that is not denormal


class LogitBias(Mapping[int, float]):
    """Token id -> what is added to its logit. Cannot change, so that the parameters that hold it have a hash."""

    def __init__(self, entries: Mapping[int, float] | None = None) -> None:
        self._entries = dict(entries or {})

    def __getitem__(self, token: int) -> float:
        return self._entries[token]

    def __iter__(self) -> Iterator[int]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __hash__(self) -> int:
        return hash(frozenset(self._entries.items()))

    def __repr__(self) -> str:
        return repr(self._entries)


@dataclass(frozen=True)
class SamplingParams:
    """Sampling and stopping of one request. The default is greedy.

    max_tokens: most tokens to generate; 0 gives an empty completion, and the context's end ends every request.
    temperature: 0 is greedy. top_k: 0 or -1 is off. top_p: 1 is off, 0 is greedy. min_p: 0 is off. They apply in this
    order. seed: a draw depends on it, the logits and the position, not on who shares the batch (whose size may change
    how matrix products round, and so a token between two that are almost even); None draws a seed. stop: strings that
    end the text and are not part of it. stop_token_ids: end tokens besides the model's own. ignore_eos: the model's end
    tokens do not end the request. min_tokens: no end token is drawn and no stop string heeded before.

    Penalties and bias change the logits before temperature, in this order:
    repetition_penalty: divides positive, multiplies negative logits of tokens in prompt or answer; above 0, 1 is off.
    frequency_penalty: taken off a logit as often as the answer has the token; -2 to 2 as in OpenAI's API, 0 is off.
    presence_penalty: taken off a logit, once, if the answer has the token; -2 to 2 as in OpenAI's API, 0 is off.
    logit_bias: {token id: added to its logit}; -100 to 100 as in OpenAI's API. It brings back no end token too early.

    logprobs: report log-probabilities of each token and of this many best ones; 0 to 20, None is off. They are the
    model's own: before penalties, bias, temperature and filters.
    prompt_logprobs: the same for each token of the prompt but the first.
    n: completions of the prompt, 1 to 128; with a seed, the i-th draws with `choice_seed(seed, i)`.
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
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = LogitBias()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1

    def __post_init__(self) -> None:
        whole("max_tokens", self.max_tokens, 0, None)
        whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        whole("n", self.n, 1, MAX_CHOICES)
        self._check_sampling()
        self._check_penalties()
        for name, count in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if count is not None:
                whole(name, count, 0, MAX_LOGPROBS)
        self._check_ends()

    def _check_sampling(self) -> None:
        _number("temperature", self.temperature, 0.0, math.inf)
        whole("top_k", self.top_k, -1, None)
        _number("top_p", self.top_p, 0.0, 1.0)
        _number("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            whole("seed", self.seed, -MAX_SEED - 1, MAX_SEED)

    def _check_penalties(self) -> None:
        penalty = self.repetition_penalty
        if not _is_number(penalty) or not penalty > 0 or penalty == math.inf:
            raise ValueError(f"repetition_penalty must be a number, above 0, was {penalty!r}")
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        if not isinstance(self.logit_bias, Mapping):
            raise ValueError(f"logit_bias must be a mapping of token ids to numbers, was {self.logit_bias!r}")
        for token, value in self.logit_bias.items():
            whole("logit_bias token id", token, 0, None)
            _number(f"logit_bias[{token}]", value, -MAX_BIAS, MAX_BIAS)
        object.__setattr__(self, "logit_bias", LogitBias(self.logit_bias))

    def _check_ends(self) -> None:
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

    def check_vocabulary(self, vocab_size: int) -> None:
        """ValueError for a logit_bias on a token that the model does not have.

        stop_token_ids beyond the vocabulary are no error: such a token is never drawn.
        """
        if not self.logit_bias:
            return
        highest = max(self.logit_bias)
        if highest >= vocab_size:
            raise ValueError(f"logit_bias must have token ids below {vocab_size}, was one with {highest}")

    # The next five are asked for at every token, so they are worked out once.

    @cached_property
    def filters(self) -> tuple[float, float, float, int]:
        """temperature, top_p, min_p and top_k, each in the range of the operator's dtype (FP32, int32)."""
        # FP32 infinity as temperature would make NaN of -inf.
        return min(self.temperature, FLOAT32_MAX), self.top_p, self.min_p, min(self.top_k, 2**31 - 1)

    @cached_property
    def penalties(self) -> tuple[float, float, float]:
        """Repetition, frequency and presence penalty in the range of FP32."""
        # An infinite factor or one of 0 would make NaN of a logit of 0.
        repetition = max(min(self.repetition_penalty, FLOAT32_MAX), FLOAT32_TINY)
        return repetition, self.frequency_penalty, self.presence_penalty

    @cached_property
    def changes_logits(self) -> bool:
        """Whether a penalty or a bias is on."""
        return self.penalties != (1, 0, 0) or len(self.logit_bias) > 0

    @cached_property
    def has_options(self) -> bool:
        """Whether every token is more than a draw: its logits are changed, by all tokens so far, or reported."""
        return self.changes_logits or self.logprobs is not None

    @cached_property
    def may_have_options(self) -> bool:
        """The same, or the ban of end tokens among the first ones."""
        return self.has_options or self.min_tokens > 0


def choice_seed(seed: int, index: int) -> int:
    """The seed of the index-th of n completions: index 0 has `seed` itself, the others 63 mixed bits.

    The finaliser of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014): nearby
    seeds and indices give unrelated ones.
    """
    if index == 0:
        return seed
    mask = 2**64 - 1
    bits = (seed + index * 0x9E3779B97F4A7C15) & mask
    bits = ((bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9) & mask
    bits = ((bits ^ (bits >> 27)) * 0x94D049BB133111EB) & mask
    return (bits ^ (bits >> 31)) >> 1


def whole(name: str, value: object, low: int, high: int | None) -> None:
    """ValueError naming the argument unless it is an int (no bool) from low to high."""
    wish = f"{low} or more" if high is None else f"from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be a whole number, {wish}, was {value!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _number(name: str, value: object, low: float, high: float) -> None:
    if not _is_number(value) or not low <= value <= high or value == math.inf:  # type: ignore[operator]
        wish = f"{low:g} or more" if high == math.inf else f"from {low:g} to {high:g}"
        raise ValueError(f"{name} must be a number, {wish}, was {value!r}")
