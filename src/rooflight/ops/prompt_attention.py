"""Attention of one whole prompt whose keys and values have just been written to the paged cache.

    out_t = sum_{j <= t} softmax_j(scale * q_t . k_j) v_j

What `prefill_attention` computes for a prompt with nothing before it, for when the host knows that this is what it is:
then PyTorch's fused attention can do it, which on long prompts is faster than the Triton kernel (docs/decode.md).
It reads keys side by side, so they are gathered from their pages first: three more passes over the prompt's keys and
values, a few percent of the time at the lengths where it pays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.paged_attention import ATTENTION_TOLERANCE, attention_cost, compose, paged_inputs

PLANNED = 1024  # tokens: prompts are filled up to a multiple


def prompt_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    *,
    scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """q: (num_tokens, num_heads, head_dim), at positions 0, 1, …; returns the same shape.

    k_cache, v_cache: (num_pages, num_kv_heads, page_size, head_dim) of q's dtype; block_table: (1, max_pages) int32,
    with at least num_tokens / page_size pages. scale: default 1 / sqrt(head_dim). Raises ValueError for what does not
    fit. No gradient. Computed by PyTorch: cuDNN's or FlashAttention's kernel on a GPU.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    operator = PROMPT_ATTENTION.overload(q, backend)
    return operator(q, k_cache, v_cache, block_table, scale)  # type: ignore[no-any-return]


def _check(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, scale: float
) -> None:
    checks.is_float("q", q)
    checks.has_shape("q", q, None, None, None)
    checks.has_shape("k_cache", k_cache, None, None, None, q.shape[2])
    checks.same_shape("v_cache", v_cache, k_cache)
    if k_cache.shape[1] == 0 or q.shape[1] % k_cache.shape[1]:
        checks.fail("q", f"have a multiple of num_kv_heads = {k_cache.shape[1]} heads", q.shape[1])
    checks.has_dtype("block_table", block_table, torch.int32)
    checks.has_shape("block_table", block_table, 1, None)
    need = -(-q.shape[0] // k_cache.shape[2])
    if block_table.shape[1] < need:
        checks.fail("block_table", f"have {need} pages for {q.shape[0]} tokens at least", block_table.shape[1])
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        checks.same_dtype(name, tensor, q)
        checks.same_device(name, tensor, q)
    checks.same_device("block_table", block_table, q)


def _reference(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, scale: float
) -> torch.Tensor:
    tokens = q.shape[0]
    if q.numel() == 0:
        return q.new_empty(q.shape)
    # Kernels of libraries are planned for a shape, in some 50 ms, and read rows that are not aligned wrongly.
    room = -(-tokens // PLANNED) * PLANNED if q.is_cuda else tokens
    if room > tokens or q.data_ptr() % 16 or any(stride % 8 for stride in q.stride()[:2]):
        q = torch.cat((q, q.new_zeros(room - tokens, *q.shape[1:])))
    pages = block_table[0, : -(-tokens // k_cache.shape[2])]
    k, v = (_side_by_side(cache, pages, tokens, room) for cache in (k_cache, v_cache))
    from torch.nn.attention import SDPBackend, sdpa_kernel  # here: it brings Triton along

    # cuDNN's is the fastest on Hopper and later; where it does not take the tensors the next one does.
    kinds = SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH
    with sdpa_kernel(list(kinds), set_priority=True):
        heads = q.transpose(0, 1)[None]
        out = F.scaled_dot_product_attention(heads, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)[:tokens].contiguous()


def _side_by_side(cache: torch.Tensor, pages: torch.Tensor, tokens: int, room: int) -> torch.Tensor:
    """(1, num_kv_heads, room, head_dim); zeros beyond the tokens, which no token before them sees."""
    gathered = cache.index_select(0, pages).transpose(0, 1)  # (num_kv_heads, pages, page_size, head_dim)
    out = cache.new_zeros(cache.shape[1], room, cache.shape[3])
    whole = tokens // cache.shape[2] * cache.shape[2]
    full = whole // cache.shape[2]
    out[:, :whole].unflatten(1, (full, cache.shape[2])).copy_(gathered[:, :full])
    if whole < tokens:
        out[:, whole:tokens].copy_(gathered[:, full, : tokens - whole])
    return out[None]


def _composition(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    scale: float,
    *,
    compute: torch.dtype,
) -> torch.Tensor:
    tokens = q.shape[0]
    lengths, starts = torch.tensor([tokens]), torch.tensor([0, tokens])
    rest = block_table, lengths, starts, tokens, tokens, scale, 0, False
    return compose(q, k_cache, v_cache, *rest, compute=compute)[0]


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    tokens = args["q"].shape[0]
    return attention_cost({**args, "window": 0, "return_lse": False}, [tokens], [tokens])


def _inputs(
    make: Make, num_tokens: int, num_heads: int = 4, num_kv_heads: int = 2, head_dim: int = 64, page_size: int = 16
) -> Args:
    shape = num_heads, num_kv_heads, head_dim, page_size, float("nan")
    q, k_cache, v_cache, table, *_ = paged_inputs(make, [num_tokens], [num_tokens], *shape)
    return q, k_cache, v_cache, table, head_dim**-0.5


PROMPT_ATTENTION = define(
    "prompt_attention",
    "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, float scale) -> Tensor",
    reference=_reference,
    fake=lambda q, *rest: q.new_empty(q.shape),
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    tolerance=ATTENTION_TOLERANCE,
    sweep=[{"num_tokens": n} for n in (0, 1, 33, 150)]
    + [
        {"num_tokens": 19, "num_heads": h, "num_kv_heads": kv, "head_dim": d}
        for h, kv, d in ((40, 8, 128), (14, 2, 64), (3, 1, 80), (4, 2, 256))
    ],
    workloads={
        f"qwen3-0.6b {n}": {"num_tokens": n, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128} for n in (1024, 8192)
    },
)
