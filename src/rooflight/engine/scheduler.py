"""Who runs in this step.

Continuous batching. A step has room for so many tokens. First every sequence that has its prompt behind it gets one;
what is left goes to prompts, in chunks, the oldest first; then waiting sequences begin, in the order in which they
came. Pages are taken when they are needed. When there are none, the youngest sequence gives back its own and waits in
front of those that came after it; later it computes them again, as far as the prefix cache has not kept them. The
oldest is never stopped, so that every sequence ends.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence as Many
from itertools import count

from rooflight.engine.ledger import Ledger, arrival
from rooflight.engine.page_pool import ROOT
from rooflight.engine.plan import UNKNOWN, Row, StepPlan
from rooflight.engine.sequence import Sequence

# Prompts that share a step while they could fill it: more would all end late.
MOST_PROMPTS = 4
MOST_SHORT = 4  # more of them, if they need no more than a quarter of it
SHARE = 128  # tokens: both numbers grow with the room, to one for each so many of it
EVERY_LOGIT = 256  # tokens of a step whose logits are wanted beside the last ones: a vocabulary of numbers for each


class Scheduler(Ledger):
    """Continuous batches over a page pool; see the module text.

    max_num_seqs: sequences that run together, never more than a step has room for. max_num_batched_tokens: that room.
    most_steps: decode steps of a launch; a launch has 1, 2, 4, 8, … of them. options_on_device: the runner needs the
    host for prompt_logprobs alone; else also to change logits and to report log-probabilities.
    """

    def plan(self) -> StepPlan | None:
        """The next launch; asked again before it is `launched`, it is the same one.

        None: with nothing in flight, nothing is left to run; else the oldest launch in flight must land first, since
        nothing is left until then, or what comes next depends on what it gives.
        """
        if (self.in_flight and self.in_flight[-1].needs_host) or not self._grow():
            return None
        self._begin()
        left = {s: tokens for s in self.running if (tokens := _left(s)) > 0}
        prompts = [s for s, tokens in left.items() if tokens > 1]
        room = self.max_num_batched_tokens - (len(left) - len(prompts))
        chunks = dict(zip(prompts, _chunks([left[s] for s in prompts], room), strict=True))
        logits = EVERY_LOGIT
        for sequence in prompts:
            if sequence.reads_prompt:
                chunks[sequence] = min(chunks[sequence], logits)
                logits -= chunks[sequence]
        parts = [(s, tokens) for s in left if (tokens := chunks.get(s, 1)) > 0]
        needs_host = any(self._needs_host(s) for s, _ in parts)
        if not parts or (needs_host and self.in_flight):
            return None
        steps = 1 if needs_host or prompts else self._steps(list(left))
        return StepPlan(tuple([self._row(s, tokens, steps) for s, tokens in parts]), steps, needs_host)

    def _needs_host(self, sequence: Sequence) -> bool:
        if not self.options_on_device or sequence.fills_tables:
            return sequence.needs_host
        return sequence.reads_prompt

    def _grow(self) -> bool:
        """Pages for the next token of those that need one; the youngest give way.

        False if one would have to, but launches are in flight: what they give it must be known, and may end others.
        """
        pool, size = self.pool, self.page_size
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            # By one: chunks of prompts have their pages.
            tokens = len(sequence.tokens) + sequence.pending
            if tokens > len(sequence.pages) * size and not sequence.ends_in_flight:
                if pool.free == 0 and self.in_flight:
                    return False
                while pool.free == 0 and self.running[-1] is not sequence:
                    self._preempt(self.running[-1])
                if pool.free == 0:
                    self._preempt(sequence)
                    break
                sequence.pages += pool.take(1)
            index += 1
        return True

    def _steps(self, sequences: list[Sequence]) -> int:
        """Decode steps of a launch of these; takes the pages that they need, and stops nobody for them."""
        # Who runs the last token of its prompt gets its first one soon.
        if self.most_steps == 1 or any(s.num_tokens == s.num_prompt for s in sequences):
            return 1
        rest = [s.max_len - s.num_tokens for s in sequences]
        # Whoever waits may begin when one of them ends.
        most = min(self.most_steps, min(rest) if self.waiting else max(rest))
        steps = 1 << (max(most, 1).bit_length() - 1)
        while steps > 1:
            ends = [min(s.num_computed + steps, s.max_cached) for s in sequences]
            missing = [max(self.pages_for(end) - len(s.pages), 0) for s, end in zip(sequences, ends, strict=True)]
            if sum(missing) <= self.pool.free:
                for sequence, pages in zip(sequences, missing, strict=True):
                    sequence.pages += self.pool.take(pages)
                break
            steps //= 2
        return steps

    def _begin(self) -> None:
        """Admit waiting sequences, in order, while there is room for their first tokens and for all their pages."""
        if not self.waiting:
            return
        left = [_left(s) for s in self.running]
        prompts = [tokens for tokens in left if tokens > 1]
        wanted, many, room = sum(prompts), len(prompts), self.max_num_batched_tokens - left.count(1)
        taken = {s.place for s in self.running}
        places = (place for place in count() if place not in taken)
        while self.waiting and len(self.running) < self.max_num_seqs:
            sequence = self.waiting[0]
            most = max(MOST_PROMPTS, room // SHARE)
            if 4 * _left(sequence) <= room:
                most += max(MOST_SHORT, room // SHARE)
            if many >= room or (wanted >= room and many >= most) or not self._take_pages(sequence):
                break
            del self.waiting[0]
            sequence.place = next(places)
            insort(self.running, sequence, key=arrival)
            tokens = _left(sequence)
            if tokens == 1:
                room -= 1
            else:
                many, wanted = many + 1, wanted + tokens

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

    def _row(self, sequence: Sequence, tokens: int, steps: int) -> Row:
        start, limit = sequence.num_computed, sequence.max_cached
        end = start + tokens
        return Row(
            sequence.request_id,
            start,
            tuple(sequence.tokens[start:end]) or (UNKNOWN,),
            tuple(sequence.pages[: self.pages_for(end if steps == 1 else min(start + steps, limit))]),
            end == len(sequence.tokens) + sequence.pending,
            sequence.reads_prompt,
            sequence.place,
            limit,
        )


def _left(sequence: Sequence) -> int:
    """Tokens that it would run in a step with room for everything; none if what is in flight ends it."""
    if sequence.pending and sequence.ends_in_flight:
        return 0
    left = len(sequence.tokens) + sequence.pending - sequence.num_computed
    return min(left, EVERY_LOGIT) if left > 1 and sequence.reads_prompt else left


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
