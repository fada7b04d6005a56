"""RMSNorm, the fused additions and the gradient: values by hand, against PyTorch and transformers, reported faults."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from rooflight import ops
from rooflight.ops import REGISTRY, Make
from tests.contract.harness import TARGETS, Target, as_param, each_target, implementations, same_bits, ulps_apart

# NumPy speaks up in Triton's interpreter where a row of zeros is divided by zero, eps being 0.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|divide by zero) encountered:RuntimeWarning")

BF16 = torch.bfloat16
ADD_NORMS = [target for target in TARGETS if target.op.name == "fused_add_rms_norm"]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def add_norm(
    target: Target, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    """Both forms, which must agree bit for bit; returns (out, residual_out)."""
    x, residual, weight = (t.to(target.device) for t in (x, residual, weight))
    results = ops.fused_add_rms_norm(x, residual, weight, eps, backend=target.provider)
    x_, residual_ = x.clone(), residual.clone()
    ops.fused_add_rms_norm_(x_, residual_, weight, eps, backend=target.provider)
    assert same_bits(x_, results[0])
    assert same_bits(residual_, results[1])
    return results


@implementations("rms_norm")
def test_rms_norm_by_hand(target: Target) -> None:
    """x = (3, 4): mean of squares 12.5; eps is inside the root."""
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], device=target.device)
    weight = torch.tensor([1.0, 10.0], device=target.device)
    out = ops.rms_norm(x, weight, 0.0001, backend=target.provider).cpu()
    root = 12.5001**0.5
    torch.testing.assert_close(out, torch.tensor([[3 / root, 40 / root], [0.0, 0.0]]))
    large_eps = ops.rms_norm(x, weight, 12.5, backend=target.provider).cpu()
    torch.testing.assert_close(large_eps, torch.tensor([[0.6, 8.0], [0.0, 0.0]]))


@implementations("rms_norm")
def test_rms_norm_agrees_with_torch(target: Target) -> None:
    for shape in ((33, 769), (2, 3, 64), (5,), (1, 1), (2, 0, 8)):
        x, weight = randn(*shape, device=target.device), randn(shape[-1], seed=1, device=target.device)
        for eps in (0.0, 1e-6, 1e-5, 0.1):
            out = ops.rms_norm(x, weight, eps, backend=target.provider)
            torch.testing.assert_close(out, F.rms_norm(x, (shape[-1],), weight, eps))


@pytest.mark.parametrize("target", [as_param(target) for target in ADD_NORMS])
def test_fused_add_by_hand(target: Target) -> None:
    """bf16 has 8 bits: 256 + 1 rounds to 256, 256 + 3 to 260 (ties to even); the norm squares what was rounded."""
    x = torch.tensor([[1.0, 3.0, -2.0, 0.0]], dtype=BF16)
    residual = torch.tensor([[256.0, 256.0, 2.0, 0.0]], dtype=BF16)
    out, total = add_norm(target, x, residual, torch.ones(4, dtype=BF16), 0.0)
    assert total.tolist() == [[256.0, 260.0, 0.0, 0.0]]
    root = ((256.0**2 + 260.0**2) / 4) ** 0.5
    assert out.tolist() == [torch.tensor([256 / root, 260 / root, 0, 0]).to(BF16).tolist()]


@pytest.mark.parametrize("target", [as_param(target) for target in ADD_NORMS])
def test_fused_add_of_zero_is_rms_norm(target: Target) -> None:
    x, weight = randn(5, 770, dtype=torch.float16), randn(770, seed=1, dtype=torch.float16)
    out, total = add_norm(target, x, torch.zeros_like(x), weight)
    assert torch.equal(total.cpu(), x)
    assert ulps_apart(out, ops.rms_norm(x, weight).to(out.device)) <= 1


@implementations("rms_norm")
def test_br_001_fp16_squares_overflow(target: Target) -> None:
    """300^2 is beyond fp16's 65504; the largest finite value as the only one in a row of zeros."""
    x = torch.full((2, 4096), 300.0, dtype=torch.float16)
    lone = torch.zeros(1, 4096, dtype=torch.float16)
    lone[0, 77] = 60000.0
    rows = torch.cat((x, lone)).to(target.device)
    out = ops.rms_norm(rows, torch.ones(4096, dtype=torch.float16, device=target.device), backend=target.provider)
    expected = torch.cat((torch.ones(2, 4096), torch.where(lone.float() > 0, 64.0, 0.0))).half()
    assert torch.equal(out.cpu(), expected)


