"""Plans as plain data: chunks, room, order, fairness, and the logits that are wanted."""

from __future__ import annotations

import pytest

import rooflight.engine.scheduler as module
from rooflight.engine.plan import Row, StepPlan
from tests.engine.scheduling import (
    PLAIN,
    READING,
    alone,
    chunks,
    do,
    run,
    scheduler,
    sequence,
    shape,
    update,
)


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
        for got in update(plans, plan, {3: [7]} if row.samples else {}):
            plans.finish(got, "length")
    assert tokens == [300 + i for i in range(30)]


def test_a_plan_is_plain_data_that_can_be_written_down() -> None:
    plans = scheduler(budget=4)
    plans.add(sequence(2, 5, max_tokens=3))
    first = plans.plan()
    assert first == StepPlan((Row(2, 0, (200, 201, 202, 203), (0,), False, limit=7),))
    assert first == eval(repr(first))
    assert len({first, plans.plan()}) == 1
    update(plans, first, {})
    last = plans.plan()
    assert last == StepPlan((Row(2, 4, (204,), (0, 1), True, limit=7),))
    assert last.is_decode


def test_a_prompt_of_one_token_is_no_decode_step() -> None:
    """Its first token has no cache behind it; one that is the last of a chunked prompt has."""
    plans = scheduler()
    plans.add(sequence(0, 1))
    first = plans.plan()
    assert first == StepPlan((Row(0, 0, (0,), (0,), True, limit=4),))
    assert not first.is_decode
    update(plans, first, {0: [7]})
    second = plans.plan()
    assert second == StepPlan((Row(0, 1, (7,), (0,), True, limit=4),))
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
        for got in update(plans, plan, do(plans, plan)):
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
        for got in update(plans, plan, do(plans, plan)):
            plans.finish(got, "length")
    assert logits == [
        [(0, 0, 256, False), (2, 0, 1, True), (3, 0, 1, True)],  # 1 has to wait; the one logit of 3 is always there
        [(0, 256, 44, True), (1, 0, 100, True)],
    ]


def test_such_a_prompt_takes_no_room_that_it_cannot_use() -> None:
    plans = scheduler(num_pages=1000, budget=1024)
    plans.add(sequence(0, 2000, params=READING))
    plans.add(sequence(1, 1500))
    assert chunks(plans.plan()) == {0: 256, 1: 768}


def test_the_last_token_of_such_a_prompt_alone_gives_one_logit() -> None:
    plans = scheduler(num_pages=200, budget=512)
    plans.add(sequence(0, 257, max_tokens=2, params=READING))
    assert run(plans, 1) == [[(0, 0, 256, 64, False)]]
    plan = plans.plan()
    assert plan == StepPlan((Row(0, 256, (256,), tuple(range(65)), True, True, limit=258),), needs_host=True)
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
