"""Pages: stopping and going on, the prefix cache, leaving."""

from __future__ import annotations

import pytest

from tests.engine.scheduling import (
    BIG,
    alone,
    chunks,
    do,
    run,
    scheduler,
    sequence,
    shape,
    update,
)
from tests.engine.support import assert_conserved

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
    assert update(plans, plan, sampled) == [kept]
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
    assert update(plans, plan, {0: [7]}) == []
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
    run(plans)
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
