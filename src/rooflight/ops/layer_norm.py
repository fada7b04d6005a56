"""LayerNorm, alone and after a residual addition.

    layer_norm(x)_i = (x_i - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight_i + bias_i

Ba, Kiros and Hinton, "Layer Normalization", 2016. The mean first and then the squares of what is centred, never the
mean of the squares less the square of the mean. Everything between load and store is FP32 (FP64 for FP64 inputs) with
one rounding at the end. The fused form rounds the sum `x + residual` to the dtype first, because the sum is itself an
output, and normalises that rounded value.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.checks import wide
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.norm_backward import LAYER_NORM_BACKWARD, around_a_mean, chosen_again, layer_norm_backward, rows


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """LayerNorm over the last dimension.

    x: (..., hidden_size), FP32, FP16, BF16 or FP64, any strides. weight: (hidden_size,), any float dtype; bias: None,
    or like weight. Returns a new contiguous tensor of x's shape and dtype. Agrees with
    `torch.nn.functional.layer_norm`. The same row gives the same bits at any batch size, except from the reference,
    whose order of sums follows the number of rows on a GPU, and on a CPU in rows of 32768 elements or more. The sum of
    a row and of its squares must be within FP32's range. Differentiable in x, weight and bias. Raises ValueError for
    wrong shapes, dtypes or devices.
    """
    return LAYER_NORM.overload(x, backend)(x, weight, bias, eps)  # type: ignore[no-any-return]


def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual_out = x + residual`, rounded to the dtype; `out = layer_norm(residual_out)`.

    x, residual: (..., hidden_size) of one dtype; weight, bias: as in `layer_norm`. Returns (out, residual_out), new
    tensors. Differentiable in x, residual, weight and bias. Errors as for `layer_norm`.
    """
    operator = FUSED_ADD_LAYER_NORM.overload(x, backend)
    return operator(x, residual, weight, bias, eps)  # type: ignore[no-any-return]


def _check(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5) -> None:
    checks.is_float("x", x)
    checks.has_rows("x", x)
    checks.is_float("weight", weight)
    checks.has_shape("weight", weight, x.shape[-1])
    checks.same_device("weight", weight, x)
    if bias is not None:
        checks.same_dtype("bias", bias, weight)
        checks.has_shape("bias", bias, x.shape[-1])
        checks.same_device("bias", bias, x)
    if not eps >= 0:
        checks.fail("eps", "be zero or more", eps)


