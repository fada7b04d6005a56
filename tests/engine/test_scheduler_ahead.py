"""Plans while launches are in flight: places, steps, tokens nobody knows yet, and what must land first."""

from __future__ import annotations

import pytest

from rooflight import SamplingParams, ops
from rooflight.engine.plan import UNKNOWN, Row, StepPlan
from rooflight.engine.scheduler import Scheduler
from tests.engine.scheduling import BANNED, HELPED, PLAIN, READING, alone, do, land, run, sequence, shape
from tests.engine.support import assert_conserved


def scheduler(num_pages: int = 16, max_num_seqs: int = 8, budget: int = 64, most_steps: int = 1) -> Scheduler:
    return Scheduler(num_pages, 4, max_num_seqs, budget, most_steps=most_steps)


def launch(plans: Scheduler) -> tuple[StepPlan, dict[int, list[int]]]:
    plan = plans.plan()
    assert plan is not None
    given = do(plans, plan)
    plans.launched(plan)
    return plan, given


def places(plans: Scheduler) -> dict[int, int]:
    return {item.request_id: item.place for item in plans.running}


def test_places_are_the_lowest_that_are_free_and_stay() -> None:
    plans = scheduler()
    items = [sequence(request_id, 2, max_tokens=9) for request_id in range(6)]
    for item in items[:4]:
        plans.add(item)
    assert {row.request_id: row.place for row in launch(plans)[0].rows} == {0: 0, 1: 1, 2: 2, 3: 3}
    plans.cancel(1)
    plans.cancel(2)
    plans.add(items[4])
    plans.plan()
    assert places(plans) == {0: 0, 3: 3, 4: 1}
    plans.add(items[5])
    plans.cancel(0)
    plans.plan()
    assert places(plans) == {3: 3, 4: 1, 5: 0}
    assert items[1].place == -1


def test_a_launch_ahead_continues_with_the_token_that_nobody_knows_yet() -> None:
    plans = scheduler()
    item = sequence(0, 3, max_tokens=4)
    plans.add(item)
    first, given = launch(plans)
    assert (item.pending, item.num_computed, item.num_tokens, item.num_generated) == (1, 3, 4, 0)
    second, later = launch(plans)
    assert second.rows == (Row(0, 3, (UNKNOWN,), (0,), True, limit=6),)
    assert plans.plan() == StepPlan((Row(0, 4, (UNKNOWN,), (0, 1), True, limit=6),))
    assert land(plans, first, given) == [(item, 1)]
    assert (item.pending, item.num_computed, item.tokens[3:]) == (1, 4, given[0])
    assert land(plans, second, later) == [(item, 1)]
    assert plans.plan() == StepPlan((Row(0, 4, tuple(later[0]), (0, 1), True, limit=6),))


def test_chunks_of_a_prompt_follow_each_other_in_flight() -> None:
    plans = scheduler(budget=4)
    item = sequence(0, 9, max_tokens=2)
    plans.add(item)
    flight = [launch(plans) for _ in range(3)]
    assert [plan.rows[0].tokens for plan, _ in flight] == [(0, 1, 2, 3), (4, 5, 6, 7), (8,)]
    assert plans.pool.shareable == 0  # nothing has landed
    for (plan, given), pages in zip(flight, [1, 2, 2], strict=True):
        land(plans, plan, given)
        assert plans.pool.shareable == pages
    assert item.tokens == alone(list(range(9)), 1)


def test_who_gets_its_last_token_in_flight_has_no_further_row() -> None:
    plans = scheduler(num_pages=4)
    short, long = sequence(0, 4, max_tokens=1), sequence(1, 2, max_tokens=2)
    plans.add(short)
    plans.add(long)
    first, _ = launch(plans)
    assert [row.request_id for row in first.rows] == [0, 1]
    second, _ = launch(plans)
    assert [row.request_id for row in second.rows] == [1]
    assert plans.plan() is None
    assert (len(short.pages), len(plans.running)) == (1, 2)


@pytest.mark.parametrize("params", [HELPED, BANNED, READING, SamplingParams(presence_penalty=1.0)], ids=str)
def test_what_needs_the_host_neither_follows_nor_is_followed(params: SamplingParams) -> None:
    plans = scheduler()
    plain, helped = sequence(0, 3, max_tokens=9), sequence(1, 3, max_tokens=9, params=params)
    plans.add(plain)
    first, given = launch(plans)
    plans.add(helped)
    assert plans.plan() is None
    land(plans, first, given)
    second, given = launch(plans)
    assert (second.needs_host, [row.request_id for row in second.rows]) == (True, [0, 1])
    plans.cancel(1)
    assert plans.plan() is None  # its logits may still be with the host
    land(plans, second, given)
    assert not launch(plans)[0].needs_host


