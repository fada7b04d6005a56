"""What the launchers of row kernels share: the tensors that they take, and how rows are spread over threads.

All of it runs on the host before every launch, so it is little, and the plan of a width is made once.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton

PER_THREAD = 16  # elements of a tile that one thread holds: two loads of 16 bytes at 2 bytes each
MOST_ROWS = 16  # of one tile


class Plan(NamedTuple):
    """How a program sees rows of one width: a tile of `rows` rows by `block` columns, both powers of two."""

    block: int
    rows: int  # more than one where rows are narrow
    warps: int
    whole: bool  # whether a row fits into a block; if not it is walked in pieces of one


@cache
def plan(hidden_size: int, largest: int, tile: int) -> Plan:
    """Rows up to `largest` columns are held whole; narrow ones together, up to `tile` elements a program.

    It depends on the width alone and never on the number of rows, so that a row has the same bits in any batch.
    """
    block = min(int(triton.next_power_of_2(hidden_size)), largest)
    rows = max(1, min(MOST_ROWS, tile // block))
    return Plan(block, rows, min(max(rows * block // (32 * PER_THREAD), 1), 32), hidden_size <= largest)


@cache
def multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def as_rows(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as (rows, hidden_size) without a copy, or ValueError."""
    width = tensor.shape[-1]
    check_last_dimension(name, tensor)
    if tensor.dim() == 2:
        return tensor
    try:
        return tensor.view(-1, width)
    except RuntimeError:
        raise ValueError(
            f"{name} must have leading dimensions that fold into rows, was shape {tuple(tensor.shape)} "
            f"with strides {tensor.stride()}"
        ) from None


def check_last_dimension(name: str, tensor: torch.Tensor) -> None:
    """The elements of a row must lie side by side; every other stride is passed to the kernel."""
    if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have stride 1 in its last dimension, was {tensor.stride(-1)}")


def check_vector(name: str, tensor: torch.Tensor) -> None:
    """A weight or bias must lie in one piece."""
    if tensor.shape[0] > 1 and tensor.stride(0) != 1:
        raise ValueError(f"{name} must have stride 1, was {tensor.stride(0)}")


def check_dtype(name: str, tensor: torch.Tensor) -> None:
    """The kernels compute in FP32."""
    if tensor.dtype == torch.float64:
        raise ValueError(f"{name} must be float32, float16 or bfloat16 for the triton provider, was torch.float64")
