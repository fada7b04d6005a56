"""Who waits, who runs, what is in flight, and in whose pages. With the scheduler, the only room that knows about pages.

A launch may be planned while others are in flight, `launched` and not `landed`. The device runs them one after the
other, so pages and places of a sequence that has ended may be given away at once, whatever still writes there: those
who get them come later.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Many

from rooflight.engine.outputs import FinishReason
from rooflight.engine.page_pool import ROOT, PagePool
from rooflight.engine.plan import StepPlan
from rooflight.engine.sequence import Sequence
from rooflight.ops import NO_TOKEN


class Ledger:
    """What a scheduler keeps about sequences and pages; see `Scheduler` for the arguments."""

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: bool = True,
        most_steps: int = 1,
        options_on_device: bool = False,
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.page_size = page_size
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each gets a token in every step
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_cache = prefix_cache
        self.most_steps = most_steps
        self.options_on_device = options_on_device
        self.in_flight: deque[StepPlan] = deque()  # launched and not landed, the oldest first
        self.waiting: list[Sequence] = []  # both in the order of request ids, which is that of arrival
        self.running: list[Sequence] = []
        self.preemptions = 0

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def check(self, max_cached: int) -> None:
        """ValueError if a sequence of so many tokens in the cache could never fit the pool."""
        need = self.pages_for(max_cached)
        if need > self.pool.num_pages:
            raise ValueError(
                f"the request may need {max_cached} tokens of KV cache ({need} pages of {self.page_size}), "
                f"the pool has {self.pool.num_pages} pages: lower max_tokens or give the cache more pages"
            )

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence; ValueError if it could never fit the pool."""
        self.check(sequence.max_cached)
        if not self.running and self.pool.free < self.pool.num_pages:
            # Ctrl-C can fall between taking pages and writing down who has them.
            self.pool = PagePool(self.pool.num_pages, self.page_size)
        insort(self.waiting, sequence, key=arrival)

    def cancel(self, request_id: int) -> None:
        """Forget a sequence, waiting or running; unknown ones are no error."""
        index = bisect_left(self.waiting, request_id, key=arrival)
        if index < len(self.waiting) and self.waiting[index].request_id == request_id:
            del self.waiting[index]
        for sequence in self.running:
            if sequence.request_id == request_id:
                self._stop(sequence)
                break

    def launched(self, plan: StepPlan) -> None:
        """Note that a plan is on its way."""
        self.in_flight.append(plan)
        running = self._running
        for row in plan.rows:
            sequence = running.get(row.request_id)
            if sequence is not None:
                gets = plan.gets(row)
                sequence.num_computed = row.start + len(row.tokens) + (gets - 1 if gets else 0)
                sequence.pending += gets

    def landed(self, plan: StepPlan, tokens: Iterable[Many[int]]) -> list[tuple[Sequence, int]]:
        """Record the oldest launch in flight and the tokens that it gave each row that samples.

        Returns the sequences that got some, and how many: nothing behind an end token or a row without a distribution.
        """
        running, given = self._running, iter(tokens)
        advanced = []
        for row in plan.rows:
            new = next(given) if row.samples else ()
            sequence = running.get(row.request_id)
            if sequence is None:  # it has ended, or was cancelled, while the launch was in flight
                continue
            kept = _until_end(new, sequence.end_ids)
            sequence.tokens += kept
            sequence.pending -= plan.gets(row)
            computed = row.start + len(row.tokens) + (len(kept) - 1 if kept else 0)
            if self.prefix_cache and computed // self.page_size > sequence.num_published:
                self._publish(sequence, computed)
            if row.samples:
                advanced.append((sequence, len(kept)))
        self.in_flight.popleft()
        return advanced

    def recall(self) -> None:
        """Forget all that is in flight: its tokens will be planned again."""
        running = self._running
        while self.in_flight:
            for row in self.in_flight[-1].rows:
                sequence = running.get(row.request_id)
                if sequence is not None:
                    sequence.num_computed, sequence.pending = row.start, 0
            self.in_flight.pop()

    @property
    def _running(self) -> dict[int, Sequence]:
        return {sequence.request_id: sequence for sequence in self.running}

    def _publish(self, sequence: Sequence, computed: int) -> None:
        """Share the pages that are full of tokens which have been computed."""
        size = self.page_size
        while (sequence.num_published + 1) * size <= computed:
            number = sequence.num_published
            tokens = sequence.tokens[number * size : (number + 1) * size]
            sequence.link = self.pool.publish(sequence.pages[number], sequence.link, tokens)
            sequence.num_published += 1

    def finish(self, sequence: Sequence, reason: FinishReason, withdraw: bool = False) -> None:
        """End a running sequence. withdraw: nobody may share its pages from now on."""
        sequence.finish_reason = reason
        if withdraw:
            self.pool.withdraw(sequence.pages)
        self._stop(sequence)

    def _preempt(self, sequence: Sequence) -> None:
        self.preemptions += 1
        sequence.preemptions += 1
        self._stop(sequence)
        insort(self.waiting, sequence, key=arrival)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.pages)
        sequence.pages, sequence.num_computed, sequence.num_published, sequence.link = [], 0, 0, ROOT
        sequence.pending, sequence.place = 0, -1


def arrival(sequence: Sequence) -> int:
    return sequence.request_id


def _until_end(tokens: Many[int], end_ids: frozenset[int]) -> Many[int]:
    """As far as they belong to a request. What a launch gives behind that is made of nothing, or nobody's."""
    for index, token in enumerate(tokens):
        if token == NO_TOKEN or token in end_ids:
            return tokens[: index + 1]
    return tokens
