"""The parameters of the decoder: canonical names and shapes, in one list.

Query, key and value projections are packed along their rows into `qkv`, gate and up into `gate_up`, so that one
matrix product serves each group. Weights are (out, in), as `rooflight.ops.linear` reads them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # config derives its figures from this file
    from rooflight.models.config import ModelConfig

Shape = tuple[int, ...]


def layer_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Parameters of one layer, named without the `layers.<i>.` prefix."""
    hidden, intermediate = config.hidden_size, config.intermediate_size
    q_width = config.num_heads * config.head_dim
    qkv_width = q_width + 2 * config.num_kv_heads * config.head_dim
    shapes: dict[str, Shape] = {"input_norm": (hidden,), "qkv.weight": (qkv_width, hidden)}
    if config.qkv_bias:
        shapes["qkv.bias"] = (qkv_width,)
    if config.qk_norm:
        shapes["q_norm"] = (config.head_dim,)
        shapes["k_norm"] = (config.head_dim,)
    shapes["o.weight"] = (hidden, q_width)
    if config.o_bias:
        shapes["o.bias"] = (hidden,)
    shapes["post_norm"] = (hidden,)
    shapes["gate_up.weight"] = (2 * intermediate, hidden)
    shapes["down.weight"] = (hidden, intermediate)
    if config.mlp_bias:
        shapes["gate_up.bias"] = (2 * intermediate,)
        shapes["down.bias"] = (hidden,)
    return shapes


def parameter_shapes(config: ModelConfig) -> dict[str, Shape]:
    """All parameters by canonical name. A tied head has no entry of its own: it is `embed`."""
    shapes: dict[str, Shape] = {"embed": (config.vocab_size, config.hidden_size)}
    for index in range(config.num_layers):
        shapes.update({f"layers.{index}.{name}": shape for name, shape in layer_shapes(config).items()})
    shapes["norm"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes
