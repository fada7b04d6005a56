"""RMSNorm, alone and after a residual addition.

    rms_norm(x)_i = x_i / sqrt(mean(x^2) + eps) * weight_i

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019. Everything between load and store is FP32
(FP64 for FP64 inputs) with one rounding at the end. The fused forms round the sum `x + residual` to the
dtype first, because the sum is itself an output, and square that rounded value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.norm_backward import RMS_NORM_BACKWARD, chosen_again, rms_norm_backward, rows, sample_eps


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6, *, backend: str | None = None) -> torch.Tensor:
    """RMSNorm over the last dimension.

    x: (..., hidden_size), FP32, FP16, BF16 or FP64, any strides. weight: (hidden_size,), any float dtype (FP32
    weights with half inputs are usual). GPU kernels copy nothing and take no FP64: the last dimension must be
    contiguous and the others must fold into rows; the compiled one takes weights of x's dtype or FP32. Returns a new
    contiguous tensor of x's shape and dtype. Agrees with `torch.nn.functional.rms_norm`. The same row gives the same
    bits at any batch size, except from the reference, whose order of sums follows the number of rows on a GPU, and on a
    CPU in rows of 32768 elements or more. Differentiable in x and weight. Raises ValueError for wrong shapes, dtypes or
    devices.
    """
    return RMS_NORM.overload(x, backend)(x, weight, eps)  # type: ignore[no-any-return]


def fused_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual_out = x + residual`, rounded to the dtype; `out = rms_norm(residual_out)`.

    x, residual: (..., hidden_size) of one dtype; weight: (hidden_size,). Returns (out, residual_out), new
    tensors. Differentiable in x, residual and weight. Errors as for `rms_norm`.
    """
    return FUSED_ADD_RMS_NORM.overload(x, backend)(x, residual, weight, eps)  # type: ignore[no-any-return]


