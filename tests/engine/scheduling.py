"""Sequences, a memory simulated slot by slot, and runs of a scheduler over both, for the tests of the scheduler."""

from __future__ import annotations

from collections.abc import Sequence as Many
from weakref import WeakKeyDictionary

import rooflight.engine.scheduler as module
from rooflight import SamplingParams
from rooflight.engine.plan import UNKNOWN, Row, StepPlan
from rooflight.engine.scheduler import Scheduler
from rooflight.engine.sequence import Sequence
from tests.engine.support import assert_conserved

BIG = 2**61 - 1  # CPython gives it the hash of 0
PLAIN, READING = SamplingParams(), SamplingParams(prompt_logprobs=0)
HELPED, BANNED = SamplingParams(logprobs=0), SamplingParams(min_tokens=3)

Shape = tuple[int, int, int, int, bool]


def sequence(request_id: int, prompt: int | list[int], max_tokens: int = 4, params: SamplingParams = PLAIN) -> Sequence:
    """A prompt given by its length has the tokens 100 * request_id, counting up."""
    tokens = [100 * request_id + i for i in range(prompt)] if isinstance(prompt, int) else list(prompt)
    return Sequence(request_id, tokens, len(tokens), len(tokens) + max_tokens, params, 0, frozenset())


def scheduler(
    num_pages: int = 16, page_size: int = 4, max_num_seqs: int = 8, budget: int = 64, prefix_cache: bool = True
) -> Scheduler:
    return Scheduler(num_pages, page_size, max_num_seqs, budget, prefix_cache)


def shape(plan: StepPlan | None) -> list[Shape]:
    """(request, first position, tokens, pages, samples) of each row."""
    assert plan is not None
    return [(r.request_id, r.start, len(r.tokens), len(r.pages), r.samples) for r in plan.rows]


def chunks(plan: StepPlan | None) -> dict[int, int]:
    """Tokens of each request."""
    assert plan is not None
    return {row.request_id: len(row.tokens) for row in plan.rows}


def states(before: Many[int], tokens: Many[int]) -> list[int]:
    """What a make-believe model keeps of tokens: it depends on them and on what it kept of all those before."""
    kept, value = [], before[-1] if before else 17
    for token in tokens:
        value = (value * 31 + token + 1) % 9973
        kept.append(value)
    return kept


def answer(kept: Many[int]) -> int:
    """Its next token, made of all that it kept."""
    value = 5
    for state in kept:
        value = (value * 7 + state) % 9967
    return value


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(answer(states([], tokens)))
    return tokens


