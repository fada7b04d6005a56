"""The decoder: one module for every family, written in `rooflight.ops` and driven by a `ModelConfig`.

A layer, on `num_tokens` rows of one or many sequences laid end to end:

    hidden, residual = fused_add_rms_norm(hidden, residual)     every norm but the very first
    q, k, v          = linear(hidden, packed qkv)               split by views
    q                = head norm and RoPE; k the same and into the cache, v into the cache
    hidden           = linear(attention(q, cache), o)
    hidden, residual = fused_add_rms_norm(hidden, residual)
    hidden           = linear(silu_and_mul(linear(hidden, packed gate_up)), down)

Of a prompt most rows are there for their keys and values alone. These are complete once the last layer's attention is
done, and no row needs another's after it: from there on only the rows that are wanted go on.

With `recipe.projections` the norms, SwiGLU and the residual's sums are part of the projections instead, and with
`recipe.attention` a decode step's attention normalises, turns and writes as well: five launches a layer, for decoding a
few sequences, where a launch costs as much as its bytes. With `recipe.scaled` it is five for tens of sequences too.
The recipe's other switches take apart what is one operator above, to show what it gives (`rooflight ladder`).

It knows neither requests nor devices: shapes depend only on `num_tokens` and `num_seqs`, nothing is read back to
the host, so the same code runs eagerly, inside a CUDA graph and under fake tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from rooflight import ops
from rooflight.models.communicator import Communicator, SingleRank
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import KvCache, Recipe, add_norm, attend, norm_rope_cache, with_parts
from rooflight.models.rope_table import rope_table
from rooflight.models.shapes import parameter_shapes

Scaled = tuple[torch.Tensor, torch.Tensor]  # of a residual, what `ops.linear_add_scale_` leaves for the next product
WIDEST_SCALED = 2560  # with a residual of 4,096 elements a norm by itself is faster (docs/lab)


class Linear(nn.Module):
    """A packed projection. A module of its own, so that a quantised one can take its place."""

    weight: torch.Tensor  # (out, in)
    bias: torch.Tensor | None  # (out)

    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("bias", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.linear(x, self.weight, self.bias)

    # Past nn.Module's hook machinery, which a step would else pay for at every product.
    __call__ = forward

    def pack(self) -> None:
        """Replace the weight by its packed layout; it is no parameter any more."""
        packed = ops.pack_weight(self.weight)
        if packed is not self.weight:
            del self.weight
            self.weight = packed


class DecoderLayer(nn.Module):
    """Attention and MLP with their norms."""

    input_norm: torch.Tensor
    post_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None

    def __init__(self, config: ModelConfig, index: int, communicator: Communicator) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.head_dim = config.head_dim
        self.heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]  # of q, k, v
        self.packed_heads = sum(self.heads)
        self.q_width = config.num_heads * config.head_dim
        self.window = config.sliding_windows[index]
        wide, inner = config.hidden_size, config.intermediate_size
        shapes = (self.packed_heads * config.head_dim, wide), (wide, self.q_width), (2 * inner, wide), (wide, inner)
        # Of a step that shares norms between products.
        self.scaled_rows = ops.scaled_rows(shapes) if wide <= WIDEST_SCALED else range(0)
        self.communicator = communicator
        self.qkv, self.o, self.gate_up, self.down = Linear(), Linear(), Linear(), Linear()
        self.register_parameter("q_norm", None)
        self.register_parameter("k_norm", None)

    def forward(
        self,
        hidden: torch.Tensor,
        residual: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: KvCache,
        slots: torch.Tensor,
        meta: ops.AttentionMeta,
        decode: bool,
        recipe: Recipe,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`hidden` (num_tokens, hidden_size) is normalised already; `residual`, as large, is updated in place.

        wanted: (rows) int64, the tokens that go on behind attention; None: all.
        Returns hidden and residual, both (rows, hidden_size); residual is the one given, or a new one of `wanted`.
        """
        mixed = self._mix(self.qkv(hidden), positions, cos_sin, cache, slots, meta, decode, recipe)
        if wanted is not None:
            mixed, residual = mixed[wanted], residual[wanted]
        hidden = self.communicator.all_reduce(self.o(mixed))  # (rows, hidden_size)
        hidden = add_norm(hidden, residual, self.post_norm, self.eps, recipe)
        gated = ops.silu_and_mul(self.gate_up(hidden))  # (rows, intermediate_size)
        return self.communicator.all_reduce(self.down(gated)), residual

    def forward_fused(
        self,
        residual: torch.Tensor,
        scaled: Scaled | None,
        next_norm: torch.Tensor | None,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: KvCache,
        slots: torch.Tensor,
        meta: ops.AttentionMeta,
        decode: bool,
        recipe: Recipe,
        wanted: torch.Tensor | None,
    ) -> tuple[torch.Tensor, Scaled | None]:
        """The layer on `residual` (num_tokens, hidden_size) alone, in place; for one rank.

        scaled: of residual, if the layer before has left it. next_norm: of the layer behind, which may be left one.
        Returns residual (rows, hidden_size), as `forward` does, and what is left of it.
        """
        qkv, gate_up = self.qkv, self.gate_up
        if scaled is None:
            packed = ops.rms_norm_linear(residual, self.input_norm, qkv.weight, qkv.bias, self.eps)
        else:
            packed = ops.scaled_linear(*scaled, qkv.weight, qkv.bias, self.eps)
        mixed = self._mix(packed, positions, cos_sin, cache, slots, meta, decode, recipe)
        if wanted is not None:
            mixed, residual = mixed[wanted], residual[wanted]
        scales = recipe.scaled and residual.shape[0] in self.scaled_rows
        scaled = self._add(residual, mixed, self.o, self.post_norm if scales else None)
        if scaled is None:
            gated = ops.rms_norm_swiglu(residual, self.post_norm, gate_up.weight, gate_up.bias, self.eps)
        else:
            gated = ops.scaled_swiglu(*scaled, gate_up.weight, gate_up.bias, self.eps)
        return residual, self._add(residual, gated, self.down, next_norm if scales else None)

    def _add(
        self, residual: torch.Tensor, x: torch.Tensor, projection: Linear, norm: torch.Tensor | None
    ) -> Scaled | None:
        """Into residual; norm: of the product behind, to which its half is left."""
        if norm is None:
            ops.linear_add_(residual, x, projection.weight, projection.bias)
            return None
        scaled, squares = ops.empty_scaled(residual)
        ops.linear_add_scale_(residual, scaled, squares, x, projection.weight, norm, projection.bias)
        return scaled, squares

    def _mix(
        self,
        packed: torch.Tensor,
        positions: torch.Tensor,
        cos_sin: torch.Tensor,
        cache: KvCache,
        slots: torch.Tensor,
        meta: ops.AttentionMeta,
        decode: bool,
        recipe: Recipe,
    ) -> torch.Tensor:
        """From the packed projection to attention's result, (num_tokens, q width)."""
        num_tokens = packed.shape[0]
        qkv = packed.view(num_tokens, self.packed_heads, self.head_dim)  # (tokens, heads, head_dim)
        # Views (tokens, heads, head_dim) with rows of the packed width. 2 us; through Tensor.split it is 6.
        q, k, v = qkv.split_with_sizes(self.heads, dim=1)
        norms = self.q_norm, self.k_norm
        if decode and recipe.attention:
            mixed = torch.empty(q.shape, dtype=q.dtype, device=q.device)
            step = *norms, cos_sin, positions, slots, *cache
            ops.qk_norm_rope_attention_(mixed, q, k, v, *step, meta, self.eps, window=self.window)
            return mixed.view(num_tokens, self.q_width)
        q = norm_rope_cache(q, k, v, norms, cos_sin, positions, slots, cache, self.eps, recipe)
        mixed = attend(q, cache, meta, self.window, decode, recipe)  # (tokens, q heads, head_dim)
        return mixed.view(num_tokens, self.q_width)


