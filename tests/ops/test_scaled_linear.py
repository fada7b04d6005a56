"""A norm in two halves is the norm, and what must not share memory is refused."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from rooflight.ops import Make


def halves(
    residual: torch.Tensor, x: torch.Tensor, down: torch.Tensor, norm: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    scaled, squares = ops.empty_scaled(residual)
    ops.linear_add_scale_(residual, scaled, squares, x, down, norm)
    return ops.scaled_linear(scaled, squares, weight, None, eps), ops.scaled_swiglu(scaled, squares, weight, None, eps)


@pytest.mark.parametrize("size", [1.0, 1e-3])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
@pytest.mark.parametrize("width", [1, 63, 64, 200])
def test_two_halves_are_the_norm(width: int, eps: float, size: float) -> None:
    make = Make()
    residual, x = make.randn(7, width, scale=size, salt=1), make.randn(7, 24, scale=size, salt=2)
    down, norm = make.randn(width, 24, scale=0.2, salt=3), 1 + make.randn(width, scale=0.2, salt=4)
    weight = make.randn(32, width, scale=width**-0.5, salt=5)
    summed = residual.clone()
    ops.linear_add_(summed, x, down)
    linear, swiglu = halves(residual, x, down, norm, weight, eps)
    assert torch.equal(residual, summed)
    torch.testing.assert_close(linear, ops.rms_norm_linear(summed, norm, weight, None, eps))
    torch.testing.assert_close(swiglu, ops.rms_norm_swiglu(summed, norm, weight, None, eps))


def test_rows_of_no_width_and_no_rows() -> None:
    weight = torch.ones(4, 0)
    assert torch.equal(ops.scaled_linear(torch.ones(3, 0), torch.ones(3, 0), weight), torch.zeros(3, 4))
    scaled, squares = ops.empty_scaled(torch.ones(0, 100))
    assert (scaled.shape, squares.shape) == ((0, 100), (0, 2))


def test_room_is_laid_out_for_the_kernel_whatever_the_residual() -> None:
    scaled, squares = ops.empty_scaled(torch.ones(100, 9).t())
    assert scaled.is_contiguous()
    assert squares.stride() == (1, 9)


@pytest.mark.parametrize(
    ("written", "other"),
    [("scaled", "residual"), ("squares", "residual"), ("squares", "scaled"), ("residual", "x"), ("scaled", "x"),
     ("squares", "x")],
)  # fmt: skip
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_memory_that_is_shared_is_refused(written: str, other: str, device: str) -> None:
    """All are 9 by 1, so that each could be any other."""
    given = {name: torch.ones(9, 1, device=device) for name in ("residual", "scaled", "squares", "x")}
    given[written] = given[other]
    before = [value.clone() for value in given.values()]
    with pytest.raises(ValueError, match=rf"^{written} must not (share {other}'s memory|be {other}, which is read)"):
        ops.linear_add_scale_(*given.values(), torch.ones(1, 1, device=device), torch.ones(1, device=device))
    assert all(map(torch.equal, before, given.values()))


def test_memory_is_compared_by_bytes() -> None:
    """Sums are FP32 beside BF16: the same element of one buffer is another byte."""
    buffer = torch.ones(4096, dtype=torch.uint8)

    def view(first: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return buffer[first : first + count * dtype.itemsize].view(dtype).view(-1, 1)

    half, one = torch.bfloat16, torch.ones(1, 1, dtype=torch.bfloat16)
    x, residual, scaled = (view(first, 9, half) for first in (512, 1024, 1536))
    squares = view(2048, 9, torch.float32)
    assert squares.storage_offset() == view(1024, 9, half).storage_offset()
    ops.linear_add_scale_(residual, scaled, squares, x, one, one[0])
    with pytest.raises(ValueError, match="squares must not be x"):
        ops.linear_add_scale_(residual, scaled, view(512, 9, torch.float32), x, one, one[0])


def test_a_residual_is_not_its_own_product() -> None:
    residual = torch.ones(9, 4)
    with pytest.raises(ValueError, match="residual must not be x"):
        ops.linear_add_(residual, residual, torch.ones(4, 4))


def test_rows_that_the_kernel_takes() -> None:
    assert ops.scaled_rows([(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072)]) == range(9, 257)
    assert ops.scaled_rows([(6160, 1024), (64, 64)]) == range(9, 65)
    for shape in ((96, 132), (88, 128), (65_552, 8)):
        assert ops.scaled_rows([(64, 64), shape]) == range(0)
