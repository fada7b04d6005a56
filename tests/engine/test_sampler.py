from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooflight.engine.params import choice_seed
from rooflight.engine.sampler import sample, sample_tokens
from rooflight.engine.sequence import Sequence
from tests.engine.sequences import INF, logits, sequence


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


def every_kind() -> list[Sequence]:
    """Rows that ask for all that there is, some of them with the same tokens or the same seed."""
    options: list[dict[str, Any]] = [
        {},
        {"logprobs": 0},
        {"logprobs": 20, "repetition_penalty": 1.2},
        {"temperature": 0.8, "seed": 42},
        {"temperature": 0.8, "seed": 42, "top_k": 30, "logprobs": 3},
        {"temperature": 0.8, "seed": 7, "top_p": 0.7},
        {"temperature": 2.0, "min_p": 0.05, "frequency_penalty": 0.9, "generated": [3, 3, 9]},
        {"temperature": 1.0, "presence_penalty": -2, "generated": list(range(200, 260)), "logprobs": 5},
        {"temperature": 1.0, "logit_bias": {7: 3.5, 400: -1}, "logprobs": 1},
        {"temperature": 1.0, "logit_bias": {3: 2.0}, "generated": 5},
        {"min_tokens": 4, "ends": range(0, 500, 2), "generated": 2, "logprobs": 2},
        {"temperature": 1.0, "min_tokens": 4, "ends": {0, 1}, "logit_bias": {0: 100, 1: 100}},
        {"temperature": 1.0, "top_k": 10**30, "prompt": [5] * 300, "repetition_penalty": 3},
        {"temperature": 1.0, "top_p": 0.0},
    ]
    return [sequence(**({"seed": index} | option)) for index, option in enumerate(options)]


KINDS = every_kind()
ROWS = (logits(len(KINDS) + 2, 500) * 8).round() / 4  # equals are common, as in BF16
ROWS[-2], ROWS[-1, 5] = torch.nan, torch.nan
KINDS += [sequence(temperature=1.0, logprobs=5, repetition_penalty=2), sequence(logprobs=5)]
ALONE = [sample(ROWS[i : i + 1].clone(), [KINDS[i]]) for i in range(len(KINDS))]


@given(st.permutations(range(len(KINDS))), st.integers(1, len(KINDS)))
def test_br_059_neighbours_change_neither_token_nor_logprob(order: list[int], size: int) -> None:
    batch = order[:size]
    tokens, reports = sample(ROWS[batch], [KINDS[i] for i in batch])
    assert [([token], [report]) for token, report in zip(tokens, reports, strict=True)] == [ALONE[i] for i in batch]


def play(own: Sequence, steps: int, others: list[Sequence]) -> list[int]:
    """The tokens that a sequence draws in so many steps, beside others that grow too."""
    for _ in range(steps):
        rows = torch.cat([logits(len(others), 300, seed=99), logits(1, 300, seed=len(own.tokens))])
        for member, token in zip([*others, own], sample_tokens(rows, [*others, own]), strict=True):
            member.tokens.append(token)
    return own.tokens[own.num_prompt :]


SEEDED: dict[str, Any] = {"temperature": 0.8, "repetition_penalty": 1.5, "frequency_penalty": 0.5}


def test_br_059_a_seeded_request_repeats_itself_in_any_company_and_after_preemption() -> None:
    alone = play(sequence(seed=42, **SEEDED), 16, [])
    assert len(set(alone)) > 8
    for others in ([], [sequence(seed=3, temperature=0.8)], [sequence(seed=7, temperature=1.0, logprobs=1)] * 2):
        assert play(sequence(seed=42, **SEEDED), 16, [dataclasses.replace(s, tokens=[1]) for s in others]) == alone
    # A preempted sequence comes back with its tokens and nothing else.
    first = play(sequence(seed=42, **SEEDED), 6, [sequence(temperature=1.0)])
    assert play(sequence(first, seed=42, **SEEDED), 10, []) == alone


def test_br_059_choices_of_one_seed_differ_and_repeat() -> None:
    choices = [play(sequence(seed=choice_seed(42, i), **SEEDED), 16, []) for i in range(4)]
    assert len({tuple(choice) for choice in choices}) == 4
    assert [play(sequence(seed=choice_seed(42, i), **SEEDED), 16, []) for i in range(4)] == choices
    assert choices[0] == play(sequence(seed=42, **SEEDED), 16, [])


def test_choices_of_one_seed_follow_the_distribution() -> None:
    """2,000 choices of one request over 4 tokens; 3 degrees of freedom, chance of a false alarm 1e-5."""
    probabilities = torch.tensor([0.1, 0.2, 0.3, 0.4])
    rows = probabilities.log().expand(2000, 4).clone()
    tokens = sample_tokens(rows, [sequence(seed=choice_seed(42, i), temperature=1.0) for i in range(2000)])
    expected = probabilities * 2000
    assert float(((torch.bincount(torch.tensor(tokens), minlength=4) - expected) ** 2 / expected).sum()) < 25.9


def test_logits_may_be_a_slice_of_wider_ones() -> None:
    """A vocabulary padded to a round size leaves rows that are further apart than they are long."""
    wide = logits(3, 64)
    sequences = [sequence(logit_bias={5: 50}), sequence(ends=range(49), min_tokens=1), sequence(logprobs=2)]
    assert sample(wide[:, :50].clone(), sequences) == sample(wide[:, :50], sequences)
