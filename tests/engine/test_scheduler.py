"""Plans as plain data, and a machine of random histories that checks every slot of the memory they describe."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from rooflight import SamplingParams
from rooflight.engine.scheduler import Row, Scheduler, Sequence, StepPlan


def sequence(request_id: int, num_prompt: int, max_tokens: int = 4) -> Sequence:
    """Prompt tokens are 100 * request_id, counting up."""
    tokens = [100 * request_id + i for i in range(num_prompt)]
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(request_id, tokens, num_prompt, num_prompt + max_tokens, params, 0, frozenset())


def scheduler(num_pages: int = 16, page_size: int = 4, max_num_seqs: int = 8, prefill_chunk: int = 4) -> Scheduler:
    return Scheduler(num_pages, page_size, max_num_seqs, prefill_chunk)


def shape(plan: StepPlan | None) -> list[tuple[int, int, int, int, bool]]:
    """(request, first position, tokens, pages, samples) of each row."""
    assert plan is not None
    return [(r.request_id, r.start, len(r.tokens), len(r.pages), r.samples) for r in plan.rows]


def run(plans: Scheduler, steps: int | None = None, token: int = 7) -> list[list[tuple[int, int, int, int, bool]]]:
    """Shapes of the next steps, every sample being `token`; to the end, sequences ending at their lengths."""
    shapes: list[list[tuple[int, int, int, int, bool]]] = []
    while steps is None or len(shapes) < steps:
        plan = plans.plan()
        if plan is None:
            break
        shapes.append(shape(plan))
        for got in plans.update(plan, {row.request_id: token for row in plan.rows if row.samples}):
            if len(got.tokens) == got.max_len:
                plans.finish(got, "length")
    return shapes


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
def test_a_prompt_runs_in_chunks_and_only_the_last_one_samples(num_prompt: int, steps: list[Any]) -> None:
    plans = scheduler()
    plans.add(sequence(0, num_prompt, max_tokens=1))
    assert run(plans) == [[(0, *step)] for step in steps]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_are_consecutive_parts_of_the_prompt(chunk: int) -> None:
    plans = scheduler(prefill_chunk=chunk)
    plans.add(sequence(3, 30, max_tokens=1))
    tokens: list[int] = []
    while (plan := plans.plan()) is not None:
        (row,) = plan.rows
        assert row.start == len(tokens)
        assert len(row.tokens) <= chunk
        tokens.extend(row.tokens)
        for got in plans.update(plan, {3: 7} if row.samples else {}):
            plans.finish(got, "length")
    assert tokens == [300 + i for i in range(30)]


def test_a_plan_is_plain_data_that_can_be_written_down() -> None:
    plans = scheduler()
    plans.add(sequence(2, 5, max_tokens=3))
    assert plans.plan() == StepPlan((Row(2, 0, (200, 201, 202, 203), (0,), False),))
    assert plans.plan() == StepPlan((Row(2, 0, (200, 201, 202, 203), (0,), False),))  # planning changes nothing
    plans.update(plans.plan(), {})  # type: ignore[arg-type]
    last = plans.plan()
    assert last == StepPlan((Row(2, 4, (204,), (0, 1), True),))
    assert last.is_decode


def test_a_prompt_of_one_token_is_no_decode_step() -> None:
    """Its first token has no cache behind it; one that is the last of a chunked prompt has."""
    plans = scheduler()
    plans.add(sequence(0, 1))
    first = plans.plan()
    assert first is not None
    assert not first.is_decode
    plans.update(first, {0: 7})
    second = plans.plan()
    assert second == StepPlan((Row(0, 1, (7,), (0,), True),))
    assert second.is_decode


def test_pages_of_a_row_grow_at_the_page_border() -> None:
    plans = scheduler(page_size=4, prefill_chunk=64)
    plans.add(sequence(0, 3, max_tokens=7))
    assert [step[0][3] for step in run(plans)] == [1, 1, 2, 2, 2, 2, 3]  # the last token, number 10, is never run


def test_prompts_run_one_after_the_other_then_all_decode_together() -> None:
    plans = scheduler(page_size=4, prefill_chunk=4)
    plans.add(sequence(0, 6, max_tokens=2))
    plans.add(sequence(1, 2, max_tokens=3))
    plans.add(sequence(2, 5, max_tokens=1))
    assert run(plans) == [
        [(0, 0, 4, 1, False)],
        [(0, 4, 2, 2, True)],
        [(1, 0, 2, 1, True)],
        [(2, 0, 4, 1, False)],
        # The last token of prompt 2 is a step of one token like the others' and joins them.
        [(0, 6, 1, 2, True), (1, 2, 1, 1, True), (2, 4, 1, 2, True)],
        [(1, 3, 1, 1, True)],
    ]


def test_a_batch_is_static_and_takes_requests_in_order() -> None:
    plans = scheduler(num_pages=4, page_size=4, prefill_chunk=64)
    plans.add(sequence(0, 4, max_tokens=4))  # 2 pages
    plans.add(sequence(1, 8, max_tokens=4))  # 3 pages: does not fit beside request 0
    plans.add(sequence(2, 1, max_tokens=1))  # 1 page: would, but may not overtake
    assert [{row[0] for row in step} for step in run(plans)] == [{0}] * 4 + [{1}, {2}] + [{1}] * 3
    assert plans.pool.free == 4


def test_no_more_sequences_than_allowed() -> None:
    plans = scheduler(max_num_seqs=2)
    for request_id in range(5):
        plans.add(sequence(request_id, 1, max_tokens=2))
    assert [[row[0] for row in step] for step in run(plans)] == [
        [0], [1], [0, 1],
        [2], [3], [2, 3],
        [4], [4],
    ]  # fmt: skip


def test_br_063_a_request_that_can_never_fit_is_refused_with_numbers() -> None:
    plans = scheduler(num_pages=2, page_size=16)
    message = r"may need 39 tokens of KV cache \(3 pages of 16\), the pool has 2 pages: lower max_tokens"
    with pytest.raises(ValueError, match=message):
        plans.add(sequence(0, 32, max_tokens=8))
    with pytest.raises(ValueError, match=r"may need 33 tokens of KV cache \(3 pages of 16\)"):
        plans.add(sequence(1, 33, max_tokens=1))
    plans.add(sequence(2, 25, max_tokens=8))  # 32 tokens in the cache: exactly the pool
    plans.add(sequence(3, 2, max_tokens=2))
    steps = run(plans)
    assert [[row[0] for row in step] for step in steps[-2:]] == [[3], [3]]
    assert (plans.pool.free, len(plans.waiting), plans.running) == (2, 0, [])


@pytest.mark.parametrize(("num_prompt", "max_tokens", "pages"), [(4, 1, 1), (4, 2, 2), (1, 4, 1), (1, 5, 2), (4, 0, 1)])
def test_pages_are_reserved_for_every_token_but_the_last(num_prompt: int, max_tokens: int, pages: int) -> None:
    """Its keys would be read by nobody, so they are never written."""
    plans = scheduler(page_size=4)
    item = sequence(0, num_prompt, max_tokens)
    plans.add(item)
    plans.plan()
    assert len(item.pages) == pages


def test_cancel_while_waiting() -> None:
    plans = scheduler(num_pages=2)
    plans.add(sequence(0, 4, max_tokens=2))
    plans.add(sequence(1, 4, max_tokens=2))
    plans.plan()
    plans.cancel(1)
    assert len(plans.waiting) == 0
    assert [{row[0] for row in step} for step in run(plans)] == [{0}, {0}]
    assert plans.pool.free == 2


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 4])
def test_cancel_while_running_frees_the_pages_at_once(steps: int) -> None:
    plans = scheduler()
    plans.add(sequence(0, 9, max_tokens=8))
    plans.plan()
    run(plans, steps)
    plans.cancel(0)
    assert (plans.pool.free, plans.running, plans.plan()) == (16, [], None)


def test_cancel_between_plan_and_update_drops_the_token_and_keeps_the_neighbour() -> None:
    plans = scheduler()
    plans.add(sequence(0, 2))
    plans.add(sequence(1, 2))
    run(plans, 2)
    plan = plans.plan()
    assert plan is not None
    plans.cancel(0)
    (advanced,) = plans.update(plan, {0: 8, 1: 9})
    assert (advanced.request_id, advanced.tokens) == (1, [100, 101, 7, 9])
    assert plans.pool.free == 16 - 2
    assert shape(plans.plan()) == [(1, 3, 1, 1, True)]


def test_pages_of_a_cancelled_sequence_serve_the_next_batch() -> None:
    plans = scheduler(num_pages=2)
    plans.add(sequence(0, 4, max_tokens=4))
    plans.add(sequence(1, 4, max_tokens=4))
    plan = plans.plan()
    assert plan is not None
    plans.cancel(0)
    assert plans.update(plan, {0: 7}) == []
    assert shape(plans.plan()) == [(1, 0, 4, 1, True)]


def test_cancel_of_unknown_and_finished_requests_is_no_error() -> None:
    plans = scheduler()
    plans.cancel(5)
    plans.add(sequence(0, 2, max_tokens=1))
    run(plans)
    plans.cancel(0)
    assert plans.pool.free == 16


def test_finish_records_the_reason() -> None:
    plans = scheduler()
    item = sequence(0, 2)
    plans.add(item)
    run(plans, 1)
    plans.finish(item, "stop")
    assert (item.finish_reason, item.pages, plans.plan()) == ("stop", [], None)


def oracle(tokens: list[int]) -> int:
    """The next token of a make-believe model: it depends on every token and on their order."""
    value = 17
    for token in tokens:
        value = (value * 31 + token + 1) % 9973
    return value


def alone(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(oracle(tokens))
    return tokens


class Histories(RuleBasedStateMachine):
    """Submit, step, cancel (also in mid-step), with a pool of a few pages.

    Memory is simulated slot by slot: a step writes its tokens where the plan says and its samples are made of what
    stands in the slots, so a page with two owners, a lost token or a wrong start gives another text.
    """

    requests = Bundle("requests")

    @initialize(
        pages=st.integers(2, 6), page_size=st.integers(1, 4), max_seqs=st.integers(1, 4), chunk=st.integers(1, 5)
    )
    def start(self, pages: int, page_size: int, max_seqs: int, chunk: int) -> None:
        self.plans = Scheduler(pages, page_size, max_seqs, chunk)
        self.memory: dict[int, int] = {}
        self.open: dict[int, Sequence] = {}
        self.order: list[int] = []  # submitted and not begun
        self.next_id = 0

    @rule(target=requests, num_prompt=st.integers(1, 12), max_tokens=st.integers(1, 8))
    def submit(self, num_prompt: int, max_tokens: int) -> int:
        item = sequence(self.next_id, num_prompt, max_tokens)
        self.next_id += 1
        cached = num_prompt + max_tokens - 1
        if -(-cached // self.plans.page_size) > self.plans.pool.num_pages:
            with pytest.raises(ValueError, match=f"may need {cached} tokens"):
                self.plans.add(item)
        else:
            self.plans.add(item)
            self.open[item.request_id] = item
            self.order.append(item.request_id)
        return item.request_id

    @rule(request_id=requests)
    def cancel(self, request_id: int) -> None:
        self.plans.cancel(request_id)
        self.open.pop(request_id, None)
        self.order = [waiting for waiting in self.order if waiting != request_id]

    @rule()
    def step(self) -> None:
        self.advance()

    @rule(request_id=requests)
    def step_with_a_cancel_in_the_middle(self, request_id: int) -> None:
        self.advance(cancelled=request_id)

    def advance(self, cancelled: int | None = None) -> bool:
        plan = self.plans.plan()
        if plan is None:
            assert not self.open
            return False
        sampled = {row.request_id: self.run_row(row) for row in plan.rows}
        assert len(sampled) == len(plan.rows)
        if not plan.is_decode:
            assert len(plan.rows) == 1
        if cancelled is not None:
            self.cancel(cancelled)
        wanted = [row.request_id for row in plan.rows if row.samples and row.request_id in self.open]
        advanced = self.plans.update(
            plan, {row.request_id: sampled[row.request_id] for row in plan.rows if row.samples}
        )
        assert [item.request_id for item in advanced] == wanted
        for item in advanced:
            if len(item.tokens) == item.max_len or item.tokens[-1] % 13 == 0:  # now and then an early end
                self.plans.finish(item, "length")
                del self.open[item.request_id]
                assert item.tokens == alone(item.tokens[: item.num_prompt], len(item.tokens) - item.num_prompt)
        return True

    def run_row(self, row: Row) -> int:
        """Writes the row's tokens and returns the model's next one, made of the slots alone."""
        item = self.open[row.request_id]
        size, end = self.plans.page_size, row.start + len(row.tokens)
        assert row.start == item.num_computed
        assert row.tokens == tuple(item.tokens[row.start : end])
        assert 1 <= len(row.tokens) <= self.plans.prefill_chunk
        assert row.pages == tuple(item.pages[: -(-end // size)])
        assert row.samples == (end == len(item.tokens))
        if row.request_id in self.order:  # begins here: nobody may have been overtaken
            assert self.order.pop(0) == row.request_id
        slots = [row.pages[position // size] * size + position % size for position in range(end)]
        self.memory.update(zip(slots[row.start :], row.tokens, strict=True))
        return oracle([self.memory[slot] for slot in slots])

    @invariant()
    def pages_are_conserved_and_have_one_owner(self) -> None:
        pool = self.plans.pool
        owned = [page for item in self.plans.running for page in item.pages]
        assert sorted(owned + pool._free) == list(range(pool.num_pages))

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        known = [item.request_id for item in [*self.plans.waiting, *self.plans.running]]
        assert sorted(known) == sorted(self.open)
        assert len(self.plans.running) <= self.plans.max_num_seqs

    def teardown(self) -> None:
        if hasattr(self, "plans"):
            limit = 20 * (1 + len(self.open)) * 21
            while self.open and limit:
                assert self.advance()
                limit -= 1
            assert not self.open
            assert self.plans.plan() is None
            assert self.plans.pool.free == self.plans.pool.num_pages


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestHistories = Histories.TestCase
