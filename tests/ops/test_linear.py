"""linear and embedding: values by hand and against PyTorch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from rooflight import ops
from tests.contract.harness import Target, implementations


@implementations("linear")
def test_linear_by_hand(target: Target) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, -1.0]], device=target.device)
    weight = torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 5.0]], device=target.device)
    bias = torch.tensor([100.0, 0.0, -1.0], device=target.device)
    out = ops.linear(x, weight, bias, backend=target.provider)
    assert out.tolist() == [[101.0, 2.0, 11.0], [103.0, -1.0, 0.0]]
    assert ops.linear(x, weight, backend=target.provider).tolist() == [[1.0, 2.0, 12.0], [3.0, -1.0, 1.0]]


@implementations("linear")
def test_linear_agrees_with_torch_for_leading_dimensions(target: Target) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(7, 33, generator=generator).to(target.device)
    for shape in ((33,), (2, 33), (2, 3, 33), (0, 33), (2, 0, 33)):
        x = torch.randn(*shape, generator=generator).to(target.device)
        torch.testing.assert_close(ops.linear(x, weight, backend=target.provider), F.linear(x, weight))


@implementations("linear")
def test_linear_accumulates_in_fp32(target: Target) -> None:
    """4096 ones in fp16: an fp16 accumulator stops at 2048."""
    x, weight = (torch.ones(1, 4096, dtype=torch.float16, device=target.device) for _ in range(2))
    assert ops.linear(x, weight, backend=target.provider).item() == 4096.0


PACKED = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", PACKED, ids=str)
@pytest.mark.parametrize("shape", [(33,), (1, 33), (2, 3, 33), (130, 33), (0, 33), (2, 0, 33)], ids=str)
@pytest.mark.parametrize("with_bias", [False, True])
def test_packed_weight_gives_what_the_plain_one_gives(
    dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).to(dtype) for s in (shape, (70, 33), (70,)))
    packed = ops.pack_weight(weight)
    assert packed.is_mkldnn
    assert (packed.shape, packed.dtype) == (weight.shape, weight.dtype)
    out = ops.linear(x, packed, bias if with_bias else None)
    truth = F.linear(x.double(), weight.double(), bias.double() if with_bias else None)
    assert (out.shape, out.dtype, out.is_mkldnn) == (truth.shape, dtype, False)
    # 33 products and the bias in FP32, in some order, then one rounding to the dtype.
    magnitude = F.linear(x.double().abs(), weight.double().abs(), bias.double().abs())
    allowed = 34 * torch.finfo(torch.float32).eps * magnitude + torch.finfo(dtype).eps * truth.abs()
    assert bool(((out.double() - truth).abs() <= allowed).all())


@pytest.mark.parametrize("dtype", PACKED, ids=str)
def test_packed_weight_takes_rows_of_any_stride(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(40, 64, generator=generator).to(dtype)
    wide_rows = torch.randn(5, 200, generator=generator).to(dtype)
    packed = ops.pack_weight(weight)
    for x in (wide_rows[:, 7:71], wide_rows.t()[:64].t(), wide_rows[:1, :64].expand(5, 64)):
        torch.testing.assert_close(ops.linear(x, packed), ops.linear(x.contiguous(), packed))


def test_packing_leaves_alone_what_has_no_packed_product() -> None:
    for weight in (torch.ones(4, 3, dtype=torch.float16), torch.ones(4, 3, dtype=torch.float64), torch.ones(0, 3)):
        assert ops.pack_weight(weight) is weight


def test_packed_weight_is_checked_like_a_plain_one() -> None:
    packed = ops.pack_weight(torch.ones(4, 3))
    with pytest.raises(ValueError, match="weight must have shape"):
        ops.linear(torch.ones(2, 5), packed)
    with pytest.raises(ValueError, match=r"weight must be torch.float16, was torch.float32"):
        ops.linear(torch.ones(2, 3, dtype=torch.float16), packed)
    with pytest.raises(ValueError, match="bias must have shape"):
        ops.linear(torch.ones(2, 3), packed, torch.ones(3))


def test_packed_weight_under_no_grad_and_inference_mode() -> None:
    packed, x = ops.pack_weight(torch.ones(4, 3)), torch.ones(2, 3)
    with torch.no_grad():
        assert ops.linear(x, packed).tolist() == [[3.0] * 4] * 2
    with torch.inference_mode():
        assert ops.linear(x, packed).tolist() == [[3.0] * 4] * 2


@implementations("embedding")
def test_embedding_by_hand(target: Target) -> None:
    weight = torch.arange(12.0, device=target.device).view(4, 3)
    for dtype in (torch.int32, torch.int64):
        ids = torch.tensor([[3, 0], [1, 3]], dtype=dtype, device=target.device)
        out = ops.embedding(ids, weight, backend=target.provider)
        assert out.tolist() == [[[9.0, 10.0, 11.0], [0.0, 1.0, 2.0]], [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]]


@implementations("embedding")
def test_embedding_keeps_bits(target: Target) -> None:
    """A gather computes nothing: NaN payloads, -0 and denormals arrive as they are."""
    bits = torch.tensor([[0x7FC1, -0x8000, 0x0001]], dtype=torch.int16, device=target.device)
    ids = torch.zeros(2, dtype=torch.int64, device=target.device)
    out = ops.embedding(ids, bits.view(torch.bfloat16), backend=target.provider)
    assert torch.equal(out.view(torch.int16), bits.expand(2, 3))


@pytest.mark.parametrize("token", [4, -1])
def test_embedding_outside_the_vocabulary_is_an_index_error_on_the_cpu(token: int) -> None:
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([0, token]), torch.ones(4, 3))
