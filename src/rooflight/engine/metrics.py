"""How an engine is doing: counts since its start, and times of late."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from threading import RLock

from rooflight.engine.request import Request
from rooflight.engine.scheduler import Scheduler

WINDOW_S = 10.0  # over which tokens a second are counted
KEPT = 1000  # requests and tokens whose times percentiles are taken of


@dataclass(frozen=True)
class Percentiles:
    """Of the latest `count` times, in seconds; all 0 where there are none."""

    p50: float
    p90: float
    p99: float
    count: int

    @staticmethod
    def of(times: Sequence[float]) -> Percentiles:
        """The nearest rank: values that were measured."""
        ordered, last = sorted(times), len(times) - 1
        if last < 0:
            return Percentiles(0.0, 0.0, 0.0, 0)
        p50, p90, p99 = (ordered[round(share * last)] for share in (0.5, 0.9, 0.99))
        return Percentiles(p50, p90, p99, len(times))


@dataclass(frozen=True)
class Metrics:
    """One look at an engine.

    waiting, running: sequences. pages: of the pool, of which `free_pages` can be taken and `shared_pages` hold a prefix
    that can be shared; a page may be both. submitted, finished (by reason): sequences, n of a request with n. steps,
    preemptions; prompt_tokens, of which cached_tokens came from the prefix cache; generated_tokens: since the start.
    tokens_per_second: generated in the last ten seconds. first_token: from submission, seconds. per_token: between one
    token of a sequence and the next, seconds; the tokens of one launch, which come together, share its time.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    shared_pages: int
    submitted: int
    finished: Mapping[str, int]
    steps: int
    preemptions: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    tokens_per_second: float
    first_token: Percentiles
    per_token: Percentiles


class Recorder:
    """Counts while the engine runs. One thread writes, any may take a snapshot."""

    def __init__(self) -> None:
        self._lock = RLock()  # Python's collector may end a request while it is held
        self._submitted = self._steps = self._prompt = self._cached = self._generated = 0
        self._finished: Counter[str] = Counter()
        self._first: deque[float] = deque(maxlen=KEPT)
        self._between: deque[float] = deque(maxlen=KEPT)
        self._latest = [0.0, 0]  # when a launch landed, tokens that were delivered since
        self._lately: deque[list[float]] = deque()

    def submitted(self, sequences: int) -> None:
        with self._lock:
            self._submitted += sequences

    def finished(self, reason: str) -> None:
        with self._lock:
            self._finished[reason] += 1

    def step(self, now: float, steps: int, gains: Sequence[tuple[Request, int]]) -> None:
        """A launch of so many steps landed. It gave each of these so many tokens, or found that there is none."""
        with self._lock:
            self._steps += steps
            for request, tokens in gains:
                sequence = request.sequence
                if request.first_token:
                    self._between.extend([(now - request.last_token) / tokens] * tokens)
                else:
                    request.first_token = now
                    self._prompt += sequence.num_prompt
                    self._cached += sequence.num_cached
                    self._first.append(now - request.submitted)
                request.last_token = now
            self._latest = [now, 0]
            self._lately.append(self._latest)
            self._forget(now)

    def tokens(self, count: int) -> None:
        """So many are delivered. Too often to take the lock, which a single addition does not need."""
        self._generated += count
        self._latest[1] += count

    def _forget(self, now: float) -> None:
        while self._lately and self._lately[0][0] < now - WINDOW_S:
            self._lately.popleft()

    def snapshot(self, scheduler: Scheduler) -> Metrics:
        now = time.perf_counter()
        with self._lock:
            self._forget(now)
            lately = [(when, tokens) for when, tokens in self._lately]
            first, between, finished = list(self._first), list(self._between), dict(self._finished)
            counts = self._submitted, self._steps, self._prompt, self._cached, self._generated
        submitted, steps, prompt, cached, generated = counts
        # The first step's tokens came before the span between the steps began.
        span = now - lately[0][0] if lately else 0.0
        rate = sum(tokens for _, tokens in lately[1:]) / span if span > 0 else 0.0
        pool = scheduler.pool
        return Metrics(
            waiting=len(scheduler.waiting),
            running=len(scheduler.running),
            pages=pool.num_pages,
            free_pages=pool.free,
            shared_pages=pool.shareable,
            submitted=submitted,
            finished=finished,
            steps=steps,
            preemptions=scheduler.preemptions,
            prompt_tokens=prompt,
            cached_tokens=cached,
            generated_tokens=generated,
            tokens_per_second=rate,
            first_token=Percentiles.of(first),
            per_token=Percentiles.of(between),
        )
