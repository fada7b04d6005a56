"""rope: angles by hand and in FP64, against transformers, partial, interleaved, in place on slices."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from rooflight import ops
from tests.contract.harness import (
    TARGETS,
    Target,
    as_param,
    copy_args,
    whole_buffer,
)

Heads = Callable[[], tuple[torch.Tensor, torch.Tensor]]
ROPES = [target for target in TARGETS if target.op.name == "rope"]
ropes = pytest.mark.parametrize("target", [as_param(target) for target in ROPES])


def table(max_positions: int, rotary_dim: int, theta: float = 1e4) -> torch.Tensor:
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.arange(max_positions, dtype=torch.float64)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1).float()


def both_forms(
    target: Target,
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The functional and the in-place form, which must agree bit for bit."""
    q, k, cos_sin, positions = copy_args((q, k, cos_sin, positions), target.device)
    results = ops.rope(q, k, cos_sin, positions, interleaved=interleaved, backend=target.provider)
    ops.rope_(q, k, cos_sin, positions, interleaved=interleaved, backend=target.provider)
    assert torch.equal(q, results[0])
    assert torch.equal(k, results[1])
    return results[0].cpu(), results[1].cpu()


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@ropes
def test_quarter_turns_by_hand(target: Target) -> None:
    """Angle 90 degrees for the first pair, 180 for the second: (a, b) -> (-b, a) and (-a, -b)."""
    cos_sin = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, -1.0, 1.0, 0.0]])
    q = torch.tensor([[[1.0, 2.0, 3.0, 4.0]], [[1.0, 2.0, 3.0, 4.0]]])
    positions = torch.tensor([1, 0])
    half, k_half = both_forms(target, q, q * 10, cos_sin, positions)
    assert half.tolist() == [[[-3.0, -2.0, 1.0, -4.0]], [[1.0, 2.0, 3.0, 4.0]]]
    assert torch.equal(k_half, half * 10)
    pairs, k_pairs = both_forms(target, q, q * 10, cos_sin, positions, interleaved=True)
    assert pairs.tolist() == [[[-2.0, 1.0, -3.0, -4.0]], [[1.0, 2.0, 3.0, 4.0]]]
    assert torch.equal(k_pairs, pairs * 10)


@ropes
def test_agrees_with_transformers(target: Target) -> None:
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3", reason="transformers is not installed")
    q, k = randn(7, 4, 64), randn(7, 2, 64, seed=1)
    positions = torch.tensor([0, 1, 5, 100, 3, 3, 99])
    cos_sin = table(101, 64)
    cos, sin = (part.repeat(1, 2)[None] for part in cos_sin[positions].chunk(2, -1))
    theirs = modeling.apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    for ours, other in zip(both_forms(target, q, k, cos_sin, positions), theirs, strict=True):
        torch.testing.assert_close(ours, other[0].transpose(0, 1))


@ropes
def test_interleaved_is_half_rotation_of_reordered_heads(target: Target) -> None:
    q, k = randn(5, 4, 64), randn(5, 2, 64, seed=1)
    positions = torch.arange(5)
    order = torch.cat((torch.arange(0, 64, 2), torch.arange(1, 64, 2)))
    pairs = both_forms(target, q, k, table(5, 64), positions, interleaved=True)
    halves = both_forms(target, q[..., order], k[..., order], table(5, 64), positions)
    for one, other in zip(pairs, halves, strict=True):
        torch.testing.assert_close(one[..., order], other)


@pytest.mark.parametrize("interleaved", [False, True])
@ropes
def test_partial_rotation_leaves_the_tail(target: Target, interleaved: bool) -> None:
    q, k = randn(5, 4, 80), randn(5, 2, 80, seed=1)
    positions = torch.arange(5) + 3
    turned = both_forms(target, q, k, table(8, 32), positions, interleaved)
    narrow = both_forms(target, q[..., :32], k[..., :32], table(8, 32), positions, interleaved)
    for before, whole, head in zip((q, k), turned, narrow, strict=True):
        assert torch.equal(whole[..., 32:], before[..., 32:])
        assert torch.equal(whole[..., :32], head)
        assert not torch.equal(whole[..., :32], before[..., :32])


@pytest.mark.parametrize("theta", [1e4, 1e6])
@ropes
def test_br_012_angles_at_far_positions(target: Target, theta: float) -> None:
    """bf16 heads of ones at positions up to 40959: within 0.01 of FP64 angles, which bf16 angles miss by far."""
    positions = torch.tensor([0, 1, 257, 1857, 4095, 40959])
    ones = torch.ones(6, 1, 128, dtype=torch.bfloat16)
    frequencies = theta ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    angles = positions.double()[:, None] * frequencies
    expected = torch.cat((angles.cos() - angles.sin(), angles.cos() + angles.sin()), 1)[:, None]
    q, k = both_forms(target, ones, ones, table(40960, 128, theta), positions)
    assert (q.double() - expected).abs().max() <= 0.01
    assert torch.equal(q, k)
    pairs = torch.stack((angles.cos() - angles.sin(), angles.cos() + angles.sin()), -1).flatten(1)[:, None]
    q, _ = both_forms(target, ones, ones, table(40960, 128, theta), positions, interleaved=True)
    assert (q.double() - pairs).abs().max() <= 0.01


