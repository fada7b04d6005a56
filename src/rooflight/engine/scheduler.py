"""Who runs in this step. The only room that knows about pages.

This is the simplest scheduler that is right: a static batch. Requests are taken in order while their pages fit, which
are reserved for the prompt and every token they may generate but the last; their prompts are run one after the other in
chunks, then all decode together until the last has ended; then comes the next batch. A step's plan is plain data.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rooflight.engine.kv_cache import PagePool
from rooflight.engine.outputs import FinishReason
from rooflight.engine.params import SamplingParams


@dataclass
class Sequence:
    """One request on its way: its tokens so far, how many are in the cache, and its pages."""

    request_id: int
    tokens: list[int]
    num_prompt: int
    max_len: int  # tokens at which it must end: prompt + max_tokens, or the context
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    finish_reason: FinishReason | None = None

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_cached(self) -> int:
        """Most tokens it may have in the cache: the last one generated is delivered and never run."""
        return max(self.max_len - 1, self.num_prompt)


@dataclass(frozen=True)
class Row:
    """The part of one sequence that runs in a step: tokens at positions start, start + 1, …"""

    request_id: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    samples: bool  # whether the last token's logits are wanted


@dataclass(frozen=True)
class StepPlan:
    rows: tuple[Row, ...]

    @property
    def is_decode(self) -> bool:
        return all(row.start > 0 and len(row.tokens) == 1 for row in self.rows)


class Scheduler:
    """Static batches over a page pool; see the module text."""

    def __init__(self, num_pages: int, page_size: int, max_num_seqs: int, prefill_chunk: int) -> None:
        self.pool = PagePool(num_pages)
        self.page_size = page_size
        self.max_num_seqs = max_num_seqs
        self.prefill_chunk = prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; ValueError if it could never fit the pool."""
        need = self.pages_for(sequence.max_cached)
        if need > self.pool.num_pages:
            raise ValueError(
                f"the request may need {sequence.max_cached} tokens of KV cache ({need} pages of {self.page_size}), "
                f"the pool has {self.pool.num_pages} pages: lower max_tokens or give the cache more pages"
            )
        self.waiting.append(sequence)

    def cancel(self, request_id: int) -> None:
        """Forget a sequence, waiting or running; unknown ones are no error."""
        self.waiting = deque(s for s in self.waiting if s.request_id != request_id)
        for sequence in [s for s in self.running if s.request_id == request_id]:
            self._end(sequence)

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing is left to run."""
        if not self.running:
            self._start_batch()
        for sequence in self.running:
            if sequence.num_computed < len(sequence.tokens) - 1 or sequence.num_computed == 0:
                return StepPlan((self._row(sequence, self.prefill_chunk),))
        return StepPlan(tuple(self._row(sequence, 1) for sequence in self.running)) if self.running else None

    def _start_batch(self) -> None:
        while self.waiting and len(self.running) < self.max_num_seqs:
            need = self.pages_for(self.waiting[0].max_cached)
            if need > self.pool.free:
                break
            sequence = self.waiting.popleft()
            sequence.pages = self.pool.take(need)
            self.running.append(sequence)

    def _row(self, sequence: Sequence, limit: int) -> Row:
        start = sequence.num_computed
        end = min(start + limit, len(sequence.tokens))
        pages = tuple(sequence.pages[: self.pages_for(end)])
        tokens = tuple(sequence.tokens[start:end])
        return Row(sequence.request_id, start, tokens, pages, samples=end == len(sequence.tokens))

    def update(self, plan: StepPlan, sampled: dict[int, int]) -> list[Sequence]:
        """Record a step that ran and the tokens it gave; return the sequences that got one."""
        by_id = {sequence.request_id: sequence for sequence in self.running}
        advanced = []
        for row in plan.rows:
            sequence = by_id.get(row.request_id)
            if sequence is None:  # cancelled while the step ran
                continue
            sequence.num_computed = row.start + len(row.tokens)
            if row.samples:
                sequence.tokens.append(sampled[row.request_id])
                advanced.append(sequence)
        return advanced

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.finish_reason = reason
        self._end(sequence)

    def _end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.pages)
        sequence.pages = []
