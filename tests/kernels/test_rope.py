"""The compiled rotation: packs and single elements, far strides, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from rooflight.kernels import library
from rooflight.ops import Make
from rooflight.ops.rope import packed_heads, table

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(library.load() is not None, reason=f"no compiled kernels here: {library.load()}"),
]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
pairings = pytest.mark.parametrize("interleaved", [False, True])


def heads(dtype: torch.dtype, tokens: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    make = Make(dtype, "cuda")
    return make.randn(tokens, 5, head_dim), make.randn(tokens, 2, head_dim, salt=1)


def moved(x: torch.Tensor) -> torch.Tensor:
    """The same values one element past every border, in wider rows."""
    view = x.new_zeros(*x.shape[:-1], x.shape[-1] + 3)[..., 1:-2]
    view.copy_(x)
    return view


def table_and_positions(tokens: int, rotary_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    positions = torch.arange(tokens, device="cuda") * 7 % 50
    return table(Make(device="cuda"), 50, rotary_dim), positions


@pairings
@dtypes
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"),
    [(64, 64), (128, 128), (256, 256), (512, 512), (80, 32), (80, 80), (96, 48), (128, 16), (7, 4), (1, 0), (64, 0)],
)
def test_single_elements_give_the_bits_of_packs(
    head_dim: int, rotary_dim: int, dtype: torch.dtype, interleaved: bool
) -> None:
    """One test for both paths: right against FP64, and the same bits wherever the heads or the table lie."""
    q, k = heads(dtype, 9, head_dim)
    cos_sin, positions = table_and_positions(9, rotary_dim)
    truth = ops.rope(q.double(), k.double(), cos_sin, positions, interleaved=interleaved, backend="ref")
    turned = ops.rope(q, k, cos_sin, positions, interleaved=interleaved, backend="cuda")
    for one, other in zip(turned, truth, strict=True):
        # One rounding to the dtype, and two of FP32 of products of up to about four.
        exact = torch.finfo(torch.float32).eps
        torch.testing.assert_close(one.double(), other, rtol=torch.finfo(dtype).eps, atol=8 * exact)
        assert torch.equal(one[..., rotary_dim:].double(), other[..., rotary_dim:])
    for args in (
        (moved(q), k, cos_sin, positions),
        (q, moved(k), cos_sin, positions.int()),
        (q, k, moved(cos_sin), positions),
        (q, k, cos_sin, torch.stack((positions, positions - 99), 1)[:, 0]),
    ):
        again = ops.rope(*args, interleaved=interleaved, backend="cuda")
        assert all(map(torch.equal, turned, again))


@pairings
@dtypes
@pytest.mark.parametrize("tokens", [0, 1, 3, 1024])
def test_in_place_on_packed_heads(tokens: int, dtype: torch.dtype, interleaved: bool) -> None:
    """As the decoder has them; the values between and behind the heads stay as they are."""
    for num_heads in (2, 128):  # one block a token, and several
        q, k, v = packed_heads(Make(dtype, "cuda"), tokens, num_heads, 2, 64)
        cos_sin, positions = table_and_positions(tokens, 64)
        expected = ops.rope(q, k, cos_sin, positions, interleaved=interleaved, backend="cuda")
        before = v.clone()
        ops.rope_(q, k, cos_sin, positions, interleaved=interleaved, backend="cuda")
        assert torch.equal(q, expected[0])
        assert torch.equal(k, expected[1])
        assert torch.equal(v, before)


def test_the_very_same_heads_are_turned_once() -> None:
    q, _ = heads(torch.bfloat16, 5, 64)
    cos_sin, positions = table_and_positions(5, 64)
    expected, _ = ops.rope(q, q, cos_sin, positions, backend="cuda")
    ops.rope_(q, q, cos_sin, positions, backend="cuda")
    assert torch.equal(q, expected)
    with pytest.raises(ValueError, match=r"^k must not share q's memory, since both are written"):
        ops.rope_(q, q[:, :2], cos_sin, positions, backend="cuda")


def test_without_heads() -> None:
    q, k = heads(torch.bfloat16, 5, 64)
    cos_sin, positions = table_and_positions(5, 64)
    whole = ops.rope(q, k, cos_sin, positions, backend="cuda")
    for some in ((q[:, :0], k), (q, k[:, :0]), (q[:, :0], k[:, :0])):
        results = ops.rope(*some, cos_sin, positions, backend="cuda")
        assert all(r.shape[1] == 0 or torch.equal(r, w) for r, w in zip(results, whole, strict=True))


def test_a_token_of_too_many_elements_is_refused() -> None:
    """By its shape alone: the heads are one, seen again and again."""
    q = torch.zeros(1, 1, 64, device="cuda").expand(1, 2**17, 64)
    cos_sin, positions = table_and_positions(1, 64)
    with pytest.raises(ValueError, match=r"^q must have .* 2\^22 elements at most for the cuda provider"):
        ops.rope(q, q[:, :1], cos_sin, positions, backend="cuda")


@pytest.mark.slow
@pytest.mark.parametrize("past", [0, 1], ids=["packs", "elements"])
def test_tokens_and_heads_more_than_2_31_elements_apart(past: int) -> None:
    far = 2**31 + 8 + past
    buffer = torch.zeros(2 * far + 256, dtype=torch.bfloat16, device="cuda")
    cos_sin, positions = table_and_positions(3, 64)
    q, k = heads(torch.bfloat16, 3, 64)
    tokens, apart = buffer.as_strided((3, 2, 64), (far, 64, 1)), buffer.as_strided((1, 3, 64), (64, far, 1), 128)
    tokens.copy_(k)
    apart.copy_(q[:1, :3])
    expected = ops.rope(k, k, cos_sin, positions, backend="cuda")[0]
    expected_apart = ops.rope(q[:1, :3].contiguous(), k[:1], cos_sin, positions[:1], backend="cuda")[0]
    ops.rope_(tokens, k, cos_sin, positions, backend="cuda")
    ops.rope_(apart, k[:1], cos_sin, positions[:1], backend="cuda")
    assert torch.equal(tokens, expected)
    assert torch.equal(apart, expected_apart)
