"""quack's norms, kernels in the CuTe DSL that are compiled when a width is first met.

Forward is `quack.rmsnorm`, backward the functions that its gradient calls, with the statistics made in `bind`. Its
fused addition normalises the sum before that is rounded, ours the rounded sum. Its layer norm takes FP32 parameters:
others are widened in `bind`, which changes no value; its layer norm has no residual.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from rooflight.bench.peers.ops.installed import require

Closure = Callable[[], object]
Tensor = torch.Tensor


def version() -> str:
    return require("quack", "quack-kernels")


@torch.inference_mode()
def bind(operator: str, args: tuple[Any, ...]) -> Closure | None:
    binder = _BINDERS.get(operator)
    return None if binder is None else binder(*args)


def _norms() -> Any:
    return importlib.import_module("quack.rmsnorm")


def _rows(values: Tensor) -> Tensor:
    return values.view(-1, values.shape[-1])


def _bind_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Closure:
    rmsnorm = _norms().rmsnorm
    return lambda: rmsnorm(x, weight, eps=eps)


def _bind_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> Closure:
    rmsnorm = _norms().rmsnorm
    return lambda: rmsnorm(x, weight, residual=residual, eps=eps, prenorm=True)


def _bind_rms_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, grad_residual: Tensor | None = None
) -> Closure:
    norms, rows, gradient = _norms(), _rows(x), _rows(grad_out)
    into_residual = None if grad_residual is None else _rows(grad_residual)
    rstd = norms.rmsnorm_fwd(rows, weight, eps=eps, store_rstd=True)[2]

    def run() -> tuple[Tensor, Tensor]:
        grad_x, grad_weight, *_ = norms.rmsnorm_bwd(
            rows, weight, gradient, rstd, into_residual, has_residual=into_residual is not None
        )
        return grad_x.view(x.shape), grad_weight

    return run


def _bind_layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Closure | None:
    if x.dim() != 2:
        return None
    layernorm_fwd, scale, shift = _norms().layernorm_fwd, weight.float(), None if bias is None else bias.float()
    return lambda: layernorm_fwd(x, scale, shift, eps)


def _bind_layer_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-5, grad_residual: Tensor | None = None
) -> Closure | None:
    if x.dim() != 2 or grad_residual is not None:
        return None
    norms = _norms()
    _, rstd, mean = norms.layernorm_fwd(x, weight.float(), None, eps, return_rstd=True, return_mean=True)
    return lambda: norms.layernorm_bwd(x, weight, grad_out, rstd, mean)


_BINDERS: Mapping[str, Callable[..., Closure | None]] = {
    "rms_norm": _bind_rms_norm,
    "fused_add_rms_norm": _bind_fused_add_rms_norm,
    "rms_norm_backward": _bind_rms_norm_backward,
    "layer_norm": _bind_layer_norm,
    "layer_norm_backward": _bind_layer_norm_backward,
}