@pytest.mark.parametrize("params", [HELPED, BANNED, SamplingParams(presence_penalty=1.0)], ids=str)
def test_options_on_the_device_are_launched_ahead_and_several_steps_at_once(params: SamplingParams) -> None:
    plans = Scheduler(16, 4, 8, 64, most_steps=4, options_on_device=True)
    plans.add(sequence(0, 3, max_tokens=19, params=params))
    plans.add(sequence(1, 3, max_tokens=19))
    flight = [launch(plans) for _ in range(4)]
    assert [(plan.needs_host, plan.steps) for plan, _ in flight] == [(False, 1)] + [(False, 4)] * 3
    assert flight[3][0].rows[0].tokens == (UNKNOWN,)


def test_prompt_logprobs_need_the_host_whatever_the_device_can_do() -> None:
    plans = Scheduler(16, 4, 8, 64, most_steps=4, options_on_device=True)
    helped, reading = sequence(0, 3, max_tokens=9, params=HELPED), sequence(1, 3, max_tokens=9, params=READING)
    plans.add(helped)
    first, given = launch(plans)
    plans.add(reading)
    assert plans.plan() is None
    land(plans, first, given)
    second, given = launch(plans)
    assert (second.needs_host, second.steps, [row.request_id for row in second.rows]) == (True, 1, [0, 1])
    assert plans.plan() is None
    land(plans, second, given)
    assert [launch(plans)[0].needs_host for _ in range(2)] == [False, False]


def test_a_ban_ends_with_the_token_that_reaches_min_tokens() -> None:
    plans = scheduler(most_steps=4)
    plans.add(sequence(0, 3, max_tokens=9, params=BANNED))
    launches = []
    while len(launches) < 4:
        plan = plans.plan()
        assert plan is not None
        launches.append((plan.needs_host, plan.steps))
        plans.launched(plan)
        land(plans, plan, {0: [7] * plan.steps})
    assert launches[:4] == [(True, 1)] * 3 + [(False, 4)]


def test_nobody_is_stopped_while_a_launch_is_in_flight() -> None:
    plans = scheduler(num_pages=3)
    old, young = sequence(0, 3, max_tokens=3), sequence(1, 3, max_tokens=3)
    plans.add(old)
    plans.add(young)
    flight = [launch(plans), launch(plans)]
    assert plans.plan() is None
    assert (old.preemptions, young.preemptions) == (0, 0)
    land(plans, *flight[0])
    assert plans.plan() is None
    land(plans, *flight[1])
    assert shape(plans.plan()) == [(0, 4, 1, 2, True)]
    assert (young.preemptions, young.pending, young.place) == (1, 0, -1)


