"""Fused residual addition and RMSNorm in Triton: one program a row, the row read once and kept in registers.

    residual_out = round(x + residual);  out = residual_out / sqrt(mean(residual_out^2) + eps) * weight

Four tensors of traffic (two read, two written), which is the limit: add and norm apart move five. Rows wider than
MAX_BLOCK do not fit into a program's registers and are walked in pieces, the second time from the residual just
written, which is still in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

MAX_BLOCK = 16384  # FP32 values of a row that 32 warps hold without spilling


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm_row(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    x_stride, residual_stride, out_stride, sum_stride,
    hidden_size, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """The whole row in registers. Strides are in elements, between rows."""
    row = tl.program_id(0).to(tl.int64)  # 64 bits: rows times stride passes 2^31
    column = tl.arange(0, BLOCK)
    inside = column < hidden_size
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    rounded = (x + residual).to(sum_ptr.dtype.element_ty)  # what is stored is what is squared
    tl.store(sum_ptr + row * sum_stride + column, rounded, mask=inside)
    total = rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(total * total, 0) / hidden_size + eps)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    out = (total * inverse * weight).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + column, out, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _add_rms_norm_wide_row(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    x_stride, residual_stride, out_stride, sum_stride,
    hidden_size, eps, BLOCK: tl.constexpr,
):  # fmt: skip
    """The row in pieces: sum and squares first, then the norm from the sum that was written."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
        rounded = (x + residual).to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * sum_stride + column, rounded, mask=inside)
        squares += rounded.to(tl.float32) * rounded.to(tl.float32)
    inverse = 1.0 / tl.sqrt(tl.sum(squares, 0) / hidden_size + eps)
    tl.debug_barrier()  # the sum is read back below, perhaps by other threads than those that wrote it
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        total = tl.load(sum_ptr + row * sum_stride + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        out = (total * inverse * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + column, out, mask=inside)


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def fused_add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    _launch(x, residual, weight, x, residual, eps)


def _rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as (rows, hidden_size) without a copy, or ValueError."""
    width = tensor.shape[-1]
    if width > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, was {tensor.stride(-1)}")
    try:
        return tensor.view(-1, width)
    except RuntimeError:
        raise ValueError(
            f"{name} must have leading dimensions that fold into rows, was shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        ) from None


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor,
    eps: float,
) -> None:
    if x.dtype == torch.float64:
        raise ValueError("x must be float32, float16 or bfloat16 for the triton provider, was torch.float64")
    if x.numel() == 0:  # an empty grid is a launch error
        return
    hidden_size = x.shape[-1]
    if hidden_size > 1 and weight.stride(0) != 1:
        raise ValueError(f"weight must have stride 1, was {weight.stride(0)}")
    x, residual, out, total = (
        _rows(name, tensor) for name, tensor in (("x", x), ("residual", residual), ("x", out), ("residual", total))
    )
    block = min(triton.next_power_of_2(hidden_size), MAX_BLOCK)
    kernel = _add_rms_norm_row if hidden_size <= MAX_BLOCK else _add_rms_norm_wide_row
    strides = (tensor.stride(0) for tensor in (x, residual, out, total))
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever the tensors say
        kernel[(x.shape[0],)](
            x, residual, weight, out, total, *strides, hidden_size, eps,
            BLOCK=block, num_warps=min(max(block // 512, 1), 32),
        )  # fmt: skip
