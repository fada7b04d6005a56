"""What prefill and decode attention over the paged KV cache share: metadata, checks, reference, composition, cost.

    out_t = sum_j softmax_j(scale * q_t . k_j) v_j    over the keys j that token t may see

All keys and values are read from the cache through the block table, those of the new tokens included. The mask is
causal and lined up at the bottom right: the last new token sees every key, the one before all but the last.
A window of W shows a token itself and the W - 1 keys before it. A row that sees nothing gives zeros and
LSE -inf, never NaN; slots beyond a sequence's length are never read, whatever they hold. Scores, softmax and
sums are FP32 (FP64 for FP64), LSE is the natural logarithm of the sum of exponentials.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.checks import wide
from rooflight.ops.contract import Cost, Make

QUERY_BLOCK = 128  # rows of scores the reference holds at a time

# Twice the usual bound: scores are sums over head_dim inside an exponential, and the matrix library sums them in
# another order for another number of rows, so two right compositions differ by more than either rounds (seen: 2.4x in
# FP32 at head_dim 128 and 256 on an H200, one element in 10,000).
ATTENTION_TOLERANCE = 4.0


@dataclass(frozen=True)
class AttentionMeta:
    """Which tokens belong to which sequence, and where their keys are.

    block_table: (num_seqs, max_pages) int32, physical page of each logical page. seq_lens: (num_seqs,) int32, keys of
    each sequence, new ones included. query_starts: (num_seqs + 1,) int32, first row of each sequence's new tokens,
    rising from 0; kernels on a GPU take that for granted.
    max_query_len and max_seq_len are host-side upper bounds; larger bounds give the same bits (graphs rely on it).
    whole_prompt: the host knows that there is one sequence, all of whose keys are those of the new tokens.
    decodes: further sequences of one new token each, behind all those tokens, for decode attention.
    splits: parts that decode attention cuts a sequence's keys into, at most; 0 leaves it to the provider's rule.
    """

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_starts: torch.Tensor
    max_query_len: int
    max_seq_len: int
    whole_prompt: bool = False
    decodes: AttentionMeta | None = None
    splits: int = 0


def check_cache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    window: int,
) -> None:
    checks.is_float("q", q)
    checks.has_shape("q", q, None, None, None)
    checks.has_shape("k_cache", k_cache, None, None, None, q.shape[2])
    checks.same_shape("v_cache", v_cache, k_cache)
    if k_cache.shape[1] == 0 or q.shape[1] % k_cache.shape[1]:
        checks.fail("q", f"have a multiple of num_kv_heads = {k_cache.shape[1]} heads", q.shape[1])
    checks.has_shape("seq_lens", seq_lens, None)
    checks.has_shape("block_table", block_table, seq_lens.shape[0], None)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.same_dtype(name, tensor, q)
        checks.same_device(name, tensor, q)
    for name, tensor in (("block_table", block_table), ("seq_lens", seq_lens)):
        checks.has_dtype(name, tensor, torch.int32)
        checks.same_device(name, tensor, q)
    if window < 0:
        checks.fail("window", "be 0 (off) or more", window)


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, hidden: torch.Tensor | None, scale: float, return_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """q: (rows, num_heads, head_dim) over k, v: (num_kv_heads, keys, head_dim) in the computing precision.

    hidden: (rows, n) bool, which of the last n keys a row may not see; None if every row sees every key. All query
    heads of a KV head are served by one product.
    """
    rows, heads, dim = q.shape
    kv_heads, keys, _ = k.shape
    group = heads // kv_heads
    grouped = wide(q).view(rows, kv_heads, group, dim).permute(1, 2, 0, 3).reshape(kv_heads, group * rows, dim)
    scores = torch.bmm(grouped, k.transpose(1, 2)).mul_(scale)  # (num_kv_heads, group * rows, keys)
    if hidden is not None:
        per_row = scores.view(kv_heads, group, rows, keys)
        per_row[..., keys - hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    weights = torch.softmax(scores, -1)
    if hidden is not None and hidden.shape[1] == keys:  # a row that sees nothing: 0, not the NaN of an empty softmax
        weights.view(kv_heads, group, rows, keys).masked_fill_(hidden.all(-1, keepdim=True), 0)
    out = torch.bmm(weights, v).view(kv_heads, group, rows, dim).permute(2, 0, 1, 3).reshape(rows, heads, dim)
    if not return_lse:
        return out.to(q.dtype), None
    lse = torch.logsumexp(scores, -1).view(kv_heads, group, rows).permute(2, 0, 1).reshape(rows, heads)
    return out.to(q.dtype), lse


def _hidden(device: torch.device, rows: int, keys: int, first: int, first_key: int, window: int) -> torch.Tensor:
    """(rows, keys) bool: the keys that a row may not see."""
    position = torch.arange(first, first + rows, device=device)[:, None]
    key = torch.arange(first_key, first_key + keys, device=device)
    hidden = key > position
    return hidden | (key <= position - window) if window else hidden


def _pages(cache: torch.Tensor, pages: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Rows first … last - 1 of the given pages laid end to end, (num_kv_heads, keys, head_dim)."""
    # Along dimension 0: index_select along another one first copies the whole cache.
    return cache.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, first:last]


