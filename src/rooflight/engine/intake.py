"""From a prompt and parameters to requests, checked before anything runs."""

from __future__ import annotations

import secrets
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from rooflight.engine.params import SamplingParams, choice_seed
from rooflight.engine.request import Group, OnChunk, Request
from rooflight.engine.scheduler import Scheduler
from rooflight.engine.sequence import Sequence as Running
from rooflight.engine.text_stream import TextStream
from rooflight.text.tokenizer import Tokenizer


class Intake:
    """What an engine asks of requests. `requests` may be called from any thread.

    context: most tokens of prompt and answer. ids: where request ids come from, in the order of arrival.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        tokenizer: Tokenizer | None,
        end_ids: frozenset[int],
        context: int,
        vocab_size: int,
        ids: Iterator[int],
    ) -> None:
        self._scheduler, self._tokenizer = scheduler, tokenizer
        self._context, self._vocab_size, self._ids = context, vocab_size, ids
        self._model_ends = self._known(end_ids)  # worked out once: most requests have no others

    def requests(self, prompt: list[int], params: SamplingParams, on_chunk: OnChunk | None) -> list[Request]:
        """The n requests of a prompt; ValueError for one that cannot be served. The first one gets the list itself."""
        self._check(prompt)
        params.check_vocabulary(self._vocab_size)
        max_len = min(len(prompt) + params.max_tokens, self._context)
        self._scheduler.check(max(max_len - 1, len(prompt)))
        end_ids: frozenset[int] = frozenset() if params.ignore_eos else self._model_ends
        if params.stop_token_ids:
            end_ids |= self._known(params.stop_token_ids)
        seed = secrets.randbits(63) if params.seed is None else params.seed
        # The first one reads the prompt for all.
        others = params if params.prompt_logprobs is None else replace(params, prompt_logprobs=None)
        numbers = [next(self._ids) for _ in range(params.n)]
        reads = params.prompt_logprobs is not None
        group = Group(numbers[0], list(prompt) if reads else [], params, params.n, on_chunk)
        if reads:
            group.prompt_logprobs = [None] * len(prompt)
        now = time.perf_counter()
        requests = []
        for index, number in enumerate(numbers):
            sequence = Running(
                request_id=number,
                tokens=list(prompt) if index else prompt,
                num_prompt=len(prompt),
                max_len=max_len,
                params=others if index else params,
                seed=choice_seed(seed, index),
                end_ids=end_ids,
            )
            requests.append(Request(sequence, TextStream(self._tokenizer, tuple(params.stop)), group, index, now))
        return requests

    def _known(self, tokens: Iterable[int]) -> frozenset[int]:
        """Those of the vocabulary: others are never drawn."""
        return frozenset(token for token in tokens if 0 <= token < self._vocab_size)

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise ValueError("prompt must have at least one token, was empty")
        try:
            ids = _as_array(prompt)
        except OverflowError:
            raise ValueError(f"prompt must have token ids below {self._vocab_size}, was one beyond 64 bits") from None
        if ids.view(np.uint64).max() >= self._vocab_size:  # negative ones are the largest: one pass for both ends
            raise ValueError(
                f"prompt must have token ids below {self._vocab_size}, was one with {ids.min()} to {ids.max()}"
            )
        if len(prompt) >= self._context:
            raise ValueError(
                f"prompt must leave room for an answer in the context of {self._context} tokens, "
                f"was {len(prompt)} tokens"
            )


def _as_array(prompt: Sequence[int]) -> np.ndarray:
    try:
        return np.frombuffer(struct.pack(f"{len(prompt)}q", *prompt), np.int64)  # half of the time
    except struct.error:  # not all of them are whole numbers of 64 bits
        return np.fromiter(prompt, np.int64, len(prompt))
