"""Gradients of RMSNorm and LayerNorm, as operators: what `backward()` of the norms is made of.

With n the normalised row, s what it was divided by and g = grad_out * weight:

    RMSNorm      grad_x = (g - n * mean(g * n)) / s + grad_residual              n = x / s
    LayerNorm    grad_x = (g - mean(g) - n * mean(g * n)) / s + grad_residual    n = (x - mean(x)) / s
    both         grad_weight = sum over rows of grad_out * n,  grad_bias = sum over rows of grad_out

Everything is FP32 (FP64 for FP64) with one rounding at the end, and the row's statistics are computed again from x, so
the forward pass saves nothing beside x and weight. The sums over rows have a fixed order: the same call gives the same
bits every time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.checks import wide
from rooflight.ops.contract import Args, Cost, Make, Operator, define


def rms_norm_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    grad_residual: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of `rms_norm` in x and weight; of `fused_add_rms_norm` with x its residual_out.

    grad_out, x: (..., hidden_size) of one dtype; weight: (hidden_size,), any float dtype; grad_residual: None, or like
    x: what flows into residual_out, added in FP32 before the one rounding. Returns (grad_x, grad_weight), new and
    contiguous, of the dtypes of x and weight; a row of grad_x is batch invariant where `rms_norm` is. Differentiable
    (slowly). Raises ValueError for wrong shapes, dtypes or devices.
    """
    operator = RMS_NORM_BACKWARD.overload(x, backend)
    return operator(grad_out, x, weight, eps, grad_residual)  # type: ignore[no-any-return]


def layer_norm_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    grad_residual: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of `layer_norm` in x, weight and bias; of `fused_add_layer_norm` with x its residual_out.

    As `rms_norm_backward`; returns (grad_x, grad_weight, grad_bias), the last two in weight's dtype.
    """
    operator = LAYER_NORM_BACKWARD.overload(x, backend)
    return operator(grad_out, x, weight, eps, grad_residual)  # type: ignore[no-any-return]


# For the gradients of the norms ---------------------------------------------------------------------------------------


def chosen_again(ctx: Any, forward: Operator, backward: Operator, x: torch.Tensor) -> str | None:
    """The provider that the gradient of a call should run on: the one that was asked for, if `backward` has it.

    None, the default, where the call itself ran on its default.
    """
    asked_for = ctx.provider in backward.providers and ctx.provider != forward.active.get(x.device.type)
    return ctx.provider if asked_for else None


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as kernels take it: copied where its last dimension has gaps or the others do not fold into rows.

    Gradients come as they come: `sum().backward()` sends one number expanded with stride 0, and nobody can be told to
    send another. So here, unlike in a call, a copy is made where a kernel would refuse.
    """
    if tensor.is_contiguous() or (tensor.dim() == 2 and tensor.stride(1) == 1):
        return tensor
    return tensor.contiguous()


# Definitions ----------------------------------------------------------------------------------------------------------


def _check(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 0.0,
    grad_residual: torch.Tensor | None = None,
) -> None:
    checks.is_float("grad_out", grad_out)
    checks.has_rows("grad_out", grad_out)
    for name, tensor in (("x", x), ("grad_residual", grad_residual)):
        if tensor is not None:
            checks.same_shape(name, tensor, grad_out)
            checks.same_dtype(name, tensor, grad_out)
            checks.same_device(name, tensor, grad_out)
    checks.is_float("weight", weight)
    checks.has_shape("weight", weight, grad_out.shape[-1])
    checks.same_device("weight", weight, grad_out)
    if not eps >= 0:
        checks.fail("eps", "be zero or more", eps)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def _sum_rows(values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0).to(weight.dtype)


def _grad_x(
    g: torch.Tensor, normalised: torch.Tensor, inverse: torch.Tensor, x: torch.Tensor, residual: torch.Tensor | None
) -> torch.Tensor:
    grad_x = inverse * (g - normalised * (g * normalised).mean(-1, keepdim=True))
    return (grad_x if residual is None else grad_x + residual).to(x.dtype).contiguous()


