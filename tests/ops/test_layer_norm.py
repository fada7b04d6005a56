"""LayerNorm, after an addition, and the gradient: values by hand, against PyTorch, and the reported faults of norms."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from rooflight import ops
from rooflight.ops import REGISTRY
from tests.contract.harness import Target, each_target, implementations, same_bits

# NumPy speaks up in Triton's interpreter where a row without variance is divided by zero, eps being 0.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

BF16 = torch.bfloat16
norms = each_target(lambda target: target.op.name in ("layer_norm", "fused_add_layer_norm"))


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def norm_of(
    target: Target, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    """layer_norm(x), or what fused_add_layer_norm gives for x and a residual of zeros."""
    if target.op.name == "layer_norm":
        return ops.layer_norm(x, weight, bias, eps, backend=target.provider)
    zeros = torch.zeros_like(x)
    out, total = ops.fused_add_layer_norm(x, zeros, weight, bias, eps, backend=target.provider)
    assert torch.equal(total, x)
    return out


@norms
def test_by_hand(target: Target) -> None:
    """(1, 2, 6): mean 3, variance 14/3; eps is inside the root."""
    x = torch.tensor([[1.0, 2.0, 6.0], [5.0, 5.0, 5.0]], device=target.device)
    weight, bias = torch.tensor([[1.0, 10.0, -1.0], [0.5, 0.0, 7.0]], device=target.device)
    root = (14 / 3 + 1 / 3) ** 0.5
    out = norm_of(target, x, weight, bias, 1 / 3).cpu()
    torch.testing.assert_close(out, torch.tensor([[-2 / root + 0.5, -10 / root, -3 / root + 7], [0.5, 0.0, 7.0]]))
    without = norm_of(target, x, weight, None, 1 / 3).cpu()
    torch.testing.assert_close(without, torch.tensor([[-2 / root, -10 / root, -3 / root], [0.0, 0.0, 0.0]]))


@norms
def test_agrees_with_torch(target: Target) -> None:
    for shape in ((33, 769), (2, 3, 64), (5,), (1, 1), (2, 0, 8)):
        x = randn(*shape, device=target.device)
        weight, bias = (randn(shape[-1], seed=seed, device=target.device) for seed in (1, 2))
        for eps in (1e-6, 1e-5, 0.1):
            out = norm_of(target, x, weight, bias, eps)
            torch.testing.assert_close(out, F.layer_norm(x, (shape[-1],), weight, bias, eps))


@norms
def test_a_large_mean_costs_no_digits(target: Target) -> None:
    """4096 ± 1 in FP32: the mean of the squares less the square of the mean would be wrong in every digit."""
    signs = torch.where(randn(2, 512) > 0, 1.0, -1.0)
    x = 4096 + torch.cat((signs, -signs), -1).to(target.device)
    out = norm_of(target, x, torch.ones(1024, device=target.device), None, 0.0)
    torch.testing.assert_close(out, x - 4096)


@norms
def test_br_001_fp16_squares_overflow(target: Target) -> None:
    """A row of 300 has no variance: its norm is the bias. A lone 60000 among zeros: its square is beyond fp16."""
    x = torch.full((2, 4096), 300.0)
    x[1] = 0
    x[1, 77] = 60000.0
    weight, bias = torch.ones(4096).half().to(target.device), torch.full((4096,), 0.25).half().to(target.device)
    out = norm_of(target, x.half().to(target.device), weight, bias).cpu()
    assert out[0].eq(0.25).all()
    assert out[1, 77].item() == pytest.approx(4095**0.5 + 0.25, rel=2**-11)
    others = torch.cat((out[1, :77], out[1, 78:])).float()
    torch.testing.assert_close(others, torch.full((4095,), 0.25 - 4095**-0.5), rtol=2**-11, atol=0)


@pytest.mark.parametrize("width", [4096, 4095])
@implementations("fused_add_layer_norm")
def test_br_003_the_sum_is_rounded_once_and_first(target: Target, width: int) -> None:
    """residual_out is bit-equal to the rounded sum, and out is the norm of that, not of the sum before rounding."""
    x, residual = randn(4, width, dtype=BF16), (randn(4, width, seed=1) * 30).to(BF16)
    weight, bias = (randn(width, seed=seed, dtype=BF16) for seed in (2, 3))
    on_device = [t.to(target.device) for t in (x, residual, weight, bias)]
    out, total = (t.cpu() for t in ops.fused_add_layer_norm(*on_device, backend=target.provider))
    exact = (x.float() + residual.float()).to(BF16)
    assert torch.equal(total, exact)
    truth, unrounded = (
        F.layer_norm(each, (width,), weight.double(), bias.double(), 1e-5).to(BF16)
        for each in (exact.double(), x.double() + residual.double())
    )
    assert (unrounded != truth).double().mean() > 0.1  # the input tells the two rules apart
    assert (out != truth).double().mean() < 0.01
    compiled = torch.compile(ops.fused_add_layer_norm, fullgraph=True, backend="aot_eager")(x, residual, weight, bias)
    assert torch.equal(compiled[1], exact)
    assert (compiled[0] != truth).double().mean() < 0.01


@norms
def test_br_004_fp32_weight_with_bf16_input(target: Target) -> None:
    """3-D input; the output has the input's dtype, and weight and bias are not rounded to it."""
    x, weight, bias = randn(2, 3, 256, dtype=BF16), randn(256, seed=1), randn(256, seed=2)
    out = norm_of(target, *(t.to(target.device) for t in (x, weight, bias))).cpu()
    assert out.dtype == BF16
    assert out.shape == (2, 3, 256)
    truth, rounded_first = (
        F.layer_norm(x.double(), (256,), w.double(), b.double()).to(BF16)
        for w, b in ((weight, bias), (weight.to(BF16), bias.to(BF16)))
    )
    assert (rounded_first != truth).double().mean() > 0.1  # the input tells the two apart
    assert (out != truth).double().mean() < 0.01


