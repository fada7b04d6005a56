"""LayerNorm in Triton, alone and after a residual addition: the row read once and kept in registers.

    out = (x - mean) / sqrt(mean((x - mean)^2) + eps) * weight + bias

Mean first and then the squares of what is centred, both from registers: the mean of the squares less the square of the
mean would lose every digit where the mean is large. Traffic and layout are those of `norm`: two tensors, four with the
addition, and rows wider than the registers in pieces.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import as_rows, check_dtype, check_vector, plan

MOST_BYTES = 32768  # of a row that 32 warps hold in registers without spilling
TILE = 1024  # elements of narrow rows that share a program


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _layer_norm_rows(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr,
    x_stride, residual_stride, out_stride, sum_stride, num_rows, hidden_size, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers. Strides are in elements, between rows. Without ADD residual and sum are not touched."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64 bits: times a stride it passes 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < hidden_size)
    total = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    # Before the reductions, so that their way from memory is behind that of the row.
    weight = tl.load(weight_ptr + column, mask=column < hidden_size, other=0.0)
    if BIAS:
        bias = tl.load(bias_ptr + column, mask=column < hidden_size, other=0.0)
    if ADD:
        rounded = (total + residual).to(sum_ptr.dtype.element_ty)  # what is stored is what is normalised
        tl.store(sum_ptr + row * sum_stride + column, rounded, mask=inside)
        total = rounded.to(tl.float32)
    mean = tl.sum(total, 1)[:, None] / hidden_size
    centred = tl.where(column < hidden_size, total - mean, 0.0)  # the lanes beyond the row would hold -mean
    inverse = tl.rsqrt(tl.sum(centred * centred, 1)[:, None] / hidden_size + eps)
    out = centred * inverse * weight.to(tl.float32)
    if BIAS:
        out += bias.to(tl.float32)
    tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _layer_norm_pieces(
    x_ptr, residual_ptr, weight_ptr, bias_ptr, out_ptr, sum_ptr,
    x_stride, residual_stride, out_stride, sum_stride, num_rows, hidden_size, eps,
    ADD: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One wide row, walked three times, the second and third time as sum_ptr holds it. Without ADD that is x itself."""
    row = tl.program_id(0).to(tl.int64)
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        total = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
            rounded = (total + residual).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * sum_stride + column, rounded, mask=inside)
            total = rounded.to(tl.float32)
        sums += total
    mean = tl.sum(sums, 0) / hidden_size
    if ADD:
        tl.debug_barrier()  # the sum is read back below, perhaps by other threads than those that wrote it
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        total = tl.load(sum_ptr + row * sum_stride + column, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, total - mean, 0.0)
        squares += centred * centred
    inverse = tl.rsqrt(tl.sum(squares, 0) / hidden_size + eps)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        total = tl.load(sum_ptr + row * sum_stride + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        out = (total - mean) * inverse * weight
        if BIAS:
            out += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * out_stride + column, out.to(out_ptr.dtype.element_ty), mask=inside)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, eps: float = 1e-5
) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, bias, out, None, eps)
    return out


def fused_add_layer_norm(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x, residual, weight, bias, out, total, eps)
    return out, total


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    """`residual` and `total`, the sum, are both None for the norm alone; out and total are new."""
    check_dtype("x", x)
    check_vector("weight", weight)
    if bias is not None:
        check_vector("bias", bias)
    if x.numel() == 0:  # an empty grid is a launch error
        return
    x = as_rows("x", x)
    add = residual is not None
    residual = x if residual is None else as_rows("residual", residual)
    num_rows, hidden_size = x.shape
    sum_stride = x.stride(0) if total is None else hidden_size
    block, rows, warps, whole = plan(hidden_size, MOST_BYTES // x.element_size(), TILE)
    kernel = _layer_norm_rows if whole else _layer_norm_pieces
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever the tensors say
        kernel[(triton.cdiv(num_rows, rows),)](
            x, residual, weight, weight if bias is None else bias, out, x if total is None else total,
            x.stride(0), residual.stride(0), hidden_size, sum_stride, num_rows, hidden_size, eps,
            ADD=add, BIAS=bias is not None, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
