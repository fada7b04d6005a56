from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.engine.logprobs import prompt_logprobs
from rooflight.engine.outputs import TokenLogprobs
from rooflight.engine.sampler import sample, sample_tokens
from tests.engine.sequences import INF, logits, sequence

LOWEST = -torch.finfo(torch.float32).max


def check(report: TokenLogprobs | None, row: torch.Tensor, token: int, k: int) -> None:
    """The report on a row of distinct finite logits is that of FP64, and JSON can carry it."""
    assert report is not None
    expected = torch.log_softmax(row.double(), -1)
    assert report.token_id == token
    assert report.logprob == pytest.approx(float(expected[token]), abs=1e-5)
    best = torch.argsort(row, descending=True)[:k].tolist()
    assert [i for i, _ in report.top] == best
    assert [v for _, v in report.top] == pytest.approx(expected[best].tolist(), abs=1e-5)
    assert report.logprob <= 0
    assert dict(report.top).get(token, report.logprob) == report.logprob
    json.dumps(dataclasses.asdict(report), allow_nan=False)


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "top_k": 1},
        {"temperature": 1.0, "top_p": 0.3},
        {"temperature": 0.5, "min_p": 0.2},
        {"temperature": 1.0, "repetition_penalty": 1.7, "frequency_penalty": 1.0, "presence_penalty": -1},
        {"logit_bias": {7: 100, 8: -100}},
        {"min_tokens": 3},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_br_060_logprobs_are_the_models_own_and_finite(options: dict[str, Any], k: int) -> None:
    rows = logits(3)
    best = rows.argmax(-1).tolist()
    sequences = [sequence(seed=s, ends=[best[0]], logprobs=k, **options) for s in range(3)]
    tokens, reports = sample(rows.clone(), sequences)
    assert tokens == sample_tokens(rows.clone(), sequences)
    for row, token, report in zip(rows, tokens, reports, strict=True):
        check(report, row, token, k)
    if "logit_bias" in options:
        assert tokens == [7, 7, 7]
    if "min_tokens" in options:
        assert tokens[0] != best[0]


def test_rows_that_do_not_ask_get_none_and_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[torch.Size] = []
    report = ops.top_logprobs
    monkeypatch.setattr(ops, "top_logprobs", lambda rows, *rest: sizes.append(rows.shape) or report(rows, *rest))
    rows = logits(3)
    assert sample(rows.clone(), [sequence()] * 3) == (rows.argmax(-1).tolist(), [None] * 3)
    assert sizes == []
    tokens, reports = sample(rows.clone(), [sequence(), sequence(logprobs=2), sequence()])
    assert sizes == [(1, 50)]
    assert [reports[0], reports[2]] == [None, None]
    check(reports[1], rows[1], tokens[1], 2)


def test_there_are_no_more_best_tokens_than_the_vocabulary_has() -> None:
    _, (report,) = sample(logits(1, 3), [sequence(prompt=[0], logprobs=20)])
    assert report is not None
    assert sorted(token for token, _ in report.top) == [0, 1, 2]


def test_tokens_that_the_model_ruled_out_are_not_among_the_best() -> None:
    row = torch.tensor([[-INF, 1.0, -INF, 2.0]])
    _, (report,) = sample(row, [sequence(logprobs=4)])
    assert report is not None
    assert [token for token, _ in report.top] == [3, 1]
    assert [math.exp(value) for _, value in report.top] == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.e)])


def test_equals_come_by_token_id_so_that_the_greedy_token_is_the_first() -> None:
    row = torch.zeros(1, 1000)
    row[0, [900, 30, 500]] = 2.0
    row[0, [100, 800]] = 3.0
    tokens, (report,) = sample(row, [sequence(logprobs=4)])
    assert tokens == [100]
    assert report is not None
    assert [token for token, _ in report.top] == [100, 800, 30, 500]


def test_br_054_rows_without_a_distribution_get_none_and_the_others_are_as_alone() -> None:
    rows = logits(6)
    sequences = [sequence(seed=i, temperature=0.5 * (i % 2), logprobs=3) for i in range(6)]
    alone = [sample(rows[i : i + 1].clone(), sequences[i : i + 1]) for i in range(6)]
    rows[1] = torch.nan
    rows[2, 9] = torch.nan
    rows[4] = -INF
    tokens, reports = sample(rows, sequences)
    assert [(tokens[i], reports[i]) for i in (1, 2, 4)] == [(ops.NO_TOKEN, None)] * 3
    for i in (0, 3, 5):
        assert ([tokens[i]], [reports[i]]) == alone[i]


def test_br_054_a_row_with_infinity_gives_its_first_and_numbers() -> None:
    rows = logits(2)
    rows[0, [30, 20]] = INF
    tokens, reports = sample(rows, [sequence(logprobs=2)] * 2)
    assert tokens[0] == 20
    half = pytest.approx(math.log(0.5))
    assert reports[0] == TokenLogprobs(20, half, ((20, half), (30, half)))  # type: ignore[arg-type]


def test_a_row_that_is_broken_only_at_a_banned_end_token_has_numbers() -> None:
    rows = torch.tensor([[0.0, math.nan, 0.0, -INF], [0.0, INF, 0.0, -INF]])
    tokens, reports = sample(rows, [sequence(ends={1}, min_tokens=1, logprobs=3)] * 2)
    assert tokens == [0, 0]
    assert reports[0] is not None
    assert reports[1] is not None
    assert [math.exp(value) for _, value in reports[0].top] == pytest.approx([0.5, 0.5])
    assert reports[1].top[0] == (1, 0.0)
    assert LOWEST <= reports[1].logprob < -1e38
    json.dumps([dataclasses.asdict(report) for report in reports if report], allow_nan=False)


def test_logits_further_apart_than_fp32_goes_give_the_lowest_number() -> None:
    row = torch.tensor([[3e38, -3e38]])
    tokens, reports = sample(row, [sequence(ends={0}, min_tokens=1, logprobs=2)])
    assert (tokens, reports) == ([1], [TokenLogprobs(1, LOWEST, ((0, 0.0),))])


def test_prompt_logprobs_are_those_of_the_next_tokens() -> None:
    rows, before = logits(7), logits(7)
    following = [3, 49, 0, 7, 7, 1, 30]
    for k in (0, 1, 20):
        for row, token, report in zip(rows, following, prompt_logprobs(rows, following, k), strict=True):
            check(report, row, token, k)
    assert torch.equal(rows, before)
    assert prompt_logprobs(rows[:0], [], 5) == []


def test_prompt_logprobs_in_chunks_are_those_of_the_whole() -> None:
    rows = (logits(9, 300) * 2).round()  # many equals
    following = list(range(9))
    whole = prompt_logprobs(rows, following, 5)
    assert prompt_logprobs(rows[:4], following[:4], 5) + prompt_logprobs(rows[4:], following[4:], 5) == whole
    fewer = prompt_logprobs(rows, following, 2)
    assert [report.top[:2] for report in whole if report] == [report.top for report in fewer if report]


def test_br_054_a_prompt_position_without_a_distribution_is_none_alone() -> None:
    rows = logits(4)
    whole = prompt_logprobs(rows, [1, 2, 3, 4], 2)
    rows[0] = -INF
    rows[2, 5] = math.nan
    assert prompt_logprobs(rows, [1, 2, 3, 4], 2) == [None, whole[1], None, whole[3]]


def test_a_prompt_token_that_the_model_ruled_out_has_the_lowest_number() -> None:
    assert prompt_logprobs(torch.tensor([[0.0, -INF]]), [1], 2) == [TokenLogprobs(1, LOWEST, ((0, 0.0),))]
