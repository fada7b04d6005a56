"""FlashInfer's norms, through its Python functions.

With the CuTe DSL installed they run as CuTe kernels, otherwise, or with FLASHINFER_USE_CUDA_NORM=1, as CUDA C++ that
FlashInfer compiles at its first use; `version` says which. Rows are half precision with weights of the same dtype.
Its layer norm takes BF16 rows and FP32 parameters: other parameters are widened in `bind`, which changes no value.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from rooflight.bench.peers.ops.installed import require

_HALF = (torch.float16, torch.bfloat16)


def version() -> str:
    number = require("flashinfer", "flashinfer-python")
    norms = _norms()
    cuda = norms._use_cuda_norm(torch.device("cuda")) if hasattr(norms, "_use_cuda_norm") else True
    return f"{number} ({'CUDA C++' if cuda else 'CuTe DSL'})"


def bind(operator: str, args: tuple[Any, ...]) -> Callable[[], object] | None:
    if operator == "rms_norm":
        return _bind_rms_norm(*args)
    if operator == "fused_add_rms_norm_":
        return _bind_fused_add_rms_norm_in_place(*args)
    if operator == "layer_norm":
        return _bind_layer_norm(*args)
    return None


def _norms() -> Any:
    return importlib.import_module("flashinfer.norm")


def _bind_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Callable[[], object] | None:
    if x.dtype not in _HALF or weight.dtype != x.dtype:
        return None
    rmsnorm, rows = _norms().rmsnorm, x.view(-1, x.shape[-1])
    if x.dim() == 2:
        return lambda: rmsnorm(x, weight, eps)
    return lambda: rmsnorm(rows, weight, eps).view(x.shape)


def _bind_fused_add_rms_norm_in_place(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> Callable[[], object] | None:
    if x.dtype not in _HALF or weight.dtype != x.dtype:
        return None
    fused_add_rmsnorm = _norms().fused_add_rmsnorm
    rows, residual_rows = x.view(-1, x.shape[-1]), residual.view(-1, x.shape[-1])
    return lambda: fused_add_rmsnorm(rows, residual_rows, weight, eps)


def _bind_layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> Callable[[], object] | None:
    if x.dtype != torch.bfloat16 or x.dim() != 2:
        return None
    layernorm, scale = _norms().layernorm, weight.float()
    shift = torch.zeros_like(scale) if bias is None else bias.float()
    return lambda: layernorm(x, scale, shift, eps)
