"""Random histories that check every slot of the memory they describe."""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter, deque
from typing import ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import rooflight.engine.scheduler as module
from rooflight import SamplingParams
from rooflight.engine.plan import StepPlan
from rooflight.engine.scheduler import Scheduler
from rooflight.engine.sequence import Sequence
from tests.engine.scheduling import (
    BANNED,
    BIG,
    HELPED,
    PLAIN,
    READING,
    Memory,
    alone,
    land,
    sequence,
)
from tests.engine.support import assert_conserved

# Random histories.

# Few beginnings, so that they meet; the pages of 0 and BIG have one hash.
TEXTS = [
    [0, BIG] * 7,
    [0, BIG, 0, BIG, 0, BIG, BIG, 0, 5, 6, 7, 8, 9, 10],
    [BIG, 0] * 3 + [5] * 8,
    [0, BIG, BIG, 0] + [5] * 10,
]
PLACES = st.integers(0, 7)  # in a list, counted round and round
MOST_OPEN = 8
PARAMS = [PLAIN, PLAIN, PLAIN, PLAIN, READING, HELPED, BANNED]
ENDS = frozenset(range(0, 9967, 29))  # now and then an early end


class Histories(RuleBasedStateMachine):
    """Submit, plan, launch, land, step, cancel (also in mid-step), recall, and `Memory` does what the plans say.

    ahead: launches in flight while another is planned. most_steps: of a launch. Their tokens are known when they land.

    Some requests have several choices, which come as the engine sends them: numbered together, and queued when the
    first has its first token. Some read their prompt, some end early, some with an error.
    """

    num_pages: ClassVar[int]
    ahead: ClassVar[int] = 0
    most_steps: ClassVar[int] = 1
    counts: ClassVar[Counter[str]]

    @initialize(
        page_size=st.integers(1, 5), max_seqs=st.integers(1, 6), budget=st.integers(1, 16), prefix_cache=st.booleans()
    )
    def start(self, page_size: int, max_seqs: int, budget: int, prefix_cache: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        for name, value in {"EVERY_LOGIT": 3, "MOST_PROMPTS": 2, "MOST_SHORT": 1}.items():
            self.patch.setattr(module, name, value)
        self.plans = Scheduler(self.num_pages, page_size, max_seqs, budget, prefix_cache, self.most_steps)
        self.memory = Memory()
        self.open: dict[int, Sequence] = {}
        self.later: dict[int, list[Sequence]] = {}  # by the request whose first token they wait for
        self.queued: list[int] = []  # and never begun
        self.texts = list(TEXTS)
        self.planned: StepPlan | None = None  # asked for and not run
        self.flight: deque[tuple[StepPlan, dict[int, list[int]]]] = deque()
        self.next_id = 0

    @precondition(lambda self: len(self.open) < MOST_OPEN)
    @rule(
        text=PLACES,
        length=st.integers(1, 14),
        max_tokens=st.integers(1, 12),
        params=st.sampled_from(PARAMS),
        choices=st.sampled_from([1, 1, 1, 3]),
    )
    def submit(self, text: int, length: int, max_tokens: int, params: SamplingParams, choices: int) -> None:
        prompt = self.texts[text % len(self.texts)][:length]
        others = PLAIN if params is READING else params
        items = [sequence(self.next_id + i, prompt, max_tokens, others if i else params) for i in range(choices)]
        for item in items:
            item.end_ids = ENDS
        self.next_id += choices
        cached = len(prompt) + max_tokens - 1
        if -(-cached // self.plans.page_size) > self.num_pages:
            with pytest.raises(ValueError, match=f"may need {cached} tokens"):
                self.plans.add(items[0])
            return
        self.add(items[0])
        self.later[items[0].request_id] = items[1:]

    def add(self, item: Sequence) -> None:
        self.plans.add(item)
        self.open[item.request_id] = item
        insort(self.queued, item.request_id)
        self.planned = None

    @precondition(lambda self: self.open)
    @rule(place=PLACES)
    def cancel(self, place: int) -> None:
        self.forget(list(self.open)[place % len(self.open)])

    def forget(self, request_id: int) -> None:
        free, item = self.plans.pool.free, self.open.pop(request_id)
        alone_on = [page for page in item.pages if self.plans.pool._holders[page] == 1]
        self.plans.cancel(request_id)
        assert self.plans.pool.free == free + len(alone_on)
        self.later.pop(request_id, None)
        self.queued = [queued for queued in self.queued if queued != request_id]
        self.planned = None

    @rule()
    def plan(self) -> None:
        """Ask for a plan and do not run it."""
        self.planned = self.checked_plan()

    @rule()
    def launch(self) -> None:
        """One more, if it may be; what is in flight need not land first."""
        if len(self.flight) <= self.ahead and (plan := self.checked_plan()) is not None:
            self.planned = None
            self.counts["steps"] += 1
            self.counts["ahead"] += len(self.flight) > 0
            self.counts["several steps"] += plan.steps > 1
            self.flight.append((plan, self.memory.run(self.plans, plan)))
            self.plans.launched(plan)

    @precondition(lambda self: self.flight)
    @rule()
    def recall(self) -> None:
        """As if the launches in flight had never been; what they wrote stands where nobody looks."""
        self.flight.clear()
        self.plans.recall()
        self.planned = None
        assert not any(item.pending for item in self.plans.running)

    @rule()
    def step(self) -> None:
        self.advance()

    @precondition(lambda self: self.open)
    @rule(place=PLACES)
    def step_with_a_cancel_in_the_middle(self, place: int) -> None:
        self.advance(list(self.open)[place % len(self.open)])

    def checked_plan(self) -> StepPlan | None:
        """A plan, and whether it stops and begins those whom it should."""
        plans = self.plans
        before, stops = list(plans.running), [item.preemptions for item in plans.running]
        going = [item for item in before if not item.ends_in_flight]
        growing = sum(item.num_tokens > len(item.pages) * plans.page_size for item in going)
        enough = growing <= plans.pool.free
        plan = plans.plan()
        assert self.planned in (None, plan)
        if self.flight:  # it lands first for a reason only
            helped = self.flight[-1][0].needs_host or any(item.needs_host for item in plans.running)
            assert plan is not None or helped or not enough or all(item.ends_in_flight for item in plans.running)
            assert enough or plan is None
            assert [item.preemptions for item in before] == stops
        stopped = [item.preemptions > count for item, count in zip(before, stops, strict=True)]
        assert stopped == sorted(stopped)  # the youngest, not one of the others
        assert not (enough and any(stopped))
        assert not (stopped and stopped[0])  # never the oldest
        begun = [item for item in plans.running if item not in before]
        first = [item.request_id for item in begun if item.preemptions == 0]
        assert first == self.queued[: len(first)]
        self.queued = self.queued[len(first) :]
        if begun and plans.waiting:
            assert begun[-1].request_id < plans.waiting[0].request_id  # nobody was overtaken
        if plan is not None and plans.waiting and len(plans.running) < plans.max_num_seqs:
            room = plans.max_num_batched_tokens - sum(len(row.tokens) for row in plan.rows)
            need = plans.pages_for(len(plans.waiting[0].tokens)) + len(plans.running)
            reading = any(item.reads_prompt for item in plans.running)  # which may run less than their share
            assert room == 0 or reading or need > plans.pool.free  # it waits for a reason
        self.counts["stopped"] += sum(stopped)
        self.counts["hits"] += sum(item.num_cached > 0 for item in begun if item.preemptions == 0)
        self.counts["resumed from the cache"] += sum(item.num_computed > 0 for item in begun if item.preemptions > 0)
        return plan

    def advance(self, cancelled: int | None = None) -> None:
        """What the engine does: as many launches as may be in flight, then the oldest lands."""
        for _ in range(1 + self.ahead):
            self.launch()
        if not self.flight:
            assert not self.open
            return
        if cancelled is not None:
            self.counts["cancelled in a step"] += any(cancelled == row.request_id for row in self.flight[0][0].rows)
            self.forget(cancelled)
        self.land()

    @precondition(lambda self: self.flight)
    @rule()
    def land(self) -> None:
        plan, given = self.flight.popleft()
        self.planned = None
        advanced = land(self.plans, plan, given)
        assert [item.request_id for item, _ in advanced] == [request for request in given if request in self.open]
        self.counts["landed for nobody"] += len(given) - len(advanced)
        for item, count in advanced:
            for choice in self.later.pop(item.request_id, []):
                self.add(choice)
            new = given[item.request_id][:count]
            assert item.tokens[-count:] == new
            assert all(token not in ENDS for token in new[:-1])
            assert count == len(given[item.request_id]) or new[-1] in ENDS
            self.counts["cut"] += count < len(given[item.request_id])
            failed = any(token % 29 == 1 for token in new)  # which only the engine can know
            if failed or len(item.tokens) == item.max_len or new[-1] in ENDS:
                self.end(item, failed)

    def end(self, item: Sequence, failed: bool) -> None:
        pages = set(item.pages)
        self.plans.finish(item, "error" if failed else "length", withdraw=failed)
        del self.open[item.request_id]
        assert item.tokens == alone(item.tokens[: item.num_prompt], item.num_generated)
        if failed:
            assert not pages & set(self.plans.pool._keys)
        else:
            self.texts[len(TEXTS) :] = [*self.texts[-3:], item.tokens][-4:]  # a next turn may begin with it
        self.counts["failed" if failed else "ended"] += 1

    def drain(self) -> None:
        """All end, and soon: the oldest that runs gets on in every step, and a late one stops the others once."""
        late = [choice for choices in self.later.values() for choice in choices]
        limit = (1 + len(late)) * (1 + self.ahead) * (1 + sum(item.max_len for item in [*self.open.values(), *late]))
        while self.open or self.flight:
            self.advance()
            limit -= 1
            assert limit >= 0
        assert self.plans.plan() is None
        assert self.plans.pool.free == self.num_pages
        assert_conserved(self.plans)

    @invariant()
    def pages_are_conserved(self) -> None:
        assert_conserved(self.plans)
        if not self.plans.prefix_cache:
            assert self.plans.pool.shareable == 0

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        waiting = [item.request_id for item in self.plans.waiting]
        running = [item.request_id for item in self.plans.running]
        assert (waiting, running) == (sorted(waiting), sorted(running))
        assert sorted(waiting + running) == sorted(self.open)
        assert not any(item.pages or item.num_computed or item.pending for item in self.plans.waiting)

    def teardown(self) -> None:
        if hasattr(self, "plans"):
            try:
                self.drain()
            finally:
                self.patch.undo()


def machine(pages: int, ahead: int, steps: int) -> type[Histories]:
    name = f"Pages{pages}Ahead{ahead}Steps{steps}"
    kept = {"num_pages": pages, "ahead": ahead, "most_steps": steps, "counts": Counter(), "__module__": __name__}
    return type(name, (Histories,), kept)


MODES = [(0, 1), (0, 4), (1, 1), (1, 4), (1, 8), (2, 8)]  # launches ahead, steps of a launch
MACHINES = [machine(pages, *mode) for mode in MODES for pages in (3, 8, 60)]


@pytest.mark.parametrize("histories", MACHINES)
def test_short_histories(histories: type[Histories]) -> None:
    examples = 100 if histories in MACHINES[:3] else 30
    run_state_machine_as_test(histories, settings=settings(max_examples=examples, stateful_step_count=40))


@pytest.mark.parametrize("histories", MACHINES)
def test_thousands_of_random_steps(histories: type[Histories]) -> None:
    """Hypothesis makes short histories, which it can shrink; these are long, so that much happens in them."""
    counts, many = histories.counts, 10_000 if histories in MACHINES[:3] else 5_000
    counts.clear()
    seed = 0
    while counts["steps"] < many:
        draw = random.Random(seed)
        machine = histories()
        machine.start(draw.randint(1, 5), draw.randint(1, 6), draw.randint(1, 16), prefix_cache=seed % 4 > 0)
        try:
            for _ in range(200):
                move(machine, draw)
                machine.pages_are_conserved()
                machine.everybody_is_somewhere_once()
            machine.drain()
        finally:
            machine.patch.undo()
        seed += 1
    assert counts["hits"] > 0.03 * many
    assert min(counts[what] for what in ("ended", "failed", "cancelled in a step")) > 0.01 * many
    if histories.num_pages < 10:
        assert counts["stopped"] > 0.01 * many
        assert counts["resumed from the cache"] > 0.004 * many
    if histories.ahead:
        assert min(counts["ahead"], counts["landed for nobody"]) > 0.03 * many
    if histories.most_steps > 1:
        assert counts["several steps"] > 0.03 * many
        assert counts["cut"] > 0.005 * many


MOVES = {"submit": 6, "step": 12, "launch": 3, "land": 3, "cancel in a step": 1, "cancel": 1, "plan": 2, "recall": 0.2}


def move(machine: Histories, draw: random.Random) -> None:
    kind, place = draw.choices(list(MOVES), list(MOVES.values()))[0], draw.randrange(8)
    if kind == "step":
        machine.step()
    elif kind == "plan":
        machine.plan()
    elif kind == "launch":
        machine.launch()
    elif kind == "land" and machine.flight:
        machine.land()
    elif kind == "recall" and machine.flight:
        machine.recall()
    elif kind == "submit" and len(machine.open) < MOST_OPEN:
        params, choices = draw.choice(PARAMS), draw.choice([1, 1, 1, 3])
        machine.submit(place, draw.randint(1, 14), draw.randint(1, 12), params, choices)
    elif kind == "cancel" and machine.open:
        machine.cancel(place)
    elif kind == "cancel in a step" and machine.open:
        machine.step_with_a_cancel_in_the_middle(place)
