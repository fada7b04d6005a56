"""Liger-Kernel's Triton norms.

Forward goes through its autograd functions, as a model patched by Liger calls them. Backward calls the functions that
these end in, with the statistics that forward saved, made in `bind`. The casting mode is Gemma's: FP32 from load to
store, as our definition has it; its default, Llama's, moves the same bytes and rounds once more.

Liger's RMSNorm backward writes the gradient of x over the gradient it was given, unless asked not to, which costs a
pass of zeros: the closure works on a copy made in `bind`, so only its first call starts from grad_out. Its layer norm
wants a bias, so a bias of zeros is made in `bind` where there is none, as Liger's module does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rooflight.bench.peers.ops.installed import require

Closure = Callable[[], object]
Tensor = torch.Tensor

_CASTING, _OFFSET = "gemma", 0.0


def version() -> str:
    return require("liger_kernel", "liger-kernel")


@torch.inference_mode()
def bind(operator: str, args: tuple[Any, ...]) -> Closure | None:
    binder = _BINDERS.get(operator)
    return None if binder is None else binder(*args)


def _ops(name: str) -> Any:
    return importlib.import_module(f"liger_kernel.ops.{name}")


def _bind_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Closure:
    function = _ops("rms_norm").LigerRMSNormFunction
    return lambda: function.apply(x, weight, eps, _OFFSET, _CASTING)


def _bind_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Closure:
    function = _ops("fused_add_rms_norm").LigerFusedAddRMSNormFunction
    return lambda: function.apply(x, residual, weight, eps, _OFFSET, _CASTING)


def _bind_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Closure:
    function, shift = _ops("layer_norm").LigerLayerNormFunction, torch.zeros_like(weight) if bias is None else bias
    return lambda: function.apply(x, weight, shift, eps)


def _bind_rms_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, grad_residual: Tensor | None = None
) -> Closure:
    norm, fused = _ops("rms_norm"), _ops("fused_add_rms_norm")
    _, rows, rstd, block, warps, casting = norm.rms_norm_forward(x, weight, eps, _OFFSET, _CASTING, row_mode=None)
    if grad_residual is None:
        gradient = grad_out.clone()
        return lambda: norm.rms_norm_backward(
            gradient, rows, weight, rstd, _OFFSET, casting, block, warps, in_place=True, row_mode=None
        )

    def run() -> tuple[Tensor, Tensor]:
        grad_x, _, grad_weight = fused.fused_add_rms_norm_backward(
            grad_out, grad_residual, rows, weight, rstd, _OFFSET, casting, block, warps, num_stages=2, in_place=False
        )
        return grad_x, grad_weight

    return run


def _bind_layer_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-5, grad_residual: Tensor | None = None
) -> Closure:
    norm, bias = _ops("layer_norm"), torch.zeros_like(weight)
    _, rows, mean, rstd, *_ = norm.layer_norm_forward(x, weight, bias, eps)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        grad_x, grad_weight, grad_bias = norm.layer_norm_backward(grad_out, rows, weight, bias, mean, rstd)
        return grad_x if grad_residual is None else grad_x + grad_residual, grad_weight, grad_bias

    return run


_BINDERS: Mapping[str, Callable[..., Closure]] = {
    "rms_norm": _bind_rms_norm,
    "fused_add_rms_norm": _bind_fused_add_rms_norm,
    "rms_norm_backward": _bind_rms_norm_backward,
    "layer_norm": _bind_layer_norm,
    "layer_norm_backward": _bind_layer_norm_backward,
}
