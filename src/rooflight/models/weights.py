"""From a checkpoint's tensors to the decoder's parameters.

The table below says, once, which tensor of a Hugging Face or GGUF checkpoint fills which rows of which parameter.
Packing (q, k, v into qkv; gate, up into gate_up) is nothing more than that: each tensor is read straight into its
rows. The lists are compared before memory is taken: a tensor that is missing, unexpected, mis-shaped or of a type
that cannot be read stops the load and is named with its file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch

from rooflight.models.checkpoint.base import Checkpoint, CheckpointError
from rooflight.models.config import ModelConfig
from rooflight.models.shapes import parameter_shapes

Progress = Callable[[int, int], None]
_NAMED_AT_MOST = 20  # a wrong config misses hundreds; the first ones say it


@dataclass(frozen=True)
class Target:
    """Where one tensor of a checkpoint goes: rows `start` onwards of `parameter`, with this shape.

    `interleaved_heads`: the tensor stores this many heads with rotary pairs side by side (llama.cpp's order for
    Llama); after reading, its rows are put back into the order of rotated halves.
    """

    parameter: str
    start: int
    shape: tuple[int, ...]
    interleaved_heads: int = 0


@dataclass(frozen=True)
class _Part:
    parameter: str
    hf: str
    gguf: str
    start: int = 0
    num_rows: int | None = None  # None: all
    rotary_heads: int = 0


def hf_targets(config: ModelConfig) -> dict[str, Target]:
    """Tensor name to place, for Hugging Face names."""
    shapes = parameter_shapes(config)
    return {part.hf: _target(part, shapes, interleaved=False) for part in _parts(config)}


def gguf_targets(config: ModelConfig) -> dict[str, Target]:
    """Tensor name to place, for GGUF names. Only files of the Llama family store q and k rows interleaved."""
    shapes = parameter_shapes(config)
    return {part.gguf: _target(part, shapes, config.family == "llama") for part in _parts(config)}


def hf_ignored(config: ModelConfig) -> Callable[[str], bool]:
    """Tensors that may lie in a Hugging Face checkpoint and are not needed.

    A copy of a tied embedding under the name of the head (some fine-tunes write it: sglang#1508), and the
    frequencies that old versions saved with the model; the table is made from the config.
    """
    names = r".*rotary_emb\.inv_freq" + (r"|lm_head\.weight" if config.tie_word_embeddings else "")
    pattern = re.compile(names)
    return lambda name: pattern.fullmatch(name) is not None


def head_differs(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether a head that lies beside a tied embedding is another matrix (then it is the one to use).

    transformers 5 decides so too; earlier versions ignored such a head, which is only right if it is a copy.
    """
    head, embed = (checkpoint.tensors.get(name) for name in ("lm_head.weight", "model.embed_tokens.weight"))
    if not config.tie_word_embeddings or head is None or embed is None or head.refused or embed.refused:
        return False
    if head.shape != embed.shape or head.dtype != embed.dtype:
        return True
    values = [torch.empty(info.shape, dtype=info.dtype) for info in (head, embed)]
    for name, out in zip(("lm_head.weight", "model.embed_tokens.weight"), values, strict=True):
        checkpoint.read_into(name, out)
    return not torch.equal(*values)


def load_weights(
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    targets: Mapping[str, Target],
    progress: Progress | None = None,
) -> None:
    """Fills `parameters` (canonical names), one tensor at a time, after `check_tensors` has passed.

    `progress(done, total)` counts bytes of the files.
    """
    total = sum(checkpoint.tensors[name].num_bytes for name in targets)
    done = 0
    for name, info in checkpoint.tensors.items():  # the checkpoint's order: sequential reading
        target = targets.get(name)
        if target is None:
            continue
        out = parameters[target.parameter].narrow(0, target.start, target.shape[0])
        checkpoint.read_into(name, out)
        if target.interleaved_heads:
            out.copy_(_halves_from_pairs(out, target.interleaved_heads))
        done += info.num_bytes
        if progress is not None:
            progress(done, total)


def check_tensors(checkpoint: Checkpoint, targets: Mapping[str, Target], ignored: Callable[[str], bool]) -> None:
    """CheckpointError unless the checkpoint's list of tensors is exactly what the decoder needs."""
    problems = [f"{checkpoint.name}: tensor {name} is missing" for name in targets if name not in checkpoint.tensors]
    for name, info in checkpoint.tensors.items():
        target = targets.get(name)
        if target is None:
            if not ignored(name):
                problems.append(f"{info.file}: tensor {name} is unexpected, shape {info.shape}")
        elif info.shape != target.shape:
            problems.append(f"{info.file}: tensor {name} must have shape {target.shape}, has {info.shape}")
        elif info.refused:
            problems.append(f"{info.file}: tensor {name} cannot be read: {info.refused}")
    if problems:
        more = len(problems) - _NAMED_AT_MOST
        listed = "; ".join(problems[:_NAMED_AT_MOST])
        raise CheckpointError(listed + (f"; and {more} more" if more > 0 else ""))


def _parts(config: ModelConfig) -> Iterator[_Part]:
    yield _Part("embed", "model.embed_tokens.weight", "token_embd.weight")
    for index in range(config.num_layers):
        yield from _layer_parts(config, f"layers.{index}.", f"model.layers.{index}.", f"blk.{index}.")
    yield _Part("norm", "model.norm.weight", "output_norm.weight")
    if not config.tie_word_embeddings:
        yield _Part("head.weight", "lm_head.weight", "output.weight")


def _layer_parts(config: ModelConfig, to: str, hf: str, gguf: str) -> Iterator[_Part]:
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    up = config.intermediate_size
    yield _Part(to + "input_norm", hf + "input_layernorm.weight", gguf + "attn_norm.weight")
    for kind in ("weight", "bias") if config.qkv_bias else ("weight",):
        qkv, attn = f"{to}qkv.{kind}", hf + "self_attn."
        yield _Part(qkv, f"{attn}q_proj.{kind}", f"{gguf}attn_q.{kind}", 0, q_rows, config.num_heads)
        yield _Part(qkv, f"{attn}k_proj.{kind}", f"{gguf}attn_k.{kind}", q_rows, kv_rows, config.num_kv_heads)
        yield _Part(qkv, f"{attn}v_proj.{kind}", f"{gguf}attn_v.{kind}", q_rows + kv_rows, kv_rows)
    if config.qk_norm:
        yield _Part(to + "q_norm", hf + "self_attn.q_norm.weight", gguf + "attn_q_norm.weight")
        yield _Part(to + "k_norm", hf + "self_attn.k_norm.weight", gguf + "attn_k_norm.weight")
    for kind in ("weight", "bias") if config.o_bias else ("weight",):
        yield _Part(f"{to}o.{kind}", f"{hf}self_attn.o_proj.{kind}", f"{gguf}attn_output.{kind}")
    yield _Part(to + "post_norm", hf + "post_attention_layernorm.weight", gguf + "ffn_norm.weight")
    for kind in ("weight", "bias") if config.mlp_bias else ("weight",):
        yield _Part(f"{to}gate_up.{kind}", f"{hf}mlp.gate_proj.{kind}", f"{gguf}ffn_gate.{kind}", 0, up)
        yield _Part(f"{to}gate_up.{kind}", f"{hf}mlp.up_proj.{kind}", f"{gguf}ffn_up.{kind}", up, up)
        yield _Part(f"{to}down.{kind}", f"{hf}mlp.down_proj.{kind}", f"{gguf}ffn_down.{kind}")


def _target(part: _Part, shapes: Mapping[str, tuple[int, ...]], interleaved: bool) -> Target:
    rows, *rest = shapes[part.parameter]
    shape = (part.num_rows if part.num_rows is not None else rows, *rest)
    return Target(part.parameter, part.start, shape, part.rotary_heads if interleaved else 0)


def _halves_from_pairs(rows: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows x0 y0 x1 y1 ... of each head to x0 x1 ... y0 y1 ..., where (xi, yi) is the i-th rotary pair."""
    head_dim = rows.shape[0] // num_heads
    pairs = rows.view(num_heads, head_dim // 2, 2, *rows.shape[1:])  # (heads, pairs, 2, in)
    return pairs.transpose(1, 2).reshape(rows.shape)
