"""RMSNorm in Triton, alone and after a residual addition: the row read once and kept in registers.

    residual_out = round(x + residual);  out = residual_out / sqrt(mean(residual_out^2) + eps) * weight

Two tensors of traffic for the norm alone. Four with the addition (two read, two written), which is the limit: add and
norm apart move five. One program has one row, or several narrow ones. Rows wider than its registers are walked in
pieces, the second time from x or from the sum just written, which are still in L2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import as_rows, check_dtype, check_vector, plan

MOST_BYTES = 32768  # of a row that 32 warps hold in registers without spilling
TILE = 1024  # elements of narrow rows that share a program


# The number of rows is no constant of a kernel: a batch of another size must not compile anew.
@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _norm_rows(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    x_stride, residual_stride, out_stride, sum_stride,
    num_rows, hidden_size, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Whole rows in registers. Strides are in elements, between rows. Without ADD residual and sum are not touched."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]  # 64 bits: times a stride it passes 2^31
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row < num_rows) & (column < hidden_size)
    total = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
    # Before the reduction, so that its way from memory is behind that of the row: in a small launch every wait counts.
    weight = tl.load(weight_ptr + column, mask=column < hidden_size, other=0.0)
    if ADD:
        rounded = (total + residual).to(sum_ptr.dtype.element_ty)  # what is stored is what is squared
        tl.store(sum_ptr + row * sum_stride + column, rounded, mask=inside)
        total = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(total * total, 1)[:, None] / hidden_size + eps)
    out = (total * inverse * weight.to(tl.float32)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + column, out, mask=inside)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _norm_pieces(
    x_ptr, residual_ptr, weight_ptr, out_ptr, sum_ptr,
    x_stride, residual_stride, out_stride, sum_stride,
    num_rows, hidden_size, eps, ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One wide row: the squares first, then the norm of what sum_ptr holds. Without ADD that is x itself."""
    row = tl.program_id(0).to(tl.int64)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        total = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        if ADD:
            residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
            rounded = (total + residual).to(sum_ptr.dtype.element_ty)
            tl.store(sum_ptr + row * sum_stride + column, rounded, mask=inside)
            total = rounded.to(tl.float32)
        squares += total * total
    inverse = tl.rsqrt(tl.sum(squares, 0) / hidden_size + eps)
    if ADD:
        tl.debug_barrier()  # the sum is read back below, perhaps by other threads than those that wrote it
    for start in range(0, hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < hidden_size
        total = tl.load(sum_ptr + row * sum_stride + column, mask=inside, other=0.0).to(tl.float32)
        weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
        out = (total * inverse * weight).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + row * out_stride + column, out, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    _launch(x, None, weight, out, None, eps)
    return out


def fused_add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    total = torch.empty_like(out)
    _launch(x, residual, weight, out, total, eps)
    return out, total


def fused_add_rms_norm_(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> None:
    _launch(x, residual, weight, x, residual, eps)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    out: torch.Tensor,
    total: torch.Tensor | None,
    eps: float,
) -> None:
    """`residual` and `total`, the sum, are both None for the norm alone."""
    check_dtype("x", x)
    check_vector("weight", weight)
    if x.numel() == 0:  # an empty grid is a launch error
        return
    x = as_rows("x", x)
    out = as_rows("x", out)
    add = residual is not None
    residual = x if residual is None else as_rows("residual", residual)
    total = x if total is None else as_rows("residual", total)
    num_rows, hidden_size = x.shape
    block, rows, warps, whole = plan(hidden_size, MOST_BYTES // x.element_size(), TILE)
    kernel = _norm_rows if whole else _norm_pieces
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever the tensors say
        kernel[(triton.cdiv(num_rows, rows),)](
            x, residual, weight, out, total, x.stride(0), residual.stride(0), out.stride(0), total.stride(0),
            num_rows, hidden_size, eps, ADD=add, ROWS=rows, BLOCK=block, num_warps=warps,
        )  # fmt: skip