@pytest.mark.parametrize(
    ("most", "left", "waiting", "free", "steps"),
    [
        (1, [9], False, 9, 1),
        (4, [9], False, 9, 4),
        (6, [9], False, 9, 4),  # powers of two
        (8, [9], False, 9, 8),
        (8, [7], False, 9, 4),  # no more than somebody may get
        (8, [3, 9], False, 9, 8),  # the other stops at its own limit
        (8, [3, 9], True, 9, 2),  # somebody may begin when it ends
        (8, [1, 9], True, 9, 1),
        (8, [9, 9], False, 4, 8),
        (8, [9, 9], False, 3, 4),  # pages for all of the steps
        (8, [9, 9], False, 1, 2),
        (8, [9, 9], False, 0, 2),
        (8, [3, 9], False, 3, 8),  # and none beyond the limit
    ],
)
def test_as_many_steps_as_there_is_use_and_room_for(
    most: int, left: list[int], waiting: bool, free: int, steps: int
) -> None:
    plans = scheduler(num_pages=20, max_num_seqs=len(left), most_steps=most)
    for request_id, rest in enumerate(left):
        plans.add(sequence(request_id, 2, max_tokens=rest + 1))
    run(plans, 1)
    if waiting:
        plans.add(sequence(9, 2))
    plans.pool.take(plans.pool.free - free)
    plan = plans.plan()
    assert plan is not None
    assert plan.steps == steps
    assert [plan.gets(row) for row in plan.rows] == [min(rest, steps) for rest in left]
    assert [len(row.pages) for row in plan.rows] == [-(-(2 + min(rest, steps)) // 4) for rest in left]
    assert plans.plan() == plan
    assert plans.preemptions == 0


def test_one_step_while_a_prompt_is_computed_also_its_last_token() -> None:
    plans = scheduler(budget=4, most_steps=8)
    plans.add(sequence(0, 2, max_tokens=30))
    plans.add(sequence(1, 8, max_tokens=30))
    seen = []
    for _ in range(5):
        plan, given = launch(plans)
        seen.append((plan.steps, [len(row.tokens) for row in plan.rows]))
        land(plans, plan, given)
    assert seen == [(1, [2, 2]), (1, [1, 3]), (1, [1, 3]), (8, [1, 1]), (8, [1, 1])]


@pytest.mark.parametrize(("end", "kept"), [(0, 1), (2, 3), (3, 4), (9, 4)])
@pytest.mark.parametrize("ending", [True, False])
def test_tokens_behind_an_end_are_neither_kept_nor_published(end: int, kept: int, ending: bool) -> None:
    """An end token, or none at all: what was computed of the rest is in the same pages, and nobody's."""
    plans = scheduler(most_steps=4)
    item = sequence(0, 5, max_tokens=30)
    item.end_ids = frozenset([77])
    plans.add(item)
    run(plans, 1)
    plan = plans.plan()
    assert plan is not None
    plans.launched(plan)
    ahead = plans.plan()
    assert ahead is not None
    plans.launched(ahead)
    last = 77 if ending else ops.NO_TOKEN
    new = [last if number == end else 7 for number in range(4)]
    assert land(plans, plan, {0: new}) == [(item, kept)]
    assert item.tokens[6:] == new[:kept]
    assert plans.pool.shareable == (5 + kept) // 4  # the last one of those kept has not run, the one before has
    plans.finish(item, "stop")
    assert plans.pool.free == 16
    assert land(plans, ahead, {0: [5] * 4}) == []
    assert plans.pool.shareable == (5 + kept) // 4
    assert_conserved(plans)


def test_what_is_recalled_is_planned_again() -> None:
    plans = scheduler(most_steps=4)
    item, other = sequence(0, 5, max_tokens=20), sequence(1, 9, max_tokens=20)
    plans.add(item)
    plans.add(other)
    run(plans, 2)
    assert len(item.tokens) == 10
    plans.cancel(1)
    before = plans.plan()
    for _ in range(2):
        launch(plans)
    plans.recall()
    assert (item.pending, list(plans.in_flight)) == (0, [])
    assert plans.plan() == before
    run_to = alone(list(range(5)), 20)
    while (plan := plans.plan()) is not None:
        given = do(plans, plan)
        plans.launched(plan)
        land(plans, plan, given)
        if len(item.tokens) == item.max_len:
            plans.finish(item, "length")
    assert item.tokens == run_to


def test_recalling_passes_over_those_that_are_gone() -> None:
    plans = scheduler()
    gone, kept = sequence(0, 3), sequence(1, 3)
    plans.add(gone)
    plans.add(kept)
    launch(plans)
    plans.cancel(0)
    plans.recall()
    assert (gone.num_computed, kept.num_computed, kept.pending) == (0, 0, 0)
    assert shape(plans.plan()) == [(1, 0, 3, 1, True)]


def test_one_that_is_cancelled_before_its_plan_is_launched_stays_gone() -> None:
    plans = scheduler()
    plans.add(sequence(0, 3))
    plan = plans.plan()
    assert plan is not None
    plans.cancel(0)
    plans.launched(plan)
    assert land(plans, plan, {0: [5]}) == []
    assert plans.plan() is None


@pytest.mark.parametrize(
    ("prompt", "budget", "begin"),
    [(300, 512, 4), (100, 512, 8), (300, 1024, 8), (100, 1024, 16), (4000, 8192, 64), (1000, 8192, 70)],
)
def test_more_prompts_share_a_larger_step(prompt: int, budget: int, begin: int) -> None:
    """One for each 128 tokens of it, or four; and as many again if they are short."""
    plans = Scheduler(20_000, 16, 100, budget)
    for request_id in range(70):
        plans.add(sequence(request_id, prompt, params=PLAIN))
    plans.plan()
    assert len(plans.running) == begin
