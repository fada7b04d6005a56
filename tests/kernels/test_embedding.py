"""The compiled gather: packs and single elements, few and many tokens, ids outside the vocabulary."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from rooflight.kernels import library
from rooflight.ops import Make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(library.load() is not None, reason=f"no compiled kernels here: {library.load()}"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
VOCAB = 103


def weights(dtype: torch.dtype, hidden_size: int) -> list[torch.Tensor]:
    """The same rows at a 16-byte border, one element past it, and as a slice of wider ones."""
    rows = Make(dtype, "cuda").randn(VOCAB, hidden_size)
    past = rows.new_zeros(rows.numel() + 1)[1:].view_as(rows)
    wider = rows.new_zeros(VOCAB, hidden_size + 3)[:, 1:-2]
    return [rows, past.copy_(rows), wider.copy_(rows)]


@dtypes
@pytest.mark.parametrize("tokens", [0, 1, 3, 8192])
@pytest.mark.parametrize("hidden_size", [1, 7, 64, 255, 1024, 2056, 5125])
def test_rows_arrive_bit_for_bit(hidden_size: int, tokens: int, dtype: torch.dtype) -> None:
    ids = torch.randint(VOCAB, (tokens,), generator=torch.Generator().manual_seed(0)).cuda()
    for weight in weights(dtype, hidden_size):
        for numbers in (ids, ids.int()):
            assert torch.equal(ops.embedding(numbers, weight, backend="cuda"), weight[ids])


@dtypes
@pytest.mark.parametrize("tokens", [6, 6000])
def test_an_id_outside_the_vocabulary_gives_a_row_of_nan(tokens: int, dtype: torch.dtype) -> None:
    """Whatever the id; the rows beside it are right, and nothing else of the device notices."""
    outside = [-1, VOCAB, 2**31 - 1, -(2**31), 2**40 + 3, -(2**63)]
    ids = torch.arange(tokens, device="cuda") % VOCAB
    place = torch.tensor([4, 0, 1, 5, 3, 2], device="cuda")
    for hidden_size in (7, 1024):
        for weight in weights(dtype, hidden_size):
            for many in (len(outside), 3):
                bad = ids.clone()
                bad[place[:many]] = torch.tensor(outside[:many], device="cuda")
                numbers = bad if many > 4 else bad.int()
                out = ops.embedding(numbers, weight, backend="cuda")
                expected = weight[ids]
                expected[place[:many]] = float("nan")
                torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
    torch.cuda.synchronize()


def test_an_empty_vocabulary_has_no_rows() -> None:
    out = ops.embedding(torch.zeros(3, dtype=torch.int64, device="cuda"), torch.ones(0, 64, device="cuda"))
    assert out.shape == (3, 64)
    assert out.isnan().all()


def test_ids_of_any_shape() -> None:
    weight, *_ = weights(torch.bfloat16, 64)
    ids = torch.arange(24, device="cuda").view(4, 6)
    for numbers in (ids[0, 0], ids[1], ids[:, 1], ids[1:3], ids[:, ::2], ids.view(2, 2, 6), ids[0, :1].expand(5)):
        assert torch.equal(ops.embedding(numbers, weight, backend="cuda"), weight[numbers])
    for numbers in (ids.t(), ids[:, :3]):
        with pytest.raises(ValueError, match=r"^ids must have dimensions that fold into one, was shape"):
            ops.embedding(numbers, weight, backend="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("past", [0, 1], ids=["packs", "elements"])
def test_rows_more_than_2_31_elements_apart(past: int) -> None:
    far = 2**31 + 8 + past
    weight = torch.zeros(2 * far + 64, dtype=torch.bfloat16, device="cuda").as_strided((3, 64), (far, 1))
    weight.copy_(Make(torch.bfloat16, "cuda").randn(3, 64))
    ids = torch.tensor([2, 0, 1, 2], device="cuda")
    assert torch.equal(ops.embedding(ids, weight, backend="cuda"), weight[ids])
