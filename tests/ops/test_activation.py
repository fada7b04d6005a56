"""silu_and_mul: values by hand and against PyTorch, and the reported faults."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from rooflight import ops
from tests.contract.harness import Target, implementations, ulps_apart


@implementations("silu_and_mul")
def test_by_hand(target: Target) -> None:
    """silu(1) = 0.731..., silu(0) = 0, silu(-2) = -0.238...; the gate is the first half."""
    x = torch.tensor([[1.0, 0.0, -2.0, 10.0, 5.0, 3.0]], device=target.device)
    out = ops.silu_and_mul(x, backend=target.provider).cpu()
    expected = [10 / (1 + math.exp(-1)), 0.0, 3 * -2 / (1 + math.exp(2))]
    torch.testing.assert_close(out, torch.tensor([expected]))


@implementations("silu_and_mul")
def test_the_halves_are_not_exchanged(target: Target) -> None:
    gate, up = torch.tensor([[-100.0]]), torch.tensor([[2.0]])
    out = ops.silu_and_mul(torch.cat((gate, up), -1).to(target.device), backend=target.provider)
    assert abs(out.item()) < 1e-30  # silu(-100) * 2; exchanged it would be silu(2) * -100


@pytest.mark.parametrize("size", [3420, 1234, 7, 1])
@implementations("silu_and_mul")
def test_br_018_second_half_is_not_aligned(target: Target, size: int) -> None:
    """With these sizes the up half starts off a 16-byte border; views put the gate half off one too."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.float16, torch.bfloat16):
        buffer = torch.randn(3 * 2 * size + 1, generator=generator).to(target.device, dtype)
        for x in (buffer[:-1].view(3, 2 * size), buffer[1:].view(3, 2 * size)):
            out = ops.silu_and_mul(x, backend=target.provider)
            expected = (F.silu(x[:, :size].double()) * x[:, size:].double()).to(dtype)
            assert ulps_apart(out, expected) <= 1


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_br_021_sum_backward(device: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 1024, 256, generator=generator).to(device, torch.bfloat16).requires_grad_()
    wide = x.detach().float().requires_grad_()
    ops.silu_and_mul(x).sum().backward()
    (F.silu(wide[..., :128]) * wide[..., 128:]).sum().backward()
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=2**-8, atol=2**-8)


@implementations("silu_and_mul")
def test_large_negative_gates_give_zero_not_nan(target: Target) -> None:
    x = torch.tensor([[-1e4, -88.0, 1.0, 1.0]], device=target.device)
    out = ops.silu_and_mul(x, backend=target.provider)
    assert out[0, 0].item() == 0.0
    assert out.isfinite().all()


def test_odd_width_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^x must have an even last dimension \(gate and up\), was 5"):
        ops.silu_and_mul(torch.ones(2, 5))