def test_br_012_a_table_in_bf16_is_refused() -> None:
    """What `.to(bfloat16)` on a whole module would leave behind."""
    with pytest.raises(ValueError, match=r"^cos_sin must be torch\.float32, was torch\.bfloat16"):
        ops.rope(torch.ones(2, 1, 8), torch.ones(2, 1, 8), table(4, 8).bfloat16(), torch.arange(2))


def strided_heads() -> tuple[torch.Tensor, torch.Tensor]:
    return randn(8, 64, 256)[..., :64], randn(8, 2624, seed=1)[:, :64].view(8, 1, 64)


def packed_heads() -> tuple[torch.Tensor, torch.Tensor]:
    buffer = randn(8, (4 + 2 + 2) * 64)
    q, k, _ = (part.unflatten(-1, (-1, 64)) for part in buffer.split([256, 128, 128], -1))
    return q, k


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary_dim", [64, 32])
@pytest.mark.parametrize("heads", [strided_heads, packed_heads])
@ropes
def test_br_023_in_place_on_slices(target: Target, heads: Heads, rotary_dim: int, interleaved: bool) -> None:
    """q and k with their own strides: equal to contiguous copies, and not one byte outside the slices changes."""
    q, k = heads()
    positions = torch.tensor([8, 0, 3, 3, 1, 7, 2, 5])
    cos_sin = table(9, rotary_dim)
    expected = both_forms(target, q.contiguous(), k.contiguous(), cos_sin, positions, interleaved)
    used_q, used_k, *rest = copy_args((q, k, cos_sin, positions), target.device)
    ops.rope_(used_q, used_k, *rest, interleaved=interleaved, backend=target.provider)
    assert torch.equal(used_q.cpu(), expected[0])
    assert torch.equal(used_k.cpu(), expected[1])
    for used, before in ((used_q, q), (used_k, k)):
        now, then = whole_buffer(used).cpu().clone(), whole_buffer(before).clone()
        for view in (q, k):
            if view.untyped_storage().data_ptr() == before.untyped_storage().data_ptr():
                for buffer in (now, then):
                    buffer.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
        assert torch.equal(now, then)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("interleaved", [False, True])
def test_br_021_sum_backward(interleaved: bool, device: str) -> None:
    """The gradient of a rotation is the rotation back; here of ones that arrive with stride 0."""
    q, k = (randn(9, heads, 64).to(device, torch.bfloat16).requires_grad_() for heads in (4, 2))
    cos_sin, positions = table(9, 64).to(device), torch.arange(9, device=device)
    q_out, k_out = ops.rope(q, k, cos_sin, positions, interleaved=interleaved)
    (q_out.sum() + k_out.sum()).backward()
    cos, sin = cos_sin.double().chunk(2, -1)
    plus, minus = cos + sin, cos - sin
    expected = torch.stack((plus, minus), -1).flatten(1) if interleaved else torch.cat((plus, minus), 1)
    for gradient in (q.grad, k.grad):
        torch.testing.assert_close(gradient.double(), expected[:, None].expand_as(gradient), rtol=2**-8, atol=2**-8)


@ropes
def test_lengths_are_kept_and_products_depend_on_distance_alone(target: Target) -> None:
    q, k = randn(1, 1, 64).expand(20, 1, 64), randn(1, 1, 64, seed=1).expand(20, 1, 64)
    positions = torch.arange(20)
    q_turned, k_turned = ops.rope(*copy_args((q, k, table(20, 64), positions), target.device), backend=target.provider)
    torch.testing.assert_close(q_turned.norm(dim=-1).cpu(), q.norm(dim=-1))
    scores = (q_turned.squeeze(1) @ k_turned.squeeze(1).T).cpu()
    for distance in (0, 1, 7):
        diagonal = scores.diagonal(-distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=1e-4, atol=1e-4)
    assert not math.isclose(scores[0, 0].item(), scores[5, 0].item(), rel_tol=1e-3)


def test_an_odd_or_too_wide_table_is_refused() -> None:
    q = torch.ones(2, 1, 8)
    for width in (7, 10):
        with pytest.raises(ValueError, match=f"^cos_sin must have an even width of at most head_dim = 8, was {width}"):
            ops.rope(q, q, torch.ones(4, width), torch.arange(2))
