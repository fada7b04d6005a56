"""Bounds are only bounds, and parts of an attention merge to the whole: what graphs and split kernels rely on."""

from __future__ import annotations

import pytest
import torch

from rooflight import ops
from rooflight.ops import AttentionMeta, Make
from tests.contract.harness import (
    Target,
    assert_right,
    copy_args,
    describe,
    each_target,
    expect,
    replaced,
    same_bits,
    sweep_args,
)

DECODES = ("decode_attention", "qk_norm_rope_attention_")
attention_targets = each_target(lambda target: target.op.name in ("prefill_attention", *DECODES))
split_targets = each_target(lambda target: target.op.name in DECODES)
decode_targets = each_target(lambda target: target.op.name == "decode_attention")


@attention_targets
def test_quadrupled_bounds_give_the_same_bits(target: Target) -> None:
    for dims in target.op.sweep:
        args = sweep_args(target.op, dims, target.op.dtypes[-1])
        expected = target.run_copy(args)
        named = target.op.bind(*args)
        for bound in ("max_query_len", "max_seq_len"):
            if bound in named:
                args = replaced(target.op, args, bound, 4 * named[bound])
        assert all(map(same_bits, expected, target.run_copy(args))), describe(dims)


@attention_targets
def test_a_wider_block_table_gives_the_same_bits(target: Target) -> None:
    """A table with room for more pages, whose unused places hold pages that do not exist."""
    for dims in target.op.sweep:
        args = sweep_args(target.op, dims, target.op.dtypes[-1])
        expected = target.run_copy(args)
        table, page_size = target.op.bind(*args)["block_table"], target.op.bind(*args)["k_cache"].shape[2]
        wider = torch.full((table.shape[0], 4 * table.shape[1] + 3), 1 << 30, dtype=torch.int32)
        wider[:, : table.shape[1]] = table
        for row, length in enumerate(target.op.bind(*args)["seq_lens"].tolist()):
            wider[row, -(-length // page_size) :] = 1 << 30
        assert all(map(same_bits, expected, target.run_copy(replaced(target.op, args, "block_table", wider))))


@split_targets
def test_any_number_of_parts_is_right(target: Target) -> None:
    for splits in (1, 2, 7, 16, 1000):
        dims = {"seq_lens": (0, 1, 130, 40), "splits": splits}
        for dtype in target.op.dtypes:
            args = sweep_args(target.op, dims, dtype)
            assert_right(expect(target.op, args), target.run_copy(args))
    with pytest.raises(ValueError, match=r"^splits must be 0 \(the provider's rule\) or more, was -1"):
        target.run_copy(replaced(target.op, args, "splits", -1))


@decode_targets
def test_merged_parts_equal_the_whole(target: Target) -> None:
    """Keys before and after a page border, each part with its LSE, merged: as if nothing had been cut."""
    dims = {"seq_lens": (40, 17, 1, 48), "num_heads": 6, "num_kv_heads": 2, "head_dim": 64}
    for dtype in target.op.dtypes:
        args = sweep_args(target.op, dims, dtype)
        expected, eps = expect(target.op, args), torch.finfo(dtype).eps
        q, k_cache, v_cache, table, lengths, bound, scale, *_ = copy_args(args, target.device)
        for split_page in (0, 1, 3):
            first = lengths.clamp(max=16 * split_page)
            parts = []
            for part_table, part_lengths in ((table, first), (table[:, split_page:], lengths - first)):
                meta = AttentionMeta(part_table, part_lengths, part_lengths, 1, bound)
                parts += ops.decode_attention_lse(q, k_cache, v_cache, meta, scale=scale, backend=target.provider)
            out, lse = ops.merge_attention(*parts)
            # Looser than the rule: each part is rounded to the dtype before the merge, which rounds once more.
            torch.testing.assert_close(out.cpu().double(), expected.truths[0], rtol=3 * eps, atol=3 * eps)
            torch.testing.assert_close(lse.cpu().double(), expected.truths[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", [pytest.param("cpu"), pytest.param("cuda", marks=pytest.mark.gpu)])
def test_merged_prefix_and_chunk_equal_the_whole(target: str) -> None:
    """A prompt's tail over a shared prefix: the prefix as decode of every row, the chunk as prefill, merged."""
    prefix, chunk, page = 32, 19, 16
    dims = {"seq_lens": (prefix + chunk,), "query_lens": (chunk,), "num_heads": 4, "num_kv_heads": 2}
    args = copy_args(ops.REGISTRY["prefill_attention"].inputs(Make(), **dims), target)
    q, k_cache, v_cache, table, lengths, starts, *_ = args
    whole = ops.prefill_attention_lse(q, k_cache, v_cache, AttentionMeta(table, lengths, starts, chunk, 51))
    lengths_before = torch.full((chunk,), prefix, dtype=lengths.dtype, device=target)
    every_row = AttentionMeta(table.expand(chunk, -1), lengths_before, starts, 1, 32)
    before = ops.decode_attention_lse(q, k_cache, v_cache, every_row)
    own = AttentionMeta(table[:, prefix // page :], lengths - prefix, starts, chunk, chunk)
    out, lse = ops.merge_attention(*before, *ops.prefill_attention_lse(q, k_cache, v_cache, own))
    torch.testing.assert_close(out, whole[0])
    torch.testing.assert_close(lse, whole[1])
