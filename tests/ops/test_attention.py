"""Paged attention, prefill and decode, and the merge: masks by hand, PyTorch's attention, and the reported faults."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from rooflight import ops
from rooflight.ops import AttentionMeta
from tests.contract.harness import (
    TARGETS,
    Target,
    as_param,
    implementations,
    poisoned_memory,
    same_bits,
)

NAMES = ("prefill_attention", "decode_attention")
BOTH = [target for target in TARGETS if target.op.name in NAMES]
attentions = pytest.mark.parametrize("target", [as_param(target) for target in BOTH])
prefills, decodes = (implementations(name) for name in NAMES)
PAGE = 16


class Paged:
    """Sequences written into a cache whose pages are in random order; every slot that is not used holds `poison`."""

    def __init__(
        self, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor], device: str, poison: float = float("nan")
    ) -> None:
        lengths = [len(k) for k in keys]
        pages = [-(-length // PAGE) for length in lengths]
        total = sum(pages) + 2
        order = torch.randperm(total, generator=torch.Generator().manual_seed(len(lengths))).tolist()
        heads, dim = keys[0].shape[1:]
        self.k, self.v = (torch.full((total, heads, PAGE, dim), poison, dtype=keys[0].dtype) for _ in range(2))
        table = torch.zeros(len(lengths), max([*pages, 1]), dtype=torch.int32)
        for row, count in enumerate(pages):
            for page in range(count):
                table[row, page] = own = order.pop()
                part = slice(page * PAGE, (page + 1) * PAGE)
                for cache, rows in ((self.k, keys[row]), (self.v, values[row])):
                    piece = rows[part].transpose(0, 1)
                    cache[own, :, : piece.shape[1]] = piece
        self.device, self.lengths = device, lengths
        self.k, self.v, self.table = self.k.to(device), self.v.to(device), table.to(device)

    def meta(self, query_lens: Sequence[int]) -> AttentionMeta:
        starts = torch.tensor([0, *query_lens]).cumsum(0).int().to(self.device)
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        return AttentionMeta(self.table, lengths, starts, max([*query_lens, 0]), max([*self.lengths, 0]))

    def attend(
        self, target: Target, q: torch.Tensor, query_lens: Sequence[int] | None = None, window: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        function = ops.decode_attention_lse if query_lens is None else ops.prefill_attention_lse
        meta = self.meta([1] * len(self.lengths) if query_lens is None else query_lens)
        out, lse = function(q.to(self.device), self.k, self.v, meta, window=window, backend=target.provider)
        return out.cpu(), lse.cpu()


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int = 0) -> torch.Tensor:
    """PyTorch's attention in FP64 with an explicit mask, causal at the bottom right. q: (rows, heads, dim)."""
    rows, keys, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    position = torch.arange(rows)[:, None] + keys - rows
    key = torch.arange(keys)[None]
    mask = key <= position
    if window:
        mask &= key > position - window
    k, v = (x.double().repeat_interleave(group, 1).transpose(0, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.double().transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1)


def one_hot_values(keys: int) -> torch.Tensor:
    """Value i is the i-th unit vector, so that the output shows the weight of every key; (keys, 1, 64)."""
    return torch.eye(keys, 64)[:, None]


def zero_scores(target: Target, keys: int, rows: int, window: int = 0) -> torch.Tensor:
    """Weights of `keys` keys in `rows` rows when all scores are 0; the rows are the newest ones."""
    paged = Paged([torch.zeros(keys, 1, 64)], [one_hot_values(keys)], target.device)
    if target.op.name == "prefill_attention":
        return paged.attend(target, torch.zeros(rows, 1, 64), [rows], window)[0][:, 0, :keys]
    steps = []
    for end in range(keys - rows + 1, keys + 1):  # step by step, each with its own cache
        paged = Paged([torch.zeros(end, 1, 64)], [one_hot_values(end)], target.device)
        steps.append(paged.attend(target, torch.zeros(1, 1, 64), window=window)[0][:, 0, :keys])
    return torch.cat(steps)


@attentions
def test_br_026_causal_mask_is_lined_up_at_the_bottom_right(target: Target) -> None:
    """q_len 2, kv_len 5: row 0 averages keys 0 to 3, row 1 keys 0 to 4."""
    weights = zero_scores(target, keys=5, rows=2)
    torch.testing.assert_close(weights, torch.tensor([[0.25] * 4 + [0.0], [0.2] * 5]))


@pytest.mark.parametrize("window", [1, 4, 9, 10, 11, 50])
@attentions
def test_br_027_window_shows_a_token_and_those_just_before_it(target: Target, window: int) -> None:
    """10 tokens: with W = 4 row 9 sees keys 6 to 9; W at and beyond the length changes nothing."""
    weights = zero_scores(target, keys=10, rows=10, window=window)
    expected = torch.zeros(10, 10)
    for row in range(10):
        first = max(0, row - window + 1)
        expected[row, first : row + 1] = 1 / (row - first + 1)
    torch.testing.assert_close(weights, expected)
    if window == 4:
        assert weights[9].nonzero().flatten().tolist() == [6, 7, 8, 9]
    if window >= 10:
        assert torch.equal(weights, zero_scores(target, keys=10, rows=10))


@pytest.mark.parametrize("keys", [16, 17, 33, 48])
@attentions
def test_br_027_window_across_pages(target: Target, keys: int) -> None:
    """A window that begins inside a page, at its first and at its last slot."""
    for window in (1, 15, 16, 17, 18):
        weights = zero_scores(target, keys=keys, rows=2, window=window)
        for row, end in ((0, keys - 1), (1, keys)):
            first = max(0, end - window)
            assert weights[row].nonzero().flatten().tolist() == list(range(first, end))


@attentions
def test_br_005_scores_far_below_any_finite_minus_infinity(target: Target) -> None:
    """All scores near -18100 and lower: the first key wins; a start value of -1e4 for the maximum gives zeros."""
    keys = -(4 + 0.03125 * torch.arange(8))[:, None, None].expand(8, 1, 128).bfloat16()
    values = (torch.arange(8) + 1.0)[:, None, None].expand(8, 1, 128).bfloat16()
    paged = Paged([keys], [values], target.device)
    q = torch.full((1, 1, 128), 400.0).bfloat16()
    out, lse = paged.attend(target, q, [1] if target.op.name == "prefill_attention" else None)
    assert out.eq(1).all()
    torch.testing.assert_close(lse.item(), -4 * 400 * 128 / 128**0.5)


@prefills
def test_br_008_rows_without_a_visible_key_are_zero(target: Target) -> None:
    """q_len 5, kv_len 3: rows 0 and 1 see nothing: output 0, LSE -inf; the others are as if alone."""
    q, k, v = randn(5, 4, 64), randn(3, 2, 64, seed=1), randn(3, 2, 64, seed=2)
    for window in (0, 2, 9):
        out, lse = Paged([k], [v], target.device).attend(target, q, [5], window)
        assert out[:2].eq(0).all()
        assert lse[:2].eq(float("-inf")).all()
        torch.testing.assert_close(out[2:].double(), dense(q[2:], k, v, window), rtol=1e-5, atol=1e-5)
        assert lse[2:].isfinite().all()


@attentions
def test_br_008_an_empty_sequence_beside_others(target: Target) -> None:
    lengths, query_lens = [0, 5, 0], [2, 1, 1]
    keys, values = ([randn(n, 2, 64, seed=seed + i) for i, n in enumerate(lengths)] for seed in (1, 5))
    paged = Paged(keys, values, target.device)
    if target.op.name == "decode_attention":
        q = randn(3, 4, 64)
        out, lse = paged.attend(target, q)
        row = 1
    else:
        q = randn(4, 4, 64)
        out, lse = paged.attend(target, q, query_lens)
        row = 2
    expected = dense(q[row : row + 1], keys[1], values[1])
    torch.testing.assert_close(out[row : row + 1].double(), expected, rtol=1e-5, atol=1e-5)
    others = [i for i in range(len(q)) if i != row]
    assert out[others].eq(0).all()
    assert lse[others].eq(float("-inf")).all()


@prefills
def test_rows_of_no_sequence_are_zero(target: Target) -> None:
    """Padding behind the last sequence, as in a batch of fixed size: output 0 and LSE -inf, whatever was in memory."""
    q, k, v = randn(5, 4, 64), randn(3, 2, 64, seed=1), randn(3, 2, 64, seed=2)
    paged = Paged([k], [v], target.device)
    with poisoned_memory():
        out, lse = paged.attend(target, q, [2])
    torch.testing.assert_close(out[:2].double(), dense(q[:2], k, v), rtol=1e-5, atol=1e-5)
    assert out[2:].eq(0).all()
    assert lse[2:].eq(float("-inf")).all()


@implementations("merge_attention")
def test_br_008_merge_with_an_empty_part(target: Target) -> None:
    """The empty part may hold anything; the other comes through bit for bit; two empty parts give zeros."""
    out, lse = randn(4, 2, 64).to(target.device), randn(4, 2, seed=1).to(target.device)
    empty = torch.full_like(lse, float("-inf"))
    for garbage in (0.0, 5.0, float("nan"), float("inf")):
        rubbish = torch.full_like(out, garbage)
        for merged in (
            ops.merge_attention(out, lse, rubbish, empty, backend=target.provider),
            ops.merge_attention(rubbish, empty, out, lse, backend=target.provider),
        ):
            assert same_bits(merged[0], out)
            assert torch.equal(merged[1], lse)
        nothing, minus_infinity = ops.merge_attention(rubbish, empty, rubbish, empty, backend=target.provider)
        assert nothing.eq(0).all()
        assert minus_infinity.eq(float("-inf")).all()


@implementations("merge_attention")
def test_merge_by_hand(target: Target) -> None:
    """LSEs log 1 and log 3: shares a quarter and three quarters, LSE log 4; large LSEs do not overflow."""
    for shift in (0.0, 1000.0, -1000.0):
        lse_a = torch.tensor([[shift]], device=target.device)
        lse_b = lse_a + torch.tensor(3.0).log()
        out_a, out_b = (torch.full((1, 1, 8), value, device=target.device) for value in (8.0, 16.0))
        out, lse = ops.merge_attention(out_a, lse_a, out_b, lse_b, backend=target.provider)
        torch.testing.assert_close(out.cpu(), torch.full((1, 1, 8), 14.0), rtol=1e-4, atol=0)
        torch.testing.assert_close(lse.item(), shift + torch.tensor(4.0).log().item())


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("length", [330, 335, 336, 600])
@attentions
def test_br_009_what_a_window_hides_may_hold_nan(target: Target, length: int, head_dim: int) -> None:
    """Half types, in whose kernels a place in shared memory has seen and hidden tokens, and then a later chunk."""
    window, rows = 200, 1 if target.op.name == "decode_attention" else 3
    keys, values = (randn(length, 2, head_dim, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    q = randn(rows, 4, head_dim, dtype=torch.bfloat16)
    expected = dense(q, keys, values, window)
    for hidden in (keys, values):
        hidden[: length - rows - window + 1] = float("nan")
    out, _ = Paged([keys], [values], target.device).attend(target, q, None if rows == 1 else [rows], window)
    torch.testing.assert_close(out.double(), expected, rtol=0.02, atol=0.02)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["tokens before heads", "padded pages", "padded tokens"])
def test_caches_with_other_strides(layout: str) -> None:
    """As the copy engine may or may not count them; always the same result."""
    keys, values = (randn(90, 2, 128, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    q = randn(1, 4, 128, dtype=torch.bfloat16)
    paged = Paged([keys], [values], "cuda")
    expected = ops.decode_attention(q.cuda(), paged.k, paged.v, paged.meta([1]))

    def laid_out(cache: torch.Tensor) -> torch.Tensor:
        _, heads, tokens, width = cache.shape
        if layout == "tokens before heads":
            return cache.transpose(1, 2).contiguous().transpose(1, 2)
        if layout == "padded tokens":
            return torch.nn.functional.pad(cache, (0, 8))[..., :width]
        whole = torch.nn.functional.pad(cache.flatten(1), (0, 8))
        return whole[:, : heads * tokens * width].unflatten(1, (heads, tokens, width))

    k, v = laid_out(paged.k), laid_out(paged.v)
    assert k.stride() != paged.k.stride()
    assert torch.equal(ops.decode_attention(q.cuda(), k, v, paged.meta([1])), expected)
    prompt = randn(90, 4, 128, seed=5, dtype=torch.bfloat16).cuda()
    found, wanted = (ops.prefill_attention(prompt, *cache, paged.meta([90])) for cache in ((k, v), (paged.k, paged.v)))
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


@attentions
def test_a_cache_of_one_page_whose_stride_says_nothing(target: Target) -> None:
    """(1, 2, 16, 64) with the strides of (2, 1, 16, 64): from one page to the next is as far as between heads."""
    keys, values = (randn(16, 2, 64, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    rows = 1 if target.op.name == "decode_attention" else 16
    q = randn(rows, 4, 64, dtype=torch.bfloat16)
    paged = Paged([keys], [values], target.device)
    paged.k, paged.v = (
        cache[paged.table[0].long()].as_strided((1, 2, 16, 64), (1024, 1024, 64, 1)) for cache in (paged.k, paged.v)
    )
    assert paged.k.stride()[0] == paged.k.stride()[1]
    paged.table.zero_()
    out, _ = paged.attend(target, q, None if rows == 1 else [rows])
    torch.testing.assert_close(out.double(), dense(q, keys, values), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), float("-inf")], ids=str)
@attentions
def test_br_009_unused_slots_do_not_leak(target: Target, poison: float) -> None:
    """Lengths 1, 3, 17, 32 in pages of 16: whatever stands behind them, the same bits as with zeros there."""
    lengths = (1, 3, 17, 32)
    keys, values = ([randn(n, 2, 64, seed=seed + i) for i, n in enumerate(lengths)] for seed in (1, 9))
    for window in (0, 5):
        results = []
        for fill in (poison, 0.0):
            paged = Paged(keys, values, target.device, fill)
            if target.op.name == "decode_attention":
                q = randn(4, 4, 64)
                rows = [slice(i, i + 1) for i in range(4)]
                results.append(paged.attend(target, q, window=window))
            else:
                q = randn(1 + 3 + 2 + 32, 4, 64)
                rows = [slice(0, 1), slice(1, 4), slice(4, 6), slice(6, 38)]
                results.append(paged.attend(target, q, [1, 3, 2, 32], window))
        (out, lse), (clean_out, clean_lse) = results
        assert out.isfinite().all()
        assert same_bits(out, clean_out)
        assert same_bits(lse, clean_lse)
        for index, part in enumerate(rows):
            expected = dense(q[part], keys[index], values[index], window)
            torch.testing.assert_close(out[part].double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("heads", [(40, 8), (24, 4), (28, 4), (14, 2), (3, 1), (64, 4), (32, 32)], ids=str)
@attentions
def test_br_025_group_sizes_and_head_dims(target: Target, heads: tuple[int, int], head_dim: int) -> None:
    """Any ratio of query heads to KV heads, in both operators; each query head reads the KV head of its group."""
    lengths = (19, 33)
    keys, values = ([randn(n, heads[1], head_dim, seed=seed + i) for i, n in enumerate(lengths)] for seed in (1, 9))
    paged = Paged(keys, values, target.device)
    if target.op.name == "decode_attention":
        q, rows, query_lens = randn(2, heads[0], head_dim), (slice(0, 1), slice(1, 2)), None
    else:
        q, rows, query_lens = randn(8, heads[0], head_dim), (slice(0, 3), slice(3, 8)), (3, 5)
    out, _ = paged.attend(target, q, query_lens)
    for part, k, v in zip(rows, keys, values, strict=True):
        torch.testing.assert_close(out[part].double(), dense(q[part], k, v), rtol=1e-5, atol=1e-5)


@attentions
def test_query_heads_belong_to_the_kv_head_of_their_group(target: Target) -> None:
    """Values say which KV head they are of: query heads 0, 1, 2 read head 0, the next three head 1."""
    values = torch.arange(2.0)[None, :, None].expand(5, 2, 64)
    paged = Paged([torch.zeros(5, 2, 64)], [values], target.device)
    out, _ = paged.attend(target, torch.zeros(1, 6, 64), [1] if target.op.name == "prefill_attention" else None)
    assert out[0, :, 0].tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]


@attentions
def test_lse_is_the_natural_logarithm_of_the_sum(target: Target) -> None:
    """Five keys with score 0: log 5; with score 2 each: 2 + log 5."""
    for score in (0.0, 2.0):
        paged = Paged([torch.full((5, 1, 64), score / 8)], [one_hot_values(5)], target.device)
        q = torch.ones(1, 1, 64)  # q . k = 8 * score, and the default scale is an eighth
        _, lse = paged.attend(target, q, [1] if target.op.name == "prefill_attention" else None)
        torch.testing.assert_close(lse.item(), score + torch.tensor(5.0).log().item())


@attentions
def test_scale_is_taken_as_given(target: Target) -> None:
    """Scale 0 averages; the default is 1 / sqrt(head_dim)."""
    function = getattr(ops, target.op.name)
    keys, values = randn(6, 1, 64), one_hot_values(6)
    paged = Paged([keys], [values], target.device)
    q = randn(1, 1, 64, seed=3).to(target.device)
    meta = paged.meta([1])
    flat = function(q, paged.k, paged.v, meta, scale=0.0, backend=target.provider)
    torch.testing.assert_close(flat[0, 0, :6].cpu(), torch.full((6,), 1 / 6))
    default = function(q, paged.k, paged.v, meta, backend=target.provider)
    assert torch.equal(default, function(q, paged.k, paged.v, meta, scale=0.125, backend=target.provider))
    assert not torch.equal(default, function(q, paged.k, paged.v, meta, scale=0.25, backend=target.provider))


@pytest.mark.parametrize("window", [0, 40])
@prefills
def test_br_026_a_prompt_in_chunks_equals_the_whole(target: Target, window: int) -> None:
    """300 tokens written by qk_norm_rope_cache_ and attended whole and in chunks of 1, 7 and 64."""
    tokens, device = 300, target.device
    q_all, k_all, v_all = (randn(tokens, heads, 64, seed=heads).to(device) for heads in (4, 2, 2))
    weight = randn(64, seed=7).to(device)
    angles = torch.arange(tokens)[:, None] * 1e4 ** (-torch.arange(0, 64, 2) / 64)
    cos_sin = torch.cat((angles.cos(), angles.sin()), 1).to(device)
    pages = 20
    table = torch.randperm(pages, generator=torch.Generator().manual_seed(0))[:19].to(device)

    def run(chunk: int) -> torch.Tensor:
        k_cache, v_cache = (torch.full((pages, 2, PAGE, 64), float("nan"), device=device) for _ in range(2))
        outs = []
        for start in range(0, tokens, chunk):
            positions = torch.arange(start, min(start + chunk, tokens), device=device)
            q, k, v = (x[positions].clone() for x in (q_all, k_all, v_all))
            slots = table[positions // PAGE] * PAGE + positions % PAGE
            ops.qk_norm_rope_cache_(q, k, v, weight, weight, cos_sin, positions, slots, k_cache, v_cache)
            end = start + len(positions)
            lengths = torch.tensor([end], dtype=torch.int32, device=device)
            starts = torch.tensor([0, len(positions)], dtype=torch.int32, device=device)
            meta = AttentionMeta(table[None].int(), lengths, starts, len(positions), end)
            outs.append(ops.prefill_attention(q, k_cache, v_cache, meta, window=window, backend=target.provider))
        return torch.cat(outs)

    whole = run(tokens)
    assert whole.isfinite().all()
    for chunk in (7, 64) if window else (1, 7, 64):
        torch.testing.assert_close(run(chunk), whole, rtol=1e-5, atol=1e-5)


@decodes
def test_decode_equals_the_last_row_of_prefill(target: Target) -> None:
    lengths = (1, 16, 17, 45)
    keys, values = ([randn(n, 2, 64, seed=seed + i) for i, n in enumerate(lengths)] for seed in (1, 9))
    q = randn(4, 4, 64)
    paged = Paged(keys, values, target.device)
    for window in (0, 7):
        decoded = paged.attend(target, q, window=window)
        meta = paged.meta([1] * 4)
        prefilled = ops.prefill_attention_lse(q.to(target.device), paged.k, paged.v, meta, window=window)
        for one, other in zip(decoded, prefilled, strict=True):
            torch.testing.assert_close(one, other.cpu(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_head_count_that_does_not_divide_is_refused(name: str) -> None:
    paged = Paged([torch.zeros(3, 2, 64)], [torch.zeros(3, 2, 64)], "cpu")
    with pytest.raises(ValueError, match=r"^q must have a multiple of num_kv_heads = 2 heads, was 3"):
        getattr(ops, name)(torch.zeros(1, 3, 64), paged.k, paged.v, paged.meta([1]))
    with pytest.raises(ValueError, match=r"^window must be 0 \(off\) or more, was -1"):
        getattr(ops, name)(torch.zeros(1, 4, 64), paged.k, paged.v, paged.meta([1]), window=-1)


def test_lengths_beyond_the_block_table_are_refused() -> None:
    """A length that the table has no pages for would else attend the keys it finds, in silence."""
    q, cache = torch.ones(1, 1, 8), torch.ones(3, 1, 4, 8)
    table, starts = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    for length in (5, 9, -1):
        meta = ops.AttentionMeta(table, torch.tensor([length], dtype=torch.int32), starts, 1, 9)
        for attention in (ops.decode_attention, ops.prefill_attention):
            with pytest.raises(ValueError, match=f"seq_lens must fit 1 pages of 4 in the block table, was {length}"):
                attention(q, cache, cache, meta)


@pytest.mark.parametrize("starts", [[0, 5], [-1, 1], [1, 0], [1, 1]], ids=str)
def test_query_starts_outside_the_rows_are_refused(starts: list[int]) -> None:
    q, cache = torch.ones(1, 1, 8), torch.ones(3, 1, 4, 8)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
    meta = ops.AttentionMeta(table, lengths, torch.tensor(starts, dtype=torch.int32), 5, 1)
    with pytest.raises(ValueError, match="query_starts must rise from 0 to at most num_tokens = 1"):
        ops.prefill_attention(q, cache, cache, meta)
