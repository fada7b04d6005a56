"""The step between projection and attention: equal to its parts, and what it writes where."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from rooflight.ops import Make
from rooflight.ops.rope import table
from tests.contract.harness import Target, implementations, ulps_apart

steps = implementations("qk_norm_rope_cache_")


def packed(tokens: int, dtype: torch.dtype, device: str, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    qkv = torch.randn(tokens, (4 + 2 + 2) * 64, generator=generator).to(device, dtype)
    return [part.unflatten(-1, (-1, 64)) for part in qkv.split([256, 128, 128], -1)]


def caches(pages: int, dtype: torch.dtype, device: str, fill: float = float("nan")) -> list[torch.Tensor]:
    return [torch.full((pages, 2, 16, 64), fill, dtype=dtype, device=device) for _ in range(2)]


def read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return cache[slots // 16, :, slots % 16]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", [True, False])
@steps
def test_equals_norm_then_rope_then_write(target: Target, norm: bool, interleaved: bool) -> None:
    """In FP32 to the last few bits; in bf16 it may only be more exact, since it rounds once instead of twice."""
    for dtype in target.op.dtypes:
        q, k, v = packed(9, dtype, target.device)
        generator = torch.Generator().manual_seed(1)
        weights = [torch.randn(64, generator=generator).to(target.device, dtype) if norm else None for _ in range(2)]
        cos_sin = table(Make(device=target.device), 50, 32)
        positions = torch.tensor([3, 49, 0, 7, 7, 1, 2, 30, 11], device=target.device)
        slots = torch.tensor([0, 47, 16, 15, 31, 32, 5, 6, 20], device=target.device)
        parts = [
            ops.rms_norm(x, w, backend="ref") if w is not None else x for x, w in zip((q, k), weights, strict=True)
        ]
        expected = ops.rope(*parts, cos_sin, positions, interleaved=interleaved)
        v_before = v.clone()
        k_cache, v_cache = caches(3, dtype, target.device)
        ops.qk_norm_rope_cache_(
            q, k, v, *weights, cos_sin, positions, slots, k_cache, v_cache, 1e-6,
            interleaved=interleaved, backend=target.provider,
        )  # fmt: skip
        bits = {torch.float32: 1e-5, torch.float16: 2**-9, torch.bfloat16: 2**-6}[dtype]
        torch.testing.assert_close(q, expected[0], rtol=bits, atol=bits)
        torch.testing.assert_close(read(k_cache, slots), expected[1], rtol=bits, atol=bits)
        assert torch.equal(read(v_cache, slots), v_before)
        assert torch.equal(v, v_before)
        unused = torch.ones(48, dtype=torch.bool, device=target.device)
        unused[slots] = False
        for cache in (k_cache, v_cache):
            assert cache.transpose(1, 2).reshape(48, -1)[unused].isnan().all()


@steps
def test_rounds_once(target: Target) -> None:
    """bf16 within 1 ulp of FP64 over thousands of elements, where normalising, rounding and turning is not."""
    q, k, v = packed(64, torch.bfloat16, target.device)
    weight = torch.ones(64, dtype=torch.bfloat16, device=target.device)
    cos_sin, positions = table(Make(device=target.device), 64, 64), torch.arange(64, device=target.device)
    normed = q.double() * torch.rsqrt(q.double().pow(2).mean(-1, keepdim=True) + 1e-6)
    truth = ops.rope(normed, normed, cos_sin, positions, backend="ref")[0].to(torch.bfloat16)
    twice = ops.rope(ops.rms_norm(q, weight, backend="ref"), k, cos_sin, positions)[0]
    k_cache, v_cache = caches(4, torch.bfloat16, target.device)
    ops.qk_norm_rope_cache_(
        q, k, v, weight, weight, cos_sin, positions, positions, k_cache, v_cache, backend=target.provider
    )
    assert (q != truth).double().mean() < 0.01
    assert (twice != truth).double().mean() > 0.1
    significant = truth.abs() > 2**-6
    assert ulps_apart(q[significant], truth[significant]) <= 1


@pytest.mark.parametrize("slots", [[-1, 5, -1], [-1, -1, -1], [47, -1, 0]], ids=str)
@steps
def test_br_068_slot_minus_one_writes_nothing(target: Target, slots: list[int]) -> None:
    """A padded row: the very last slot keeps its bytes, and q is still turned."""
    for fill in (7.0, float("nan")):
        q, k, v = packed(3, torch.float32, target.device)
        k_cache, v_cache = caches(3, torch.float32, target.device, fill)
        where = torch.tensor(slots, device=target.device)
        cos_sin, positions = table(Make(device=target.device), 9, 64), torch.tensor([1, 2, 3], device=target.device)
        expected = ops.rope(q, k, cos_sin, positions)
        ops.qk_norm_rope_cache_(
            q, k, v, None, None, cos_sin, positions, where, k_cache, v_cache, backend=target.provider
        )
        torch.testing.assert_close(q, expected[0])
        for cache, rows in ((k_cache, expected[1]), (v_cache, v)):
            flat = cache.transpose(1, 2).reshape(48, 2, 64)
            for slot in range(48):
                if slot in slots:
                    torch.testing.assert_close(flat[slot], rows[slots.index(slot)])
                else:
                    assert flat[slot].isnan().all() if fill != fill else flat[slot].eq(fill).all()


@steps
def test_page_and_offset_of_a_slot(target: Target) -> None:
    """slot = page * page_size + offset, with a page size that is no power of two."""
    q, k, v = packed(2, torch.float32, target.device)
    cache_k, cache_v = (torch.zeros(4, 2, 5, 64, device=target.device) for _ in range(2))
    cos_sin = torch.cat((torch.ones(1, 32), torch.zeros(1, 32)), 1).to(target.device)  # no turn
    zero = torch.zeros(2, dtype=torch.int64, device=target.device)
    slots = torch.tensor([13, 5], device=target.device)
    ops.qk_norm_rope_cache_(q, k, v, None, None, cos_sin, zero, slots, cache_k, cache_v, backend=target.provider)
    assert torch.equal(cache_k[2, :, 3], k[0])
    assert torch.equal(cache_k[1, :, 0], k[1])
    assert torch.equal(cache_v[2, :, 3], v[0])
    assert torch.equal(cache_v[1, :, 0], v[1])
    assert cache_k.ne(0).any(-1).sum().item() == 4


@steps
def test_without_query_heads_norms_and_angles_it_is_the_write_alone(target: Target) -> None:
    for dtype in target.op.dtypes:
        q, k, v = packed(4, dtype, target.device)
        before = [x.clone() for x in (q, k, v)]
        k_cache, v_cache = caches(2, dtype, target.device)
        cos_sin, positions = table(Make(device=target.device), 9, 64), torch.tensor([1, 2, 3, 8], device=target.device)
        slots = torch.tensor([30, -1, 0, 17], device=target.device)
        ops.qk_norm_rope_cache_(
            q[:, :0], k, v, None, None, cos_sin[:, :0], positions, slots, k_cache, v_cache, backend=target.provider
        )
        assert all(map(torch.equal, (q, k, v), before))
        kept = slots >= 0
        assert torch.equal(read(k_cache, slots[kept]), k[kept])
        assert torch.equal(read(v_cache, slots[kept]), v[kept])
        for cache in (k_cache, v_cache):
            assert int((~cache.isnan()).sum()) == 3 * 2 * 64


def test_one_weight_without_the_other_is_refused() -> None:
    q, k, v = packed(2, torch.float32, "cpu")
    rest = table(Make(), 9, 64), torch.arange(2), torch.arange(2), *caches(1, torch.float32, "cpu")
    with pytest.raises(ValueError, match=r"^k_weight must be given together with q_weight"):
        ops.qk_norm_rope_cache_(q, k, v, torch.ones(64), None, *rest)
