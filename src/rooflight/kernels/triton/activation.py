"""SwiGLU's element-wise half in Triton: gate and up read once, their product written, in pieces of a row.

out_i = silu(gate_i) * up_i,   silu(g) = g / (1 + exp(-g))
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import as_rows, check_dtype

BLOCK = 1024  # columns of a program: 8 a thread, one load of 16 bytes each of gate and up at 2 bytes


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul(x_ptr, out_ptr, x_stride, size, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)  # 64 bits: times a stride it passes 2^31
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x_ptr += row * x_stride
    gate = tl.load(x_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + size + column, mask=column < size, other=0.0).to(tl.float32)
    # Rounded division: the fast one gives 0 where the divisor is above 2^126.
    out = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * size + column, out.to(out_ptr.dtype.element_ty), mask=column < size)


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    check_dtype("x", x)
    size = x.shape[-1] // 2
    out = x.new_empty(*x.shape[:-1], size)
    if x.numel() == 0:  # an empty grid is a launch error
        return out
    x = as_rows("x", x)
    block = min(BLOCK, triton.next_power_of_2(size))
    with torch.cuda.device_of(x):  # Triton launches on the current device, whatever the tensors say
        _silu_and_mul[(x.shape[0], triton.cdiv(size, block))](
            x, out, x.stride(0), size, BLOCK=block, num_warps=max(1, block // 256)
        )
    return out
