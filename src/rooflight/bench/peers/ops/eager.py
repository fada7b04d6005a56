"""PyTorch's own operators, called one after the other.

Weights of another dtype than x take the way that a model written in PyTorch takes: x is widened to FP32, the norm
computed there and its result rounded. Backward is what autograd would run: the statistics that forward saves, and the
FP32 copy of x where there is one, are made in `bind`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import functional

Closure = Callable[[], object]
Tensor = torch.Tensor


def version() -> str:
    return f"torch {torch.__version__}"


@torch.inference_mode()
def bind(operator: str, args: tuple[Any, ...]) -> Closure | None:
    binder = _BINDERS.get(operator)
    return None if binder is None else binder(*args)


def _rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    if weight.dtype == x.dtype:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return functional.rms_norm(x.float(), weight.shape, weight.float(), eps).to(x.dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    if weight.dtype == x.dtype:
        return functional.layer_norm(x, weight.shape, weight, bias, eps)
    wide_bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def _bind_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Closure:
    return lambda: _rms_norm(x, weight, eps)


def _bind_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Closure:
    def run() -> tuple[Tensor, Tensor]:
        total = x + residual
        return _rms_norm(total, weight, eps), total

    return run


def _bind_fused_add_rms_norm_in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Closure:
    def run() -> None:
        residual.add_(x)
        x.copy_(_rms_norm(residual, weight, eps))

    return run


def _bind_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Closure:
    return lambda: _layer_norm(x, weight, bias, eps)


def _bind_fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> Closure:
    def run() -> tuple[Tensor, Tensor]:
        total = x + residual
        return _layer_norm(total, weight, bias, eps), total

    return run


def _bind_rms_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, grad_residual: Tensor | None = None
) -> Closure:
    """The fused backward that CUDA has; on a CPU, where there is none, the operations autograd would run."""
    shape, mixed = weight.shape, weight.dtype != x.dtype
    saved, scale = (x.float(), weight.float()) if mixed else (x, weight)
    if x.is_cuda:
        rstd = torch.ops.aten._fused_rms_norm(saved, shape, scale, eps)[1]
    else:
        rstd = torch.rsqrt(saved.square().mean(-1, keepdim=True) + eps)

    def run() -> tuple[Tensor, Tensor]:
        gradient = grad_out.float() if mixed else grad_out
        if x.is_cuda:
            grad_x, grad_weight = torch.ops.aten._fused_rms_norm_backward(
                gradient, saved, shape, rstd, scale, [True, True]
            )
        else:
            normalised, scaled = saved * rstd, gradient * scale
            grad_x = rstd * (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True))
            grad_weight = (gradient * normalised).reshape(-1, x.shape[-1]).sum(0)
        return _with_residual(grad_x.to(x.dtype), grad_residual), grad_weight.to(weight.dtype)

    return run


def _bind_layer_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-5, grad_residual: Tensor | None = None
) -> Closure:
    shape, mixed = weight.shape, weight.dtype != x.dtype
    saved, scale = (x.float(), weight.float()) if mixed else (x, weight)
    bias = torch.zeros_like(scale)  # its values do not matter, but it is asked for where its gradient is
    _, mean, rstd = torch.ops.aten.native_layer_norm(saved, shape, scale, bias, eps)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        gradient = grad_out.float() if mixed else grad_out
        grad_x, grad_weight, grad_bias = torch.ops.aten.native_layer_norm_backward(
            gradient, saved, shape, mean, rstd, scale, bias, [True, True, True]
        )
        grad_x = _with_residual(grad_x.to(x.dtype), grad_residual)
        return grad_x, grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)

    return run


def _with_residual(grad_x: Tensor, grad_residual: Tensor | None) -> Tensor:
    return grad_x if grad_residual is None else grad_x + grad_residual


_BINDERS: Mapping[str, Callable[..., Closure]] = {
    "rms_norm": _bind_rms_norm,
    "fused_add_rms_norm": _bind_fused_add_rms_norm,
    "fused_add_rms_norm_": _bind_fused_add_rms_norm_in_place,
    "rms_norm_backward": _bind_rms_norm_backward,
    "layer_norm": _bind_layer_norm,
    "fused_add_layer_norm": _bind_fused_add_layer_norm,
    "layer_norm_backward": _bind_layer_norm_backward,
}
