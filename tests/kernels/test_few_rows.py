"""The kernel for products of few rows: a row has the same bits alone and among up to seven others."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from rooflight.ops import REGISTRY, Make

FEW = 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["rms_norm_linear", "rms_norm_swiglu", "linear_add_"])
@pytest.mark.parametrize(("in_features", "out_features"), [(1024, 4096), (576, 1536), (3072, 1024), (2048, 70)])
def test_a_row_has_the_same_bits_among_few(name: str, dtype: torch.dtype, in_features: int, out_features: int) -> None:
    make = Make(dtype, "cuda")
    args = REGISTRY[name].inputs(make, num_tokens=FEW, in_features=in_features, out_features=out_features)

    def run(rows: slice) -> torch.Tensor:
        if name == "linear_add_":
            residual = args[0][rows].clone()
            ops.linear_add_(residual, args[1][rows], *args[2:], backend="cuda")
            return residual
        out: torch.Tensor = getattr(ops, name)(args[0][rows], *args[1:], backend="cuda")
        return out

    together = run(slice(None))
    for row in range(FEW):
        assert torch.equal(run(slice(row, row + 1))[0], together[row]), row
    assert torch.equal(run(slice(2, 7)), together[2:7])
