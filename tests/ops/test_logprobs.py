"""top_logprobs: against PyTorch and by hand."""

from __future__ import annotations

import math

import pytest
import torch

from rooflight import ops
from tests.contract.harness import Target, implementations

logprobs = implementations("top_logprobs")


@logprobs
def test_by_hand(target: Target) -> None:
    """Probabilities a half, a quarter and two eighths."""
    logits = torch.tensor([[0.25, 0.5, 0.125, 0.125]]).log().to(target.device)
    ids = torch.tensor([3], device=target.device)
    chosen, values, indices = ops.top_logprobs(logits + 100, ids, 2, backend=target.provider)
    torch.testing.assert_close(chosen.cpu(), torch.tensor([math.log(0.125)]), rtol=0, atol=1e-5)
    torch.testing.assert_close(values.cpu(), torch.tensor([[math.log(0.5), math.log(0.25)]]), rtol=0, atol=1e-5)
    assert indices.tolist() == [[1, 0]]


@pytest.mark.parametrize("k", [0, 1, 5, 101])
@logprobs
def test_agrees_with_log_softmax(target: Target, k: int) -> None:
    logits = torch.randn(7, 101, generator=torch.Generator().manual_seed(0)) * 4
    ids = torch.arange(7) * 11
    chosen, values, indices = ops.top_logprobs(logits.to(target.device), ids.to(target.device), k)
    expected = torch.log_softmax(logits.double(), -1)
    torch.testing.assert_close(chosen.cpu().double(), expected.gather(1, ids[:, None])[:, 0], rtol=1e-5, atol=1e-5)
    order = expected.sort(-1, descending=True)
    torch.testing.assert_close(values.cpu().double(), order.values[:, :k], rtol=1e-5, atol=1e-5)
    assert torch.equal(indices.cpu(), order.indices[:, :k])
    assert (chosen <= 0).all()


@logprobs
def test_extreme_rows_stay_right(target: Target) -> None:
    """One token holds everything: 0 for it, -inf for what was masked; huge logits do not overflow."""
    logits = torch.full((2, 1000), float("-inf"))
    logits[0, 7], logits[1] = 3e38, -3e38
    logits[1, 9] = 3e38
    ids = torch.tensor([7, 9], device=target.device)
    chosen, values, indices = ops.top_logprobs(logits.to(target.device), ids, 1, backend=target.provider)
    assert chosen.tolist() == [0.0, 0.0]
    assert values.tolist() == [[0.0], [0.0]]
    assert indices.tolist() == [[7], [9]]


@logprobs
def test_br_060_a_row_without_a_token_or_a_distribution_is_nan_and_no_error(target: Target) -> None:
    """What `sample` returns may be handed on as it is; the rows beside keep their values."""
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    expected = torch.log_softmax(logits, -1)
    logits[1], logits[2, 3], logits[3, 4], logits[4] = torch.nan, torch.nan, torch.inf, -torch.inf
    ids = torch.tensor([7, ops.NO_TOKEN, ops.NO_TOKEN, 4, ops.NO_TOKEN, ops.NO_TOKEN])
    tensors = logits.to(target.device), ids.to(target.device)
    chosen, values, indices = (out.cpu() for out in ops.top_logprobs(*tensors, 3, backend=target.provider))
    assert chosen.isnan().tolist() == [False, True, True, True, True, True]
    assert values.isnan().tolist() == [[False] * 3, *[[True] * 3] * 4, [False] * 3]
    assert ((indices >= 0) & (indices < 50)).all()
    torch.testing.assert_close(chosen[0], expected[0, 7], rtol=1e-5, atol=1e-5)
    for good in (0, 5):
        torch.testing.assert_close(values[good], expected[good].topk(3).values, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("token", [-2, 4])
def test_other_ids_outside_the_vocabulary_are_no_answer(token: int) -> None:
    with pytest.raises(RuntimeError, match="out of bounds"):
        ops.top_logprobs(torch.zeros(1, 4), torch.tensor([token]), 1, backend="ref")


@pytest.mark.parametrize("k", [-1, 5])
def test_k_must_fit_the_vocabulary(k: int) -> None:
    with pytest.raises(ValueError, match=f"^k must be from 0 to vocab_size = 4, was {k}"):
        ops.top_logprobs(torch.zeros(1, 4), torch.zeros(1, dtype=torch.int64), k)


def test_an_empty_vocabulary_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^logits must have a vocabulary of at least one token"):
        ops.top_logprobs(torch.zeros(1, 0), torch.zeros(1, dtype=torch.int64), 0)
