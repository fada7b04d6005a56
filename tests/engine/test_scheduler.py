"""Plans as plain data, and random histories that check every slot of the memory they describe."""

from __future__ import annotations

import random
from bisect import insort
from collections import Counter
from collections.abc import Sequence as Many
from typing import ClassVar
from weakref import WeakKeyDictionary

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import rooflight.engine.scheduler as module
from rooflight import SamplingParams
from rooflight.engine.plan import Row, StepPlan
from rooflight.engine.scheduler import Scheduler, Sequence
from tests.engine.support import assert_conserved

BIG = 2**61 - 1  # CPython gives it the hash of 0
PLAIN, READING = SamplingParams(), SamplingParams(prompt_logprobs=0)

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
    """Does what plans say, slot by slot, and checks each of them.

    A step writes where the plan says and its samples are made of what stands in the slots, so a page with two writers,
    the same tokens behind another prefix, a lost token or a wrong start give another token or find nothing.
    """

    def __init__(self) -> None:
        self.states: dict[tuple[int, int], int] = {}  # by page and place in it

    def run(self, plans: Scheduler, plan: StepPlan) -> dict[int, int]:
        """The tokens that a step samples."""
        size = plans.page_size
        running = {item.request_id: item for item in plans.running}
        ids = [row.request_id for row in plan.rows]
        assert ids == [i for i in sorted(running) if i in ids]  # each once, the oldest first
        assert ids[0] == min(running)  # the oldest always gets on
        assert {i for i, item in running.items() if len(item.tokens) - item.num_computed == 1} <= set(ids)
        assert sum(len(row.tokens) for row in plan.rows) <= plans.max_num_batched_tokens
        assert sum(len(row.tokens) for row in plan.rows if row.every_logit and not row.samples) <= module.EVERY_LOGIT
        assert len(running) <= plans.max_num_seqs
        for item in running.values():  # nobody may rely on what stood behind its last token
            for position in range(item.num_computed, len(item.pages) * size):
                self.states.pop(_slot(item.pages, position, size), None)
        before = [  # of all rows first: they run side by side
            [self.states[_slot(row.pages, position, size)] for position in range(row.start)] for row in plan.rows
        ]
        sampled = {}
        for row, past in zip(plan.rows, before, strict=True):
            item = running[row.request_id]
            _check(plans, row, item)
            new = states(past, row.tokens)
            places = range(row.start, row.start + len(row.tokens))
            self.states.update({_slot(row.pages, place, size): kept for place, kept in zip(places, new, strict=True)})
            if row.samples:
                sampled[row.request_id] = answer(past + new)
                assert sampled[row.request_id] == answer(states([], item.tokens))  # what it would get alone
        return sampled


