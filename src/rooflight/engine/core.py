"""The loop: schedule, run, sample, deliver. Requests in, chunks of text out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from rooflight import ops
from rooflight.engine.outputs import Chunk, Completion, FinishReason, Timing
from rooflight.engine.params import SamplingParams
from rooflight.engine.runner import Runner
from rooflight.engine.sampler import sample_tokens
from rooflight.engine.scheduler import Scheduler, Sequence
from rooflight.engine.text_stream import TextStream
from rooflight.text.tokenizer import Tokenizer


@dataclass
class Request:
    """What the engine keeps beside a sequence to deliver it."""

    sequence: Sequence
    stream: TextStream
    submitted: float
    first_token: float = 0.0
    text: list[str] = field(default_factory=list)
    error: str | None = None


class Engine:
    """One model, one KV pool, many requests. Not thread-safe."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, tokenizer: Tokenizer | None, end_ids: frozenset[int]
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        self._requests: dict[int, Request] = {}
        self._next_id = 0

    def submit(self, prompt: list[int], params: SamplingParams) -> int:
        """Queue a prompt of token ids; ValueError for one that is empty, out of the vocabulary or too long."""
        context, vocabulary = self.runner.max_model_len, self.runner.decoder.config.vocab_size
        if not prompt:
            raise ValueError("prompt must have at least one token, was empty")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            raise ValueError(
                f"prompt must have token ids below {vocabulary}, was one with {min(prompt)} to {max(prompt)}"
            )
        if len(prompt) >= context:
            raise ValueError(
                f"prompt must leave room for an answer in the context of {context} tokens, was {len(prompt)} tokens"
            )
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.end_ids)
        sequence = Sequence(
            request_id=self._next_id,
            tokens=list(prompt),
            num_prompt=len(prompt),
            max_len=min(len(prompt) + params.max_tokens, context),
            params=params,
            seed=secrets.randbits(63) if params.seed is None else params.seed,
            end_ids=frozenset(token for token in ends if 0 <= token < vocabulary),
        )
        request = Request(sequence, TextStream(self.tokenizer, tuple(params.stop)), time.perf_counter())
        self.scheduler.add(sequence)
        self._requests[self._next_id] = request
        self._next_id += 1
        return sequence.request_id

    def abort(self, request_id: int) -> None:
        """Drop a request and free its pages; one that is unknown or finished is no error."""
        self.scheduler.cancel(request_id)
        self._requests.pop(request_id, None)

    @torch.inference_mode()
    def step(self) -> Iterator[tuple[int, Chunk]]:
        """Run one step; yields (request id, chunk) for every request that has something to show."""
        chunks = self._finish_empty()
        plan = self.scheduler.plan()
        if plan is not None:
            sampling = [self._requests[row.request_id].sequence for row in plan.rows if row.samples]
            logits = self.runner.run(plan)
            tokens = sample_tokens(logits, sampling) if sampling else []
            sampled = {s.request_id: token for s, token in zip(sampling, tokens, strict=True)}
            now = time.perf_counter()
            for sequence in self.scheduler.update(plan, sampled):
                chunks.append((sequence.request_id, self._advance(self._requests[sequence.request_id], now)))
        return iter(chunks)

    @property
    def busy(self) -> bool:
        return bool(self._requests)

    def _finish_empty(self) -> list[tuple[int, Chunk]]:
        """Requests for no tokens at all end before they run."""
        done = [r for r in self._requests.values() if r.sequence.params.max_tokens == 0]
        for request in done:
            self.scheduler.cancel(request.sequence.request_id)
        return [(r.sequence.request_id, self._complete(r, "", (), "length", time.perf_counter())) for r in done]

    def _advance(self, request: Request, now: float) -> Chunk:
        """Deliver the token that the sequence just got, and end the request if it must."""
        sequence = request.sequence
        token = sequence.tokens[-1]
        request.first_token = request.first_token or now
        if token == ops.NO_TOKEN:
            sequence.tokens.pop()
            request.error = "the model gave no finite logits (NaN, or all -inf)"
            return self._end(request, request.stream.finish()[0], "error", now)
        ended = token in sequence.end_ids
        text, stopped = ("", False) if ended else request.stream.add(sequence, token)
        if stopped:
            return self._end(request, text, "stop", now)
        if not ended and len(sequence.tokens) < sequence.max_len:
            request.text.append(text)
            return Chunk(text, (token,))
        rest, stopped = request.stream.finish()
        return self._end(request, text + rest, "stop" if ended or stopped else "length", now)

    def _end(self, request: Request, text: str, reason: FinishReason, now: float) -> Chunk:
        self.scheduler.finish(request.sequence, reason)
        new = () if reason == "error" else (request.sequence.tokens[-1],)
        return self._complete(request, text, new, reason, now)

    def _complete(
        self, request: Request, text: str, tokens: tuple[int, ...], reason: FinishReason, now: float
    ) -> Chunk:
        sequence = request.sequence
        del self._requests[sequence.request_id]
        request.text.append(text)
        first = (request.first_token or now) - request.submitted
        completion = Completion(
            text="".join(request.text),
            token_ids=tuple(sequence.tokens[sequence.num_prompt :]),
            prompt_token_ids=tuple(sequence.tokens[: sequence.num_prompt]),
            finish_reason=reason,
            timing=Timing(first, now - request.submitted),
            error=request.error,
        )
        return Chunk(text, tokens, reason, completion)
