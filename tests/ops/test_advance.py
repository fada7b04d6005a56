"""The step from one decode step to the next, against a loop on the host, for every provider."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.ops import Make
from rooflight.ops.advance import ADVANCE_DECODE_

PROVIDERS = [
    pytest.param("ref", "cpu"),
    pytest.param("ref", "cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", "cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("provider", "device"), PROVIDERS)
def test_equals_the_loop(provider: str, device: str) -> None:
    for dims in ADVANCE_DECODE_.sweep:
        args = ADVANCE_DECODE_.inputs(Make(), **dims)
        expected = ADVANCE_DECODE_.composition(*args, compute=torch.float64)
        used = [a.clone().to(device) if isinstance(a, torch.Tensor) else a for a in args]
        ops.advance_decode_(*used, backend=provider)
        for name, want in zip(ADVANCE_DECODE_.mutated, expected, strict=True):
            got = used[[a.name for a in ADVANCE_DECODE_.arguments].index(name)]
            assert torch.equal(got.cpu(), want), (dims, name)


def _one(token: int, position: int, limit: int, place: int = 0) -> dict[str, Any]:
    """One sequence with pages 7 and 3 of four tokens, moved on once."""
    column = lambda value: torch.tensor([value])  # noqa: E731
    state: dict[str, Any] = {
        "tokens": column(token),
        "ids": column(50),
        "positions": column(position),
        "num_tokens": column(position + 1),
        "seq_lens": column(position + 1).int(),
        "slots": column(99),
        "last_tokens": torch.tensor([11, 12]),
        "history": torch.full((2, 1), 5),
        "block_table": torch.tensor([[7, 3]], dtype=torch.int32),
        "limits": column(limit),
        "places": column(place),
    }
    ops.advance_decode_(**state, page_size=4, step=1)
    return {name: value.tolist() for name, value in state.items()}


def test_moves_over_a_page_border() -> None:
    state = _one(token=42, position=3, limit=8)
    assert (state["ids"], state["positions"], state["num_tokens"], state["seq_lens"]) == ([42], [4], [5], [5])
    assert state["slots"] == [3 * 4]
    assert (state["last_tokens"], state["history"]) == ([42, 12], [[5], [42]])


def test_stands_still_at_its_limit() -> None:
    state = _one(token=42, position=7, limit=8)
    assert (state["ids"], state["positions"], state["seq_lens"], state["slots"]) == ([50], [7], [8], [-1])
    assert (state["last_tokens"], state["history"]) == ([42, 12], [[5], [42]])


def test_stands_still_without_a_token() -> None:
    state = _one(token=-1, position=3, limit=8)
    assert (state["ids"], state["positions"], state["seq_lens"], state["slots"]) == ([50], [3], [4], [-1])
    assert state["history"] == [[5], [-1]]


def test_a_padded_row_leaves_all_places_alone() -> None:
    assert _one(token=42, position=3, limit=0, place=-1)["last_tokens"] == [11, 12]


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("ids", torch.zeros(2, dtype=torch.int64), "ids must have shape"),
        ("seq_lens", torch.zeros(1, dtype=torch.int64), "seq_lens must be torch.int32"),
        ("step", 3, "step must be a row of history"),
        ("page_size", 0, "page_size must be 1 or more"),
    ],
)
def test_wrong_arguments_are_named(name: str, value: Any, message: str) -> None:
    args = ADVANCE_DECODE_.bind(*ADVANCE_DECODE_.inputs(Make(), num_seqs=1))
    with pytest.raises(ValueError, match=message):
        ops.advance_decode_(**(args | {name: value}))