def test_bias_has_the_dtype_of_the_weight() -> None:
    x = torch.ones(2, 4)
    with pytest.raises(ValueError, match=r"^bias must be torch.float32, was torch.float16"):
        ops.layer_norm(x, torch.ones(4), torch.ones(4).half())
    with pytest.raises(ValueError, match=r"^bias must have shape \(4\), was \(3,\)"):
        ops.layer_norm(x, torch.ones(4), torch.ones(3))
    with pytest.raises(ValueError, match=r"^eps must be zero or more, was -1.0"):
        ops.layer_norm(x, torch.ones(4), None, -1.0)


@pytest.mark.parametrize("width", [3584, 770, 7, 1])
@norms
def test_br_018_widths_and_addresses_that_are_not_aligned(target: Target, width: int) -> None:
    """buf[1 : 1 + n] views: every row of every argument starts off any 16-byte border."""
    for dtype in (torch.float16, BF16):
        x, weight, bias = (
            randn(3 * width + 1, seed=seed, dtype=dtype, device=target.device)[1:].view(3, width) for seed in range(3)
        )
        out = norm_of(target, x, weight[0], bias[0])
        expected = F.layer_norm(x.double(), (width,), weight[0].double(), bias[0].double(), 1e-5)
        torch.testing.assert_close(out.double(), expected, rtol=torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("width", [20000, 262144])
@implementations("fused_add_layer_norm")
def test_rows_wider_than_one_program_holds(target: Target, width: int) -> None:
    """Beyond what a kernel keeps in registers, after an addition and alone."""
    x, residual = (randn(2, width, seed=seed, dtype=BF16, device=target.device) for seed in (0, 1))
    weight, bias = (randn(width, seed=seed, device=target.device) for seed in (2, 3))
    out, total = ops.fused_add_layer_norm(x, residual, weight, bias, backend=target.provider)
    assert torch.equal(total, (x.float() + residual.float()).to(BF16))
    truth = F.layer_norm(total.double(), (width,), weight.double(), bias.double(), 1e-5).to(BF16)
    assert (out != truth).double().mean() < 0.01
    alone = ops.layer_norm(total, weight, bias, backend=target.provider)
    assert (alone != truth).double().mean() < 0.01


# The gradient ---------------------------------------------------------------------------------------------------------


@implementations("layer_norm_backward")
def test_backward_by_hand(target: Target) -> None:
    """x = (1, 3), so mean 2, n = (-1, 1) / s and s^2 = 1 + eps = 2; whatever comes in, its mean and n's part go out."""
    s = 2**0.5
    x, grad = torch.tensor([[1.0, 3.0], [7.0, 7.0]]), torch.tensor([[1.0, 0.0], [2.0, 4.0]])
    # g = (1, 0): less its mean (0.5, -0.5), mean(g n) = -0.5 / s, so (0.5 - 0.25, -0.5 + 0.25) / s; then (-1, 1) / 1.
    expected = torch.tensor([[0.25 / s, -0.25 / s], [-1.0, 1.0]]), torch.tensor([-1 / s, 0.0]), torch.tensor([3.0, 4.0])
    residual = torch.tensor([[1.0, 2.0], [-3.0, 0.5]])
    for flowing in (None, residual):
        args = [t.to(target.device) for t in (grad, x, torch.ones(2))]
        there = None if flowing is None else flowing.to(target.device)
        found = ops.layer_norm_backward(*args, 1.0, there, backend=target.provider)
        sums = (expected[0] if flowing is None else expected[0] + flowing, *expected[1:])
        for one, other in zip(found, sums, strict=True):
            torch.testing.assert_close(one.cpu(), other)


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_agree_with_those_of_torch(bias: bool) -> None:
    for shape in ((33, 769), (2, 3, 64), (5,), (1, 1)):
        shapes = shape, shape[-1:], shape[-1:]
        tensors = [randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes)][: 2 + bias]
        gradient = randn(*shape, seed=3, dtype=torch.float64)
        found = torch.autograd.grad(ops.layer_norm(*tensors), tensors, gradient)
        expected = torch.autograd.grad(F.layer_norm(tensors[0], shape[-1:], *tensors[1:]), tensors, gradient)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("width", [20000, 262144])
