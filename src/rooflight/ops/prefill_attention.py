"""Attention of several new tokens a sequence over the paged cache: prompts, whole or in chunks.

See `paged_attention` for the formula and the rules of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.paged_attention import (
    ATTENTION_TOLERANCE,
    AttentionMeta,
    attend_sequence,
    attention_cost,
    check_cache,
    compose,
    empty_result,
    fake,
    host_lengths,
    paged_inputs,
)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    *,
    scale: float | None = None,
    window: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of every new token; see `prefill_attention_lse` for the arguments. Returns out only."""
    return _run(q, k_cache, v_cache, meta, scale, window, False, backend)[0]


def prefill_attention_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    *,
    scale: float | None = None,
    window: int = 0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (num_tokens, num_heads, head_dim), the new tokens of all sequences one after the other.

    k_cache, v_cache: (num_pages, num_kv_heads, page_size, head_dim) of q's dtype; num_heads is a multiple of
    num_kv_heads. scale: default 1 / sqrt(head_dim). window: 0 for none. Returns (out like q,
    lse (num_tokens, num_heads) FP32). Raises ValueError for shapes, dtypes or devices that do not fit. No gradient.
    The Triton and CUDA providers take at most 128 query heads a KV head and want stride 1 in the last dimension.
    """
    return _run(q, k_cache, v_cache, meta, scale, window, True, backend)


def _run(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    scale: float | None,
    window: int,
    return_lse: bool,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operator = PREFILL_ATTENTION.overload(q, backend)
    table, lengths, starts = meta.block_table, meta.seq_lens, meta.query_starts
    bounds = meta.max_query_len, meta.max_seq_len
    result: tuple[torch.Tensor, torch.Tensor]
    result = operator(q, k_cache, v_cache, table, lengths, starts, *bounds, scale, window, return_lse)
    return result


def _check_prefill(
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
) -> None:
    check_cache(q, k_cache, v_cache, block_table, seq_lens, window)
    checks.has_shape("query_starts", query_starts, seq_lens.shape[0] + 1)
    checks.has_dtype("query_starts", query_starts, torch.int32)
    checks.same_device("query_starts", query_starts, q)


def _prefill_reference(
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
) -> tuple[torch.Tensor, torch.Tensor]:
    out, all_lse = empty_result(q, return_lse)
    starts = query_starts.tolist()
    if starts != sorted(starts) or starts[0] != 0 or starts[-1] > q.shape[0]:
        checks.fail("query_starts", f"rise from 0 to at most num_tokens = {q.shape[0]}", starts)
    for index, length in enumerate(seq_lens.tolist()):
        rows = slice(starts[index], starts[index + 1])
        if rows.stop > rows.start:
            own = q[rows], k_cache, v_cache, block_table[index]
            out[rows], lse = attend_sequence(*own, length, scale, window, return_lse)
            if lse is not None:
                all_lse[rows] = lse
    return out, all_lse


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    lengths = host_lengths(args, hints, "seq_lens")
    if "query_lens" in hints:
        return attention_cost(args, lengths, hints["query_lens"])
    starts = host_lengths(args, hints, "query_starts")
    return attention_cost(args, lengths, [end - start for start, end in pairwise(starts)])


def _inputs(
    make: Make,
    seq_lens: Sequence[int],
    query_lens: Sequence[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    window: int = 0,
) -> Args:
    tensors = paged_inputs(make, seq_lens, query_lens, num_heads, num_kv_heads, head_dim, page_size, float("nan"))
    bounds = max([*query_lens, 0]), max([*seq_lens, 0])
    return *tensors, *bounds, head_dim**-0.5, window, True


_SHAPES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (
    ((), ()),
    ((1,), (1,)),
    ((3,), (5,)),  # two rows that see nothing
    ((5,), (2,)),
    ((0, 17, 33), (0, 17, 3)),
    ((150, 16), (140, 16)),
)
PREFILL_ATTENTION = define(
    "prefill_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor query_starts, "
    "int max_query_len, int max_seq_len, float scale, int window, bool return_lse) -> (Tensor, Tensor)",
    reference=_prefill_reference,
    fake=lambda q, *rest: fake(q, rest[-1]),
    cost=_cost,
    composition=compose,
    inputs=_inputs,
    check=_check_prefill,
    capturable_reference=False,
    tolerance=ATTENTION_TOLERANCE,
    sweep=[{"seq_lens": s, "query_lens": q} for s, q in _SHAPES]
    + [{"seq_lens": (10, 3), "query_lens": (7, 3), "window": window} for window in (1, 4, 10, 50)]
    + [{"seq_lens": (150,), "query_lens": (150,), "window": 20}]  # a second block of rows behind the window
    + [
        {"seq_lens": (19,), "query_lens": (6,), "num_heads": h, "num_kv_heads": kv, "head_dim": d}
        for h, kv, d in ((40, 8, 128), (14, 2, 64), (3, 1, 80), (4, 2, 256))
    ],
    workloads={
        f"qwen3-0.6b {n}+{prefix}": {
            "seq_lens": (n + prefix,),
            "query_lens": (n,),
            "num_heads": 16,
            "num_kv_heads": 8,
            "head_dim": 128,
        }
        for n, prefix in ((32, 0), (1024, 0), (8192, 0), (512, 7680))
    },
)