@pytest.mark.parametrize("target", [as_param(target) for target in ADD_NORMS])
def test_br_001_fp16_squares_overflow_in_the_fused_form(target: Target) -> None:
    x, residual = torch.full((2, 4096), 100.0).half(), torch.full((2, 4096), 200.0).half()
    residual[1], x[1] = 0, 0
    x[1, 9], residual[1, 9] = 30000.0, 30000.0
    out, total = add_norm(target, x, residual, torch.ones(4096).half())
    assert total[0].eq(300).all()
    assert out[0].eq(1).all()
    assert out[1, 9].item() == 64.0
    assert out[1].ne(0).sum().item() == 1
    assert out.isfinite().all()


@pytest.mark.parametrize("width", [4096, 4095])
def test_br_003_every_path_rounds_the_sum_once(width: int) -> None:
    """Kernels, reference, functional, in-place and compiled forms: residual_out bit-equal, out within 1 ulp."""
    x, residual = randn(4, width, dtype=BF16), (randn(4, width, seed=1) * 30).to(BF16)
    weight = randn(width, seed=2, dtype=BF16)
    exact = (x.float() + residual.float()).to(BF16)
    assert not torch.equal(exact.float(), x.float() + residual.float())  # the rounding matters in this input
    outputs = []
    for target in ADD_NORMS:
        if target.device == "cuda" and not torch.cuda.is_available():
            continue
        out, total = add_norm(target, x, residual, weight)
        assert torch.equal(total.cpu(), exact), str(target)
        outputs.append(out.cpu())
    compiled = torch.compile(ops.fused_add_rms_norm, fullgraph=True, backend="aot_eager")(x, residual, weight)
    assert torch.equal(compiled[1], exact)
    truth, unrounded = (
        F.rms_norm(total, (width,), weight.double(), 1e-6).to(BF16)
        for total in (exact.double(), x.double() + residual.double())
    )
    assert (unrounded != truth).double().mean() > 0.1  # the input tells the two rules apart
    for out in (*outputs, compiled[0]):
        assert ulps_apart(out, truth) <= 1
        assert (out != truth).double().mean() < 0.01
        assert ulps_apart(out, outputs[0]) <= 1


@implementations("rms_norm")
def test_br_004_weight_after_the_norm_as_in_transformers(target: Target) -> None:
    """3-D input and bf16 weights: 1 ulp from Qwen3's norm, which rounds once more, before the multiplication."""
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3", reason="transformers is not installed")
    x, weight = randn(2, 4, 1024, dtype=BF16), randn(1024, seed=1, dtype=BF16)
    theirs = modeling.Qwen3RMSNorm(1024, eps=1e-6).to(BF16)
    with torch.no_grad():
        theirs.weight.copy_(weight)
        expected = theirs(x)
    out = ops.rms_norm(x.to(target.device), weight.to(target.device), 1e-6, backend=target.provider)
    assert ulps_apart(out, expected) <= 1