@implementations("layer_norm_backward")
def test_gradients_of_rows_wider_than_one_program_holds(target: Target, width: int) -> None:
    """Three rows, so that a program has several of them and adds to the sums that it has written."""
    args = [randn(*s, seed=i, device=target.device) for i, s in enumerate(((3, width), (3, width), (width,)))]
    residual = randn(3, width, seed=3, device=target.device)
    found = ops.layer_norm_backward(*args, 1e-5, residual, backend=target.provider)
    expected = ops.layer_norm_backward(*(t.double() for t in args), 1e-5, residual.double(), backend="ref")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


@implementations("layer_norm_backward")
def test_the_weight_and_bias_gradients_have_the_same_bits_every_time(target: Target) -> None:
    rows = 20000 if target.device == "cuda" else 150
    for width in (64, 1000):
        grad, x = (randn(rows, width, seed=seed, dtype=BF16, device=target.device) for seed in range(2))
        weight = randn(width, seed=2, device=target.device)
        first, *others = (ops.layer_norm_backward(grad, x, weight, backend=target.provider) for _ in range(3))
        assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))
        normalised = F.layer_norm(x.double(), (width,))
        for found, each in zip(first[1:], (grad.double() * normalised, grad.double()), strict=True):
            torch.testing.assert_close(found.double(), each.sum(0), rtol=1e-5, atol=1e-4)


@implementations("layer_norm_backward")
def test_br_017_gradients_of_zero_rows_are_zeros(target: Target) -> None:
    for shape in ((0, 4096), (2, 0, 4096)):
        x, weight = torch.ones(shape, dtype=BF16, device=target.device), torch.ones(shape[-1], device=target.device)
        grad_x, *sums = ops.layer_norm_backward(x, x, weight, backend=target.provider)
        assert (grad_x.shape, grad_x.dtype) == (shape, BF16)
        assert len(sums) == 2
        assert all(same_bits(each, torch.zeros_like(weight)) for each in sums)


@norms
def test_br_021_sum_backward(target: Target) -> None:
    """x (2, 1024, 256) bf16 through `.sum().backward()`, which sends an expanded gradient."""
    x = randn(2, 1024, 256, dtype=BF16, device=target.device).requires_grad_()
    weight, bias = (randn(256, seed=i, dtype=BF16, device=target.device).requires_grad_() for i in (1, 2))
    wide = [t.detach().float().requires_grad_() for t in (x, weight, bias)]
    norm_of(target, x, weight, bias).sum().backward()
    F.layer_norm(wide[0], (256,), *wide[1:]).sum().backward()
    for ours, theirs in zip((x, weight, bias), wide, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2**-8, atol=2**-8)


def test_the_sum_takes_the_gradients_of_both_results() -> None:
    """The sum goes on as residual and into the norm; and where only one of the two is used."""
    x, residual, weight, bias = (
        randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(((3, 8), (3, 8), (8,), (8,)))
    )
    added = (x + residual).detach().requires_grad_()
    losses: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda out, total: out.pow(2).sum() + 3 * total.sum(),
        lambda out, total: out.pow(2).sum(),
        lambda out, total: total.pow(2).sum() + 0 * weight.sum() + 0 * bias.sum(),
    ]
    for loss in losses:
        found = torch.autograd.grad(
            loss(*ops.fused_add_layer_norm(x, residual, weight, bias)), (x, residual, weight, bias)
        )
        out = F.layer_norm(added, (8,), weight, bias)
        expected = torch.autograd.grad(loss(out, added) + 0 * out.sum(), (added, weight, bias))
        for one, other in zip(found, (expected[0], *expected), strict=True):
            torch.testing.assert_close(one, other)


@norms
def test_the_gradient_runs_on_the_provider_of_the_call(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    operator, seen = REGISTRY["layer_norm_backward"], list[str]()
    for provider, overload in list(operator.providers.items()):

        def call(*args: object, name: str = provider, overload: Callable[..., object] = overload) -> object:
            seen.append(name)
            return overload(*args)

        monkeypatch.setitem(operator.providers, provider, call)  # type: ignore[arg-type]
    x, weight = (randn(*shape, device=target.device).requires_grad_() for shape in ((3, 64), (64,)))
    norm_of(target, x, weight).sum().backward()
    default = operator.active[target.device]
    assert seen == [default if target.provider == target.op.active[target.device] else target.provider]


def test_gradients_can_be_differentiated_again() -> None:
    shapes = (2, 3), (2, 3), (3,), (3,)
    x, residual, weight, bias = (randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes))
    assert torch.autograd.gradgradcheck(lambda *args: ops.layer_norm(*args, 1e-2), (x, weight, bias))
    assert torch.autograd.gradgradcheck(
        lambda *args: ops.fused_add_layer_norm(*args, 1e-2), (x, residual, weight, bias)
    )
    assert torch.autograd.gradgradcheck(lambda g, x, w: ops.layer_norm_backward(g, x, w, 1e-2), (residual, x, weight))