def _check_add(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    _check(x, weight, bias, eps)
    checks.same_shape("residual", residual, x)
    checks.same_dtype("residual", residual, x)
    checks.same_device("residual", residual, x)


def _reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    values = wide(x)
    centred = values - values.mean(-1, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight.to(values.dtype)
    return (out if bias is None else out + bias.to(values.dtype)).to(x.dtype).contiguous()


def _add_reference(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x + residual).contiguous()
    return _reference(total, weight, bias, eps), total


def _like(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _composition(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, compute: torch.dtype
) -> torch.Tensor:
    vector = None if bias is None else bias.to(compute)
    return torch.nn.functional.layer_norm(x.to(compute), weight.shape, weight.to(compute), vector, eps)


def _add_composition(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    total = (x.double() + residual.double()).to(x.dtype)  # the rounding that belongs to the definition
    return _composition(total, weight, bias, eps, compute=compute), total


def _setup(ctx: Any, inputs: Args, output: Any) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(x, weight)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad_out: torch.Tensor | None) -> tuple[Any, ...]:
    if grad_out is None:
        return None, None, None, None
    x, weight = ctx.saved_tensors
    backend = chosen_again(ctx, LAYER_NORM, LAYER_NORM_BACKWARD, x)
    grad_x, grad_weight, grad_bias = layer_norm_backward(rows(grad_out), rows(x), weight, ctx.eps, backend=backend)
    return grad_x, grad_weight, grad_bias if ctx.has_bias else None, None


def _add_setup(ctx: Any, inputs: Args, output: Any) -> None:
    _, _, weight, bias, ctx.eps = inputs
    ctx.has_bias = bias is not None
    ctx.save_for_backward(output[1], weight)
    ctx.set_materialize_grads(False)  # a result that the loss does not use costs nothing, and no tensor of zeros


def _add_backward(ctx: Any, grad_out: torch.Tensor | None, grad_residual: torch.Tensor | None) -> tuple[Any, ...]:
    """The sum goes on as residual and into the norm: x and residual get the total of the two gradients."""
    total, weight = ctx.saved_tensors
    if grad_out is None:
        zeros = torch.zeros_like(weight)
        return grad_residual, grad_residual, zeros, zeros if ctx.has_bias else None, None
    backend = chosen_again(ctx, FUSED_ADD_LAYER_NORM, LAYER_NORM_BACKWARD, total)
    grad_residual = None if grad_residual is None else rows(grad_residual)
    gradients = layer_norm_backward(rows(grad_out), total, weight, ctx.eps, grad_residual, backend=backend)
    grad_total, grad_weight, grad_bias = gradients
    return grad_total, grad_total, grad_weight, grad_bias if ctx.has_bias else None, None


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    x, weight, bias = args["x"], args["weight"], args["bias"]
    row, vectors = x.numel() * x.element_size(), 1 if bias is None else 2
    return Cost(row + vectors * weight.numel() * weight.element_size(), row, 7 * x.numel())


def _add_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    norm, row = _cost(args, hints), args["x"].numel() * args["x"].element_size()
    return Cost(norm.bytes_read + row, norm.bytes_written + row, norm.flops + args["x"].numel())


def _inputs(make: Make, num_tokens: int, hidden_size: int, bias: bool = True) -> Args:
    vector = make.randn(hidden_size, salt=3) if bias else None
    return make.randn(num_tokens, hidden_size), make.randn(hidden_size, salt=1), vector, 1e-5


def _add_inputs(make: Make, num_tokens: int, hidden_size: int, bias: bool = True) -> Args:
    x, *rest = _inputs(make, num_tokens, hidden_size, bias)
    return x, make.randn(num_tokens, hidden_size, salt=2), *rest


def _extreme(make: Make) -> Args:
    """Rows of zeros, ±inf, NaN, the smallest denormal, a large constant, a lone large value, and a large mean."""
    limits = torch.finfo(make.dtype)
    x, *rest = _inputs(make, 8, 64)
    x[0] = 0
    x[1, 3], x[2, 5], x[3, 7] = float("inf"), float("-inf"), float("nan")
    x[4] = limits.smallest_normal * limits.eps
    x[5] = min(limits.max / 2, 2.0**121)  # 64 of them still fit in FP32
    x[6] = 0
    x[6, 9] = 60000.0
    x[7] = around_a_mean(make, 1, 64)
    return x, *rest


def _around_a_mean(make: Make) -> Args:
    x, *rest = _inputs(make, 4, 1024)
    return around_a_mean(make, *x.shape), *rest


def _add_zeros(args: Args) -> Args:
    return args[0], torch.zeros_like(args[0]), *args[1:]


def _residual_x30(make: Make) -> Args:
    x, residual, *rest = _add_inputs(make, 4, 4096)
    return x, residual * 30, *rest


_PARTS: dict[str, Any] = {
    "sweep": [{"num_tokens": n, "hidden_size": 64, "bias": n != 1} for n in (0, 1, 33)]
    + [
        {"num_tokens": 3, "hidden_size": width, "bias": bias}
        for width, bias in ((1, True), (7, True), (255, True), (769, False), (1024, True), (5125, False))
    ],
    "workloads": {
        f"{tokens}x{width}": {"num_tokens": tokens, "hidden_size": width}
        for tokens in (1, 32, 256, 1024, 16384)
        for width in (1024, 4096, 8192)
    },
}

LAYER_NORM = define(
    "layer_norm",
    "(Tensor x, Tensor weight, Tensor? bias=None, float eps=1e-5) -> Tensor",
    reference=_reference,
    fake=lambda x, weight, bias=None, eps=1e-5: _like(x),
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    setup_context=_setup,
    backward=_backward,
    awkward={"extremes": _extreme, "around_a_mean": _around_a_mean},
    **_PARTS,
)
FUSED_ADD_LAYER_NORM = define(
    "fused_add_layer_norm",
    "(Tensor x, Tensor residual, Tensor weight, Tensor? bias=None, float eps=1e-5) -> (Tensor, Tensor)",
    reference=_add_reference,
    fake=lambda x, residual, weight, bias=None, eps=1e-5: (_like(x), _like(x)),
    cost=_add_cost,
    composition=_add_composition,
    inputs=_add_inputs,
    check=_check_add,
    setup_context=_add_setup,
    backward=_add_backward,
    awkward={
        "extremes": lambda make: _add_zeros(_extreme(make)),
        "around_a_mean": lambda make: _add_zeros(_around_a_mean(make)),
        "residual_x30": _residual_x30,
    },
    **_PARTS,
)