def _slot(pages: Many[int], position: int, size: int) -> tuple[int, int]:
    return pages[position // size], position % size


def _check(plans: Scheduler, row: Row, item: Sequence) -> None:
    """A row is the next part of its sequence and writes where nobody else reads."""
    size, end = plans.page_size, row.start + len(row.tokens)
    assert row.start == item.num_computed
    assert row.tokens == tuple(item.tokens[row.start : end]) != ()
    assert row.pages == tuple(item.pages[: -(-end // size)])
    assert row.samples == (end == len(item.tokens))
    assert row.every_logit == (item.params is READING and item.num_generated == 0)
    for page in row.pages[row.start // size :]:
        assert (plans.pool._holders[page], page in plans.pool._keys) == (1, False)


MEMORIES: WeakKeyDictionary[Scheduler, Memory] = WeakKeyDictionary()


def do(plans: Scheduler, plan: StepPlan) -> dict[int, int]:
    """Run a plan in the one memory of its scheduler."""
    return MEMORIES.setdefault(plans, Memory()).run(plans, plan)


def run(plans: Scheduler, steps: int | None = None) -> list[list[Shape]]:
    """Shapes of the next steps; to the end, sequences ending at their lengths."""
    shapes: list[list[Shape]] = []
    while steps is None or len(shapes) < steps:
        plan = plans.plan()
        if plan is None:
            break
        shapes.append(shape(plan))
        assert_conserved(plans)
        for got in plans.update(plan, do(plans, plan)):
            if len(got.tokens) >= got.max_len:
                plans.finish(got, "length")
        assert_conserved(plans)
    return shapes


# What a plan is.


@pytest.mark.parametrize(
    ("num_prompt", "steps"),
    [
        (1, [(0, 1, 1, True)]),
        (3, [(0, 3, 1, True)]),
        (4, [(0, 4, 1, True)]),
        (5, [(0, 4, 1, False), (4, 1, 2, True)]),
        (8, [(0, 4, 1, False), (4, 4, 2, True)]),
        (9, [(0, 4, 1, False), (4, 4, 2, False), (8, 1, 3, True)]),
    ],
)
def test_a_prompt_runs_in_chunks_and_only_the_last_one_samples(
    num_prompt: int, steps: list[tuple[int, int, int, bool]]
) -> None:
    plans = scheduler(budget=4)
    plans.add(sequence(0, num_prompt, max_tokens=1))
    assert run(plans) == [[(0, *step)] for step in steps]


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_chunks_are_consecutive_parts_of_the_prompt(budget: int) -> None:
    plans = scheduler(budget=budget)
    plans.add(sequence(3, 30, max_tokens=1))
    tokens: list[int] = []
    while (plan := plans.plan()) is not None:
        (row,) = plan.rows
        assert row.start == len(tokens)
        assert len(row.tokens) == min(budget, 30 - row.start)
        tokens.extend(row.tokens)
        for got in plans.update(plan, {3: 7} if row.samples else {}):
            plans.finish(got, "length")
    assert tokens == [300 + i for i in range(30)]


def test_a_plan_is_plain_data_that_can_be_written_down() -> None:
    plans = scheduler(budget=4)
    plans.add(sequence(2, 5, max_tokens=3))
    first = plans.plan()
    assert first == StepPlan((Row(2, 0, (200, 201, 202, 203), (0,), False),))
    assert first == eval(repr(first))
    assert len({first, plans.plan()}) == 1
    plans.update(first, {})
    last = plans.plan()
    assert last == StepPlan((Row(2, 4, (204,), (0, 1), True),))
    assert last.is_decode


def test_a_prompt_of_one_token_is_no_decode_step() -> None:
    """Its first token has no cache behind it; one that is the last of a chunked prompt has."""
    plans = scheduler()
    plans.add(sequence(0, 1))
    first = plans.plan()
    assert first == StepPlan((Row(0, 0, (0,), (0,), True),))
    assert not first.is_decode
    plans.update(first, {0: 7})
    second = plans.plan()
    assert second == StepPlan((Row(0, 1, (7,), (0,), True),))
    assert second.is_decode


def test_a_step_is_a_decode_step_only_when_all_its_rows_are() -> None:
    plans = scheduler()
    plans.add(sequence(0, 2))
    run(plans, 1)
    plans.add(sequence(1, 3))
    mixed = plans.plan()
    assert shape(mixed) == [(0, 2, 1, 1, True), (1, 0, 3, 1, True)]
    assert mixed is not None
    assert not mixed.is_decode
    run(plans, 1)
    both = plans.plan()
    assert shape(both) == [(0, 3, 1, 1, True), (1, 3, 1, 1, True)]
    assert both is not None
    assert both.is_decode


def test_pages_of_a_row_grow_at_the_page_border() -> None:
    plans = scheduler()
    plans.add(sequence(0, 3, max_tokens=7))
    assert [step[0][3] for step in run(plans)] == [1, 1, 2, 2, 2, 2, 3]  # the last token, number 10, is never run


@pytest.mark.parametrize(("num_prompt", "max_tokens", "pages"), [(4, 1, 1), (4, 2, 2), (1, 4, 1), (1, 5, 2), (4, 0, 1)])
def test_pages_are_needed_for_every_token_but_the_last(num_prompt: int, max_tokens: int, pages: int) -> None:
    """Its keys would be read by nobody, so they are never written, and the smallest pool will do."""
    plans = scheduler(num_pages=pages)
    item = sequence(0, num_prompt, max_tokens)
    plans.add(item)
    assert max(row[3] for step in run(plans) for row in step) == pages
    assert plans.preemptions == 0
    if pages > 1:
        with pytest.raises(ValueError, match=f"the pool has {pages - 1} pages"):
            scheduler(num_pages=pages - 1).add(sequence(0, num_prompt, max_tokens))


def test_nothing_to_run_is_no_plan() -> None:
    plans = scheduler()
    assert plans.plan() is None
    plans.add(sequence(0, 3, max_tokens=1))
    assert len(run(plans)) == 1
    assert plans.plan() is None


# Who shares a step.


def test_a_prompt_runs_in_chunks_beside_those_that_decode() -> None:
    plans = scheduler(budget=4)
    plans.add(sequence(0, 2, max_tokens=9))
    run(plans, 1)
    plans.add(sequence(1, 8, max_tokens=1))
    assert run(plans, 4) == [
        [(0, 2, 1, 1, True), (1, 0, 3, 1, False)],
        [(0, 3, 1, 1, True), (1, 3, 3, 2, False)],
        [(0, 4, 1, 2, True), (1, 6, 2, 2, True)],
        [(0, 5, 1, 2, True)],
    ]


@pytest.mark.parametrize(
    ("prompts", "budget", "expected"),
    [
        ([100], 16, [16]),
        ([100, 100], 16, [8, 8]),
        ([100, 100], 15, [8, 7]),
        ([100, 100, 100], 16, [8, 4, 4]),
        ([100, 100, 100, 100], 16, [8, 4, 2, 2]),
        ([3, 100], 16, [3, 13]),
        ([100, 2], 16, [14, 2]),
        ([100, 2, 3], 16, [11, 2, 3]),
        ([6, 9, 2], 16, [6, 8, 2]),
        ([9, 9, 2], 16, [9, 5, 2]),
        ([5, 5, 5, 5], 16, [5, 5, 3, 3]),
        ([2, 3, 4], 16, [2, 3, 4]),
        ([1, 100], 16, [1, 15]),
        ([100, 1], 16, [15, 1]),
        ([100, 100, 100], 3, [2, 1]),  # the third has its pages and waits for room
    ],
)
def test_the_oldest_prompt_gets_half_of_the_room_and_what_the_young_leave(
    prompts: list[int], budget: int, expected: list[int]
) -> None:
    plans = scheduler(num_pages=200, budget=budget)
    for request_id, length in enumerate(prompts):
        plans.add(sequence(request_id, length))
    assert chunks(plans.plan()) == dict(enumerate(expected))
    assert len(plans.running) == len(prompts)
    run(plans)
    assert plans.preemptions == 0


@pytest.mark.parametrize(
    ("prompt", "budget", "begin"),
    [
        (100, 64, 4),  # long ones: as many as may share a step that they could fill
        (4, 12, 4),
        (3, 12, 8),  # short ones, of a quarter of the room: a few more
        (2, 12, 8),
        (2, 64, 12),  # as many as do not fill it
        (1, 16, 12),
        (2, 3, 3),  # never more than would get a token
        (1, 6, 6),
    ],
)
def test_prompts_begin_while_there_is_room_for_them(prompt: int, budget: int, begin: int) -> None:
    plans = scheduler(num_pages=400, max_num_seqs=20, budget=budget)
    for request_id in range(12):
        plans.add(sequence(request_id, prompt))
    plans.plan()
    assert [item.request_id for item in plans.running] == list(range(begin))
    assert [item.request_id for item in plans.waiting] == list(range(begin, 12))
    run(plans)


def test_no_more_sequences_than_allowed() -> None:
    plans = scheduler(max_num_seqs=2)
    for request_id in range(5):
        plans.add(sequence(request_id, 1, max_tokens=2))
    assert [[row[0] for row in step] for step in run(plans)] == [[0, 1], [0, 1], [2, 3], [2, 3], [4], [4]]


def test_no_more_sequences_than_a_step_has_room_for() -> None:
    plans = scheduler(max_num_seqs=8, budget=3)
    assert plans.max_num_seqs == 3
    for request_id in range(4):
        plans.add(sequence(request_id, 1, max_tokens=2))
    assert [[row[0] for row in step] for step in run(plans)] == [[0, 1, 2], [0, 1, 2], [3], [3]]


def test_a_place_that_becomes_free_is_taken_in_the_next_step() -> None:
    plans = scheduler(max_num_seqs=2)
    for request_id, max_tokens in enumerate([4, 1, 2, 1]):
        plans.add(sequence(request_id, 1, max_tokens))
    assert [[row[0] for row in step] for step in run(plans)] == [[0, 1], [0, 2], [0, 2], [0, 3]]


def test_a_prompt_in_the_cache_leaves_its_room_to_the_next() -> None:
    """What counts is the tokens that are left to run, here one of thirteen."""
    plans = scheduler(num_pages=64, budget=16)
    plans.add(sequence(0, list(range(13)), max_tokens=1))
    run(plans)
    for request_id in range(1, 7):
        plans.add(sequence(request_id, list(range(13)), max_tokens=1))
    assert chunks(plans.plan()) == dict.fromkeys(range(1, 7), 1)
    assert len(run(plans)) == 1


def test_first_come_first_served_a_small_request_does_not_overtake_one_that_needs_more_pages() -> None:
    plans = scheduler(num_pages=4)
    plans.add(sequence(0, 4, max_tokens=4))
    plans.add(sequence(1, 12, max_tokens=1))  # 3 pages: does not fit beside request 0
    plans.add(sequence(2, 1, max_tokens=1))  # would, but may not overtake
    assert [[row[0] for row in step] for step in run(plans)] == [[0]] * 4 + [[1], [2]]
    assert plans.preemptions == 0


def test_one_that_comes_late_with_an_early_number_goes_in_front() -> None:
    """So does the second choice of a request: its number is given with the first one's, and it begins after it."""
    plans = scheduler(max_num_seqs=2)
    for request_id in (1, 3, 5):
        plans.add(sequence(request_id, 1, max_tokens=2))
    run(plans, 1)
    plans.add(sequence(2, 1, max_tokens=2))
    assert [[row[0] for row in step] for step in run(plans)] == [[1, 3], [2, 5], [2, 5]]


@pytest.mark.parametrize(("running", "prompt", "begins"), [(1, 8, True), (1, 9, False), (2, 12, True), (2, 13, False)])
def test_a_newcomer_leaves_a_page_for_each_that_runs(running: int, prompt: int, begins: bool) -> None:
    """Or else it would be stopped as soon as one of them needs its next page."""
    plans = scheduler(num_pages={1: 4, 2: 7}[running])
    for request_id in range(running):
        plans.add(sequence(request_id, 3, max_tokens=3))
    run(plans, 1)
    plans.add(sequence(running, prompt, max_tokens=1))
    old, new = list(range(running)), [running]
    assert [[row[0] for row in step] for step in run(plans)] == ([old + new, old] if begins else [old, old, new])
    assert plans.preemptions == 0


def test_a_plan_asked_for_again_is_the_same_one() -> None:
    """Also where it took pages, stopped sequences and began others, and where the first waiting one did not fit."""
    plans = scheduler(num_pages=6, budget=8)
    for request_id, length in enumerate([3, 6, 3, 2, 9]):
        plans.add(sequence(request_id, length, max_tokens=9))
    steps = 0
    while (plan := plans.plan()) is not None:
        idle, free = list(plans.pool._idle), list(plans.pool._free)
        for _ in range(2):
            assert plans.plan() == plan
            assert (list(plans.pool._idle), plans.pool._free) == (idle, free)
        for got in plans.update(plan, do(plans, plan)):
            if len(got.tokens) == got.max_len:
                plans.finish(got, "length")
        steps += 1
    assert steps > 20
    assert plans.preemptions == 2


# Fairness.


def test_a_short_prompt_behind_a_very_long_one_gets_its_first_token_at_once() -> None:
    plans = scheduler(num_pages=3000, budget=64)
    long, short = sequence(0, list(range(9000)), max_tokens=2), sequence(1, [5] * 20, max_tokens=3)
    plans.add(long)
    run(plans, 10)
    plans.add(short)
    assert run(plans, 1) == [[(0, 640, 44, 171, False), (1, 0, 20, 5, True)]]
    assert short.num_generated == 1
    assert run(plans, 2) == [[(0, 684 + 63 * i, 63, 187 + 16 * i, False), (1, 20 + i, 1, 6, True)] for i in range(2)]
    assert short.num_generated == 3
    assert long.num_generated == 0


@pytest.mark.parametrize(("length", "steps"), [(16, 4), (17, 66)])
def test_a_short_prompt_need_not_wait_for_the_end_of_four_long_ones(length: int, steps: int) -> None:
    """One of more than a quarter of a step has to: the oldest of the four ends in step 63."""
    plans = scheduler(num_pages=3000, budget=64)
    for request_id in range(4):
        plans.add(sequence(request_id, [request_id] * 2000, max_tokens=1))
    short = sequence(4, length, max_tokens=2)
    plans.add(short)
    run(plans, steps - 1)
    assert short.num_generated == 0
    run(plans, 1)
    assert short.num_generated == 1


def test_a_long_prompt_gets_at_least_half_of_the_room_while_short_ones_come_and_go() -> None:
    plans = scheduler(num_pages=600, budget=64)
    long = sequence(0, list(range(1000)), max_tokens=1)
    plans.add(long)
    for step in range(100):
        plans.add(sequence(1 + step, [step] * 50, max_tokens=1))
    steps = run(plans, 1000 // 32 + 1)
    assert long.finish_reason == "length"
    assert {rows[0][0] for rows in steps} == {0}
    assert min(rows[0][2] for rows in steps[:-1]) >= 32
    assert len({row[0] for rows in steps for row in rows if row[4]}) > 10  # that got their token meanwhile


def test_those_that_decode_skip_no_step_while_a_long_prompt_runs() -> None:
    plans = scheduler(num_pages=400, max_num_seqs=4, budget=8)
    for request_id in range(3):
        plans.add(sequence(request_id, 1, max_tokens=50))
    run(plans, 1)
    plans.add(sequence(3, 200, max_tokens=1))
    steps = run(plans, 40)
    assert [[row[0] for row in rows] for rows in steps] == [[0, 1, 2, 3]] * 40  # 5 of the prompt in each
    assert [rows[3][2:] for rows in steps[-2:]] == [(5, 49, False), (5, 50, True)]
    assert {item.num_generated for item in plans.running} == {41}


# Admission.


def test_br_063_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    plans = scheduler(num_pages=2, page_size=16)
    message = r"may need 39 tokens of KV cache \(3 pages of 16\), the pool has 2 pages: lower max_tokens"
    with pytest.raises(ValueError, match=message):
        plans.add(sequence(0, 32, max_tokens=8))
    with pytest.raises(ValueError, match=r"may need 33 tokens of KV cache \(3 pages of 16\)"):
        plans.add(sequence(1, 33, max_tokens=1))
    assert (plans.waiting, plans.plan()) == ([], None)
    plans.add(sequence(2, 25, max_tokens=8))  # 32 tokens in the cache: exactly the pool
    plans.add(sequence(3, 2, max_tokens=2))
    steps = run(plans)
    assert [[row[0] for row in step] for step in steps] == [[2]] * 8 + [[3]] * 2
    assert (plans.pool.free, plans.waiting, plans.running) == (2, [], [])


def test_what_does_not_fit_now_is_queued_and_runs_later() -> None:
    plans = scheduler(num_pages=4)
    items = [sequence(request_id, 16, max_tokens=1) for request_id in range(3)]  # each the whole pool
    for item in items:
        plans.add(item)
    assert run(plans) == [[(request_id, 0, 16, 4, True)] for request_id in range(3)]
    assert [item.finish_reason for item in items] == ["length"] * 3


# Log-probabilities of a prompt.


def test_prompts_whose_logits_are_all_wanted_share_a_fixed_number_of_them() -> None:
    assert module.EVERY_LOGIT == 256
    plans = scheduler(num_pages=400, budget=1024)
    for request_id, (length, params) in enumerate([(300, READING), (100, READING), (200, PLAIN), (1, READING)]):
        plans.add(sequence(request_id, length, 1, params))
    logits = []
    while (plan := plans.plan()) is not None:
        logits.append([(row.request_id, row.start, row.num_logits, row.samples) for row in plan.rows])
        assert plan.num_logits == sum(row[2] for row in logits[-1])
        assert [row.every_logit for row in plan.rows] == [row.request_id != 2 for row in plan.rows]
        for got in plans.update(plan, do(plans, plan)):
            plans.finish(got, "length")
    assert logits == [
        [(0, 0, 256, False), (2, 0, 1, True), (3, 0, 1, True)],  # 1 has to wait; the one logit of 3 is always there
        [(0, 256, 44, True), (1, 0, 100, True)],
    ]


def test_the_last_token_of_such_a_prompt_alone_gives_one_logit() -> None:
    plans = scheduler(num_pages=200, budget=512)
    plans.add(sequence(0, 257, max_tokens=2, params=READING))
    assert run(plans, 1) == [[(0, 0, 256, 64, False)]]
    plan = plans.plan()
    assert plan == StepPlan((Row(0, 256, (256,), tuple(range(65)), True, True),))
    assert plan.num_logits == 1
    run(plans, 1)
    after = plans.plan()
    assert after is not None
    assert [(row.start, row.every_logit, row.num_logits) for row in after.rows] == [(257, False, 1)]


def test_a_prompt_in_mid_chunk_gives_no_logits() -> None:
    plans = scheduler(budget=4)
    plans.add(sequence(0, 5))
    plan = plans.plan()
    assert plan is not None
    assert [(row.samples, row.num_logits) for row in plan.rows] == [(False, 0)]
    assert plan.num_logits == 0


def test_a_prompt_whose_logits_are_all_wanted_takes_nothing_from_the_cache_and_gives_to_it() -> None:
    plans = scheduler()
    prompt = list(range(10))
    reader, second, third = sequence(0, prompt, 3, READING), sequence(1, prompt, 3), sequence(2, prompt, 3, READING)
    for item, rows in ((reader, (0, 10)), (second, (8, 2)), (third, (0, 10))):
        plans.add(item)
        assert run(plans)[0] == [(item.request_id, *rows, 3, True)]
    assert [item.num_cached for item in (reader, second, third)] == [0, 8, 0]
    assert reader.tokens == second.tokens == third.tokens == alone(prompt, 3)


@pytest.mark.parametrize("generated", [0, 1])
def test_a_stopped_one_reads_its_prompt_again_only_if_it_had_no_token(generated: int) -> None:
    plans = scheduler(budget=16 if generated else 8)
    item = sequence(0, 10, 3, READING)
    plans.add(item)
    run(plans, 1)
    assert item.num_generated == generated
    plans._preempt(item)
    assert run(plans, 1) == [[(0, 8, 3, 3, True)] if generated else [(0, 0, 8, 2, False)]]
    run(plans)
    assert item.tokens == alone(list(range(10)), 3)


# Stopping and going on.


def test_the_youngest_gives_way_and_goes_on_before_those_that_came_later() -> None:
    plans = scheduler(num_pages=5, max_num_seqs=3)
    items = [sequence(request_id, 3, max_tokens=8) for request_id in range(4)]
    for item in items:
        plans.add(item)
    steps = run(plans)
    # 5 pages for three that grow at the same time: 2 stops for its second page, then 1 for its third.
    assert [[row[0] for row in step] for step in steps[:4]] == [[0, 1, 2], [0, 1, 2], [0, 1], [0, 1]]
    assert [item.preemptions for item in items] == [0, 1, 1, 0]
    assert plans.preemptions == 2
    steps_of = [[number for number, step in enumerate(steps) for row in step if row[0] == i] for i in range(4)]
    assert [numbers[0] for numbers in steps_of] == [0, 0, 0, 10]  # 3 begins behind them all
    assert [numbers[-1] for numbers in steps_of] == [7, 9, 15, 17]
    assert [item.tokens for item in items] == [alone(item.tokens[:3], 8) for item in items]


def test_as_many_of_the_youngest_stop_as_there_are_pages_missing() -> None:
    plans = scheduler()
    items = [sequence(request_id, length, max_tokens=6) for request_id, length in enumerate([8, 8, 3, 3])]
    for item in items:
        plans.add(item)
    run(plans, 1)
    others = plans.pool.take(plans.pool.free)
    assert shape(plans.plan()) == [(0, 8, 1, 3, True), (1, 8, 1, 3, True)]  # each with the page of one that stopped
    assert [item.preemptions for item in items] == [0, 0, 1, 1]
    assert plans.waiting == items[2:]
    plans.pool.give_back(others)
    run(plans)
    assert [item.tokens for item in items] == [alone(item.tokens[: item.num_prompt], 6) for item in items]


def test_a_sequence_that_needs_a_page_stops_itself_when_it_is_the_youngest() -> None:
    plans = scheduler()
    items = [sequence(0, 3, max_tokens=6), sequence(1, 4, max_tokens=6)]
    for item in items:
        plans.add(item)
    run(plans, 1)
    others = plans.pool.take(plans.pool.free)
    assert shape(plans.plan()) == [(0, 3, 1, 1, True)]
    assert plans.waiting == items[1:]
    plans.pool.give_back(others)
    run(plans)
    assert [item.tokens for item in items] == [alone(item.tokens[: item.num_prompt], 6) for item in items]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_br_064_a_stopped_sequence_goes_on_where_it_was(length: int, prefix_cache: bool) -> None:
    """Stopped at two pages less one token, at two pages, and one token after: only what is not cached runs again."""
    plans = scheduler(num_pages=5, prefix_cache=prefix_cache)
    old, young = sequence(0, 8, max_tokens=8), sequence(1, length - 5, max_tokens=9)
    plans.add(old)
    plans.add(young)
    run(plans, 5)
    assert (len(old.tokens), len(young.tokens), young.preemptions) == (13, length, 0)
    assert [[row[0] for row in step] for step in run(plans, 3)] == [[0]] * 3
    assert (old.preemptions, young.preemptions, young.num_computed, young.pages) == (0, 1, 0, [])
    start = 4 if prefix_cache else 0  # one of its pages went to the old one: the second, if it was full
    assert run(plans, 1) == [[(1, start, length - start, -(-length // 4), True)]]
    run(plans)
    assert young.tokens == alone([100 + i for i in range(length - 5)], 9)
    assert old.tokens == alone(list(range(8)), 8)
    assert young.num_cached == 0  # its own pages are no hit
    assert plans.pool.free == 5


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("same_prompt", [True, False])
@pytest.mark.parametrize("length", [7, 8, 9])
def test_br_064_four_sequences_outgrow_the_pool_and_lose_no_token(
    length: int, same_prompt: bool, prefix_cache: bool
) -> None:
    plans = scheduler(num_pages=11, prefix_cache=prefix_cache)
    prompts = [[0 if same_prompt else request_id] * length for request_id in range(4)]
    items = [sequence(request_id, prompt, 17 - length) for request_id, prompt in enumerate(prompts)]
    for item in items:  # 2 or 3 pages each, 4 at the end
        plans.add(item)
    run(plans)
    assert [item.tokens for item in items] == [alone(prompt, 17 - length) for prompt in prompts]
    assert plans.preemptions == sum(item.preemptions for item in items) > 0
    assert items[0].preemptions == 0
    assert plans.pool.free == 11


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_smallest_pool_serves_everybody_one_after_the_other(prefix_cache: bool) -> None:
    plans = scheduler(num_pages=1, page_size=4, prefix_cache=prefix_cache)
    items = [sequence(request_id, 2, max_tokens=3) for request_id in range(3)]
    for item in items:
        plans.add(item)
    assert [[row[0] for row in step] for step in run(plans)] == [[0]] * 3 + [[1]] * 3 + [[2]] * 3
    assert plans.preemptions == 0


# The prefix cache.


@pytest.mark.parametrize(("length", "cached"), [(3, 0), (4, 0), (5, 4), (7, 4), (8, 4), (9, 8)])
def test_br_065_a_prompt_wholly_in_the_cache_still_runs_its_last_token(length: int, cached: int) -> None:
    plans = scheduler()
    first, second = sequence(0, [3] * length), sequence(1, [3] * length)
    plans.add(first)
    run(plans)
    plans.add(second)
    assert run(plans)[0] == [(1, cached, length - cached, -(-length // 4), True)]
    assert (first.num_cached, second.num_cached) == (0, cached)
    assert first.tokens == second.tokens == alone([3] * length, 4)


@pytest.mark.parametrize("length", [7, 8, 9])
def test_br_065_the_same_prompt_twice_at_the_same_moment(length: int) -> None:
    """Neither has anything to share yet; the third, which comes later, has."""
    plans = scheduler()
    items = [sequence(request_id, [3] * length) for request_id in range(3)]
    plans.add(items[0])
    plans.add(items[1])
    assert run(plans, 1) == [[(i, 0, length, -(-length // 4), True) for i in range(2)]]
    assert plans.pool.shareable == length // 4  # one copy
    plans.add(items[2])
    run(plans)
    assert [item.num_cached for item in items] == [0, 0, (length - 1) // 4 * 4]
    assert [item.tokens for item in items] == [alone([3] * length, 4)] * 3
    assert plans.pool.free == 16


def test_pages_are_shared_while_their_first_owner_runs() -> None:
    plans = scheduler(num_pages=8)
    a, b = sequence(0, [3] * 8, max_tokens=6), sequence(1, [3] * 8 + [4], max_tokens=6)
    plans.add(a)
    run(plans, 1)
    plans.add(b)
    assert shape(plans.plan()) == [(0, 8, 1, 3, True), (1, 8, 1, 3, True)]
    assert a.pages[:2] == b.pages[:2]
    assert a.pages[2] != b.pages[2]
    assert plans.pool.free == 8 - 4
    run(plans)
    assert a.tokens == alone([3] * 8, 6)
    assert b.tokens == alone([3] * 8 + [4], 6)
    assert b.num_cached == 8


def test_full_pages_of_an_answer_are_shared_too() -> None:
    """The next turn of a conversation begins with the last prompt and its answer."""
    plans = scheduler()
    first = sequence(0, 6, max_tokens=8)
    plans.add(first)
    run(plans)
    turn = sequence(1, [*first.tokens, 5, 6, 7])  # 13 of its 14 tokens were run: three pages
    plans.add(turn)
    assert run(plans, 1) == [[(1, 12, 5, 5, True)]]
    assert turn.num_cached == 12


def test_pages_of_a_prompt_are_shared_before_its_end() -> None:
    plans = scheduler(budget=8)
    plans.add(sequence(0, [3] * 20))
    run(plans, 1)
    plans.add(sequence(1, [3] * 20))
    assert run(plans, 1) == [[(0, 8, 4, 3, False), (1, 8, 4, 3, False)]]


def test_a_page_that_follows_a_shared_prefix_is_found_behind_it_and_nowhere_else() -> None:
    plans = scheduler(num_pages=32)
    prompts = [[1] * 5, [1, 1, 1, 1, 2, 2, 2, 2, 5], [2] * 5, [1, 1, 1, 1, 2, 2, 2, 2, 6], [2] * 5]
    hits = []
    for request_id, prompt in enumerate(prompts):
        item = sequence(request_id, prompt)
        plans.add(item)
        run(plans)
        assert item.tokens == alone(prompt, 4)
        hits.append(item.num_cached)
    assert hits == [0, 4, 0, 8, 4]


def test_prompts_with_one_hash_share_nothing() -> None:
    prompts = [[0, BIG, 0, BIG, 5], [BIG, 0, 0, BIG, 5], [0, BIG, BIG, 0, 5], [0] * 4 + [5]]
    assert len({hash((0, tuple(prompt[:4]))) for prompt in prompts}) == 1
    plans = scheduler()
    for request_id, prompt in enumerate([*prompts, *prompts]):
        item = sequence(request_id, prompt)
        plans.add(item)
        run(plans)
        assert item.num_cached == (4 if request_id >= 4 else 0)
        assert item.tokens == alone(prompt, 4)


def test_without_the_prefix_cache_nothing_is_shared() -> None:
    plans = scheduler(prefix_cache=False)
    for request_id in range(2):
        item = sequence(request_id, [3] * 9)
        plans.add(item)
        assert run(plans)[0] == [(request_id, 0, 9, 3, True)]
        assert (item.num_cached, plans.pool.shareable) == (0, 0)


def test_the_least_recently_used_prefix_makes_room() -> None:
    plans = scheduler(num_pages=4)
    hits = []
    # Each leaves its first page behind and uses another one; the pool has room for three of them and one at work.
    for request_id, text in enumerate([1, 2, 3, 1, 4, 1, 2]):
        item = sequence(request_id, [text] * 5, max_tokens=1)
        plans.add(item)
        run(plans)
        hits.append(item.num_cached)
    assert hits == [0, 0, 0, 4, 0, 4, 0]


def test_hits_are_those_of_the_first_beginning() -> None:
    plans = scheduler()
    first, second = sequence(0, [3] * 9), sequence(1, [3] * 9, max_tokens=8)
    plans.add(first)
    run(plans)
    plans.add(second)
    run(plans, 6)
    assert (len(second.tokens), second.num_cached) == (15, 8)
    plans._preempt(second)
    assert run(plans, 1) == [[(1, 12, 3, 4, True)]]
    assert (second.num_cached, second.preemptions) == (8, 1)


# Leaving.


def test_cancel_while_waiting() -> None:
    plans = scheduler(num_pages=2)
    for request_id in range(3):
        plans.add(sequence(request_id, 8, max_tokens=1))
    plans.plan()
    plans.cancel(1)
    assert [item.request_id for item in plans.waiting] == [2]
    assert [[row[0] for row in step] for step in run(plans)] == [[0], [2]]


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("steps", range(8))
def test_cancel_while_running_frees_the_pages_at_once(steps: int, prefix_cache: bool) -> None:
    plans = scheduler(num_pages=6, budget=4, prefix_cache=prefix_cache)
    plans.add(sequence(0, 9, max_tokens=8))
    run(plans, steps)
    plans.plan()
    assert plans.pool.free < 6
    plans.cancel(0)
    assert (plans.pool.free, plans.running, plans.plan()) == (6, [], None)
    assert_conserved(plans)


def test_cancel_of_a_stopped_sequence() -> None:
    plans = scheduler(num_pages=4)
    plans.add(sequence(0, 8, max_tokens=8))
    plans.add(sequence(1, 2, max_tokens=9))
    run(plans, 4)
    assert [(item.request_id, item.preemptions) for item in plans.waiting] == [(1, 1)]
    plans.cancel(1)
    assert {row[0] for step in run(plans) for row in step} == {0}
    assert plans.pool.free == 4


def test_cancel_of_the_first_owner_leaves_shared_pages_to_the_second() -> None:
    plans = scheduler()
    plans.add(sequence(0, [3] * 9))
    run(plans, 1)
    second = sequence(1, [3] * 9)
    plans.add(second)
    run(plans, 1)
    plans.cancel(0)
    assert plans.pool.free == 16 - 3
    run(plans)
    assert (second.tokens, second.num_cached) == (alone([3] * 9, 4), 8)


def test_cancel_between_plan_and_update_drops_the_token_and_keeps_the_neighbour() -> None:
    plans = scheduler()
    cancelled, kept = sequence(0, 2), sequence(1, 2)
    plans.add(cancelled)
    plans.add(kept)
    run(plans, 2)
    plan = plans.plan()
    assert plan is not None
    sampled = do(plans, plan)
    plans.cancel(0)
    assert plans.pool.free == 16 - 1
    assert plans.update(plan, sampled) == [kept]
    assert cancelled.tokens == alone([0, 1], 2)
    assert kept.tokens == alone([100, 101], 3)
    assert shape(plans.plan()) == [(1, 4, 1, 2, True)]


def test_cancel_of_all_between_plan_and_update() -> None:
    plans = scheduler(num_pages=2)
    plans.add(sequence(0, 8, max_tokens=1))
    plans.add(sequence(1, 4, max_tokens=4))
    plan = plans.plan()
    assert shape(plan) == [(0, 0, 8, 2, True)]
    assert plan is not None
    plans.cancel(0)
    assert plans.update(plan, {0: 7}) == []
    assert plans.pool.shareable == 0  # it was gone before its pages were said to be full
    assert shape(plans.plan()) == [(1, 0, 4, 1, True)]


def test_cancel_of_unknown_and_finished_requests_is_no_error() -> None:
    plans = scheduler()
    plans.cancel(5)
    plans.add(sequence(0, 2, max_tokens=1))
    run(plans)
    plans.cancel(0)
    assert plans.pool.free == 16


@pytest.mark.parametrize("withdraw", [False, True])
def test_nobody_shares_the_pages_of_a_sequence_that_ended_in_doubt(withdraw: bool) -> None:
    plans = scheduler()
    item = sequence(0, [3] * 9)
    plans.add(item)
    run(plans, 1)
    plans.finish(item, "error", withdraw=withdraw)
    assert (item.finish_reason, item.pages, plans.plan()) == ("error", [], None)
    assert (plans.pool.free, plans.pool.shareable) == (16, 0 if withdraw else 2)
    again = sequence(1, [3] * 9)
    plans.add(again)
    run(plans)
    assert again.num_cached == (0 if withdraw else 8)
    assert again.tokens == alone([3] * 9, 4)


def test_those_that_share_withdrawn_pages_keep_them() -> None:
    plans = scheduler()
    failing, sharing, later = (sequence(request_id, [3] * 9, max_tokens=8) for request_id in range(3))
    plans.add(failing)
    run(plans, 1)
    plans.add(sharing)
    run(plans, 1)
    plans.finish(failing, "error", withdraw=True)
    assert plans.pool.free == 16 - 3
    plans.add(later)
    run(plans)
    assert (sharing.num_cached, later.num_cached) == (8, 0)
    assert sharing.tokens == later.tokens == alone([3] * 9, 8)
    assert plans.pool.free == 16


def test_withdrawn_pages_are_not_published_again_by_one_that_shares_them() -> None:
    """The sharer has its pages, but no room in the step in which they turn out to be bad."""
    plans = scheduler(num_pages=64, budget=4)
    failing, sharing, later = sequence(0, [3] * 9), sequence(3, [3] * 11), sequence(4, [3] * 9)
    plans.add(failing)
    run(plans, 3)
    for item in (sequence(1, 30), sequence(2, 30), sharing):
        plans.add(item)
    plan = plans.plan()
    assert chunks(plan) == {0: 1, 1: 2, 2: 1}
    assert sharing.pages[:2] == failing.pages[:2]
    run(plans, 1)
    plans.finish(failing, "error", withdraw=True)
    plans.add(later)
    run(plans)
    assert (sharing.num_cached, later.num_cached) == (8, 0)


def test_pages_that_an_interrupt_left_without_an_owner_come_back_with_the_next_request() -> None:
    plans = scheduler()
    plans.add(sequence(0, [3] * 9))
    run(plans)
    plans.add(sequence(1, [3] * 9))
    assert plans.pool.shareable == 3  # nothing was lost: the cache is kept
    run(plans, 1)
    plans.pool.take(2)
    plans.add(sequence(2, 4))
    assert plans.pool.free == 16 - 3 - 2  # while others run, their pages are theirs
    plans.cancel(2)
    plans.cancel(1)
    assert plans.pool.free == 14
    plans.add(sequence(3, [3] * 9))
    assert (plans.pool.free, plans.pool.num_pages, plans.pool.page_size) == (16, 16, 4)
    assert run(plans)[0] == [(3, 0, 9, 3, True)]


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


class Histories(RuleBasedStateMachine):
    """Submit, plan, step, cancel (also in mid-step), and `Memory` does what the plans say.

    Some requests have several choices, which come as the engine sends them: numbered together, and queued when the
    first has its first token. Some read their prompt, some end early, some with an error.
    """

    num_pages: ClassVar[int]
    counts: ClassVar[Counter[str]]

    @initialize(
        page_size=st.integers(1, 5), max_seqs=st.integers(1, 6), budget=st.integers(1, 16), prefix_cache=st.booleans()
    )
    def start(self, page_size: int, max_seqs: int, budget: int, prefix_cache: bool) -> None:
        self.patch = pytest.MonkeyPatch()
        for name, value in {"EVERY_LOGIT": 3, "MOST_PROMPTS": 2, "MOST_SHORT": 1}.items():
            self.patch.setattr(module, name, value)
        self.plans = Scheduler(self.num_pages, page_size, max_seqs, budget, prefix_cache)
        self.memory = Memory()
        self.open: dict[int, Sequence] = {}
        self.later: dict[int, list[Sequence]] = {}  # by the request whose first token they wait for
        self.queued: list[int] = []  # and never begun
        self.texts = list(TEXTS)
        self.planned: StepPlan | None = None  # asked for and not run
        self.next_id = 0

    @precondition(lambda self: len(self.open) < MOST_OPEN)
    @rule(
        text=PLACES,
        length=st.integers(1, 14),
        max_tokens=st.integers(1, 12),
        params=st.sampled_from([PLAIN, PLAIN, READING]),
        choices=st.sampled_from([1, 1, 1, 3]),
    )
    def submit(self, text: int, length: int, max_tokens: int, params: SamplingParams, choices: int) -> None:
        prompt = self.texts[text % len(self.texts)][:length]
        items = [sequence(self.next_id + i, prompt, max_tokens, PLAIN if i else params) for i in range(choices)]
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
        growing = sum(len(item.tokens) > len(item.pages) * plans.page_size for item in before)
        enough = growing <= plans.pool.free
        plan = plans.plan()
        assert self.planned in (None, plan)
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
        plan = self.checked_plan()
        self.planned = None
        if plan is None:
            assert not self.open
            return
        self.counts["steps"] += 1
        sampled = self.memory.run(self.plans, plan)
        if cancelled is not None:
            self.counts["cancelled in a step"] += cancelled in [row.request_id for row in plan.rows]
            self.forget(cancelled)
        advanced = self.plans.update(plan, sampled)
        assert [item.request_id for item in advanced] == [request for request in sampled if request in self.open]
        for item in advanced:
            for choice in self.later.pop(item.request_id, []):
                self.add(choice)
            token = item.tokens[-1]
            if len(item.tokens) == item.max_len or token % 29 in (0, 1):  # now and then an early end
                self.end(item, failed=token % 29 == 1)

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
        limit = (1 + len(late)) * sum(item.max_len for item in [*self.open.values(), *late])
        while self.open:
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
        assert not any(item.pages or item.num_computed for item in self.plans.waiting)

    def teardown(self) -> None:
        if hasattr(self, "plans"):
            try:
                self.drain()
            finally:
                self.patch.undo()


class ThreePages(Histories):
    num_pages = 3
    counts: ClassVar[Counter[str]] = Counter()


class EightPages(Histories):
    num_pages = 8
    counts: ClassVar[Counter[str]] = Counter()


class ManyPages(Histories):
    num_pages = 60
    counts: ClassVar[Counter[str]] = Counter()


OFTEN = settings(max_examples=100, stateful_step_count=40)
for machine in (ThreePages, EightPages, ManyPages):
    machine.TestCase.settings = OFTEN
TestThreePages, TestEightPages, TestManyPages = ThreePages.TestCase, EightPages.TestCase, ManyPages.TestCase


@pytest.mark.parametrize("histories", [ThreePages, EightPages, ManyPages])
def test_ten_thousand_random_steps(histories: type[Histories]) -> None:
    """Hypothesis makes short histories, which it can shrink; these are long, so that much happens in them."""
    histories.counts.clear()
    seed = 0
    while histories.counts["steps"] < 10_000:
        draw = random.Random(seed)
        machine = histories()
        machine.start(draw.randint(1, 5), draw.randint(1, 6), draw.randint(1, 16), prefix_cache=seed % 4 > 0)
        for _ in range(200):
            move(machine, draw)
            machine.pages_are_conserved()
            machine.everybody_is_somewhere_once()
        machine.teardown()
        seed += 1
    assert histories.counts["hits"] > 300
    assert min(histories.counts[what] for what in ("ended", "failed", "cancelled in a step")) > 100
    if histories.num_pages < 10:
        assert histories.counts["stopped"] > 100
        assert histories.counts["resumed from the cache"] > 40


MOVES = {"submit": 6, "step": 12, "cancel in a step": 1, "cancel": 1, "plan": 2}


def move(machine: Histories, draw: random.Random) -> None:
    kind, place = draw.choices(list(MOVES), list(MOVES.values()))[0], draw.randrange(8)
    if kind == "step":
        machine.step()
    elif kind == "plan":
        machine.plan()
    elif kind == "submit" and len(machine.open) < MOST_OPEN:
        params, choices = draw.choice([PLAIN, PLAIN, READING]), draw.choice([1, 1, 1, 3])
        machine.submit(place, draw.randint(1, 14), draw.randint(1, 12), params, choices)
    elif kind == "cancel" and machine.open:
        machine.cancel(place)
    elif kind == "cancel in a step" and machine.open:
        machine.step_with_a_cancel_in_the_middle(place)
