from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rooflight.engine.sampler import sample_tokens
from rooflight.engine.sequence import Sequence
from tests.engine.sequences import INF, logits, logits_that_are_drawn_from, sequence


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"repetition_penalty": 1.5}, [-1.5, 2 / 1.5, 0.5]),
        ({"frequency_penalty": 0.5}, [-1.0, -0.5, 0.5]),
        ({"presence_penalty": 0.5}, [-1.0, 1.5, 0.5]),
        ({"logit_bias": {2: 0.25, 0: -1}}, [-2.0, 2.0, 0.75]),
        ({"repetition_penalty": 2, "logit_bias": {1: 3}}, [-2.0, 4.0, 0.5]),
        (
            {"repetition_penalty": 2, "frequency_penalty": -1, "presence_penalty": 0.5, "logit_bias": {1: 1}},
            [-2.0, 6.5, 0.5],
        ),
    ],
    ids=lambda value: ",".join(value) if isinstance(value, dict) else "",
)
def test_br_057_penalties_follow_their_formulas(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], expected: list[float]
) -> None:
    """Token 0 is in the prompt alone, token 1 was generated five times, token 2 was never seen."""
    drawn = logits_that_are_drawn_from(monkeypatch)
    row = torch.tensor([[-1.0, 2.0, 0.5]])
    (token,) = sample_tokens(row, [sequence([1] * 5, prompt=[0], **options)])
    torch.testing.assert_close(drawn[0], torch.tensor([expected]), rtol=1e-6, atol=0)
    assert token == expected.index(max(expected))


@pytest.mark.parametrize("penalty", ["frequency_penalty", "presence_penalty"])
def test_frequency_and_presence_count_the_answer_and_not_the_prompt(penalty: str) -> None:
    row = torch.tensor([[0.0, 1.0, 1.5]])
    assert sample_tokens(row.clone(), [sequence([0], prompt=[2] * 9, **{penalty: 1.0})]) == [2]
    assert sample_tokens(row.clone(), [sequence([2], prompt=[0] * 9, **{penalty: 1.0})]) == [1]


def test_a_negative_penalty_calls_for_repetition() -> None:
    row = torch.tensor([[0.0, 1.0, 1.5]])
    assert sample_tokens(row, [sequence([1, 1], frequency_penalty=-0.5)]) == [1]


def test_a_bias_forces_and_bans() -> None:
    rows = logits(1, 1000)
    best = int(rows.argmax())
    for seed in range(20):
        forced = sequence(seed=seed, temperature=1.0, logit_bias={77: 100})
        assert sample_tokens(rows.clone(), [forced]) == [77]
    few = torch.tensor([[1.0, 3, 2, 1]])
    banned = [sequence(seed=seed, temperature=1.0, logit_bias={1: -100, 2: -100}) for seed in range(100)]
    assert set(sample_tokens(few.repeat(100, 1), banned)) == {0, 3}
    assert sample_tokens(rows.clone(), [sequence(logit_bias={best: -100})]) != [best]


def test_a_bias_comes_before_the_temperature() -> None:
    """At temperature 0.01 a bias of 0.1 makes a token e^10 times likelier, and a bias after it 1.1 times."""
    rows = torch.zeros(100, 2)
    biased = [sequence(seed=seed, temperature=0.01, logit_bias={1: 0.1}) for seed in range(100)]
    assert sample_tokens(rows, biased) == [1] * 100


def test_a_bias_brings_back_no_end_token_before_min_tokens() -> None:
    row = torch.tensor([[0.0, 1, 9, 2]])
    for generated, expected in ((2, 3), (3, 2)):
        forced = sequence(generated, ends={2}, min_tokens=3, logit_bias={2: 100})
        assert sample_tokens(row.clone(), [forced]) == [expected]


def test_what_the_model_ruled_out_stays_so() -> None:
    row = torch.tensor([[-INF, 1.0, 0.5]])
    wanted = sequence([0, 0], repetition_penalty=0.01, frequency_penalty=-2, logit_bias={0: 100})
    assert sample_tokens(row, [wanted]) == [1]


@pytest.mark.parametrize("penalty", [1e-300, 1e-39, 1e300, 10**400], ids=str)
def test_extreme_repetition_penalties_leave_a_distribution(penalty: float) -> None:
    """In FP32 the smallest would be 0 and the largest infinite, and a logit of 0 would become NaN."""
    row = torch.tensor([[0.0, 5.0, -5.0, 1.0]])
    (token,) = sample_tokens(row, [sequence([0, 1, 2], repetition_penalty=penalty)])
    assert token == (1 if penalty < 1 else 3)


def test_penalties_of_one_row_leave_the_bits_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = logits_that_are_drawn_from(monkeypatch)
    rows = logits(5)
    rows[1] = torch.nan
    sequences = [
        sequence(),
        sequence(repetition_penalty=1.3),
        sequence(repetition_penalty=1.3),
        sequence(temperature=1.0),
        sequence(logit_bias={3: 1.0, 4: 2.0}),
    ]
    sample_tokens(rows.clone(), sequences)
    for index in (0, 3):
        assert torch.equal(drawn[0][index], rows[index])
    assert drawn[0][1].isnan().all()
    assert (drawn[0][2] != rows[2]).nonzero().flatten().tolist() == [1]
    assert (drawn[0][4] != rows[4]).nonzero().flatten().tolist() == [3, 4]


def test_rows_without_penalties_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[torch.Size] = []
    monkeypatch.setattr("rooflight.ops.penalize_logits_", lambda part, *rest: sizes.append(part.shape))
    plain = [sequence(), sequence(temperature=1.0), sequence(min_tokens=1, ends={2})]
    sample_tokens(logits(3), plain)
    assert sizes == []
    sample_tokens(logits(4), [*plain, sequence(presence_penalty=1.0)])
    assert sizes == [(1, 50)]


@st.composite
def penalised(draw: st.DrawFn) -> Sequence:
    """Over a vocabulary of 8, so that prompt, answer and bias meet."""
    tokens = st.lists(st.integers(0, 7), max_size=12)
    return sequence(
        draw(tokens),
        prompt=[draw(st.integers(0, 7)), *draw(tokens)],
        repetition_penalty=draw(st.sampled_from([1.0, 0.5, 1.3, 2])),
        frequency_penalty=draw(st.sampled_from([0.0, -2, 0.7])),
        presence_penalty=draw(st.sampled_from([0.0, -0.3, 2])),
        logit_bias=draw(st.dictionaries(st.integers(0, 7), st.floats(-100, 100), max_size=4)),
    )


def by_formula(row: list[float], sequence: Sequence) -> list[float]:
    params, prompt = sequence.params, sequence.tokens[: sequence.num_prompt]
    answer, result = sequence.tokens[sequence.num_prompt :], []
    for token, logit in enumerate(row):
        if token in prompt or token in answer:
            logit = logit / params.repetition_penalty if logit > 0 else logit * params.repetition_penalty
        logit -= params.frequency_penalty * answer.count(token)
        logit -= params.presence_penalty * (token in answer)
        result.append(logit + params.logit_bias.get(token, 0))
    return result


@given(st.lists(penalised(), min_size=1, max_size=5))
def test_any_mixture_of_penalties_is_that_of_the_formula(sequences: list[Sequence]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        drawn = logits_that_are_drawn_from(patch)
        rows = logits(len(sequences), 8)
        sample_tokens(rows.clone(), sequences)
    expected = [by_formula(row, s) for row, s in zip(rows.tolist(), sequences, strict=True)]
    torch.testing.assert_close(drawn[0].double(), torch.tensor(expected).double(), rtol=1e-5, atol=1e-5)
