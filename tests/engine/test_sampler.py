from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from rooflight import SamplingParams
from rooflight.engine.sampler import sample_tokens
from rooflight.engine.scheduler import Sequence

INF = float("inf")


def sequence(generated: int = 0, seed: int = 5, ends: frozenset[int] = frozenset(), **params: Any) -> Sequence:
    return Sequence(0, [1] * (3 + generated), 3, 100, SamplingParams(**params), seed, ends)


def logits(rows: int = 1, vocab_size: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def test_greedy_takes_the_first_of_the_largest() -> None:
    assert sample_tokens(torch.tensor([[1.0, 3, 3], [5, 4, 5]]), [sequence(), sequence()]) == [1, 0]


@pytest.mark.parametrize(
    "filters", [{"top_k": 5}, {"top_p": 0.1}, {"min_p": 0.9}, {"top_k": 50, "top_p": 0.5, "min_p": 0.5, "seed": 1}]
)
def test_temperature_0_with_filters_is_greedy(filters: dict[str, Any]) -> None:
    rows = logits(4)
    plain = rows.argmax(-1).tolist()
    assert sample_tokens(rows.clone(), [sequence(**filters)] * 4) == plain
    # Beside a sampled row the same filters reach the operator.
    mixed = [sequence(**filters), sequence(temperature=1.0), sequence(**filters), sequence(**filters)]
    tokens = sample_tokens(rows.clone(), mixed)
    assert [tokens[0], *tokens[2:]] == [plain[0], *plain[2:]]


def test_br_055_filters_at_their_ends_are_off_or_greedy() -> None:
    rows = logits(1, 40_001)
    greedy = int(rows.argmax())
    base = [sample_tokens(rows.clone(), [sequence(seed=s, temperature=1.0)])[0] for s in range(5)]
    assert len({*base, greedy}) == 6
    values = itertools.product([10**30, 9_999_999, 40_001, 1, 0, -1], [0, 1e-9, 1], [0, 1])
    for k, p, floor in values:
        tokens = [
            sample_tokens(rows.clone(), [sequence(seed=s, temperature=1.0, top_k=k, top_p=p, min_p=floor)])[0]
            for s in range(5)
        ]
        expected = base if (k != 1 and p == 1 and floor == 0) else [greedy] * 5
        assert tokens == expected, (k, p, floor)


def test_end_tokens_cannot_be_drawn_before_min_tokens() -> None:
    ends = frozenset({2, 4})
    row = torch.tensor([[0.0, 1, 9, 2, 8, 3]])
    for generated, expected in ((0, 5), (2, 5), (3, 2), (9, 2)):
        assert sample_tokens(row.clone(), [sequence(generated, ends=ends, min_tokens=3)]) == [expected]
    assert sample_tokens(row.clone(), [sequence(0, ends=frozenset(), min_tokens=3)]) == [2]


def test_min_tokens_of_one_row_leaves_the_others_alone() -> None:
    rows = torch.tensor([[0.0, 1, 9], [0.0, 1, 9]])
    ends = frozenset({2})
    assert sample_tokens(rows, [sequence(ends=ends, min_tokens=1), sequence(ends=ends)]) == [1, 2]


@pytest.mark.parametrize("temperature", [1e-45, 1e-300, 1e300, 10**400], ids=["1e-45", "1e-300", "1e300", "1e400"])
def test_extreme_temperatures_draw_among_what_is_allowed(temperature: float) -> None:
    """In FP32 the smallest are 0, which is greedy, and the largest infinite, which would make NaN of -inf."""
    row = torch.tensor([[-INF, 1.0, 2.0, 50.0, -INF]])
    drawn = {sample_tokens(row.clone(), [sequence(seed=s, temperature=temperature)])[0] for s in range(40)}
    assert drawn == ({3} if temperature < 1 else {1, 2, 3})
    masked = {
        sample_tokens(row.clone(), [sequence(seed=s, temperature=temperature, ends=frozenset({3}), min_tokens=1)])[0]
        for s in range(40)
    }
    assert masked == ({2} if temperature < 1 else {1, 2})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_say_so_and_the_others_are_as_alone(temperature: float) -> None:
    rows = logits(4)
    alone = [sample_tokens(rows[i : i + 1].clone(), [sequence(seed=i, temperature=temperature)])[0] for i in range(4)]
    rows[1] = torch.nan
    rows[2] = -INF
    together = sample_tokens(rows, [sequence(seed=i, temperature=temperature) for i in range(4)])
    assert together == [alone[0], -1, -1, alone[3]]


def test_all_tokens_masked_is_an_error_of_that_row() -> None:
    everything = frozenset(range(3))
    rows = torch.tensor([[0.0, 1, 2], [0.0, 1, 2]])
    assert sample_tokens(rows, [sequence(ends=everything, min_tokens=1), sequence()]) == [-1, 2]


def test_a_draw_depends_on_seed_and_length_and_on_no_neighbour() -> None:
    row = logits(1, 1000)
    mine = sequence(2, seed=42, temperature=1.0)
    token = sample_tokens(row.clone(), [mine])
    others = [sequence(i, seed=i, temperature=2.0, top_k=i) for i in range(5)]
    batch = torch.cat([logits(5, 1000, seed=1), row])
    assert sample_tokens(batch, [*others, mine])[-1:] == token
    assert sample_tokens(row.clone(), [mine]) == token
    by_length = [sample_tokens(row.clone(), [sequence(n, seed=42, temperature=1.0)])[0] for n in range(8)]
    by_seed = [sample_tokens(row.clone(), [sequence(2, seed=s, temperature=1.0)])[0] for s in range(8)]
    assert len(set(by_length)) >= 7
    assert len(set(by_seed)) >= 7


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1])
def test_every_seed_is_usable(seed: int) -> None:
    (token,) = sample_tokens(logits(), [sequence(seed=seed, temperature=1.0)])
    assert 0 <= token < 50


def test_draws_follow_the_distribution() -> None:
    """2,000 seeds over 4 tokens of known probability; 3 degrees of freedom, chance of a false alarm 1e-5."""
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    seeds = range(2000)
    rows = probabilities.log().expand(len(seeds), 4).clone()
    tokens = sample_tokens(rows, [sequence(seed=s, temperature=1.0) for s in seeds])
    counts = torch.bincount(torch.tensor(tokens), minlength=4)
    expected = probabilities * len(seeds)
    assert float(((counts - expected) ** 2 / expected).sum()) < 25.9
