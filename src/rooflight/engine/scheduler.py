"""Who runs in this step. The only room that knows about pages.

Continuous batching. A step has room for so many tokens. First every sequence that has its prompt behind it gets one;
what is left goes to prompts, in chunks, the oldest first; then waiting sequences begin, in the order in which they
came. Pages are taken when they are needed. When there are none, the youngest sequence gives back its own and waits in
front of those that came after it; later it computes them again, as far as the prefix cache has not kept them. The
oldest is never stopped, so that every sequence ends.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from rooflight.engine.outputs import FinishReason
from rooflight.engine.page_pool import ROOT, PagePool
from rooflight.engine.params import SamplingParams
from rooflight.engine.plan import Row, StepPlan

MOST_PROMPTS = 4  # that share a step while they could fill it: more would all end late
MOST_SHORT = 4  # more of them, if they need no more than a quarter of it
EVERY_LOGIT = 256  # tokens of a step whose logits are wanted beside the last ones: a vocabulary of numbers for each


@dataclass(slots=True, eq=False)
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
    num_cached: int = 0  # prompt tokens that the prefix cache had when it first began
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    num_published: int = 0  # pages
    link: int = ROOT  # of the last of them

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_cached(self) -> int:
        """Most tokens it may have in the cache: the last one generated is delivered and never run."""
        return max(self.max_len - 1, self.num_prompt)

    @property
    def reads_prompt(self) -> bool:
        """Whether it needs the logits of its whole prompt, and so no part of it from the cache."""
        return self.params.prompt_logprobs is not None and self.num_generated == 0


class Scheduler:
    """Continuous batches over a page pool; see the module text.

    max_num_seqs: sequences that run together, never more than a step has room for. max_num_batched_tokens: that room.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefix_cache: bool = True,
    ) -> None:
        self.pool = PagePool(num_pages, page_size)
        self.page_size = page_size
        self.max_num_seqs = min(max_num_seqs, max_num_batched_tokens)  # each gets a token in every step
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_cache = prefix_cache
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
        insort(self.waiting, sequence, key=_arrival)

    def cancel(self, request_id: int) -> None:
        """Forget a sequence, waiting or running; unknown ones are no error."""
        place = bisect_left(self.waiting, request_id, key=_arrival)
        if place < len(self.waiting) and self.waiting[place].request_id == request_id:
            del self.waiting[place]
        for sequence in self.running:
            if sequence.request_id == request_id:
                self._stop(sequence)
                break

    def plan(self) -> StepPlan | None:
        """The next step, or None when nothing is left to run. Asked again before `update`, it is the same one."""
        self._grow()
        self._begin()
        prompts = [s for s in self.running if _left(s) > 1]
        room = self.max_num_batched_tokens - (len(self.running) - len(prompts))
        chunks = dict(zip((s.request_id for s in prompts), _chunks([_left(s) for s in prompts], room), strict=True))
        logits = EVERY_LOGIT
        for sequence in prompts:
            if sequence.reads_prompt:
                chunks[sequence.request_id] = min(chunks[sequence.request_id], logits)
                logits -= chunks[sequence.request_id]
        rows = [self._row(s, count) for s in self.running if (count := chunks.get(s.request_id, 1)) > 0]
        return StepPlan(tuple(rows)) if rows else None

    def _grow(self) -> None:
        """Pages for the next token of those that need one; the youngest give way."""
        pool, size = self.pool, self.page_size
        place = 0
        while place < len(self.running):
            sequence = self.running[place]
            if len(sequence.tokens) > len(sequence.pages) * size:  # by one: chunks of prompts have their pages
                while pool.free == 0 and self.running[-1] is not sequence:
                    self._preempt(self.running[-1])
                if pool.free == 0:
                    self._preempt(sequence)
                    break
                sequence.pages += pool.take(1)
            place += 1

    def _begin(self) -> None:
        """Admit waiting sequences, in order, while there is room for their first tokens and for all their pages."""
        if not self.waiting:
            return
        prompts = [left for s in self.running if (left := _left(s)) > 1]
        wanted, room = sum(prompts), self.max_num_batched_tokens - (len(self.running) - len(prompts))
        many = len(prompts)
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            most = MOST_PROMPTS + (MOST_SHORT if 4 * _left(sequence) <= room else 0)
            if many >= room or (wanted >= room and many >= most) or not self._take_pages(sequence):
                break
            del self.waiting[0]
            insort(self.running, sequence, key=_arrival)
            if _left(sequence) == 1:
                room -= 1
            else:
                many, wanted = many + 1, wanted + _left(sequence)

    def _take_pages(self, sequence: Sequence) -> bool:
        """Pages for all tokens that a sequence has, shared as far as they can be; False if there are too few."""
        need = self.pages_for(len(sequence.tokens))
        shared: list[int] = []
        link = ROOT
        if self.prefix_cache and not sequence.reads_prompt:
            # One token at least is left to run: its logits give the next one.
            shared, link = self.pool.share(sequence.tokens, (len(sequence.tokens) - 1) // self.page_size)
        # A page for each that runs already, or else the newcomer would soon be stopped again.
        if need - len(shared) + len(self.running) > self.pool.free:
            self.pool.give_back(shared)
            return False
        sequence.pages = shared + self.pool.take(need - len(shared))
        sequence.num_computed = len(shared) * self.page_size
        sequence.num_published, sequence.link = len(shared), link
        if sequence.preemptions == 0:
            sequence.num_cached = min(sequence.num_computed, sequence.num_prompt)
        return True

    def _row(self, sequence: Sequence, count: int) -> Row:
        start, tokens = sequence.num_computed, sequence.tokens
        end = start + count
        return Row(
            sequence.request_id,
            start,
            tuple(tokens[start:end]),
            tuple(sequence.pages[: -(-end // self.page_size)]),
            end == len(tokens),
            sequence.reads_prompt,
        )

    def update(self, plan: StepPlan, sampled: dict[int, int]) -> list[Sequence]:
        """Record a step that ran and the tokens it gave; return the sequences that got one."""
        by_id = {sequence.request_id: sequence for sequence in self.running}
        advanced = []
        for row in plan.rows:
            sequence = by_id.get(row.request_id)
            if sequence is None:  # cancelled while the step ran
                continue
            sequence.num_computed = row.start + len(row.tokens)
            if self.prefix_cache and sequence.num_computed // self.page_size > sequence.num_published:
                self._publish(sequence)
            if row.samples:
                sequence.tokens.append(sampled[row.request_id])
                advanced.append(sequence)
        return advanced

    def _publish(self, sequence: Sequence) -> None:
        size = self.page_size
        while (sequence.num_published + 1) * size <= sequence.num_computed:
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
        insort(self.waiting, sequence, key=_arrival)

    def _stop(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.pool.give_back(sequence.pages)
        sequence.pages, sequence.num_computed, sequence.num_published, sequence.link = [], 0, 0, ROOT


def _arrival(sequence: Sequence) -> int:
    return sequence.request_id


def _left(sequence: Sequence) -> int:
    """Tokens that it would run in a step with room for everything."""
    left = len(sequence.tokens) - sequence.num_computed
    return min(left, EVERY_LOGIT) if sequence.reads_prompt else left


def _chunks(wanted: Many[int], room: int) -> list[int]:
    """Tokens of each prompt in a step, the oldest first.

    The oldest gets half of the room, the next half of what is left, and so on: a short prompt behind a long one need
    not wait for its end, and the long one gets on. What the young leave goes to the old.
    """
    chunks = []
    for place, want in enumerate(wanted):
        last = place == len(wanted) - 1
        chunks.append(min(want, room if last else (room + 1) // 2))
        room -= chunks[-1]
    for place, want in enumerate(wanted):
        more = min(want - chunks[place], room)
        chunks[place] += more
        room -= more
    return chunks
