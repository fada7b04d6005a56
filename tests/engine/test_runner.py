"""What the runner makes of a plan, seen by a decoder that only takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.engine.kv_cache import KVCache
from rooflight.engine.plan import UNKNOWN, Row, StepPlan
from rooflight.engine.runner import Runner
from rooflight.models.load import load_config
from tests.engine.sequences import sequence

CONFIG = load_config("random:tiny")


class Notes:
    """A decoder whose hidden state of a token is its id, and whose logits are that twice.

    wanted: the rows that were asked for, all where it is None.
    """

    def pack_weights(self) -> None:
        pass

    def __call__(
        self, ids: Any, positions: Any, caches: Any, slots: Any, meta: Any, decode: bool, wanted: Any = None
    ) -> torch.Tensor:
        self.wanted = None if wanted is None else wanted.tolist()
        self.ids, self.positions, self.slots = ids.tolist(), positions.tolist(), slots.tolist()
        self.dtypes = {ids.dtype, positions.dtype, slots.dtype}
        self.meta, self.decode, self.num_caches = meta, decode, len(caches)
        hidden: torch.Tensor = ids[:, None].float()
        return hidden if wanted is None else hidden[wanted]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.cat([hidden, 2 * hidden], 1)


def run(rows: Sequence[Row], page_size: int = 4) -> tuple[Notes, torch.Tensor]:
    notes = Notes()
    cache = KVCache(CONFIG, 16, page_size, torch.float32, torch.device("cpu"))
    runner = Runner(notes, cache, max_model_len=64)  # type: ignore[arg-type]
    return notes, runner.run(StepPlan(tuple(rows)))


def test_a_prompt_chunk_goes_to_the_slots_of_its_pages() -> None:
    notes, logits = run([Row(0, 3, (10, 11, 12), (5, 2), True)])
    assert (notes.ids, notes.positions) == ([10, 11, 12], [3, 4, 5])
    assert notes.slots == [5 * 4 + 3, 2 * 4, 2 * 4 + 1]
    assert notes.dtypes == {torch.int64}
    assert (notes.decode, notes.num_caches) == (False, CONFIG.num_layers)
    assert notes.meta.block_table.tolist() == [[5, 2]]
    assert (notes.meta.seq_lens.tolist(), notes.meta.query_starts.tolist()) == ([6], [0, 3])
    assert (notes.meta.max_query_len, notes.meta.max_seq_len) == (3, 6)
    assert logits.tolist() == [[12, 24]]


def test_a_decode_step_lays_rows_end_to_end_and_fills_the_table_with_page_0() -> None:
    notes, logits = run(
        [Row(4, 6, (40,), (7, 9), True), Row(2, 1, (20,), (3,), True), Row(9, 8, (90,), (4, 6, 8), True)]
    )
    assert (notes.ids, notes.positions, notes.slots) == ([40, 20, 90], [6, 1, 8], [9 * 4 + 2, 3 * 4 + 1, 8 * 4])
    assert notes.decode
    assert notes.meta.block_table.tolist() == [[7, 9, 0], [3, 0, 0], [4, 6, 8]]
    assert {notes.meta.block_table.dtype, notes.meta.seq_lens.dtype, notes.meta.query_starts.dtype} == {torch.int32}
    assert (notes.meta.seq_lens.tolist(), notes.meta.query_starts.tolist()) == ([7, 2, 9], [0, 1, 2, 3])
    assert (notes.meta.max_query_len, notes.meta.max_seq_len) == (1, 9)
    assert logits.tolist() == [[40, 80], [20, 40], [90, 180]]
    assert notes.wanted is None


def test_rows_of_different_lengths_in_one_step_give_logits_of_their_last_tokens() -> None:
    """No scheduler of today plans this, the next one will: chunks beside single tokens, some without samples."""
    rows = [Row(0, 0, (1, 2, 3), (0,), True), Row(1, 0, (4, 5), (1,), False), Row(2, 4, (6,), (2, 3), True)]
    notes, logits = run(rows)
    assert (notes.ids, notes.positions) == ([1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 4])
    assert not notes.decode
    assert (notes.meta.query_starts.tolist(), notes.meta.max_query_len) == ([0, 3, 5, 6], 3)
    assert logits.tolist() == [[3, 6], [6, 12]]
    assert notes.wanted == [2, 5]


def test_a_chunk_that_samples_nothing_gives_no_logits() -> None:
    notes, logits = run([Row(0, 0, (1, 2, 3), (0,), False)])
    assert logits.shape == (0, 2)
    assert notes.wanted == []


def test_all_logits_of_a_prompt_are_asked_for_without_picking() -> None:
    notes, logits = run([Row(0, 0, (1, 2, 3), (0,), True, every_logit=True)])
    assert logits.tolist() == [[1, 2], [2, 4], [3, 6]]
    assert notes.wanted is None


@pytest.mark.parametrize(("page_size", "slots"), [(1, [6, 8]), (16, [6 * 16, 6 * 16 + 1])])
def test_page_size_one_and_more(page_size: int, slots: list[int]) -> None:
    notes, _ = run([Row(0, 0, (1, 2), (6, 8), True)], page_size)
    assert notes.slots == slots


class Counting(Notes):
    """The token after each is the next number; a token that is no number cannot be run."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int], list[int]]] = []
        self.fails_at = -1

    def __call__(self, ids: Any, *rest: Any) -> torch.Tensor:
        if len(self.seen) == self.fails_at:
            raise MemoryError
        assert min(ids.tolist()) >= 0
        hidden = super().__call__(ids, *rest)
        self.seen.append((self.ids, self.positions, self.slots))
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = torch.zeros(len(hidden), 20)
        logits[torch.arange(len(hidden)), hidden[:, 0].long() + 1] = 1.0
        return logits.masked_fill(hidden == 13, torch.nan)