class Decoder(nn.Module):
    """Embedding, layers, final norm and head. Weights are uninitialised until a loader fills them.

    `device` may be "meta" where only shapes are asked; `dtype` defaults to the config's. Parameters do not require
    gradients. Canonical parameter names are those of `shapes.parameter_shapes`.
    """

    embed: torch.Tensor
    norm: torch.Tensor
    cos_sin: torch.Tensor

    def __init__(
        self,
        config: ModelConfig,
        communicator: Communicator | None = None,
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.config = config
        self.communicator = communicator if communicator is not None else SingleRank()
        if self.communicator.size != 1:
            raise ValueError(f"communicator must have one rank (weights are not cut), had {self.communicator.size}")
        self.recipe = Recipe()
        self.layers = nn.ModuleList(
            DecoderLayer(config, index, self.communicator) for index in range(config.num_layers)
        )
        self.head = Linear()
        for name, shape in parameter_shapes(config).items():
            owner, _, attribute = name.rpartition(".")
            data = torch.empty(shape, device=device, dtype=dtype or config.dtype)
            self.get_submodule(owner).register_parameter(attribute, nn.Parameter(data, requires_grad=False))
        self._tie()
        table = rope_table(config.rope, config.head_dim, config.max_position_embeddings, device)
        self.register_buffer("cos_sin", table, persistent=False)

    def pack_weights(self) -> None:
        """Lay the projections out as the CPU's matrix library reads them fastest, one at a time, in place.

        For running only: a packed decoder cannot be moved, cast or saved. The embedding stays as it is, so a tied head
        costs its packed copy.
        """
        for module in self.modules():
            if isinstance(module, Linear):
                module.pack()

    def _tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.head.weight = self.embed

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        """Moves and casts as every module does, except that the RoPE table stays FP32 and keeps its values."""
        if self.head.weight.is_mkldnn:
            raise RuntimeError(
                "this decoder was packed for a CPU (pack_weights) and cannot be moved or cast: load it again"
            )
        table = self.cos_sin
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._tie()  # to_empty() replaces each parameter by its own
        device = self.cos_sin.device
        if table.is_meta and device.type != "meta":  # to_empty() of a decoder built for its shapes
            config = self.config
            table = rope_table(config.rope, config.head_dim, config.max_position_embeddings, device)
        self.cos_sin = table.to(device)
        return self

    def forward(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[KvCache],
        slots: torch.Tensor,
        meta: ops.AttentionMeta,
        decode: bool,
        wanted: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Runs `num_tokens` new tokens and writes their keys and values into the caches.

        ids, positions, slots: (num_tokens) int64; a token at slot -1 is not written. caches: one (k, v) a layer.
        decode: one token a sequence (num_tokens = num_seqs) and the decode kernel; otherwise the prefill one.
        wanted: (rows) int64, the tokens whose result is asked for, in any order and as often as one likes; None: all.
        Returns (rows, hidden_size), or (num_tokens, hidden_size) of all, as `logits` takes it.
        """
        eps = self.config.rms_norm_eps
        residual = self.communicator.all_reduce(ops.embedding(ids, self.embed))  # (tokens, hidden_size)
        recipe = self.recipe
        rest = slots, with_parts(meta, recipe), decode, recipe
        layers = list(zip(self.layers, caches, [*[None] * (len(self.layers) - 1), wanted], strict=True))
        if recipe.projections:
            scaled: Scaled | None = None
            next_norms = [*(layer.input_norm for layer in self.layers[1:]), None]
            for (layer, cache, rows), norm in zip(layers, next_norms, strict=True):
                given = residual, scaled, norm, positions, self.cos_sin, cache, *rest, rows
                residual, scaled = layer.forward_fused(*given)  # type: ignore[operator]
            return residual
        hidden: torch.Tensor | None = None
        for layer, cache, rows in layers:
            input_norm: torch.Tensor = layer.input_norm  # type: ignore[assignment]
            if hidden is None:
                hidden = ops.rms_norm(residual, input_norm, eps)
            else:
                hidden = add_norm(hidden, residual, input_norm, eps, recipe)
            hidden, residual = layer(hidden, residual, positions, self.cos_sin, cache, *rest, rows)
        assert hidden is not None  # there is at least one layer
        return add_norm(hidden, residual, self.norm, eps, recipe)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """(rows, hidden_size) of `forward` to (rows, vocab_size) FP32."""
        return self.raw_logits(hidden).float()

    def raw_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The same in the weights' dtype: all there is to know, in half the bytes."""
        if self.recipe.projections:
            head = self.head
            return ops.rms_norm_linear(hidden, self.norm, head.weight, head.bias, self.config.rms_norm_eps)
        return self.communicator.all_gather(self.head(hidden), dim=-1)
