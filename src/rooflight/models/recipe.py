"""Which operators of a layer are one, and what stands for them where they are taken apart to show what they give."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from rooflight import ops

KvCache = tuple[torch.Tensor, torch.Tensor]  # k, v: (num_pages, num_kv_heads, page_size, head_dim)


@dataclass(frozen=True)
class Recipe:
    """Switches of a decoder that may change between any two steps. The results differ by roundings only."""

    norm: bool = True  # residual addition and RMSNorm; with `projections` both are elsewhere
    rope: bool = True  # head norms, RoPE and the write into the cache
    grouped: bool = True  # decode attention of all query heads of a KV head: its keys and values are read once
    split: bool = True  # decode attention cuts a sequence's keys by its provider's rule, not into one part
    projections: bool = False  # norm, SwiGLU and residual in the products
    scaled: bool = False  # with `projections`: of tens of rows the norms are half in the product in front of them
    attention: bool = False  # decode attention does what `rope` does as well; takes rope, grouped and split for granted


def on_gpu(dtype: torch.dtype, scaled: bool) -> Recipe:
    """What serves a model of that dtype on a GPU. scaled: whether the kernel for it is there; it needs BF16's range."""
    return Recipe(projections=True, scaled=scaled and dtype == torch.bfloat16, attention=True)


def add_norm(
    hidden: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, recipe: Recipe
) -> torch.Tensor:
    """The norm of `residual`, to which `hidden` is added in place."""
    if recipe.norm:
        ops.fused_add_rms_norm_(hidden, residual, weight, eps)
        return hidden
    residual.add_(hidden)
    return ops.rms_norm(residual, weight, eps)


def norm_rope_cache(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    weights: tuple[torch.Tensor | None, torch.Tensor | None],
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    cache: KvCache,
    eps: float,
    recipe: Recipe,
) -> torch.Tensor:
    """`ops.qk_norm_rope_cache_`, or an operator for each part of it; returns q."""
    if recipe.rope:
        ops.qk_norm_rope_cache_(q, k, v, *weights, cos_sin, positions, slots, *cache, eps)
        return q
    q_norm, k_norm = weights
    if q_norm is not None and k_norm is not None:
        # Heads of several tokens do not fold into rows until they are copied; those of one do, and no copy is made.
        q, k = ops.rms_norm(q.contiguous(), q_norm, eps), ops.rms_norm(k.contiguous(), k_norm, eps)
    ops.rope_(q, k, cos_sin, positions)
    # Without query heads, norms and angles what is left is the write, which needs no host to leave padded rows out.
    ops.qk_norm_rope_cache_(q[:, :0], k, v, None, None, cos_sin[:, :0], positions, slots, *cache, eps)
    return q


def with_parts(meta: ops.AttentionMeta, recipe: Recipe) -> ops.AttentionMeta:
    """As it is, or with one part a sequence."""
    if recipe.split:
        return meta
    decodes = None if meta.decodes is None else replace(meta.decodes, splits=1)
    return replace(meta, splits=1, decodes=decodes)


def attend(
    q: torch.Tensor, cache: KvCache, meta: ops.AttentionMeta, window: int, decode: bool, recipe: Recipe
) -> torch.Tensor:
    """Attention of q (num_tokens, num_heads, head_dim); the result is contiguous."""
    if decode:
        return _decode(q, cache, meta, window, recipe)
    if meta.whole_prompt and not window:
        return ops.prompt_attention(q, *cache, meta.block_table)
    if meta.decodes is None:
        return ops.prefill_attention(q, *cache, meta, window=window)
    # The prompts' attention leaves room for the others behind it: putting two results together would copy both.
    tokens = q.shape[0] - meta.decodes.seq_lens.shape[0]  # of prompts
    mixed = ops.prefill_attention(q, *cache, meta, window=window)
    mixed[tokens:] = _decode(q[tokens:], cache, meta.decodes, window, recipe)
    return mixed


def _decode(q: torch.Tensor, cache: KvCache, meta: ops.AttentionMeta, window: int, recipe: Recipe) -> torch.Tensor:
    if recipe.grouped:
        return ops.decode_attention(q, *cache, meta, window=window)
    num_tokens, num_heads, head_dim = q.shape
    kv_heads = cache[0].shape[1]
    # Each call has one query head of every KV head, and reads all keys and values.
    heads = q.view(num_tokens, kv_heads, num_heads // kv_heads, head_dim).unbind(2)
    return torch.stack([ops.decode_attention(head, *cache, meta, window=window) for head in heads], 2).flatten(1, 2)
