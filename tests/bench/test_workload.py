"""Requests of a throughput run: lengths by their distribution, Poisson arrivals, all of it from a seed."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from statistics import mean, median, stdev
from typing import Any

import pytest
import torch

from rooflight.bench.workload import CHOICES, Ask, Lengths, make


def draw(text: str, count: int = 4000, room: int = 10**6, least: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(3)
    return Lengths.parse("prompt_tokens", text, least).draw(torch.full((count,), room), generator).tolist()


def asks(prompt_tokens: str = "uniform:4-40", **changes: Any) -> list[Ask]:
    arguments: dict[str, Any] = {"requests": 50, "vocab_size": 1000, "context": 100, "seed": 5}
    answers = Lengths.parse("max_tokens", changes.pop("max_tokens", "8"), 2)
    return make(Lengths.parse("prompt_tokens", prompt_tokens), answers, **arguments | changes)


def test_fixed_lengths_are_all_alike() -> None:
    assert draw("128", 3) == draw("fixed:128", 3) == [128, 128, 128]


def test_uniform_lengths_reach_both_ends_and_nothing_beyond() -> None:
    lengths = draw("uniform:16-25")
    assert set(lengths) == set(range(16, 26))
    counts = [lengths.count(length) for length in range(16, 26)]
    assert max(abs(count - 400) for count in counts) < 5 * math.sqrt(4000 * 0.1 * 0.9)
    assert draw("uniform:7-7", 2) == [7, 7]


def test_lognormal_lengths_have_their_median_and_their_sigma() -> None:
    lengths = draw("lognormal:200,0.5")
    assert median(lengths) == pytest.approx(200, rel=0.05)
    assert stdev(math.log(length) for length in lengths) == pytest.approx(0.5, rel=0.05)
    assert mean(lengths) == pytest.approx(200 * math.exp(0.5**2 / 2), rel=0.05)
    assert draw("lognormal:200,0", 3) == [200, 200, 200]


def test_lognormal_lengths_are_clipped_on_both_sides() -> None:
    lengths = draw("lognormal:50,2", room=300, least=2)
    assert (min(lengths), max(lengths)) == (2, 300)
    beyond = draw("lognormal:50,999", room=300)  # what a float's exponent cannot hold
    assert (min(beyond), max(beyond)) == (1, 300)


@pytest.mark.parametrize(
    "text",
    ["", "x", "-3", "1.5", "gauss:3", "fixed:", "fixed:x", "fixed:3-4", "uniform:3", "uniform:3,4", "uniform:-3-4",
     "lognormal:3", "lognormal:3,-1", "lognormal:3,x", "lognormal:1.5,1", "uniform:1-2-3", " 3", "٣", "1" * 10],
)  # fmt: skip
def test_what_is_no_distribution_is_refused_with_the_choices(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"prompt_tokens must be {CHOICES}, was {text!r}")):
        Lengths.parse("prompt_tokens", text)


@pytest.mark.parametrize("text", ["1", "fixed:0", "uniform:1-5", "uniform:5-4", "lognormal:1,1"])
def test_lengths_below_the_least_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=rf"^max_tokens must be 2 or more tokens.*, was '{text}'$"):
        Lengths.parse("max_tokens", text, least=2)


def test_the_same_seed_makes_the_same_requests() -> None:
    made = asks(rate=2.0)
    assert made == asks(rate=2.0) != asks(rate=2.0, seed=6)
    assert {len(ask.prompt) for ask in made} <= set(range(4, 41))
    assert {ask.max_tokens for ask in made} == {8}
    assert {token for ask in made for token in ask.prompt} <= set(range(1000))
    assert len({tuple(ask.prompt) for ask in made}) == 50
    assert made[0].most_cached == len(made[0].prompt) + 7


def test_the_rate_changes_nothing_but_the_times() -> None:
    at_once, slow, fast = asks(), asks(rate=2.0), asks(rate=4.0)
    assert [a.prompt for a in at_once] == [a.prompt for a in slow] == [a.prompt for a in fast]
    assert {ask.arrival for ask in at_once} == {0.0}
    assert slow[0].arrival == 0.0
    assert [ask.arrival for ask in slow] == pytest.approx([2 * ask.arrival for ask in fast])


def test_gaps_between_arrivals_are_exponential() -> None:
    times = [ask.arrival for ask in asks("1", max_tokens="2", requests=4001, rate=8.0)]
    gaps = [after - before for before, after in pairwise(times)]
    assert min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 8, rel=5 / math.sqrt(4000))
    assert stdev(gaps) == pytest.approx(1 / 8, rel=0.1)
    longer = sum(gap > 1 / 8 for gap in gaps) / 4000
    assert longer == pytest.approx(math.exp(-1), abs=5 * math.sqrt(0.37 * 0.63 / 4000))


@pytest.mark.parametrize(
    ("prompts", "answers"),
    [("93", "8"), ("uniform:1-93", "8"), ("8", "uniform:2-93"), ("lognormal:5,1", "100"), ("99", "lognormal:5,1")],
)
def test_lengths_that_may_not_fit_the_context_are_refused(prompts: str, answers: str) -> None:
    words = f"must fit the context of 100 tokens together, were {prompts} and {answers}"
    with pytest.raises(ValueError, match=re.escape(words)):
        asks(prompts, max_tokens=answers)


@pytest.mark.parametrize(
    ("prompts", "answers"), [("lognormal:60,1", "8"), ("60", "lognormal:30,1"), ("lognormal:60,1", "lognormal:30,1")]
)
def test_lognormal_lengths_are_clipped_to_the_context(prompts: str, answers: str) -> None:
    made = asks(prompts, max_tokens=answers)
    assert max(len(ask.prompt) + ask.max_tokens for ask in made) == 100
    assert min(ask.max_tokens for ask in made) >= 2
    assert len(asks("92", max_tokens="8")[0].prompt) == 92
