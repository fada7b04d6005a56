"""Our engine on a GPU, watched: what the host needs for a step, and what ran on the GPU for it.

Requests go through the engine as anybody's do. The profiler makes launches slower for the rest of the process, so
whatever is timed is timed before anything is recorded.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from types import TracebackType

import torch

from rooflight.engine import LLM, SamplingParams
from rooflight.limits.profile import timeline
from rooflight.limits.profile.reader import Events, read_events
from rooflight.limits.profile.timeline import Launch, host_calls, spans_of

WARM, TIMED = 2, 6  # launches before anything is timed, and those that are
PROMPTS = 3  # prompts recorded, and warm-ups before them; medians count
Record = Callable[[Callable[[], object]], Events]


@dataclass(frozen=True)
class Seen:
    """Launches of a recording, and the tokens that a sequence had in the cache on average, meanwhile.

    host_calls: of the host, for a launch.
    """

    launches: tuple[Launch, ...]
    host_calls: float
    context: int


def record(work: Callable[[], object]) -> Events:
    """What the GPU did for `work`, and the host's calls for it."""
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            work()
            synchronize()
        profiler.export_chrome_trace(str(trace))
        return read_events(trace)


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Decoding:
    """Within the context, `batch` sequences with `prompt` random tokens each that have their first token and go on."""

    def __init__(self, llm: LLM, batch: int, prompt: int, tokens: int) -> None:
        """tokens: that each may get."""
        self._engine = llm.engine
        self._params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        generator = torch.Generator().manual_seed(batch)
        self._prompts = torch.randint(llm.config.vocab_size, (batch, prompt), generator=generator).tolist()
        self._ids: list[int] = []

    def __enter__(self) -> Decoding:
        self._ids = [self._engine.submit(prompt, self._params) for prompt in self._prompts]
        waiting = set(self._ids)
        while waiting:
            waiting -= {owner for owner, _ in self._engine.step()}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for request_id in self._ids:
            self._engine.abort(request_id)
        synchronize()

    def land(self, count: int) -> int:
        """Land so many launches; returns the tokens that the first sequence got."""
        first = self._ids[0]
        return sum(owner == first for _ in range(count) for owner, _ in self._engine.step())

    @property
    def context(self) -> int:
        """Tokens of a sequence in the cache, on average, once what is in flight has landed."""
        lengths = [sequence.num_computed for sequence in self._engine.scheduler.running]
        return round(sum(lengths) / len(lengths))


def least_context(most_steps: int, steps: int) -> int:
    """Of sequences that are timed and of which `steps` are recorded; most_steps: of a launch."""
    return 1 + max(_before(most_steps, TIMED), _before(most_steps, _launches(most_steps, steps)))


def _launches(most_steps: int, steps: int) -> int:
    """To record so many steps: one more, and as much before the middle as behind it."""
    return -(-steps // most_steps) + 2


def _before(most_steps: int, launches: int) -> int:
    """Tokens between a prompt and the middle of what is watched. One launch more is in flight when it begins."""
    return most_steps * (2 * (WARM + 1) + launches) // 2


def _decoding(llm: LLM, batch: int, context: int, launches: int) -> Decoding:
    most = llm.engine.runner.most_steps
    before = _before(most, launches)
    if context <= before:
        raise ValueError(f"context must be more than {before} tokens, which run before it, was {context:,}")
    prompt = context - before
    # Those whose prompts come first get a token in every step of the others' prompts.
    return Decoding(llm, batch, prompt, min(most * (WARM + launches + 4) + batch, llm.max_model_len - prompt))


def time_decode(llm: LLM, batch: int, context: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Microseconds of a decode step for the host, one launch after the other, around `context` tokens."""
    with _decoding(llm, batch, context, TIMED) as decoding:
        decoding.land(WARM)
        begin = clock()
        tokens = decoding.land(TIMED)
        return (clock() - begin) / tokens * 1e6


def record_decode(llm: LLM, batch: int, context: int, steps: int, recorder: Record = record) -> Seen:
    """At least `steps` decode steps, whole launches of them, around `context` tokens."""
    most = llm.engine.runner.most_steps
    launches = _launches(most, steps)
    with _decoding(llm, batch, context, launches) as decoding:
        decoding.land(WARM)
        synchronize()
        at = decoding.context
        events = recorder(lambda: decoding.land(launches - 1))
        # Before the first there is nothing that the GPU does while the host gets it ready.
        return _seen(events, (at + most + decoding.context) // 2, skipped=1)


def time_prompt(llm: LLM, tokens: int) -> float:
    """Microseconds from a prompt to its first token; the median."""
    times = []
    for turn in range(2 * PROMPTS):
        begin = time.perf_counter()
        _prompt(llm, tokens, turn)
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times[PROMPTS:])


def record_prompt(llm: LLM, tokens: int, recorder: Record = record) -> Seen:
    """Some prompts, one after the other; each is one step."""
    room = llm.engine.scheduler.max_num_batched_tokens
    if tokens > room:
        raise ValueError(f"prompt_tokens must be at most {room:,}, the tokens of a step, was {tokens:,}")
    _prompt(llm, tokens, -1)

    def work() -> None:
        for turn in range(PROMPTS):
            _prompt(llm, tokens, turn)

    return _seen(recorder(work), tokens)


def _prompt(llm: LLM, tokens: int, seed: int) -> None:
    """One request for one token."""
    generator = torch.Generator().manual_seed(seed % 1000)
    prompt = torch.randint(llm.config.vocab_size, (tokens,), generator=generator).tolist()
    llm.engine.submit(prompt, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    while llm.engine.busy:
        list(llm.engine.step())


def _seen(events: Events, context: int, skipped: int = 0) -> Seen:
    found = timeline.launches(spans_of(events))
    if not found:
        raise ValueError("the profiler saw no launch of the engine on a GPU")
    return Seen(tuple(found[skipped:] or found), host_calls(events) / len(found), context)
