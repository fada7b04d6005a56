"""`torch.compile(fullgraph=True)` of the plain formulas, compiled for each shape.

Inductor sees the formula as one would write it, in FP32 between load and store, and makes of it what it can. Every
combination of operator, shapes and dtypes is compiled once, when it is first bound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
from torch.nn import functional

BACKEND = "inductor"  # tests put Dynamo's quick ones here

Tensor = torch.Tensor
_compiled: dict[tuple[Any, ...], Callable[..., object]] = {}


def version() -> str:
    return f"torch {torch.__version__}"


def bind(operator: str, args: tuple[Any, ...]) -> Callable[[], object] | None:
    if operator not in _FORMULAS:
        return None
    key = (BACKEND, operator, *map(_signature, args))
    run = _compiled.get(key)
    if run is None:
        run = _compiled[key] = _compile(_FORMULAS[operator], args)
    return lambda: run(*args)


def _signature(argument: Any) -> Any:
    if not isinstance(argument, torch.Tensor):
        return argument
    return argument.device, argument.dtype, tuple(argument.shape), argument.stride()


@torch.inference_mode()
def _compile(formula: Callable[..., object], args: tuple[Any, ...]) -> Callable[..., object]:
    """Compile, by a call with copies, since a formula may write into its arguments."""
    compiled: Callable[..., object] = torch.compile(_own_code(formula), fullgraph=True, dynamic=False, backend=BACKEND)
    compiled(*(value.clone() if isinstance(value, torch.Tensor) else value for value in args))
    return compiled


def _own_code(function: Callable[..., object]) -> Callable[..., object]:
    """The function again with a code object of its own.

    Dynamo keeps what it compiled with the code object: sharing one, many shapes would run into its limit on
    recompilations, and each call would look for its shape among those of the others.
    """
    assert isinstance(function, FunctionType)
    code = function.__code__.replace()
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)


def _rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    values = x.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    return (values * inverse * weight.float()).to(x.dtype)


def _fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _rms_norm(total, weight, eps), total


def _fused_add_rms_norm_in_place(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    residual.add_(x)
    x.copy_(_rms_norm(residual, weight, eps))


def _rms_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-6, grad_residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    values, gradient = x.float(), grad_out.float()
    inverse = torch.rsqrt(values.square().mean(-1, keepdim=True) + eps)
    normalised, scaled = values * inverse, gradient * weight.float()
    grad_x = inverse * (scaled - normalised * (scaled * normalised).mean(-1, keepdim=True))
    if grad_residual is not None:
        grad_x = grad_x + grad_residual.float()
    return grad_x.to(x.dtype), _over_rows(gradient * normalised).to(weight.dtype)


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    wide_bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def _fused_add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    total = x + residual
    return _layer_norm(total, weight, bias, eps), total


def _layer_norm_backward(
    grad_out: Tensor, x: Tensor, weight: Tensor, eps: float = 1e-5, grad_residual: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    values, gradient = x.float(), grad_out.float()
    centred = values - values.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normalised, scaled = centred * inverse, gradient * weight.float()
    along = (scaled * normalised).mean(-1, keepdim=True)
    grad_x = inverse * (scaled - scaled.mean(-1, keepdim=True) - normalised * along)
    if grad_residual is not None:
        grad_x = grad_x + grad_residual.float()
    grad_weight, grad_bias = _over_rows(gradient * normalised), _over_rows(gradient)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)


def _over_rows(values: Tensor) -> Tensor:
    return values.reshape(-1, values.shape[-1]).sum(0)


_FORMULAS: Mapping[str, Callable[..., object]] = {
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "fused_add_rms_norm_": _fused_add_rms_norm_in_place,
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm": _layer_norm,
    "fused_add_layer_norm": _fused_add_layer_norm,
    "layer_norm_backward": _layer_norm_backward,
}
