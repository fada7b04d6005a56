"""Limits, ratios between rows and their refusal, and what a table says at its end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rooflight.bench.cell import Case
from rooflight.bench.measurement import Spread
from rooflight.bench.rows import COLD, HOT, OpRow, limit, make_row, ratio
from rooflight.bench.summary import against_ours, compared, lines
from tests.bench.fake_processes import CARD

CASE = Case("rms_norm", "bf16", 256, 4096)
FACTS = {"version": "1.0", "bytes": 4_000_000, "cold_method": "rotation of 9 sets"}


def row(contender: str, hot: float, cold: float, call: float = 10.0, case: Case = CASE) -> OpRow:
    times = {"call_us": [call], "hot_us": [hot], "cold_us": [cold]}
    return make_row("run 1", case, CARD, contender, FACTS, times, None)


def test_the_limit_is_memory_or_the_launch() -> None:
    assert limit(CARD, 4_000_000) == (pytest.approx(1.0), "memory")
    assert limit(CARD, 400_000) == (0.7, "launch")  # the better of the two kinds of launch
    assert limit(CARD, 2_800_000) == (pytest.approx(0.7), "memory")


def test_a_row_has_median_least_and_most_and_its_share_of_the_limit() -> None:
    times = {"hot_us": [2.0, 1.0, 4.0], "cold_us": [4.0, 5.0, 3.0]}
    made = make_row("run 1", CASE, CARD, "liger", FACTS, times, None)
    assert (made.hot_us, made.cold_us, made.call_us) == (Spread(2.0, 1.0, 4.0), Spread(4.0, 3.0, 5.0), None)
    assert (made.at_limit_hot, made.at_limit_cold) == (pytest.approx(0.5), pytest.approx(0.25))
    failed = make_row("run 1", CASE, CARD, "liger", FACTS, times, "wrong: off")
    assert (failed.hot_us, failed.at_limit_cold, failed.error) == (None, None, "wrong: off")
    assert OpRow.from_data(made.as_data()) == made


def test_a_difference_lost_in_noise_is_no_figure() -> None:
    """Flush and launch minus flush can come out below nothing."""
    lost = make_row("run 1", CASE, CARD, "liger", FACTS, {"hot_us": [1.0], "cold_us": [-0.1, 0.0, 0.2]}, None)
    assert (lost.hot_us, lost.at_limit_cold) == (None, None)
    assert lost.error == "the noise of the measurement is larger than the operator"


def test_a_ratio_between_rows_of_one_run_and_configuration() -> None:
    assert ratio(row("liger", 3.0, 6.0), row("rooflight", 2.0, 5.0), COLD) == pytest.approx(1.2)
    assert ratio(row("liger", 3.0, 6.0), row("rooflight", 2.0, 5.0), "event_hot_us") is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"run": "run 2"}, "run must be the same for a ratio of cold_us, was run 1 and run 2"),
        ({"operator": "layer_norm"}, "operator must be the same"),
        ({"dtype": "fp16"}, "dtype must be the same for a ratio of cold_us, was bf16 and fp16"),
        ({"num_tokens": 1}, "shape must be the same for a ratio of cold_us, was 256x4096 and 1x4096"),
        ({"hidden_size": 8192}, "shape must be the same"),
        ({"cold_method": "flush by torch.sum"}, "cold_method must be the same"),
    ],
)
def test_a_ratio_across_runs_or_configurations_is_refused(change: dict[str, str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ratio(row("liger", 3.0, 6.0), replace(row("rooflight", 2.0, 5.0), **change), COLD)


def test_how_caches_were_emptied_matters_to_cold_times_alone() -> None:
    other = replace(row("rooflight", 2.0, 5.0), cold_method="flush by torch.sum")
    assert ratio(row("liger", 3.0, 6.0), other, HOT) == pytest.approx(1.5)


def test_ours_is_compared_with_the_best_other() -> None:
    rows = [row("rooflight", 2.0, 5.0), row("rooflight again", 1.0, 1.0), row("eager", 8.0, 9.0)]
    rows += [row("liger", 1.86, 5.1), row("quack", 1.9, 4.7)]
    (hot,) = compared(rows, HOT)
    assert (hot.ours, hot.best, hot.contender, hot.within) == (2.0, 1.86, "liger", True)  # 0.14 us apart
    (cold,) = compared(rows, COLD)
    assert (cold.best, cold.contender, cold.within) == (4.7, "quack", False)
    (own,) = compared([*rows, row("rooflight.triton", 1.5, 4.9)], HOT)
    assert (own.best, own.contender) == (1.5, "rooflight.triton")  # what the card was not given is another, too
    assert compared(rows[:2], HOT) == []


def test_what_a_table_says_at_its_end() -> None:
    rows = [row("rooflight", 2.0, 5.0), row("rooflight again", 2.01, 5.1), row("liger", 1.9, 4.0, call=6.0)]
    assert lines(rows) == [
        "tie band (ours against itself, at worst): call 0.0%, hot 0.5%, cold 2.0%",
        "hot and cold: ours within 1.05x or 0.15 us of the best other in 1 of 2; "
        "outside: 256x4096 cold 5.00 against 4.00 (liger)",
        "call: ours within 1.05x or 0.5 us of the best other in 0 of 1; "
        "outside: 256x4096 call 10.00 against 6.00 (liger)",
    ]
    assert lines(rows[2:]) == []


def test_times_over_ours() -> None:
    ours, liger = row("rooflight", 2.0, 5.0), row("liger", 1.0, 6.0, call=12.0)
    assert against_ours(liger, ours) == "1.20 / 0.50 / 1.20"
    assert against_ours(ours, ours) == against_ours(liger, None) == ""
    assert against_ours(replace(liger, call_us=None), ours) == "- / 0.50 / 1.20"
