"""A workload through an engine, once: submit what has arrived, step while there is work, sleep until there is."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rooflight.bench.workload import Ask
from rooflight.engine import SamplingParams
from rooflight.engine.core import Engine
from rooflight.engine.metrics import Percentiles


@dataclass
class Served:
    """One request: when it came and when its first and its latest token did, in seconds of the run."""

    ask: Ask
    first: float = 0.0
    last: float = 0.0
    tokens: int = 0

    @property
    def first_token(self) -> float:
        """From its arrival, so that waiting to be submitted counts."""
        return self.first - self.ask.arrival

    @property
    def per_token(self) -> float:
        """Mean seconds between tokens after the first."""
        return (self.last - self.first) / (self.tokens - 1)

    @property
    def latency(self) -> float:
        return self.last - self.ask.arrival


@dataclass(frozen=True)
class Round:
    """One pass. wall: seconds from the first arrival to the last token. busy: those of them that were spent in steps.

    peak_pages: of the KV pool in use, seen between steps; a page that a sequence took for its last step is not seen.
    """

    wall: float
    busy: float
    steps: int
    preemptions: int
    peak_pages: int
    served: tuple[Served, ...]

    @property
    def output_tokens(self) -> int:
        return sum(each.tokens for each in self.served)

    @property
    def mean_batch(self) -> float:
        """Tokens that a step gave: its sequences, without those amid their prompt."""
        return self.output_tokens / self.steps

    @property
    def first_token(self) -> Percentiles:
        return Percentiles.of([each.first_token for each in self.served])

    @property
    def per_token(self) -> Percentiles:
        return Percentiles.of([each.per_token for each in self.served])

    @property
    def latency(self) -> Percentiles:
        return Percentiles.of([each.latency for each in self.served])


def drive(
    engine: Engine,
    asks: Sequence[Ask],
    most_open: int | None = None,
    ended: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    sleep: Callable[[float], object] = time.sleep,
) -> Round:
    """Serve all requests, greedily and to their last token; an end token ends none.

    most_open: requests that the engine has at a time; the others wait outside. ended: called when a request has.
    RuntimeError if a request does not give the tokens it was asked for.
    """
    params = {count: SamplingParams(max_tokens=count, ignore_eos=True) for count in {ask.max_tokens for ask in asks}}
    served = [Served(ask) for ask in asks]
    coming, unfinished = deque(served), dict[int, Served]()
    scheduler = engine.scheduler
    pool, preemptions = scheduler.pool, scheduler.preemptions
    steps, peak = engine.metrics().steps, 0
    busy, now, begin = 0.0, 0.0, clock()
    while coming or unfinished:
        while coming and coming[0].ask.arrival <= now and (most_open is None or len(unfinished) < most_open):
            ask = coming[0].ask
            unfinished[engine.submit(ask.prompt, params[ask.max_tokens])] = coming.popleft()
        if not unfinished:
            sleep(coming[0].ask.arrival - now)
            now = clock() - begin
            continue
        before = clock() - begin
        chunks = list(engine.step())
        now = clock() - begin
        busy += now - before
        peak = max(peak, pool.num_pages - pool.free)
        for request_id, chunk in chunks:
            each = unfinished[request_id]
            each.tokens += len(chunk.token_ids)
            each.first, each.last = each.first or now, now
            if chunk.completion is not None:
                _check(each, chunk.completion.error)
                del unfinished[request_id]
                ended()
    steps = engine.metrics().steps - steps
    return Round(now, busy, steps, scheduler.preemptions - preemptions, peak, tuple(served))


def _check(each: Served, error: str | None) -> None:
    wanted = each.ask.max_tokens
    if error is not None or each.tokens != wanted:
        raise RuntimeError(f"a request for {wanted} tokens ended after {each.tokens}: {error or 'no error was given'}")
