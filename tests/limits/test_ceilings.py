"""Cards as data: measured ones are what was measured, the others say what they are."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rooflight.limits.bounds import bound, memory_us
from rooflight.limits.card import Card
from rooflight.limits.ceilings import ROOT, ceilings, known
from rooflight.ops import Cost

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_the_cards_that_are_promised() -> None:
    promised = {"h200", "h100", "a100", "l4", "l40s", "rtx3090", "rtx4090", "rtx4090d", "rtx5090", "b200"}
    assert set(known()) == promised


@pytest.mark.parametrize("path", sorted((ROOT / "measured").glob("*.json")), ids=lambda path: path.stem)
def test_measured_cards_are_what_results_say(path: Path) -> None:
    assert json.loads(path.read_text()) == json.loads((RESULTS / path.stem / "card.json").read_text())


@pytest.mark.parametrize("key", known())
def test_every_card_is_complete_and_possible(key: str) -> None:
    card = ceilings(key)
    sheet = json.loads((ROOT / "datasheets" / f"{key}.json").read_text())
    assert card.key == key == sheet["key"]
    assert card.read_rate(1e12) <= sheet["memory_rate"]
    assert 0 < card.write_rate < 2 * sheet["memory_rate"]
    for name, rate in card.flops.items():
        assert 0 < rate <= sheet["flops"][name] * 1.001, name
    assert card.flops["fp32"] < card.flops["bf16"]
    assert card.memory_bytes >= 24e9
    assert card.sources
    assert all(source.startswith("https://") for source in card.sources)
    assert card.measured == (ROOT / "measured" / f"{key}.json").exists()
    assert card.origin.startswith("measured, commit" if card.measured else "data sheet, times the fraction")


def test_a_card_from_its_data_sheet_has_the_fractions_of_the_h200() -> None:
    card, h200 = ceilings("h100"), ceilings("h200")
    sheets = {key: json.loads((ROOT / "datasheets" / f"{key}.json").read_text()) for key in ("h100", "h200")}
    for name in ("bf16", "fp8", "fp32"):
        assert card.flops[name] / sheets["h100"]["flops"][name] == pytest.approx(
            h200.flops[name] / sheets["h200"]["flops"][name]
        )
    best = (card.read_rate(1e12) / sheets["h100"]["memory_rate"], h200.read_rate(1e12) / sheets["h200"]["memory_rate"])
    assert best[0] == pytest.approx(best[1])


def test_rates_lie_between_what_was_measured() -> None:
    card = ceilings("h200")
    points = sorted(card.read, key=lambda point: point.bytes)
    assert card.read_rate(1) == points[0].rate
    assert card.read_rate(1e15) == points[-1].rate
    for point in points:
        assert card.read_rate(point.bytes) == pytest.approx(point.rate)
    middle = (points[0].bytes * points[1].bytes) ** 0.5
    assert card.read_rate(middle) == pytest.approx((points[0].rate + points[1].rate) / 2)


def test_a_copy_takes_what_the_copy_took() -> None:
    card, measured = ceilings("h200"), Card.load(ROOT / "measured" / "h200.json")
    size = 4 * 2**30
    assert memory_us(size, size, card, 1e12) == pytest.approx(2 * size / measured.copy_bandwidth * 1e6)


def test_the_longest_wall_is_the_limit() -> None:
    card = ceilings("h200")
    memory = bound(Cost(10**9, 0, 10), "bf16", card)
    assert (memory.wall, memory.limit_us) == ("memory", memory.memory_us)
    compute = bound(Cost(10, 10, 10**15, unit="tensor"), "bf16", card)
    assert (compute.wall, compute.limit_us) == ("compute", pytest.approx(1e15 / card.flops["bf16"] * 1e6))
    assert bound(Cost(10, 10, 10), "bf16", card).wall == "launch"
    assert bound(Cost(10, 10, 10**15), "bf16", card).compute_us > compute.compute_us  # on the CUDA cores
    assert bound(Cost(10, 10, 10**15, unit="tensor"), "fp32", card).compute_us > compute.compute_us  # no matrix unit


def test_an_unknown_card_is_named_with_the_choices() -> None:
    with pytest.raises(ValueError, match=r"^gpu must be one of a100, b200, .*, was 'h300'$"):
        ceilings("h300")
    assert ceilings("H200") is not None