def fused_add_rms_norm_(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> None:
    """In place: residual becomes x + residual, x becomes its norm. For runtimes; it has no gradient.

    Raises ValueError for arguments that require gradients while gradients are recorded, and for expanded ones.
    """
    FUSED_ADD_RMS_NORM_.overload(x, backend)(x, residual, weight, eps)


def _check_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    checks.is_float("x", x)
    checks.has_rows("x", x)
    checks.is_float("weight", weight)
    checks.has_shape("weight", weight, x.shape[-1])
    checks.same_device("weight", weight, x)
    if not eps >= 0:
        checks.fail("eps", "be zero or more", eps)


def _check_add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    _check_norm(x, weight, eps)
    checks.same_shape("residual", residual, x)
    checks.same_dtype("residual", residual, x)
    checks.same_device("residual", residual, x)


def _check_add_norm_in_place(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    _check_add_norm(x, residual, weight, eps)
    checks.no_overlap("x", x)
    checks.no_overlap("residual", residual)
    checks.not_the_same("residual", residual, "x", x)


def _reference(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    # PyTorch's own computes in FP32 and rounds once; when the caches are full of weights it takes half the time of the
    # formula written out, which FP64 takes (on a GPU PyTorch's differs there).
    if x.dtype == torch.float64:
        inverse = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        return (x * inverse * weight.to(x.dtype)).contiguous()
    if weight.dtype == x.dtype:
        return torch.rms_norm(x.contiguous(), weight.shape, weight, eps)
    return torch.rms_norm(x.float().contiguous(), weight.shape, weight.float(), eps).to(x.dtype)


def _add_reference(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x + residual).contiguous()
    return _reference(total, weight, eps), total


def _add_reference_in_place(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    x.copy_(_reference(residual.add_(x), weight, eps))


def _fake(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _add_fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    return _fake(x, weight), _fake(x, weight)


def _composition(x: torch.Tensor, weight: torch.Tensor, eps: float, *, compute: torch.dtype) -> torch.Tensor:
    values = x.to(compute)
    return values * torch.rsqrt(values.pow(2).mean(-1, keepdim=True) + eps) * weight.to(compute)


def _add_composition(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x.double() + residual.double()).to(x.dtype)  # the rounding that belongs to the definition
    return _composition(total, weight, eps, compute=compute), total


def _setup(ctx: Any, inputs: Args, output: Any) -> None:
    x, weight, ctx.eps = inputs
    ctx.save_for_backward(x, weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: torch.Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return None, None, None
    x, weight = ctx.saved_tensors
    backend = chosen_again(ctx, RMS_NORM, RMS_NORM_BACKWARD, x)
    return *rms_norm_backward(rows(grad_out), rows(x), weight, ctx.eps, backend=backend), None


def _add_setup(ctx: Any, inputs: Args, output: Any) -> None:
    _, _, weight, ctx.eps = inputs
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)  # a result that the loss does not use costs nothing, and no tensor of zeros


def _add_backward(ctx: Any, grad_out: torch.Tensor | None, grad_residual: torch.Tensor | None) -> tuple[Any, ...]:
    """The sum goes on as residual and into the norm: x and residual get the total of the two gradients."""
    total, weight = ctx.saved_tensors
    if grad_out is None:
        return grad_residual, grad_residual, torch.zeros_like(weight), None
    backend = chosen_again(ctx, FUSED_ADD_RMS_NORM, RMS_NORM_BACKWARD, total)
    grad_residual = None if grad_residual is None else rows(grad_residual)
    grad_total, grad_weight = rms_norm_backward(rows(grad_out), total, weight, ctx.eps, grad_residual, backend=backend)
    return grad_total, grad_total, grad_weight, None


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    x, weight = args["x"], args["weight"]
    row = x.numel() * x.element_size()
    read = row + weight.numel() * weight.element_size()
    return Cost(read, row, 4 * x.numel())


def _add_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    x, weight = args["x"], args["weight"]
    row = x.numel() * x.element_size()
    return Cost(2 * row + weight.numel() * weight.element_size(), 2 * row, 5 * x.numel())


def _inputs(make: Make, num_tokens: int, hidden_size: int) -> Args:
    return make.randn(num_tokens, hidden_size), make.randn(hidden_size, salt=1), sample_eps(hidden_size)


def _add_inputs(make: Make, num_tokens: int, hidden_size: int) -> Args:
    x, weight, eps = _inputs(make, num_tokens, hidden_size)
    return x, make.randn(num_tokens, hidden_size, salt=2), weight, eps


def _extreme(make: Make) -> torch.Tensor:
    """Rows of zeros, ±inf, NaN, the smallest denormal, the largest finite value, and a lone large one."""
    limits = torch.finfo(make.dtype)
    x = make.randn(7, 64)
    x[0] = 0
    x[1, 3], x[2, 5], x[3, 7] = float("inf"), float("-inf"), float("nan")
    x[4] = limits.smallest_normal * limits.eps
    x[5] = limits.max / 2
    x[6] = 0
    x[6, 9] = 60000.0
    return x


_SWEEP = [{"num_tokens": n, "hidden_size": 64} for n in (0, 1, 33)] + [
    {"num_tokens": 3, "hidden_size": width} for width in (1, 7, 255, 769, 1024, 5125)
]
_WORKLOADS = {
    f"{tokens}x{width}": {"num_tokens": tokens, "hidden_size": width}
    for tokens in (1, 32, 256, 1024, 16384)
    for width in (1024, 4096, 8192)
}
_PARTS: dict[str, Any] = {"sweep": _SWEEP, "workloads": _WORKLOADS}

RMS_NORM = define(
    "rms_norm",
    "(Tensor x, Tensor weight, float eps=1e-6) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check_norm,
    setup_context=_setup,
    backward=_backward,
    awkward={"extremes": lambda make: (_extreme(make), make.randn(64, salt=1), 1e-6)},
    **_PARTS,
)
FUSED_ADD_RMS_NORM = define(
    "fused_add_rms_norm",
    "(Tensor x, Tensor residual, Tensor weight, float eps=1e-6) -> (Tensor, Tensor)",
    reference=_add_reference,
    fake=_add_fake,
    cost=_add_cost,
    composition=_add_composition,
    inputs=_add_inputs,
    check=_check_add_norm,
    setup_context=_add_setup,
    backward=_add_backward,
    awkward={
        "extremes": lambda make: (
            _extreme(make),
            torch.zeros_like(_extreme(make)),
            make.randn(64, salt=1),
            1e-6,
        ),
        "residual_x30": lambda make: (
            make.randn(4, 4096),
            make.randn(4, 4096, scale=30, salt=2),
            make.randn(4096, salt=1),
            1e-6,
        ),
    },
    **_PARTS,
)
FUSED_ADD_RMS_NORM_ = define(
    "fused_add_rms_norm_",
    "(Tensor(a!) x, Tensor(b!) residual, Tensor weight, float eps=1e-6) -> ()",
    reference=_add_reference_in_place,
    fake=lambda x, residual, weight, eps=1e-6: None,
    cost=_add_cost,
    composition=_add_composition,
    inputs=_add_inputs,
    check=_check_add_norm_in_place,
    awkward=FUSED_ADD_RMS_NORM.awkward,
    **_PARTS,
)