def counting() -> tuple[Counting, Runner]:
    decoder = Counting()
    cache = KVCache(CONFIG, 16, 4, torch.float32, torch.device("cpu"))
    return decoder, Runner(decoder, cache, max_model_len=64)  # type: ignore[arg-type]


def test_a_launch_of_several_steps_feeds_each_row_its_own_tokens_up_to_its_limit() -> None:
    decoder, runner = counting()
    rows = (
        Row(4, 6, (3,), (7, 9, 2), True, place=2, limit=20),
        Row(5, 2, (9,), (1,), True, place=0, limit=4),
    )
    launch = runner.launch(StepPlan(rows, steps=4), [sequence(), sequence()])
    assert launch.land() == ([[4, 5, 6, 7], [10, 11]], [[None] * 4, [None] * 2])
    assert decoder.seen == [
        ([3, 9], [6, 2], [9 * 4 + 2, 1 * 4 + 2]),
        ([4, 10], [7, 3], [9 * 4 + 3, 1 * 4 + 3]),
        ([5], [8], [2 * 4]),
        ([6], [9], [2 * 4 + 1]),
    ]
    unknown = tuple(row._replace(start=12, tokens=(UNKNOWN,), pages=(1, 2, 3, 4)) for row in rows)
    assert runner.launch(StepPlan(unknown), [sequence(), sequence()]).land()[0] == [[8], [12]]
    assert decoder.seen[-1][0] == [7, 11]


def test_a_launch_that_fails_midway_leaves_what_unknown_stands_for() -> None:
    decoder, runner = counting()
    rows = (Row(4, 6, (3,), (7, 9, 2), True, place=2, limit=20),)
    runner.launch(StepPlan(rows), [sequence()])
    ahead = StepPlan((rows[0]._replace(start=7, tokens=(UNKNOWN,)),), steps=4)
    decoder.fails_at = 3
    with pytest.raises(MemoryError):
        runner.launch(ahead, [sequence()])
    decoder.fails_at = -1
    assert runner.launch(ahead, [sequence()]).land()[0] == [[5, 6, 7, 8]]


def test_a_row_without_a_distribution_is_carried_along_and_hurts_nobody() -> None:
    _, runner = counting()
    rows = (Row(4, 6, (12,), (7, 9, 2), True, place=2, limit=20), Row(5, 2, (1,), (1, 3), True, place=0, limit=20))
    tokens, _ = runner.launch(StepPlan(rows, steps=4), [sequence(), sequence()]).land()
    assert (tokens[0][:2], tokens[1]) == ([13, ops.NO_TOKEN], [2, 3, 4, 5])
    assert len(tokens[0]) == 4


def test_the_draws_of_a_launch_are_those_of_its_steps_one_by_one() -> None:
    """Also where the sequence does not know its latest tokens yet."""
    drawn = []
    for steps in (1, 4):
        cache = KVCache(CONFIG, 16, 4, torch.float32, torch.device("cpu"))
        flat = Counting()
        flat.logits = lambda hidden: torch.zeros(len(hidden), 1000)  # type: ignore[method-assign]
        runner = Runner(flat, cache, max_model_len=64)  # type: ignore[arg-type]
        one, got = sequence(temperature=1.0, prompt=(1,) * 7), []
        for start in range(6, 14, steps):
            first = (1,) if start == 6 else (UNKNOWN,)
            plan = StepPlan((Row(4, start, first, (7, 9, 2, 3), True, place=2, limit=20),), steps)
            got += runner.launch(plan, [one]).land()[0][0]
        drawn.append(got)
    assert drawn[0] == drawn[1]
    assert len(set(drawn[0])) > 5