@implementations("rms_norm")
def test_br_004_fp32_weight_with_bf16_input(target: Target) -> None:
    """The output has the input's dtype, and the weight is not rounded to it."""
    x, weight = randn(2, 3, 256, dtype=BF16), randn(256, seed=1)
    out = ops.rms_norm(x.to(target.device), weight.to(target.device), 1e-6, backend=target.provider).cpu()
    assert out.dtype == BF16
    assert out.shape == (2, 3, 256)
    truth, rounded_first = (
        F.rms_norm(x.double(), (256,), w.double(), 1e-6).to(BF16) for w in (weight, weight.to(BF16))
    )
    assert (rounded_first != truth).double().mean() > 0.1  # the input tells the two apart
    assert (out != truth).double().mean() < 0.01


@pytest.mark.parametrize("width", [3584, 770, 7, 1])
@pytest.mark.parametrize("target", [as_param(target) for target in ADD_NORMS])
def test_br_018_widths_and_addresses_that_are_not_aligned(target: Target, width: int) -> None:
    """buf[1 : 1 + n] views: every row of every argument starts off any 16-byte border."""
    for dtype in (torch.float16, BF16):
        x, residual, weight = (
            randn(3 * width + 1, seed=seed, dtype=dtype, device=target.device)[1:].view(3, width) for seed in (0, 1, 2)
        )
        out, total = add_norm(target, x, residual, weight[0])
        assert torch.equal(total, (x.float() + residual.float()).to(dtype))
        expected = F.rms_norm(total.float(), (width,), weight[0].float(), 1e-6).to(dtype)
        assert ulps_apart(out, expected) <= 1


@pytest.mark.parametrize("width", [3584, 770, 7, 1])
@implementations("rms_norm")
def test_br_018_the_norm_alone_at_addresses_that_are_not_aligned(target: Target, width: int) -> None:
    for dtype in (torch.float16, BF16):
        x, weight = (
            randn(3 * width + 1, seed=seed, dtype=dtype, device=target.device)[1:].view(3, width) for seed in (0, 1)
        )
        out = ops.rms_norm(x, weight[0], backend=target.provider)
        assert ulps_apart(out, F.rms_norm(x.float(), (width,), weight[0].float(), 1e-6).to(dtype)) <= 1


@pytest.mark.parametrize("width", [3584, 770, 7, 1])
@implementations("rms_norm_backward")
def test_br_018_gradients_at_addresses_that_are_not_aligned(target: Target, width: int) -> None:
    for dtype in (torch.float16, BF16):
        grad, x, weight, residual = (
            randn(3 * width + 1, seed=seed, dtype=dtype, device=target.device)[1:].view(3, width) for seed in range(4)
        )
        found = ops.rms_norm_backward(grad, x, weight[0], 1e-6, residual, backend=target.provider)
        wide = [t.double() for t in (grad, x, weight[0], residual)]
        expected = ops.rms_norm_backward(*wide[:3], 1e-6, wide[3], backend="ref")
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps, atol=1e-5)


