"""Decode attention with the step before it: all there is between two projections of a decode step.

What `qk_norm_rope_cache_` and `decode_attention` do one after the other. One kernel has a launch less, and the keys of
earlier tokens, which no projection makes, can be on their way while the projection still runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.decode_attention import DECODE_ATTENTION
from rooflight.ops.paged_attention import ATTENTION_TOLERANCE, AttentionMeta, check_cache, host_lengths, paged_inputs
from rooflight.ops.qk_norm_rope_cache import QK_NORM_ROPE_CACHE_, check_step
from rooflight.ops.rope import packed_heads, table


def qk_norm_rope_attention_(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    meta: AttentionMeta,
    eps: float = 1e-6,
    *,
    scale: float | None = None,
    window: int = 0,
    interleaved: bool = False,
    backend: str | None = None,
) -> None:
    """Attention of each sequence's newest token, whose key and value are written to the cache on the way.

    out: (num_seqs, num_heads, head_dim), written, of memory of its own; fastest without gaps. q: the same shape; k, v:
    (num_seqs, num_kv_heads, head_dim): the newest tokens as the projection gives them, not changed. Weights, cos_sin,
    positions, slots and caches as in `qk_norm_rope_cache_`, meta as in `decode_attention`: seq_lens counts the newest
    token, and slots is its place by block_table. A sequence of length 0, with slot -1, gives zeros; what one with a
    length and another slot gives means nothing. Raises ValueError for shapes, dtypes and devices. No gradient.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operator = QK_NORM_ROPE_ATTENTION_.overload(q, backend)
    step = q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache
    paged = meta.block_table, meta.seq_lens, meta.max_seq_len
    operator(out, q, k, v, *step, *paged, eps, scale, window, interleaved, meta.splits)


def _check(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    eps: float,
    scale: float,
    window: int,
    interleaved: bool = False,
    splits: int = 0,
) -> None:
    checks.is_float("out", out)
    checks.has_shape("out", out, None, None, None)
    checks.same_shape("q", q, out)
    checks.same_dtype("q", q, out)
    checks.same_device("q", q, out)
    check_step(q, k, v, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache)
    checks.has_shape("seq_lens", seq_lens, q.shape[0])
    check_cache(q, k_cache, v_cache, block_table, seq_lens, window)
    checks.no_overlap("out", out)
    if splits < 0:
        checks.fail("splits", "be 0 (the provider's rule) or more", splits)


def in_two(
    step: Any,
    attend: Any,
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    eps: float,
    scale: float,
    window: int,
    interleaved: bool = False,
    splits: int = 0,
) -> None:
    """By implementations of `qk_norm_rope_cache_` and `decode_attention`."""
    turned = q.clone(memory_format=torch.contiguous_format)
    step(turned, k, v, q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache, eps, interleaved)
    paged = block_table, seq_lens, max_seq_len
    out.copy_(attend(turned, k_cache, v_cache, *paged, scale, window, False, splits)[0])


def _reference(*args: Any) -> None:
    in_two(QK_NORM_ROPE_CACHE_.reference, DECODE_ATTENTION.reference, *args)


def _composition(
    out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    max_seq_len: int,
    eps: float,
    scale: float,
    window: int,
    interleaved: bool = False,
    splits: int = 0,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, ...]:
    """The compositions of the two, the query rounded between them to what a cache could hold."""
    step = q_weight, k_weight, cos_sin, positions, slots, k_cache, v_cache, eps, interleaved
    turned, *caches = QK_NORM_ROPE_CACHE_.composition(q, k, v, *step, compute=compute)
    paged = block_table, seq_lens, max_seq_len
    attended, _ = DECODE_ATTENTION.composition(turned, *caches, *paged, scale, window, False, compute=compute)
    return attended, *caches


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    """The two together, without what lies between them: the turned query, and the newest key and value read again."""
    lengths = host_lengths(args, hints, "seq_lens")
    step = QK_NORM_ROPE_CACHE_.cost(args, hints)
    attention = DECODE_ATTENTION.cost({**args, "return_lse": False}, {**hints, "seq_lens": lengths})
    q, k = args["q"], args["k"]
    newest = sum(length > 0 for length in lengths) * 2 * k.shape[1] * k.shape[2] * k.element_size()
    between = q.numel() * q.element_size()
    return Cost(
        step.bytes_read + attention.bytes_read - between - newest,
        step.bytes_written + attention.bytes_written - between,
        step.flops + attention.flops,
        unit="tensor",
    )


def _inputs(
    make: Make,
    seq_lens: Sequence[int],
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    page_size: int = 16,
    window: int = 0,
    splits: int = 0,
    norm: bool = True,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Args:
    lens = list(seq_lens)
    _, k_cache, v_cache, pages, lengths, _ = paged_inputs(
        make, lens, [1] * len(lens), num_heads, num_kv_heads, head_dim, page_size, float("nan")
    )
    q, k, v = packed_heads(make, len(lens), num_heads, num_kv_heads, head_dim)
    last = [max(length - 1, 0) for length in lens]
    slots = torch.tensor(
        [
            int(pages[row, at // page_size]) * page_size + at % page_size if lens[row] else -1
            for row, at in enumerate(last)
        ],
        dtype=torch.int64,
    )
    for slot in slots.tolist():  # the newest token is not in the cache yet
        if slot >= 0:
            for cache in (k_cache, v_cache):
                cache[slot // page_size, :, slot % page_size] = float("nan")
    q_weight, k_weight = (make.randn(head_dim, salt=salt) if norm else None for salt in (4, 5))
    cos_sin = table(make, max([*lens, 1]), rotary_dim or head_dim)
    positions = torch.tensor(last, dtype=torch.int64)
    out = make.randn(len(lens), num_heads, head_dim, salt=11)
    step = q_weight, k_weight, cos_sin, positions.to(make.device), slots.to(make.device), k_cache, v_cache
    paged = pages, lengths, max([*lens, 0])
    return out, q, k, v, *step, *paged, 1e-6, head_dim**-0.5, window, interleaved, splits


QK_NORM_ROPE_ATTENTION_ = define(
    "qk_norm_rope_attention_",
    "(Tensor(a!) out, Tensor q, Tensor k, Tensor v, Tensor? q_weight, Tensor? k_weight, Tensor cos_sin, "
    "Tensor positions, Tensor slots, Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor block_table, Tensor seq_lens, "
    "int max_seq_len, float eps, float scale, int window, bool interleaved=False, int splits=0) -> ()",
    reference=_reference,
    fake=lambda *args: None,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    capturable_reference=False,
    tolerance=ATTENTION_TOLERANCE,
    sweep=[{"seq_lens": lens} for lens in ((), (1,), (0,), (1, 3, 17, 32), (16, 15, 130))]
    + [{"seq_lens": (40, 3, 130), "splits": splits, "window": window} for splits, window in ((1, 0), (3, 0), (2, 20))]
    + [{"seq_lens": (40, 3, 13), "page_size": 8}, {"seq_lens": (40, 3), "interleaved": True, "rotary_dim": 32}]
    + [
        {"seq_lens": (19, 33), "num_heads": h, "num_kv_heads": kv, "head_dim": d, "norm": norm}
        for h, kv, d, norm in ((40, 8, 128, True), (14, 2, 64, False), (3, 1, 80, True), (4, 2, 256, True))
    ]
    + [{"seq_lens": (200, 64), "num_heads": 20, "num_kv_heads": 2, "head_dim": 128}],
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
