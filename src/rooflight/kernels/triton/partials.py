"""Sums over all rows, for the gradients of weights: each program its own partial sum, then one sum of those.

A fixed number of programs walks the rows, keeps its partial sum in FP32 and writes it once. The second kernel adds the
partial sums in a fixed order, so the same call gives the same bits every time: no atomics.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import multiprocessors

WARPS_AT_ONCE = 16  # of one multiprocessor
REGISTERS = 65536 // (32 * WARPS_AT_ONCE)  # that a thread may take for so many to fit
TILE = 128, 32  # partial sums and columns that one program of the second kernel adds at a time
# In the interpreter a program costs milliseconds: few of them, and each walks several tiles of the tests' small inputs.
INTERPRETED_PROGRAMS, INTERPRETED_TILE = 2, (1, 4096)


def programs(x: torch.Tensor, tiles: int, warps: int) -> int:
    """How many programs walk the tiles of x: as many as run at once, and no more than there are tiles."""
    limit = INTERPRETED_PROGRAMS
    if x.is_cuda:
        limit = multiprocessors(x.device.index) * max(WARPS_AT_ONCE // warps, 1)
    return min(tiles, limit)


@triton.jit(do_not_specialize=["num_partials"])  # type: ignore[untyped-decorator]
def _add_partials(
    partial_ptr, weight_ptr, bias_ptr, num_partials, hidden_size,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Columns of one of the PARTS sums in partial (num_partials, PARTS, hidden_size): the weight's, then the bias's."""
    part = tl.program_id(1)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, num_partials, ROWS):
        index = start + tl.arange(0, ROWS)[:, None].to(tl.int64)
        inside = (index < num_partials) & (column < hidden_size)
        total += tl.load(partial_ptr + (index * PARTS + part) * hidden_size + column, mask=inside, other=0.0)
    result = tl.sum(total, 0)[None, :]
    if part == 0:
        tl.store(weight_ptr + column, result.to(weight_ptr.dtype.element_ty), mask=column < hidden_size)
    else:
        tl.store(bias_ptr + column, result.to(bias_ptr.dtype.element_ty), mask=column < hidden_size)


def add_partials(partial: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    """Sums of partial (num_partials, parts, hidden_size) into weight and, with two parts, bias. Launches on the
    current device."""
    count, parts, hidden_size = partial.shape
    rows, columns = TILE if partial.is_cuda else INTERPRETED_TILE
    _add_partials[(triton.cdiv(hidden_size, columns), parts)](
        partial, weight, weight if bias is None else bias, count, hidden_size,
        PARTS=parts, ROWS=rows, COLUMNS=columns, num_warps=8,
    )  # fmt: skip