@each_target(lambda target: target.op.name in ("rms_norm", "fused_add_rms_norm"))
def test_br_021_sum_backward_of_norms(target: Target) -> None:
    """x (2, 1024, 256) bf16 through `.sum().backward()`: gradients equal those of PyTorch's norm in FP32."""
    x = randn(2, 1024, 256, dtype=BF16, device=target.device).requires_grad_()
    weight = randn(256, seed=1, dtype=BF16, device=target.device).requires_grad_()
    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    if target.op.name == "rms_norm":
        ops.rms_norm(x, weight, backend=target.provider).sum().backward()
        F.rms_norm(wide[0], (256,), wide[1], 1e-6).sum().backward()
    else:
        out, total = ops.fused_add_rms_norm(x, torch.zeros_like(x), weight, backend=target.provider)
        (out.sum() + total.sum()).backward()
        (F.rms_norm(wide[0], (256,), wide[1], 1e-6).sum() + wide[0].sum()).backward()
    for ours, theirs in zip((x, weight), wide, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("change", [lambda g: g.mT.contiguous().mT, lambda g: g[..., ::2], lambda g: g[::2, :, ::2]])
@implementations("rms_norm")
def test_br_021_gradients_come_with_any_strides(target: Target, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """What autograd sends is not ours to refuse: column-major, with gaps, or with rows that do not fold."""
    gradient = change(randn(4, 6, 64, seed=3, device=target.device))
    x = randn(*gradient.shape, device=target.device).requires_grad_()
    weight = randn(gradient.shape[-1], seed=1, device=target.device).requires_grad_()
    out = ops.rms_norm(x, weight, backend=target.provider)
    found = torch.autograd.grad(out, (x, weight), gradient)
    expected = torch.autograd.grad(F.rms_norm(x, weight.shape, weight, 1e-6), (x, weight), gradient)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_gradient_of_the_residual_comes_from_both_results() -> None:
    """The sum goes on as residual and into the norm; its gradient is the total of the two, the same for x."""
    x, residual, weight = (randn(3, 8, seed=seed, dtype=torch.float64).requires_grad_() for seed in (0, 1, 2))
    out, total = ops.fused_add_rms_norm(x, residual, weight[0])
    (out.pow(2).sum() + 3 * total.sum()).backward()
    added = (x + residual).detach().requires_grad_()
    (F.rms_norm(added, (8,), weight[0].detach(), 1e-6).pow(2).sum() + 3 * added.sum()).backward()
    torch.testing.assert_close(x.grad, added.grad)
    torch.testing.assert_close(residual.grad, added.grad)


@pytest.mark.parametrize(("eps", "word"), [(-1e-6, "-1e-06"), (float("nan"), "nan")])
def test_eps_must_not_be_negative(eps: float, word: str) -> None:
    with pytest.raises(ValueError, match=f"^eps must be zero or more, was {word}"):
        ops.rms_norm(torch.ones(2, 4), torch.ones(4), eps)


@pytest.mark.parametrize("width", [20000, 262144])
@pytest.mark.parametrize("target", [as_param(target) for target in ADD_NORMS])
def test_rows_wider_than_one_program_holds(target: Target, width: int) -> None:
    """Beyond what a kernel keeps in registers, with the norm alone and a last piece that is not full."""
    x, residual, weight = (randn(2, width, seed=seed, dtype=BF16) for seed in (0, 1, 2))
    out, total = add_norm(target, x, residual, weight[0])
    assert torch.equal(total.cpu(), (x.float() + residual.float()).to(BF16))
    expected = F.rms_norm(total.cpu().double(), (width,), weight[0].double(), 1e-6).to(BF16)
    assert ulps_apart(out, expected) <= 1
    alone = ops.rms_norm(total, weight[0].to(target.device), backend=target.provider)
    assert ulps_apart(alone, expected) <= 1


@pytest.mark.parametrize("width", [20000, 262144])
@implementations("rms_norm_backward")
def test_gradients_of_rows_wider_than_one_program_holds(target: Target, width: int) -> None:
    """Five rows, so that a program has several of them and adds to the sums that it has written."""
    shapes = (5, width), (5, width), (width,)
    args = [randn(*shape, seed=seed, device=target.device) for seed, shape in enumerate(shapes)]
    residual = randn(5, width, seed=3, device=target.device)
    found = ops.rms_norm_backward(*args, 1e-6, residual, backend=target.provider)
    expected = ops.rms_norm_backward(*(t.double() for t in args), 1e-6, residual.double(), backend="ref")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-5)


def test_x_and_residual_may_be_rows_of_one_buffer() -> None:
    """Slices that interleave: [x | residual] in each row, written in place, and nothing between them."""
    buffer = randn(4, 40)
    before = buffer.clone()
    x, residual = buffer[:, :16], buffer[:, 20:36]
    ops.fused_add_rms_norm_(x, residual, torch.ones(16))
    total = before[:, :16] + before[:, 20:36]
    assert torch.equal(residual, total)
    torch.testing.assert_close(x, F.rms_norm(total, (16,), None, 1e-6))
    assert torch.equal(buffer[:, 16:20], before[:, 16:20])
    assert torch.equal(buffer[:, 36:], before[:, 36:])


def test_in_place_arguments_must_not_be_the_same_memory() -> None:
    x, weight = torch.ones(2, 4), torch.ones(4)
    for residual in (x, x.view_as(x), x[:]):
        with pytest.raises(ValueError, match="residual must not share x's memory"):
            ops.fused_add_rms_norm_(x, residual, weight)
    both = torch.ones(2, 8)
    ops.fused_add_rms_norm_(both[:, :4], both[:, 4:], weight)  # slices of one buffer are two tensors
    assert both[:, 4:].tolist() == [[2.0] * 4] * 2


# The gradient as an operator ------------------------------------------------------------------------------------------


@implementations("rms_norm_backward")
def test_backward_by_hand(target: Target) -> None:
    """x = (3, 4), so s^2 = 12.5; grad_out (1, 0) gives (1 - 9/25, -12/25) / s in x and (3, 0) / s in weight."""
    x, grad = torch.tensor([[3.0, 4.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    args = grad, x, torch.ones(2), 0.0
    s = 12.5**0.5
    expected = torch.tensor([[0.64 / s, -0.48 / s], [0.0, 0.0]]), torch.tensor([3 / s, 0.0])
    on_device = [value.to(target.device) if isinstance(value, torch.Tensor) else value for value in args]
    for residual in (None, torch.tensor([[1.0, 2.0], [-3.0, 0.5]])):
        flowing = None if residual is None else residual.to(target.device)
        grad_x, grad_weight = ops.rms_norm_backward(*on_device, flowing, backend=target.provider)
        torch.testing.assert_close(grad_x.cpu(), expected[0] if residual is None else expected[0] + residual)
        torch.testing.assert_close(grad_weight.cpu(), expected[1])


@implementations("rms_norm_backward")
def test_backward_adds_the_residual_before_it_rounds(target: Target) -> None:
    """bf16, weight 0: grad_x is grad_residual alone, bit for bit; and where both are there, one rounding of the sum."""
    x, grad, residual = (randn(5, 64, seed=seed, dtype=BF16, device=target.device) for seed in range(3))
    zero = torch.zeros(64, dtype=BF16, device=target.device)
    assert same_bits(ops.rms_norm_backward(grad, x, zero, 1e-6, residual, backend=target.provider)[0], residual)
    found, _ = ops.rms_norm_backward(grad, x, zero + 1, 1e-6, residual, backend=target.provider)
    wide = [t.double() for t in (grad, x, zero + 1)]
    exact, _ = ops.rms_norm_backward(*wide, 1e-6, residual.double(), backend="ref")
    rounded_twice = ops.rms_norm_backward(*wide, backend="ref")[0].to(BF16) + residual
    assert (rounded_twice != exact.to(BF16)).double().mean() > 0.1  # the input tells the two rules apart
    assert (found != exact.to(BF16)).double().mean() < 0.02


@each_target(lambda target: target.op.name == "rms_norm_backward")
def test_br_017_gradients_of_zero_rows_are_zeros(target: Target) -> None:
    for shape in ((0, 4096), (2, 0, 4096)):
        x, weight = torch.ones(shape, dtype=BF16, device=target.device), torch.ones(shape[-1], device=target.device)
        grad_x, grad_weight = ops.rms_norm_backward(x, x, weight, backend=target.provider)
        assert (grad_x.shape, grad_x.dtype) == (shape, BF16)
        assert same_bits(grad_weight, torch.zeros_like(weight))


@implementations("rms_norm_backward")
def test_the_weight_gradient_has_the_same_bits_every_time(target: Target) -> None:
    rows = 20000 if target.device == "cuda" else 200
    for width in (64, 1000):
        grad, x = (randn(rows, width, seed=seed, dtype=BF16, device=target.device) for seed in range(2))
        weight = randn(width, seed=2, device=target.device)
        first, *others = (ops.rms_norm_backward(grad, x, weight, backend=target.provider) for _ in range(3))
        assert all(same_bits(a, b) for other in others for a, b in zip(first, other, strict=True))
        normalised = F.rms_norm(x.cpu().double(), (width,), None, 1e-6)
        expected = (grad.cpu().double() * normalised).sum(0)
        torch.testing.assert_close(first[1].cpu().double(), expected, rtol=1e-5, atol=1e-4)


@each_target(lambda target: target.op.name in ("rms_norm", "fused_add_rms_norm"))
def test_br_004_gradients_with_an_fp32_weight(target: Target) -> None:
    """Half inputs, FP32 weight: each gradient has the dtype of what it belongs to."""
    x = randn(2, 3, 256, dtype=torch.float16, device=target.device).requires_grad_()
    weight = randn(256, seed=1, device=target.device).requires_grad_()
    gradient = randn(2, 3, 256, seed=2, dtype=torch.float16, device=target.device)
    others = () if target.op.name == "rms_norm" else (torch.zeros_like(x),)
    result = target.overload(x, *others, weight, 1e-6)
    out = result[0] if others else result
    found = torch.autograd.grad(out, (x, weight), gradient)
    wide = [t.detach().cpu().double().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(F.rms_norm(wide[0], (256,), wide[1], 1e-6), wide, gradient.cpu().double())
    assert [t.dtype for t in found] == [torch.float16, torch.float32]
    assert ulps_apart(found[0], expected[0].half()) <= 1
    torch.testing.assert_close(found[1].cpu().double(), expected[1], rtol=1e-5, atol=1e-5)


def test_gradients_agree_with_those_of_torch() -> None:
    for shape in ((33, 769), (2, 3, 64), (5,), (1, 1)):
        x, weight = (randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate((shape, shape[-1:])))
        gradient = randn(*shape, seed=2, dtype=torch.float64)
        found = torch.autograd.grad(ops.rms_norm(x, weight), (x, weight), gradient)
        expected = torch.autograd.grad(F.rms_norm(x, shape[-1:], weight, 1e-6), (x, weight), gradient)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


@implementations("rms_norm_backward")
@pytest.mark.parametrize(("size", "eps"), [(1e15, 1e-6), (1e-14, 0.0)])
def test_gradients_of_rows_of_any_size(target: Target, size: float, eps: float) -> None:
    """1 / rms cubed leaves FP32 long before the gradient does: it must not be formed."""
    grad, x, weight = (randn(*shape, seed=i) for i, shape in enumerate(((3, 64), (3, 64), (64,))))
    expected = target.op.reference(grad.double(), (x * size).double(), weight.double(), eps)
    found = target.run((grad.to(target.device), (x * size).to(target.device), weight.to(target.device), eps))
    for one, other in zip(found, expected, strict=True):
        assert (one.cpu().double() - other).norm() < 1e-5 * other.norm()


@pytest.fixture
def backwards(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The overloads of rms_norm_backward that run, in order."""
    operator, seen = REGISTRY["rms_norm_backward"], list[str]()

    def spy(provider: str, overload: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object) -> object:
            seen.append(provider)
            return overload(*args)

        return call

    for provider, overload in operator.providers.items():
        monkeypatch.setitem(operator.providers, provider, spy(provider, overload))  # type: ignore[arg-type]
    return seen


@each_target(lambda target: target.op.name in ("rms_norm", "fused_add_rms_norm"))
def test_the_gradient_runs_on_the_provider_of_the_call(target: Target, backwards: list[str]) -> None:
    """Asked for by the argument, though the default is another; and the default where nothing was asked for."""
    x, weight = (randn(*shape, device=target.device).requires_grad_() for shape in ((3, 64), (64,)))
    args = (x, weight) if target.op.name == "rms_norm" else (x, torch.zeros_like(x), weight)
    for backend in (target.provider, None):
        result = getattr(ops, target.op.name)(*args, backend=backend)
        (result if isinstance(result, torch.Tensor) else result[0]).sum().backward()
    default = REGISTRY["rms_norm_backward"].active[target.device]
    asked_for = default if target.provider == target.op.active[target.device] else target.provider
    assert backwards == [asked_for, default]


def test_results_that_are_not_used_cost_nothing(backwards: list[str]) -> None:
    """Only residual_out in the loss: its gradient passes on, and the norm's is not computed. Only out: no zeros."""
    x, residual, weight = (randn(*shape, seed=1).requires_grad_() for shape in ((3, 8), (3, 8), (8,)))
    out, total = ops.fused_add_rms_norm(x, residual, weight)
    total.backward(torch.full_like(total, 3.0))
    assert backwards == []
    assert x.grad.eq(3).all()
    assert residual.grad.eq(3).all()
    assert weight.grad.eq(0).all()
    out, _ = ops.fused_add_rms_norm(x, residual, weight)
    found = torch.autograd.grad(out, (x, residual, weight), torch.ones_like(out))
    added = (x + residual).detach().requires_grad_()
    expected = torch.autograd.grad(ops.rms_norm(added, weight), (added, weight), torch.ones_like(out))
    assert all(map(torch.equal, found, (expected[0], *expected)))
    assert backwards == ["ref", "ref"]


def test_gradients_can_be_differentiated_again() -> None:
    """As when the gradient was a composition; to the third order through the operator of the gradient itself."""
    shapes = (2, 3), (2, 3), (3,)
    x, residual, weight = (randn(*s, seed=i, dtype=torch.float64).requires_grad_() for i, s in enumerate(shapes))
    assert torch.autograd.gradgradcheck(lambda x, w: ops.rms_norm(x, w, 1e-2), (x, weight))
    assert torch.autograd.gradgradcheck(lambda *args: ops.fused_add_rms_norm(*args, 1e-2), (x, residual, weight))
    assert torch.autograd.gradgradcheck(lambda g, x, w: ops.rms_norm_backward(g, x, w, 1e-2), (residual, x, weight))


NORMS = (
    "rms_norm", "fused_add_rms_norm", "rms_norm_backward", "layer_norm", "fused_add_layer_norm", "layer_norm_backward",
)  # fmt: skip


def takes_any_shape_at_once(target: Target) -> bool:
    """Kernels that need no compilation for a shape: Triton's on a GPU see the widths of the sweep."""
    return target.op.name in NORMS and (target.provider, target.device) in (("cuda", "cuda"), ("triton", "cpu"))


@each_target(takes_any_shape_at_once)
@settings(max_examples=12)
@given(rows=st.integers(0, 70), width=st.integers(1, 2100), gap=st.integers(0, 9), offset=st.integers(0, 9))
def test_kernels_equal_the_reference_at_any_shape(target: Target, rows: int, width: int, gap: int, offset: int) -> None:
    """Any number of rows and columns, rows with gaps of NaN between them and a first one at any address.

    What this looks for, lost or doubled rows and lanes beyond a row, is no matter of rounding: so a large eps, which
    keeps narrow rows from dividing by next to nothing, and a wide tolerance.
    """

    def with_gaps(value: object) -> object:
        if not isinstance(value, torch.Tensor):
            return 0.1 if isinstance(value, float) else value
        buffer = torch.full((value.numel() // width, width + gap), float("nan")).flatten()
        buffer = torch.cat((torch.full((offset,), float("nan")), buffer)).to(target.device)
        view = buffer[offset:].view(-1, width + gap)[:, :width]
        return (view if value.dim() == 2 else view[0]).copy_(value)

    args = target.op.inputs(Make(), num_tokens=rows, hidden_size=width)
    found, expected = target.run(tuple(map(with_gaps, args))), target.op.reference(*map(with_gaps, args))
    for one, other in zip(found, expected if isinstance(expected, tuple) else (expected,), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
