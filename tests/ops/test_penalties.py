"""penalize_logits_: each penalty by hand, alone and together."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from tests.contract.harness import Target, implementations

penalisers = implementations("penalize_logits_")


def penalise(
    target: Target,
    logits: list[float],
    counts: list[int] | None = None,
    prompt: list[bool] | None = None,
    repetition: float = 1.0,
    frequency: float = 0.0,
    presence: float = 0.0,
    bias: dict[int, float] | None = None,
    unused: int = 0,
) -> list[float]:
    size, device = len(logits), target.device
    row = torch.tensor([logits], device=device)
    scalars = [torch.tensor([value], device=device) for value in (repetition, frequency, presence)]
    bias = bias or {}
    ops.penalize_logits_(
        row,
        torch.tensor([counts or [0] * size], dtype=torch.int32, device=device),
        torch.tensor([prompt or [False] * size], device=device),
        *scalars,
        torch.tensor([[*bias, *[-1] * unused]], dtype=torch.int64, device=device).view(1, -1),
        torch.tensor([[*bias.values(), *[99.0] * unused]], dtype=torch.float32, device=device).view(1, -1),
        backend=target.provider,
    )
    return row[0].tolist()


@penalisers
def test_br_057_repetition_penalty_once_and_away_from_zero(target: Target) -> None:
    """-1 is multiplied, 2 divided, once, though token 1 was seen five times; 0.5 was not seen."""
    out = penalise(target, [-1.0, 2.0, 0.5], counts=[1, 5, 0], repetition=1.5)
    assert out == pytest.approx([-1.5, 2 / 1.5, 0.5])


@penalisers
def test_br_057_the_prompt_counts_for_repetition_alone(target: Target) -> None:
    """A token of the prompt is repeated, but was not generated: no frequency and no presence penalty."""
    prompt = [True, True, False]
    out = penalise(target, [-1.0, 2.0, 0.5], prompt=prompt, repetition=1.5, frequency=0.5, presence=0.5)
    assert out == pytest.approx([-1.5, 2 / 1.5, 0.5])
    both = penalise(target, [-1.0, 2.0, 0.5], counts=[0, 1, 0], prompt=prompt, repetition=1.5)
    assert both == pytest.approx([-1.5, 2 / 1.5, 0.5])  # in prompt and output: still once


@penalisers
def test_br_057_frequency_counts_and_presence_does_not(target: Target) -> None:
    counts = [1, 5, 0]
    assert penalise(target, [-1.0, 2.0, 0.5], counts=counts, frequency=0.5) == pytest.approx([-1.5, -0.5, 0.5])
    assert penalise(target, [-1.0, 2.0, 0.5], counts=counts, presence=0.5) == pytest.approx([-1.5, 1.5, 0.5])
    assert penalise(target, [-1.0, 2.0, 0.5], counts=counts, frequency=-0.5) == pytest.approx([-0.5, 4.5, 0.5])


@penalisers
def test_everything_together_in_the_documented_order(target: Target) -> None:
    """Repetition on the raw logit, then frequency and presence, then bias."""
    out = penalise(
        target, [3.0, -2.0, 1.0], counts=[2, 0, 0], prompt=[False, True, False],
        repetition=2.0, frequency=0.25, presence=1.0, bias={0: 10.0, 2: -100.0}, unused=2,
    )  # fmt: skip
    assert out == pytest.approx([3.0 / 2 - 0.5 - 1.0 + 10.0, -4.0, -99.0])


@penalisers
def test_bias_places(target: Target) -> None:
    """-1 is an unused place and never the last token; a repeated id adds up; no places at all are fine."""
    assert penalise(target, [1.0, 2.0, 3.0], unused=3) == [1.0, 2.0, 3.0]
    assert penalise(target, [1.0, 2.0, 3.0]) == [1.0, 2.0, 3.0]
    assert penalise(target, [1.0, 2.0, 3.0], bias={2: 0.5, 0: -1.0}) == [0.0, 2.0, 3.5]
    logits = torch.zeros(1, 3, device=target.device)
    nothing = torch.zeros(1, 3, dtype=torch.int32, device=target.device)
    one, zero = (torch.tensor([value], device=target.device) for value in (1.0, 0.0))
    ids, values = torch.tensor([[1, 1]], device=target.device), torch.tensor([[2.0, 3.0]], device=target.device)
    ops.penalize_logits_(logits, nothing, nothing.bool(), one, zero, zero, ids, values, backend=target.provider)
    assert logits.tolist() == [[0.0, 5.0, 0.0]]


@penalisers
def test_everything_off_changes_no_bit(target: Target) -> None:
    row = torch.randn(1, 100, generator=torch.Generator().manual_seed(0))[0].tolist()
    counts, prompt = [3] * 100, [True] * 100
    assert penalise(target, row, counts=counts, prompt=prompt, unused=1) == row


@penalisers
def test_minus_infinity_stays(target: Target) -> None:
    """A token that is forbidden before the penalties is forbidden after them."""
    minus = float("-inf")
    out = penalise(target, [minus, 1.0], counts=[4, 0], repetition=1.5, frequency=1.0, presence=1.0, bias={0: 5.0})
    assert out == [minus, 1.0]


@penalisers
def test_rows_have_their_own_penalties(target: Target) -> None:
    device = target.device
    logits = torch.full((3, 2), 4.0, device=device)
    counts = torch.tensor([[1, 0], [1, 0], [0, 1]], dtype=torch.int32, device=device)
    columns = [torch.tensor(values, device=device) for values in ((1.0, 2.0, 1.0), (0.0, 0.0, 1.5), (1.0, 0.0, 0.0))]
    ids, values = torch.tensor([[-1], [1], [-1]], device=device), torch.tensor([[7.0], [7.0], [7.0]], device=device)
    ops.penalize_logits_(logits, counts, counts.bool() & False, *columns, ids, values, backend=target.provider)
    assert logits.tolist() == [[3.0, 4.0], [2.0, 11.0], [4.0, 2.5]]
