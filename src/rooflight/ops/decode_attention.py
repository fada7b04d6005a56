"""Attention of one new token a sequence over the paged cache: every step after the prompt.

See `paged_attention` for the formula and the rules of the mask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    no_lse,
    paged_inputs,
)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    *,
    scale: float | None = None,
    window: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """Attention of one new token a sequence; see `decode_attention_lse` for the arguments. Returns out only."""
    return _run(q, k_cache, v_cache, meta, scale, window, False, backend)[0]


def decode_attention_lse(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    *,
    scale: float | None = None,
    window: int = 0,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (num_seqs, num_heads, head_dim), the newest token of each sequence, whose key is already in the cache.

    Everything else as in `prefill_attention_lse`; meta.query_starts is not read. A sequence of length 0 gives zeros.
    The Triton provider takes at most 128 query heads a KV head; how it splits the keys depends on the batch, the card
    and meta.splits, so a row's last bits may too. They never depend on the bounds or on other sequences' lengths.
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
    operator = DECODE_ATTENTION.overload(q, backend)
    table, lengths = meta.block_table, meta.seq_lens
    result: tuple[torch.Tensor, torch.Tensor]
    rest = scale, window, return_lse, meta.splits
    result = operator(q, k_cache, v_cache, table, lengths, meta.max_seq_len, *rest)
    return result


def _check_decode(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    return_lse: bool,
    splits: int = 0,
) -> None:
    check_cache(q, k_cache, v_cache, block_table, seq_lens, window)
    checks.has_shape("seq_lens", seq_lens, q.shape[0])
    if splits < 0:
        checks.fail("splits", "be 0 (the provider's rule) or more", splits)


def _decode_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    return_lse: bool,
    splits: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    lengths = seq_lens.tolist()
    rest = scale, window, return_lse
    if len(lengths) == 1:
        out, lse = attend_sequence(q, k_cache, v_cache, block_table[0], lengths[0], *rest)
        return out, no_lse(q) if lse is None else lse
    out, all_lse = empty_result(q, return_lse)
    for index, length in enumerate(lengths):
        row = slice(index, index + 1)
        out[row], lse = attend_sequence(q[row], k_cache, v_cache, block_table[index], length, *rest)
        if lse is not None:
            all_lse[row] = lse
    return out, all_lse


def _decode_composition(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    scale: float,
    window: int,
    return_lse: bool,
    splits: int = 0,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.arange(q.shape[0] + 1, dtype=torch.int32, device=q.device)
    rest = block_table, seq_lens, starts, 1, max_seq_len, scale, window, return_lse
    return compose(q, k_cache, v_cache, *rest, compute=compute)


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    lengths = host_lengths(args, hints, "seq_lens")
    return attention_cost(args, lengths, [min(1, length) for length in lengths])


def _inputs(
    make: Make,
    seq_lens: Sequence[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    window: int = 0,
    splits: int = 0,
) -> Args:
    query_lens = [1] * len(seq_lens)
    tensors = paged_inputs(make, seq_lens, query_lens, num_heads, num_kv_heads, head_dim, page_size, float("nan"))
    return *tensors[:5], max([*seq_lens, 0]), head_dim**-0.5, window, True, splits


DECODE_ATTENTION = define(
    "decode_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, int max_seq_len, float scale, "
    "int window, bool return_lse, int splits=0) -> (Tensor, Tensor)",
    reference=_decode_reference,
    fake=lambda q, *rest: fake(q, rest[7]),
    cost=_cost,
    composition=_decode_composition,
    inputs=_inputs,
    check=_check_decode,
    capturable_reference=False,
    tolerance=ATTENTION_TOLERANCE,
    sweep=[{"seq_lens": lens} for lens in ((), (1,), (0,), (1, 3, 17, 32), (16, 15, 130))]
    + [{"seq_lens": (10, 3), "window": window} for window in (1, 4, 10, 50)]
    + [{"seq_lens": (40, 3, 130), "splits": splits} for splits in (1, 3)]
    + [
        {"seq_lens": (19, 33), "num_heads": h, "num_kv_heads": kv, "head_dim": d}
        for h, kv, d in ((40, 8, 128), (14, 2, 64), (3, 1, 80), (4, 2, 256))
    ],
    workloads={
        f"qwen3-0.6b {batch}x{context}": {
            "seq_lens": (context,) * batch,
            "num_heads": 16,
            "num_kv_heads": 8,
            "head_dim": 128,
        }
        for batch, context in ((1, 128), (1, 1024), (1, 8192), (64, 1024))
    },
)
