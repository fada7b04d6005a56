"""What the runner makes of a plan, seen by a decoder that only takes notes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rooflight.engine.kv_cache import KVCache
from rooflight.engine.plan import Row, StepPlan
from rooflight.engine.runner import Runner
from rooflight.models.load import load_config

CONFIG = load_config("random:tiny")


class Notes:
    """A decoder whose hidden state of a token is its id, and whose logits are that twice."""

    def pack_weights(self) -> None:
        pass

    def __call__(self, ids: Any, positions: Any, caches: Any, slots: Any, meta: Any, decode: bool) -> torch.Tensor:
        self.ids, self.positions, self.slots = ids.tolist(), positions.tolist(), slots.tolist()
        self.dtypes = {ids.dtype, positions.dtype, slots.dtype}
        self.meta, self.decode, self.num_caches = meta, decode, len(caches)
        hidden: torch.Tensor = ids[:, None].float()
        return hidden

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


def test_rows_of_different_lengths_in_one_step_give_logits_of_their_last_tokens() -> None:
    """No scheduler of today plans this, the next one will: chunks beside single tokens, some without samples."""
    rows = [Row(0, 0, (1, 2, 3), (0,), True), Row(1, 0, (4, 5), (1,), False), Row(2, 4, (6,), (2, 3), True)]
    notes, logits = run(rows)
    assert (notes.ids, notes.positions) == ([1, 2, 3, 4, 5, 6], [0, 1, 2, 0, 1, 4])
    assert not notes.decode
    assert (notes.meta.query_starts.tolist(), notes.meta.max_query_len) == ([0, 3, 5, 6], 3)
    assert logits.tolist() == [[3, 6], [6, 12]]


def test_a_chunk_that_samples_nothing_gives_no_logits() -> None:
    _, logits = run([Row(0, 0, (1, 2, 3), (0,), False)])
    assert logits.shape == (0, 2)


@pytest.mark.parametrize(("page_size", "slots"), [(1, [6, 8]), (16, [6 * 16, 6 * 16 + 1])])
def test_page_size_one_and_more(page_size: int, slots: list[int]) -> None:
    notes, _ = run([Row(0, 0, (1, 2), (6, 8), True)], page_size)
    assert notes.slots == slots