class Memory:
    """Does what plans say, slot by slot, in the order of their launches, and checks each of them.

    A step writes where the plan says and its samples are made of what stands in the slots, so a page with two writers,
    the same tokens behind another prefix, a lost token or a wrong start give another token or find nothing.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], int] = {}  # by page and position in it
        self.last: dict[int, int] = {}  # by the place of a row: the token that it got last
        self.said: dict[int, list[int]] = {}  # by request: its tokens, those in flight included

    def run(self, plans: Scheduler, plan: StepPlan) -> dict[int, list[int]]:
        """The tokens that a launch gives each request."""
        size = plans.page_size
        running = {item.request_id: item for item in plans.running}
        _check_plan(plans, plan)
        for item in running.values():  # nobody may rely on what stood behind its last token
            for position in range(item.num_computed, len(item.pages) * size):
                self.states.pop(_slot(item.pages, position, size), None)
        for row in plan.rows:
            item = running[row.request_id]
            if item.pending == 0:
                self.said[row.request_id] = list(item.tokens)
            _check_row(plans, plan, row, item, self.said[row.request_id])
        given: dict[int, list[int]] = {row.request_id: [] for row in plan.rows if row.samples}
        for step in range(plan.steps):
            rows = [row for row in plan.rows if step == 0 or step < plan.gets(row)]
            before = [  # of all rows first: they run side by side
                [self.states[_slot(row.pages, position, size)] for position in range(row.start + step)] for row in rows
            ]
            for row, past in zip(rows, before, strict=True):
                tokens = (self.last[row.place],) if step or row.tokens == (UNKNOWN,) else row.tokens
                new, start = states(past, tokens), row.start + step
                for position, kept in enumerate(new, start):
                    self.states[_slot(row.pages, position, size)] = kept
                if row.samples:
                    token, said = answer(past + new), self.said[row.request_id]
                    assert token == answer(states([], said))  # what it would get alone
                    self.last[row.place] = token
                    said.append(token)
                    given[row.request_id].append(token)
        return given


def _slot(pages: Many[int], position: int, size: int) -> tuple[int, int]:
    return pages[position // size], position % size


def _check_plan(plans: Scheduler, plan: StepPlan) -> None:
    running = {item.request_id: item for item in plans.running if not item.ends_in_flight}
    ids = [row.request_id for row in plan.rows]
    assert ids == [i for i in sorted(running) if i in ids]  # each once, the oldest first
    assert ids[0] == min(running)  # the oldest always gets on
    assert {i for i, item in running.items() if item.num_tokens - item.num_computed == 1} <= set(ids)
    assert sum(len(row.tokens) for row in plan.rows) <= plans.max_num_batched_tokens
    assert sum(len(row.tokens) for row in plan.rows if row.every_logit and not row.samples) <= module.EVERY_LOGIT
    assert len(plans.running) <= plans.max_num_seqs
    on_device = plans.options_on_device
    assert plan.needs_host == any(running[i].reads_prompt if on_device else running[i].needs_host for i in ids)
    assert not plans.in_flight or not (plan.needs_host or plans.in_flight[-1].needs_host)
    assert plan.steps in [1, 2, 4, 8]
    assert plan.steps <= plans.most_steps
    if plan.steps > 1:
        assert plan.is_decode
        assert not plan.needs_host
        assert all(item.num_tokens > item.num_prompt for item in running.values())
        rest = [item.max_len - item.num_tokens for item in running.values()]
        assert plan.steps <= (min(rest) if plans.waiting else max(rest))


def _check_row(plans: Scheduler, plan: StepPlan, row: Row, item: Sequence, said: list[int]) -> None:
    """A row is the next part of its sequence and writes where nobody else reads."""
    size, end = plans.page_size, row.start + len(row.tokens)
    assert len(said) == item.num_tokens
    assert (row.start, row.place, row.limit) == (item.num_computed, item.place, item.max_cached)
    assert row.tokens == (tuple(said[row.start : end]) if end <= len(item.tokens) else (UNKNOWN,))
    assert row.tokens != ()
    assert row.samples == (end == item.num_tokens)
    assert row.every_logit == (item.params is READING and len(said) == item.num_prompt)
    assert row.limit <= item.max_len
    gets = plan.gets(row)
    assert item.num_tokens + gets <= max(item.max_len, item.num_prompt + 1)
    assert row.pages == tuple(item.pages[: -(-(end + max(gets - 1, 0)) // size)])
    for page in row.pages[row.start // size :]:
        assert (plans.pool._holders[page], page in plans.pool._keys) == (1, False)


MEMORIES: WeakKeyDictionary[Scheduler, Memory] = WeakKeyDictionary()


def do(plans: Scheduler, plan: StepPlan) -> dict[int, list[int]]:
    """Run a plan in the one memory of its scheduler."""
    return MEMORIES.setdefault(plans, Memory()).run(plans, plan)


def land(plans: Scheduler, plan: StepPlan, given: dict[int, list[int]]) -> list[tuple[Sequence, int]]:
    return plans.landed(plan, [given[row.request_id] for row in plan.rows if row.samples])


def update(plans: Scheduler, plan: StepPlan, given: dict[int, list[int]]) -> list[Sequence]:
    """Launch and land a plan that ran; the sequences that got tokens."""
    plans.launched(plan)
    return [item for item, _ in land(plans, plan, given)]


def run(plans: Scheduler, steps: int | None = None) -> list[list[Shape]]:
    """Shapes of the next steps; to the end, sequences ending at their lengths."""
    shapes: list[list[Shape]] = []
    while steps is None or len(shapes) < steps:
        plan = plans.plan()
        if plan is None:
            break
        shapes.append(shape(plan))
        assert_conserved(plans)
        for got in update(plans, plan, do(plans, plan)):
            if len(got.tokens) >= got.max_len:
                plans.finish(got, "length")
        assert_conserved(plans)
    return shapes


# What a plan is.
