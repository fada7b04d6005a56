"""The compiled RMSNorm where the spread of rows over threads and blocks changes: with the width, and with how many."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from rooflight.kernels import library
from tests.contract.harness import same_bits, ulps_apart

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(library.load() is not None, reason=f"no compiled kernels here: {library.load()}"),
]
# Packs of 16 bytes: less than a warp, one warp, whole warps that have kernels of their own, and some that have none.
ROW_PACKS = (1, 8, 16, 24, 32, 64, 80, 96, 128, 160, 192, 256, 320, 384, 512, 640, 768, 896, 1024, 1280, 2048, 3000)
ROWS = (1, 3, 511, 513, 4095, 4097)  # rows share blocks from 512 and from 4096 on; the last block is not full
TYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32)]


@pytest.mark.parametrize("types", TYPES, ids=lambda types: "-".join(str(t).removeprefix("torch.") for t in types))
@pytest.mark.parametrize("row_packs", ROW_PACKS)
def test_every_spread_of_rows(row_packs: int, types: tuple[torch.dtype, torch.dtype]) -> None:
    """Values, the same bits in every batch and in both forms, and nothing written around the rows."""
    dtype, weight_dtype = types
    width = row_packs * 16 // dtype.itemsize
    generator = torch.Generator("cuda").manual_seed(row_packs)
    every = ROWS if row_packs <= 512 else ROWS[:4]  # enough memory is moved as it is
    x, residual = (torch.randn(max(every) + 2, width, generator=generator, device="cuda").to(dtype) for _ in range(2))
    weight = torch.randn(width, generator=generator, device="cuda").to(weight_dtype)
    expected = ops.fused_add_rms_norm(x, residual, weight, 1e-6, backend="ref")
    first = None
    for rows in every:
        inside = slice(1, rows + 1)
        out, total = x.clone(), residual.clone()
        ops.fused_add_rms_norm_(out[inside], total[inside], weight, 1e-6, backend="cuda")
        assert same_bits(total[inside], expected[1][inside])
        assert ulps_apart(out[inside], expected[0][inside]) <= (16 if dtype == torch.float32 else 1)
        for written, before in ((out, x), (total, residual)):
            assert same_bits(written[:1], before[:1])
            assert same_bits(written[rows + 1 :], before[rows + 1 :])
        results = ops.fused_add_rms_norm(x[inside], residual[inside], weight, 1e-6, backend="cuda")
        assert all(map(same_bits, results, (out[inside], total[inside])))
        assert same_bits(ops.rms_norm(total[inside], weight, 1e-6, backend="cuda"), out[inside])
        last = ops.rms_norm(total[rows : rows + 1], weight, 1e-6, backend="cuda")
        assert same_bits(last, out[rows : rows + 1])
        first = out[1:2] if first is None else first
        assert same_bits(first, out[1:2])


@pytest.mark.parametrize(
    ("rows", "width"), [(3, 262145), (3, 8192), (130, 8192), (300, 4096), (100, 16384), (33, 65536)]
)
def test_the_gradient_with_every_number_of_blocks(rows: int, width: int) -> None:
    generator = torch.Generator("cuda").manual_seed(rows)
    grad, x = (torch.randn(rows, width, generator=generator, device="cuda") for _ in range(2))
    weight = torch.randn(width, generator=generator, device="cuda")
    found = ops.rms_norm_backward(grad, x, weight, 1e-6, backend="cuda")
    expected = ops.rms_norm_backward(grad.double(), x.double(), weight.double(), 1e-6, backend="ref")
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-5, atol=1e-4)
