"""The repair of Triton's CPU interpreter: bf16 rounds, loads and multiplies as the hardware does."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="a GPU is there, where Triton compiles and interprets nothing"
)
triton = pytest.importorskip("triton", reason="Triton is not installed")

import triton.language as tl  # noqa: E402

from rooflight.kernels.triton import interpreter  # noqa: E402


@pytest.fixture(scope="module", autouse=True)
def repaired() -> None:
    interpreter.repair()


def torch_bits(values: np.ndarray) -> np.ndarray:
    """The bits of bf16 that PyTorch rounds to."""
    return torch.from_numpy(values).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)


def assert_rounds_like_torch(values: np.ndarray) -> None:
    ours, theirs = interpreter.round_to_bf16(values), torch_bits(values)
    finite = ~np.isnan(values)
    assert (ours[finite] == theirs[finite]).all()
    assert (ours[~finite] == 0x7FC0).all()


def test_all_upper_halves_with_the_deciding_lower_halves() -> None:
    """Every bf16 as the upper 16 bits, with lower 16 bits just below, at and just above the middle, and the ends."""
    upper = np.arange(1 << 16, dtype=np.uint32) << 16
    for lower in (0x0000, 0x0001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        assert_rounds_like_torch((upper | np.uint32(lower)).view(np.float32))


def test_random_patterns() -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    assert_rounds_like_torch(bits.view(np.float32))


@pytest.mark.parametrize(
    ("bits", "expected"),
    [
        (0x3F808000, 0x3F80),  # a tie goes to the even neighbour, below
        (0x3F818000, 0x3F82),  # and above
        (0x3F808001, 0x3F81),
        (0x7F7FFFFF, 0x7F80),  # the largest finite FP32 rounds to infinity
        (0xFF800000, 0xFF80),
        (0x7F800001, 0x7FC0),  # a NaN whose payload lies in the lost bits must not become infinity
        (0x80000000, 0x8000),
        (0x00008000, 0x0000),  # denormals round like all others
        (0x00018000, 0x0002),
    ],
)
def test_rounding_by_hand(bits: int, expected: int) -> None:
    rounded = interpreter.round_to_bf16(np.array([bits], np.uint32).view(np.float32))
    assert int(rounded[0]) == expected


def test_shapes_and_strides_are_kept() -> None:
    values = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    assert (interpreter.round_to_bf16(values[:, ::2]) == torch_bits(np.ascontiguousarray(values[:, ::2]))).all()


@triton.jit
def _store(source_ptr, target_ptr, size: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    place = tl.arange(0, size)
    tl.store(target_ptr + place, tl.load(source_ptr + place).to(target_ptr.dtype.element_ty))


@triton.jit
def _dot(a_ptr, b_ptr, out_ptr, size: tl.constexpr) -> None:  # type: ignore[no-untyped-def]
    row, column = tl.arange(0, size)[:, None], tl.arange(0, size)[None, :]
    a, b = tl.load(a_ptr + row * size + column), tl.load(b_ptr + row * size + column)
    tl.store(out_ptr + row * size + column, tl.dot(a, b, out_dtype=tl.float32))


def run(kernel: Any, *args: Any) -> None:
    kernel[(1,)](*args)


def test_a_kernel_stores_fp32_as_bf16_with_rounding() -> None:
    source = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    target = torch.empty(4096, dtype=torch.bfloat16)
    run(_store, source, target, 4096)
    assert torch.equal(target, source.to(torch.bfloat16))
    truncated = (source.view(torch.int32) >> 16 << 16).view(torch.float32)
    assert not torch.equal(target.float(), truncated)


def test_a_kernel_loads_every_bf16() -> None:
    """All 2^16 patterns to FP32, the denormals too: exact, since FP32 holds them all."""
    source = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    target = torch.empty(1 << 16)
    run(_store, source, target, 1 << 16)
    assert torch.equal(target.nan_to_num(7.0), source.float().nan_to_num(7.0))
    assert torch.equal(target.isnan(), source.isnan())
    expected = source.view(torch.int16).int() << 16
    assert torch.equal(target.view(torch.int32)[~source.isnan()], expected[~source.isnan()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dot_multiplies_values_and_not_bits(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(16, 16, generator=generator).to(dtype) for _ in range(2))
    out = torch.empty(16, 16)
    run(_dot, a, b, out, 16)
    torch.testing.assert_close(out, a.float() @ b.float(), rtol=1e-5, atol=1e-5)
    run(_dot, torch.eye(16, dtype=dtype), b, out, 16)
    assert torch.equal(out, b.float())


def test_repairing_twice_changes_nothing() -> None:
    from triton.runtime import interpreter as theirs

    before = theirs._convert_float, theirs.InterpreterBuilder.create_dot
    interpreter.repair()
    assert (theirs._convert_float, theirs.InterpreterBuilder.create_dot) == before
