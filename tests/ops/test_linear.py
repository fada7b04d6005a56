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
    out = ops.embedding(torch.zeros(2, dtype=torch.int64, device=target.device), bits.view(torch.bfloat16))
    assert torch.equal(out.view(torch.int16), bits.expand(2, 3))


@pytest.mark.parametrize("token", [4, -1])
def test_embedding_outside_the_vocabulary_is_an_index_error_on_the_cpu(token: int) -> None:
    with pytest.raises(IndexError):
        ops.embedding(torch.tensor([0, token]), torch.ones(4, 3))