def _rms_reference(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    grad_residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    values, gradient = wide(x), wide(grad_out)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normalised = values * inverse
    grad_x = _grad_x(gradient * weight.to(values.dtype), normalised, inverse, x, grad_residual)
    return grad_x, _sum_rows(gradient * normalised, weight)


def _layer_reference(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    grad_residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    values, gradient = wide(x), wide(grad_out)
    values = values - values.mean(-1, keepdim=True)
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normalised, g = values * inverse, gradient * weight.to(values.dtype)
    grad_x = _grad_x(g - g.mean(-1, keepdim=True), normalised, inverse, x, grad_residual)
    return grad_x, _sum_rows(gradient * normalised, weight), _sum_rows(gradient, weight)


def _rms_forward(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _layer_forward(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    # Not torch.nn.functional.layer_norm, whose third derivative is wrong (seen in PyTorch 2.13).
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps) * weight + bias


def _pull_back(
    forward: Callable[..., torch.Tensor],
    tensors: tuple[torch.Tensor, ...],
    grad_out: torch.Tensor,
    grad_residual: torch.Tensor | None,
    compute: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """Gradients of forward(*tensors), as PyTorch takes them; that of the first with grad_residual."""
    pull_back = torch.func.vjp(forward, *(tensor.to(compute) for tensor in tensors))[1]
    grad_x, *others = pull_back(grad_out.to(compute))
    return grad_x if grad_residual is None else grad_x + grad_residual.to(compute), *others


def _rms_composition(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    grad_residual: torch.Tensor | None = None,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    return _pull_back(lambda x, w: _rms_forward(x, w, eps), (x, weight), grad_out, grad_residual, compute)


def _layer_composition(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    grad_residual: torch.Tensor | None = None,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    tensors = x, weight, torch.zeros_like(weight)
    return _pull_back(lambda x, w, b: _layer_forward(x, w, b, eps), tensors, grad_out, grad_residual, compute)


def _setup(ctx: Any, inputs: Args, output: Any) -> None:
    grad_out, x, weight, ctx.eps, grad_residual = inputs
    ctx.save_for_backward(grad_out, x, weight, grad_residual)
    ctx.set_materialize_grads(False)


def _second_gradient(composition: Callable[..., tuple[torch.Tensor, ...]]) -> Callable[..., tuple[Any, ...]]:
    """The gradient of a gradient, which few need: autograd through the composition, slow and of any order."""

    def backward(ctx: Any, *upstream: torch.Tensor | None) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        if all(up is None for up in upstream):
            return (None,) * 5
        higher = torch.is_grad_enabled()
        with torch.enable_grad():
            inputs: list[Any] = [
                t if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_() for t in saved
            ]
            grad_out, x, weight, grad_residual = inputs
            results = composition(grad_out, x, weight, ctx.eps, grad_residual, compute=wide(x).dtype)
            used = [(r, up.to(r.dtype)) for r, up in zip(results, upstream, strict=True) if up is not None]
            wanted = [tensor for tensor in inputs if tensor is not None]
            gradients = torch.autograd.grad(
                [result for result, _ in used], wanted, [up for _, up in used], create_graph=higher, allow_unused=True
            )
        found = iter(gradients)
        by_input = [None if tensor is None else next(found) for tensor in inputs]
        return by_input[0], by_input[1], by_input[2], None, by_input[3]

    return backward


def _cost(flops: int, sums: int) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Cost]:
    """Flops for each element, and how many sums over rows there are beside grad_x."""

    def cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
        x, weight = args["x"], args["weight"]
        with_residual = args["grad_residual"] is not None
        row, vector = x.numel() * x.element_size(), weight.numel() * weight.element_size()
        read = (3 if with_residual else 2) * row + vector
        return Cost(read, row + sums * vector, (flops + with_residual) * x.numel())

    return cost


def _inputs(make: Make, num_tokens: int, hidden_size: int, residual: bool = False) -> Args:
    grad_out, x = (make.randn(num_tokens, hidden_size, salt=salt) for salt in (0, 1))
    grad_residual = make.randn(num_tokens, hidden_size, salt=3) if residual else None
    return grad_out, x, make.randn(hidden_size, salt=2), sample_eps(hidden_size), grad_residual


def sample_eps(hidden_size: int) -> float:
    """A usual eps; a large one for rows of one element, which is divided by itself: with a small one nothing but
    rounding would be left of its gradient."""
    return 1e-6 if hidden_size > 1 else 0.1


def around_a_mean(make: Make, num_rows: int, hidden_size: int) -> torch.Tensor:
    """Rows of 1000 plus and minus the same small numbers, in every dtype: their mean is 1000 exactly.

    Every order of summation in FP32 is exact too, so what differs between two formulas is the squares alone.
    """
    off = (make.randn(num_rows, hidden_size // 2).float() * 5).clamp(-20, 20).mul(8).round() / 8
    return torch.cat((1000 + off, 1000 - off), -1).to(make.dtype)


def _hard_rows(make: Make, not_finite: bool = False) -> Args:
    """x with rows of zeros, the smallest denormal, a large constant, a lone large value and a large mean."""
    limits = torch.finfo(make.dtype)
    grad_out, x, weight, eps, residual = _inputs(make, 5, 64, residual=True)
    if not_finite:
        x[0, 3], x[1, 5], x[2, 7], grad_out[3, 9] = float("inf"), float("-inf"), float("nan"), float("nan")
    else:
        x[0] = 0
        x[1] = limits.smallest_normal * limits.eps
        x[2] = 32768
        x[3] = 0
        x[3, 9] = 60000
        x[4] = around_a_mean(make, 1, 64)
    return grad_out, x, weight, eps, residual


_PARTS: dict[str, Any] = {
    "check": _check,
    "setup_context": _setup,
    "inputs": _inputs,
    "sweep": [{"num_tokens": n, "hidden_size": 64, "residual": n != 1} for n in (0, 1, 33)]
    + [
        {"num_tokens": 3, "hidden_size": width, "residual": residual}
        for width, residual in ((1, True), (7, True), (255, True), (769, False), (1024, True), (5125, False))
    ],
    "workloads": {
        f"{tokens}x{width}": {"num_tokens": tokens, "hidden_size": width}
        for tokens in (1, 32, 256, 1024, 16384)
        for width in (1024, 4096, 8192)
    },
    "awkward": {"hard_rows": _hard_rows, "not_finite": lambda make: _hard_rows(make, not_finite=True)},
}

RMS_NORM_BACKWARD = define(
    "rms_norm_backward",
    "(Tensor grad_out, Tensor x, Tensor weight, float eps=1e-6, Tensor? grad_residual=None) -> (Tensor, Tensor)",
    reference=_rms_reference,
    fake=lambda grad_out, x, weight, eps=1e-6, grad_residual=None: (_like(x), _like(weight)),
    cost=_cost(11, 1),
    composition=_rms_composition,
    backward=_second_gradient(_rms_composition),
    **_PARTS,
)
LAYER_NORM_BACKWARD = define(
    "layer_norm_backward",
    "(Tensor grad_out, Tensor x, Tensor weight, float eps=1e-5, Tensor? grad_residual=None)"
    " -> (Tensor, Tensor, Tensor)",
    reference=_layer_reference,
    fake=lambda grad_out, x, weight, eps=1e-5, grad_residual=None: (_like(x), _like(weight), _like(weight)),
    cost=_cost(16, 2),
    composition=_layer_composition,
    backward=_second_gradient(_layer_composition),
    **_PARTS,
)
