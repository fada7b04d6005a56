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


@penalisers
def test_places_say_which_counts_a_row_goes_by(target: Target) -> None:
    """Rows 0 and 1 go by the third and the first row of the tables; nobody by the second."""
    device = target.device
    logits = torch.full((2, 3), 4.0, device=device)
    counts = torch.tensor([[0, 0, 2], [9, 9, 9], [1, 0, 0]], dtype=torch.int32, device=device)
    prompt = torch.tensor([[True, False, False], [True, True, True], [False, True, False]], device=device)
    columns = [torch.tensor([value, value], device=device) for value in (2.0, 0.5, 0.0)]
    ids, values = torch.full((2, 1), -1, device=device), torch.zeros(2, 1, device=device)
    places = torch.tensor([2, 0], device=device)
    ops.penalize_logits_(logits, counts, prompt, *columns, ids, values, places, backend=target.provider)
    assert logits.tolist() == [[1.5, 2.0, 4.0], [2.0, 4.0, 1.0]]


@penalisers
def test_a_ban_wins_over_any_logit_and_any_other_bias(target: Target) -> None:
    """In either order, and behind the penalties; an entry that is not used bans nothing."""
    minus, row = float("-inf"), [1.0, float("inf"), float("nan"), 4.0, 5.0]
    for repetition in (1.0, 2.0):
        logits = torch.tensor([row], device=target.device)
        counts = torch.ones(1, 5, dtype=torch.int32, device=target.device)
        one, zero = (torch.tensor([value], device=target.device) for value in (repetition, 0.0))
        ids = torch.tensor([[3, 1, 0, 2, 0, -1]], device=target.device)
        values = torch.tensor([[100.0, minus, minus, minus, 100.0, minus]], device=target.device)
        ops.penalize_logits_(logits, counts, counts > 1, one, zero, zero, ids, values, backend=target.provider)
        assert logits.tolist() == [[minus, minus, minus, 4.0 / repetition + 100, 5.0 / repetition]]


@pytest.mark.parametrize("vocab_size", [1, 1000, 4096, 9000])
@penalisers
def test_every_token_of_a_large_vocabulary(target: Target, vocab_size: int) -> None:
    """Biases and bans on the first and the last token and in between, in rows with penalties and without."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, vocab_size, generator=generator)
    counts = torch.randint(0, 3, (2, vocab_size), generator=generator, dtype=torch.int32)
    chosen = sorted({0, vocab_size // 2, vocab_size - 1})
    ids = torch.tensor([chosen, chosen])
    values = torch.full(ids.shape, 3.0)
    values[:, -1] = float("-inf")
    expected = logits.clone()
    expected[1] -= 0.5 * counts[1]
    expected[:, chosen] += values
    penalties = torch.ones(2), torch.tensor([0.0, 0.5]), torch.zeros(2)
    tensors = [t.to(target.device) for t in (logits, counts, counts > 9, *penalties, ids, values)]
    ops.penalize_logits_(*tensors, backend=target.provider)
    torch.testing.assert_close(tensors[0].cpu(), expected)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("provider", ["ref", "triton"])
def test_places_beyond_2_31_counts(provider: str) -> None:
    vocab_size = 152000
    places = (1 << 31) // vocab_size + 3
    counts = torch.zeros(places, vocab_size, dtype=torch.int32, device="cuda")
    prompt = torch.zeros(places, vocab_size, dtype=torch.bool, device="cuda")
    counts[-1, 7], prompt[-1, 9] = 2, True
    logits = torch.full((1, vocab_size), 4.0, device="cuda")
    columns = [torch.tensor([value], device="cuda") for value in (2.0, 0.5, 0.0)]
    ids, values = torch.full((1, 1), -1, device="cuda"), torch.zeros(1, 1, device="cuda")
    place = torch.tensor([places - 1], device="cuda")
    ops.penalize_logits_(logits, counts, prompt, *columns, ids, values, place, backend=provider)
    assert logits[0, 5:11].tolist() == [4.0, 4.0, 1.0, 4.0, 2.0, 4.0]


def test_places_must_fit_the_rows() -> None:
    logits, counts = torch.zeros(2, 3), torch.zeros(4, 3, dtype=torch.int32)
    columns, bias = [torch.ones(2)] * 3, (torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 0))
    with pytest.raises(ValueError, match=r"^output_counts must have shape \(2, 3\)"):
        ops.penalize_logits_(logits, counts, counts > 0, *columns, *bias)
    with pytest.raises(ValueError, match=r"^places must have shape \(2\)"):
        ops.penalize_logits_(logits, counts, counts > 0, *columns, *bias, torch.zeros(3, dtype=torch.int64))
