"""rms_norm and the fused additions: values by hand and against PyTorch and transformers, and the reported faults."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rooflight import ops
from tests.contract.harness import TARGETS, Target, as_param, implementations, same_bits, ulps_apart

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


@pytest.mark.parametrize("name", ["rms_norm", "fused_add_rms_norm"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_br_021_sum_backward_of_norms(name: str, device: str) -> None:
    """x (2, 1024, 256) bf16 through `.sum().backward()`: gradients equal those of PyTorch's norm in FP32."""
    x = randn(2, 1024, 256, dtype=BF16, device=device).requires_grad_()
    weight = randn(256, seed=1, dtype=BF16, device=device).requires_grad_()
    wide = [t.detach().float().requires_grad_() for t in (x, weight)]
    if name == "rms_norm":
        ops.rms_norm(x, weight).sum().backward()
        F.rms_norm(wide[0], (256,), wide[1], 1e-6).sum().backward()
    else:
        out, total = ops.fused_add_rms_norm(x, torch.zeros_like(x), weight)
        (out.sum() + total.sum()).backward()
        (F.rms_norm(wide[0], (256,), wide[1], 1e-6).sum() + wide[0].sum()).backward()
    for ours, theirs in zip((x, weight), wide, strict=True):
        torch.testing.assert_close(ours.grad.float(), theirs.grad, rtol=2**-8, atol=2**-8)


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


@pytest.mark.parametrize("target", [as_param(target) for target in ADD_NORMS])
def test_rows_wider_than_one_program_holds(target: Target) -> None:
    """20000 columns: beyond what a kernel keeps in registers."""
    x, residual, weight = (randn(2, 20000, seed=seed, dtype=BF16) for seed in (0, 1, 2))
    out, total = add_norm(target, x, residual, weight[0])
    assert torch.equal(total.cpu(), (x.float() + residual.float()).to(BF16))
    expected = F.rms_norm(total.cpu().double(), (20000,), weight[0].double(), 1e-6).to(BF16)
    assert ulps_apart(out, expected) <= 1


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