def attend_sequence(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    table: torch.Tensor,
    length: int,
    scale: float,
    window: int,
    return_lse: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of one sequence's new tokens q, which end at position length - 1, a block of rows at a time."""
    num_rows = q.shape[0]
    if not 0 <= length <= table.shape[0] * k_cache.shape[2]:
        checks.fail("seq_lens", f"fit {table.shape[0]} pages of {k_cache.shape[2]} in the block table", length)
    start = length - num_rows  # position of the first new token; negative rows see nothing
    first_key = max(0, start - window + 1) if window else 0
    page_size = k_cache.shape[2]
    first_page = first_key // page_size
    pages = table[first_page : -(-length // page_size)]
    offset = first_page * page_size
    k, v = (wide(_pages(cache, pages, first_key - offset, length - offset)) for cache in (k_cache, v_cache))
    if num_rows == 1 and length > 0:  # decode: what was gathered is what the row sees
        return _attend(q, k, v, None, scale, return_lse)
    parts = []
    for row in range(0, num_rows, QUERY_BLOCK):
        block = q[row : row + QUERY_BLOCK]
        low = max(0, start + row - window + 1 - first_key) if window else 0
        low = min(low, k.shape[1])
        high = max(low, min(k.shape[1], start + row + block.shape[0] - first_key))
        # Without a window every row sees the keys before the block; the mask is made for the rest.
        seen = 0 if window else max(0, min(start + row, high))
        hidden = _hidden(q.device, block.shape[0], high - low - seen, start + row, first_key + low + seen, window)
        parts.append(_attend(block, k[:, low:high], v[:, low:high], hidden, scale, return_lse))
    if len(parts) == 1:
        return parts[0]
    lses = [lse for _, lse in parts if lse is not None]
    return torch.cat([out for out, _ in parts]), torch.cat(lses) if return_lse else None


def empty_result(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """out of zeros and lse of -inf, or an lse without elements where none is wanted."""
    return q.new_zeros(q.shape), no_lse(q).new_full(q.shape[:2], float("-inf")) if return_lse else no_lse(q)


def no_lse(q: torch.Tensor) -> torch.Tensor:
    """What stands for an LSE nobody wants: a tensor without elements."""
    return q.new_empty(0, dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)


def fake(q: torch.Tensor, return_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), no_lse(q).new_empty(q.shape[:2]) if return_lse else no_lse(q)


def compose(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    query_starts: torch.Tensor,
    max_query_len: int,
    max_seq_len: int,
    scale: float,
    window: int,
    return_lse: bool,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One key at a time from its page, one query row at a time, torch.softmax over the visible keys."""
    out = torch.zeros(q.shape, dtype=compute, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), dtype=compute, device=q.device)
    page_size, group = k_cache.shape[2], q.shape[1] // k_cache.shape[1]
    starts = query_starts.tolist()
    for index, length in enumerate(seq_lens.tolist()):
        where = [divmod(position, page_size) for position in range(length)]
        pages = [int(block_table[index, page]) for page, _ in where]
        offsets = [offset for _, offset in where]
        k, v = (
            cache[pages, :, offsets].to(compute).repeat_interleave(group, 1) for cache in (k_cache, v_cache)
        )  # (length, num_heads, head_dim)
        for row in range(starts[index], starts[index + 1]):
            end = length - (starts[index + 1] - row) + 1
            begin = max(0, end - window) if window else 0
            if end > begin:
                scores = torch.einsum("hd,khd->hk", q[row].to(compute), k[begin:end]) * scale
                out[row] = torch.einsum("hk,khd->hd", torch.softmax(scores, -1), v[begin:end])
                lse[row] = torch.logsumexp(scores, -1)
    return out, lse if return_lse else lse.new_empty(0)


def host_lengths(args: Mapping[str, Any], hints: Mapping[str, Any], name: str) -> list[int]:
    """Lengths for a cost: from the hints, or from a tensor that holds values (a fake one does not)."""
    if name in hints:
        return list(hints[name])
    tensor = args[name]
    if type(tensor) is not torch.Tensor or tensor.is_meta:
        raise ValueError(f"hints must hold {name}: a list of lengths, since a fake tensor has no values")
    return tensor.tolist()


def _seen(length: int, window: int) -> int:
    """Keys that the rows at positions 0 … length - 1 see, all together."""
    full = min(length, window) if window else length
    return full * (full + 1) // 2 + (length - full) * window


def attention_cost(args: Mapping[str, Any], lengths: Sequence[int], query_lens: Sequence[int]) -> Cost:
    """K and V of every key that some row sees are read once a KV head; two products a visible pair and head."""
    q, k_cache, window = args["q"], args["k_cache"], args["window"]
    lse = 4 * q.shape[0] * q.shape[1] if args["return_lse"] else 0
    pairs = keys = 0
    for (length, rows), count in Counter(zip(lengths, query_lens, strict=True)).items():  # a batch is often all alike
        pairs += count * (_seen(length, window) - _seen(max(0, length - rows), window))
        keys += count * (min(length, window + rows - 1) if window else length)
    read = (q.numel() + 2 * keys * k_cache.shape[1] * q.shape[2]) * q.element_size() + 4 * args["block_table"].numel()
    return Cost(
        read,
        q.numel() * q.element_size() + lse,
        4 * pairs * q.shape[1] * q.shape[2],
        unit="tensor",
    )


def paged_inputs(
    make: Make,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int = 16,
    poison: float | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k_cache, v_cache, block_table, seq_lens, query_starts with shuffled pages; unused slots hold `poison`."""
    pages = [-(-length // page_size) for length in seq_lens]
    num_pages = sum(pages) + 1
    order = torch.randperm(num_pages, generator=make.generator()).tolist()
    table = torch.zeros(len(seq_lens), max([*pages, 1]), dtype=torch.int32)
    caches = [make.randn(num_pages, num_kv_heads, page_size, head_dim, salt=salt) for salt in (8, 9)]
    used = torch.zeros(num_pages, page_size, dtype=torch.bool)
    for index, (count, length) in enumerate(zip(pages, seq_lens, strict=True)):
        own = [order.pop() for _ in range(count)]
        table[index, :count] = torch.tensor(own, dtype=torch.int32)
        for position in range(length):
            used[own[position // page_size], position % page_size] = True
    if poison is not None:
        for cache in caches:
            cache.masked_fill_(~used[:, None, :, None].to(make.device), poison)
    starts = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q = make.randn(sum(query_lens), num_heads, head_dim, salt=10)
    lengths = torch.tensor(list(seq_lens), dtype=torch.int32)
    k_cache, v_cache = caches
    return q, k_cache, v_cache, table.to(make.device), lengths.to(make.device), starts.to(make.device)
