"""The loop: plan, launch, land, deliver. Requests in, chunks of text out."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from itertools import count

import torch

from rooflight import ops
from rooflight.engine.intake import Intake
from rooflight.engine.launch import Launch
from rooflight.engine.logprobs import prompt_logprobs
from rooflight.engine.metrics import Metrics, Recorder
from rooflight.engine.outputs import Chunk, FinishReason, TokenLogprobs
from rooflight.engine.params import SamplingParams
from rooflight.engine.plan import StepPlan
from rooflight.engine.request import Group, OnChunk, Request
from rooflight.engine.runner import Runner
from rooflight.engine.scheduler import Scheduler
from rooflight.engine.sequence import Sequence
from rooflight.text.tokenizer import Tokenizer

NOT_FINITE = "the model gave no finite logits (NaN, or all -inf)"


class Engine:
    """One model, one KV pool, many requests. Not thread-safe, but for `prepare` and `metrics`."""

    def __init__(
        self, runner: Runner, scheduler: Scheduler, tokenizer: Tokenizer | None, end_ids: frozenset[int]
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.end_ids = end_ids
        context, vocabulary = runner.max_model_len, runner.decoder.config.vocab_size
        self._intake = Intake(scheduler, tokenizer, end_ids, context, vocabulary, count())
        self._requests: dict[int, Request] = {}  # those in the scheduler, by their own id
        self._groups: dict[int, list[Request]] = {}  # by the id that the caller knows, until all of one have ended
        self._empty: list[Request] = []  # for no tokens: nothing of them runs
        self._launches: deque[tuple[StepPlan, list[Sequence], Launch]] = deque()  # in flight, the oldest first
        self._failure: Exception | None = None  # of a launch behind those in flight, to be raised when they have landed
        # A step that is interrupted, by Ctrl-C say, leaves what it had not delivered to the next one: a token, or so
        # many that nobody looks at one by one.
        self._due: deque[tuple[Request, TokenLogprobs | None, float, int]] = deque()
        self._chunks: list[tuple[int, Chunk]] = []
        self._stepping = False
        self._aborts: deque[int] = deque()  # asked for in the middle of a step
        self._recorder = Recorder()

    def submit(self, prompt: list[int], params: SamplingParams, on_chunk: OnChunk | None = None) -> int:
        """Queue a prompt of token ids; returns the id that its chunks come with.

        on_chunk: called with every chunk in the step that makes it; if it raises, the completion ends with that error.
        It must not run the engine. ValueError for a prompt that is empty, out of the vocabulary or too long, and for
        parameters that this model cannot serve.
        """
        return self.add(self.prepare(list(prompt), params, on_chunk))

    def prepare(self, prompt: list[int], params: SamplingParams, on_chunk: OnChunk | None = None) -> list[Request]:
        """The requests of a prompt, checked and not yet queued. May be called from any thread.

        The list becomes the engine's: the answer's tokens are put behind it.
        """
        return self._intake.requests(prompt, params, on_chunk)

    def add(self, requests: list[Request]) -> int:
        """Queue what `prepare` made. The first one runs the prompt, the others share its pages."""
        group, params = requests[0].group, requests[0].sequence.params
        self._groups[group.id] = requests
        self._recorder.submitted(len(requests))
        if params.max_tokens == 0 and params.prompt_logprobs is None:
            self._empty += requests  # nothing has to run
        elif self.scheduler.prefix_cache or params.prompt_logprobs is not None:
            self._queue(requests[0])
            group.later = requests[1:]
        else:
            for request in requests:
                self._queue(request)
        return group.id

    def _queue(self, request: Request) -> None:
        self.scheduler.add(request.sequence)
        self._requests[request.id] = request

    def abort(self, request_id: int) -> list[Chunk]:
        """Drop the requests of an id and free their pages; returns their last chunks, with what they had.

        One that is unknown or has ended is no error. In the middle of a step, where a callback or Python's collector
        may ask for it, it is done as soon as it can be, and nothing is returned.
        """
        if self._stepping:
            self._aborts.append(request_id)
            return []
        return self._drop(request_id)

    def _drop(self, request_id: int) -> list[Chunk]:
        now = time.perf_counter()
        chunks = []
        for request in self._groups.pop(request_id, []):
            if not request.ended:
                self.scheduler.cancel(request.id)
                self._requests.pop(request.id, None)
                request.ended = True
                request.group.later = []
                self._recorder.finished("abort")
                chunks.append(request.last_chunk("", None, None, "abort", now))
        if not self._requests:
            self._recall()  # nobody waits for what is in flight
        return chunks

    def _drop_aborted(self) -> None:
        while self._aborts:
            self._drop(self._aborts.popleft())

    @property
    def busy(self) -> bool:
        """Whether a step would have something to do."""
        return bool(self._groups or self._due or self._chunks)

    def is_open(self, request_id: int) -> bool:
        """Whether a request has neither been aborted nor delivered its last chunk."""
        return request_id in self._groups or any(owner == request_id for owner, _ in self._chunks)

    def metrics(self) -> Metrics:
        """How the engine is doing now. May be called from any thread."""
        return self._recorder.snapshot(self.scheduler)

    @torch.inference_mode()
    def step(self) -> Iterator[tuple[int, Chunk]]:
        """Launch what the runner may have in flight, and land one launch; yields (id, chunk) for everything to show.

        What the model raises is raised here and leaves all requests as they were: launches in flight when one of them
        fails, or is interrupted, are forgotten and done again. RuntimeError from within a callback.
        """
        if self._stepping:
            raise RuntimeError("a callback must not run the engine")
        self._stepping = True
        try:
            self._drop_aborted()
            if not self._due:
                self._run()
            while self._due:
                request, report, now, together = self._due.popleft()
                if self._aborts:
                    self._drop_aborted()
                if not request.ended:
                    chunk = self._advance(request, report, now, together)
                    if chunk is not None:
                        self._chunks.append((request.group.id, chunk))
            self._drop_aborted()
            self._finish_empty()
            if not self._requests:
                self._recall()
            chunks, self._chunks = self._chunks, []
            return iter(chunks)
        finally:
            self._stepping = False

    @torch.inference_mode()
    def begin(self) -> None:
        """Launch what is queued, if the device can work on it while the host goes on, and if it has nothing to do yet.

        Raises what the model raises, and leaves all requests as they were. In the middle of a step it does nothing.
        """
        if self._stepping or self._launches or self._due or not self.runner.ahead:
            return
        self._stepping = True
        try:
            self._launch(1)
            self._drop_aborted()
        except BaseException:
            self._recall()
            raise
        finally:
            self._stepping = False

    def _run(self) -> None:
        """The model's part of a step: what a launch gave is due."""
        try:
            self._launch(1 + self.runner.ahead)
            if self._launches:
                self._land()
            elif self._requests:
                raise RuntimeError(f"{len(self._requests)} requests are open, but nothing of them can run")
        except BaseException:
            self._recall()
            raise

    def _launch(self, most: int) -> None:
        """As many launches as may be in flight."""
        if self._failure is not None and not self._launches:
            raise self._failure
        while len(self._launches) < most and self._failure is None:
            plan = self.scheduler.plan()
            if plan is None:
                break
            sampling = [self._requests[row.request_id].sequence for row in plan.rows if row.samples]
            try:
                launch = self.runner.launch(plan, sampling)
            except Exception as error:
                if not self._launches:
                    raise
                self._failure = error  # what is in flight lands first: it may do so in spite of this
                break
            self.scheduler.launched(plan)
            self._launches.append((plan, sampling, launch))

    def _land(self) -> None:
        plan, sampling, launch = self._launches[0]
        tokens, reports = launch.land()
        self._read_prompts(plan, launch)
        now = time.perf_counter()
        self._drop_aborted()
        if not self._launches:  # those were all
            return
        advanced = self.scheduler.landed(plan, tokens)
        self._launches.popleft()
        reported = {s.request_id: of_tokens for s, of_tokens in zip(sampling, reports, strict=True)}
        gains = [(self._requests[sequence.request_id], count) for sequence, count in advanced]
        self._recorder.step(now, plan.steps, gains)
        for request, got in gains:
            if got > 1 and request.is_quiet:  # only the last of them may be its end
                self._due.append((request, None, now, got))
            else:
                self._due.extend((request, report, now, 1) for report in reported[request.id][:got])

    def _recall(self) -> None:
        """Forget what is in flight, and what went wrong behind it."""
        self.scheduler.recall()
        self._launches.clear()
        self._failure = None

    def _read_prompts(self, plan: StepPlan, launch: Launch) -> None:
        """Take down log-probabilities of prompts."""
        reading = [row for row in plan.rows if row.every_logit]
        for row, logits in zip(reading, launch.prompt_logits, strict=True):
            group = self._requests[row.request_id].group
            begin, end = row.start + 1, min(row.start + 1 + len(row.tokens), len(group.prompt))
            wanted, found = group.params.prompt_logprobs or 0, group.prompt_logprobs or []
            found[begin:end] = prompt_logprobs(logits[: end - begin], group.prompt[begin:end], wanted)

    def _finish_empty(self) -> None:
        """Requests for no tokens at all end before they run."""
        while self._empty:
            request = self._empty.pop()
            if not request.ended:
                now = time.perf_counter()
                chunk = self._end(request, "", None, None, "length", now)
                self._chunks.append((request.group.id, self._deliver(request, chunk, now)))
                self._drop_aborted()

    def _advance(self, request: Request, report: TokenLogprobs | None, now: float, together: int) -> Chunk | None:
        """Deliver the next token that a sequence got, and end its request if it must; None if nobody looks.

        together: tokens that are delivered at once; more than one only of a request that `is_quiet`.
        """
        if request.group.later:
            self._begin_later(request.group)
        sequence = request.sequence
        request.shown += together - 1
        token = sequence.tokens[sequence.num_prompt + request.shown]
        shows = token != ops.NO_TOKEN and sequence.params.max_tokens > 0  # or it ran for its prompt's sake
        if shows:
            request.shown += 1
        self._recorder.tokens(together - 1 + shows)
        try:
            chunk = self._chunk(request, token, report, now)
        except Exception as error:  # whatever a tokenizer raises ends with the request it is about
            request.error = request.error or _described(error)
            chunk = self._end(request, "", token if shows else None, report, "error", now)
        return None if chunk is None else self._deliver(request, chunk, now)

    def _begin_later(self, group: Group) -> None:
        """The other answers to a prompt, once its pages can be shared."""
        later, group.later = group.later, []
        if group.params.max_tokens == 0:
            self._empty += later
        else:
            for request in later:
                self._queue(request)

    def _chunk(self, request: Request, token: int, report: TokenLogprobs | None, now: float) -> Chunk | None:
        sequence, stream = request.sequence, request.stream
        if token == ops.NO_TOKEN:
            request.error = NOT_FINITE
            return self._end(request, stream.finish()[0], None, None, "error", now)
        if sequence.params.max_tokens == 0:
            return self._end(request, "", None, None, "length", now)
        ended = token in sequence.end_ids
        text, stopped = ("", False) if ended else stream.add(sequence, token)
        if stopped:
            return self._end(request, text, token, report, "stop", now)
        if not ended and sequence.num_prompt + request.shown < sequence.max_len:
            return request.chunk(text, token, report)
        rest, stopped = stream.finish()
        return self._end(request, text + rest, token, report, "stop" if ended or stopped else "length", now)

    def _deliver(self, request: Request, chunk: Chunk, now: float) -> Chunk:
        """Show a chunk to the callback; one that raises makes it the last."""
        on_chunk = request.group.on_chunk
        if on_chunk is None:
            return chunk
        try:
            on_chunk(chunk)
        except Exception as error:
            request.error = f"its callback raised {_described(error)}"
            last = chunk.completion
            if last is None:
                last = self._end(request, "", None, None, "error", now).completion
            else:
                last = replace(last, finish_reason="error", error=request.error)
            return replace(chunk, finish_reason="error", completion=last)
        return chunk

    def _end(
        self,
        request: Request,
        text: str,
        token: int | None,
        report: TokenLogprobs | None,
        reason: FinishReason,
        now: float,
    ) -> Chunk:
        group = request.group
        if self._requests.pop(request.id, None) is not None:
            # Pages that hold NaN must not be shared.
            self.scheduler.finish(request.sequence, reason, withdraw=request.error == NOT_FINITE)
        request.ended = True
        group.open -= 1
        if group.open == 0:
            del self._groups[group.id]
        self._recorder.finished(reason)
        return request.last_chunk(text, token, report, reason, now)


def _described(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
