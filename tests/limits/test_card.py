"""The ceilings of a card, on disk and back."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooflight.limits.card import Bandwidth, Card

CARD = Card(
    name="NVIDIA H200",
    l2_bytes=60 * 2**20,
    copy=(Bandwidth(2**27, 3.6e12), Bandwidth(2**33, 4.2e12)),
    read=(Bandwidth(2**28, 3.9e12), Bandwidth(2**32, 4.6e12)),
    matmul={"bf16": 7.9e14},
    call_us={"PyTorch operator": 4.0},
    node_us={"plain": 0.79, "dependent launch": 0.72},
    methods={"copy": "copy_"},
    missing={"matmul fp8": "not on this card"},
    environment={"driver": "580", "idle": True},
)


def test_the_ceilings_are_the_best_of_what_was_measured() -> None:
    assert CARD.copy_bandwidth == 4.2e12
    assert CARD.read_bandwidth == 4.6e12
    assert CARD.launch_floor_us == 0.72


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    CARD.save(tmp_path / "card.json")
    assert Card.load(tmp_path / "card.json") == CARD


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"benchmark": "ops"}', '{"benchmark": "card", "name": "x"}'])
def test_another_file_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other.json holds no card ceilings"):
        Card.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"card.json"):
        Card.load(tmp_path / "card.json")
