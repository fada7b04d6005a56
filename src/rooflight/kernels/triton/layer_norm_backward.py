"""Gradient of LayerNorm in Triton. With n = (x - mean(x)) / std(x) and g = grad_out * weight:

    grad_x = (g - mean(g) - n * mean(g * n)) / std(x) + grad_residual
    grad_weight = sum over rows of grad_out * n                        grad_bias = sum over rows of grad_out

Traffic and layout are those of `norm_backward`, with two sums over rows in place of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.partials import REGISTERS, add_partials, programs
from rooflight.kernels.triton.rows import as_rows, check_dtype, check_vector, plan

MOST_BYTES = 16384  # of a row that is held whole, beside its gradient, the weight and two sums over rows
TILE = 4096  # elements of narrow rows that share a program


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _backward_rows(
    grad_ptr, x_ptr, weight_ptr, residual_ptr, out_ptr, partial_ptr,
    grad_stride, x_stride, residual_stride, num_rows, hidden_size, eps,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles of whole rows. residual is the gradient that is added, out is grad_x, contiguous."""
    column = tl.arange(0, BLOCK)[None, :]
    in_row = column < hidden_size
    lane = tl.arange(0, ROWS)[:, None]
    first = tl.program_id(0).to(tl.int64) * ROWS  # 64 bits: rows times a stride passes 2^31
    step = tl.num_programs(0) * ROWS
    row = first + lane
    inside = in_row & (row < num_rows)
    x_ahead = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0)
    grad_ahead = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0)
    weight = tl.load(weight_ptr + column, mask=in_row, other=0.0).to(tl.float32)
    weight_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in range(first, num_rows, step):
        row = start + lane
        inside = in_row & (row < num_rows)
        x, grad = x_ahead.to(tl.float32), grad_ahead.to(tl.float32)
        ahead = in_row & (row + step < num_rows)
        x_ahead = tl.load(x_ptr + (row + step) * x_stride + column, mask=ahead, other=0.0)
        grad_ahead = tl.load(grad_ptr + (row + step) * grad_stride + column, mask=ahead, other=0.0)
        if RESIDUAL:
            residual = tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0)
        mean = tl.sum(x, 1)[:, None] / hidden_size
        centred = tl.where(in_row, x - mean, 0.0)  # the lanes beyond the row would hold -mean
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 1)[:, None] / hidden_size + eps))
        normalised = centred * inverse
        product = grad * normalised
        if ROWS > 1:  # a row beyond the last is 0 / 0 where eps is 0
            product = tl.where(inside, product, 0.0)
        weight_sum += product
        bias_sum += grad
        scaled = grad * weight
        grad_mean = tl.sum(scaled, 1)[:, None] / hidden_size
        product_mean = tl.sum(product * weight, 1)[:, None] / hidden_size
        out = (scaled - grad_mean - normalised * product_mean) * inverse
        if RESIDUAL:
            out += residual.to(tl.float32)
        tl.store(out_ptr + row * hidden_size + column, out.to(out_ptr.dtype.element_ty), mask=inside)
    partial_ptr += tl.program_id(0) * 2 * hidden_size
    tl.store(partial_ptr + column, tl.sum(weight_sum, 0)[None, :], mask=in_row)
    tl.store(partial_ptr + hidden_size + column, tl.sum(bias_sum, 0)[None, :], mask=in_row)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _backward_pieces(
    grad_ptr, x_ptr, weight_ptr, residual_ptr, out_ptr, partial_ptr,
    grad_stride, x_stride, residual_stride, num_rows, hidden_size, eps,
    RESIDUAL: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Wide rows, each walked four times, from L2 after the first: mean, centred squares, products, gradient."""
    first = tl.program_id(0).to(tl.int64)
    partial_ptr += first * 2 * hidden_size  # the two scratch rows are this program's own
    for start in range(0, 2 * hidden_size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        tl.store(partial_ptr + column, tl.zeros([BLOCK], tl.float32), mask=column < 2 * hidden_size)
    for row in range(first, num_rows, tl.num_programs(0)):
        sums = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            sums += tl.load(x_ptr + row * x_stride + column, mask=column < hidden_size, other=0.0).to(tl.float32)
        mean = tl.sum(sums, 0) / hidden_size
        squares = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + column, mask=column < hidden_size, other=0.0).to(tl.float32)
            centred = tl.where(column < hidden_size, x - mean, 0.0)
            squares += centred * centred
        inverse = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(squares, 0) / hidden_size + eps))
        scaled = tl.zeros([BLOCK], tl.float32)
        products = tl.zeros([BLOCK], tl.float32)
        for start in range(0, hidden_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden_size
            x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            scaled += grad * weight
            products += grad * ((x - mean) * inverse) * weight  # beyond the row grad is 0
        grad_mean = tl.sum(scaled, 0) / hidden_size
        product_mean = tl.sum(products, 0) / hidden_size
        for start in range(0, hidden_size, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < hidden_size
            x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
            grad = tl.load(grad_ptr + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
            normalised = (x - mean) * inverse
            out = (grad * weight - grad_mean - normalised * product_mean) * inverse
            if RESIDUAL:
                out += tl.load(residual_ptr + row * residual_stride + column, mask=inside, other=0.0).to(tl.float32)
            tl.store(out_ptr + row * hidden_size + column, out.to(out_ptr.dtype.element_ty), mask=inside)
            weight_sum = tl.load(partial_ptr + column, mask=inside, other=0.0) + grad * normalised
            bias_sum = tl.load(partial_ptr + hidden_size + column, mask=inside, other=0.0) + grad
            tl.store(partial_ptr + column, weight_sum, mask=inside)
            tl.store(partial_ptr + hidden_size + column, bias_sum, mask=inside)
        tl.debug_barrier()  # other threads than those that wrote the scratch rows may read them back for the next row


def layer_norm_backward(
    grad_out: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-5,
    grad_residual: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    check_dtype("x", x)
    check_vector("weight", weight)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    grad_weight, grad_bias = torch.empty_like(weight), torch.empty_like(weight)
    if x.numel() == 0:  # an empty grid is a launch error
        return grad_x, grad_weight.zero_(), grad_bias.zero_()
    grad, x = as_rows("grad_out", grad_out), as_rows("x", x)
    residual = grad if grad_residual is None else as_rows("grad_residual", grad_residual)
    num_rows, hidden_size = x.shape
    block, rows, warps, whole = plan(hidden_size, MOST_BYTES // x.element_size(), TILE)
    kernel = _backward_rows if whole else _backward_pieces
    count = programs(x, triton.cdiv(num_rows, rows), warps)
    partial = torch.empty((count, 2, hidden_size), dtype=torch.float32, device=x.device)
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever the tensors say
        kernel[(count,)](
            grad, x, weight, residual, grad_x, partial,
            grad.stride(0), x.stride(0), residual.stride(0), num_rows, hidden_size, eps,
            RESIDUAL=grad_residual is not None, ROWS=rows, BLOCK=block, num_warps=warps, maxnreg=REGISTERS,
        )  # fmt: skip
        add_partials(partial, grad_weight, grad_bias)
    return grad_x, grad_weight, grad_bias
