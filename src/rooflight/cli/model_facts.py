"""What a model is and takes, computed from its config alone: no weight is read or allocated."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rooflight.models.config import ModelConfig
from rooflight.models.load import DTYPES
from rooflight.models.shapes import parameter_shapes


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one name in all layers (`layers.*.qkv.weight`): their shape, and how many there are."""

    name: str
    shape: tuple[int, ...]
    count: int

    @property
    def parameters(self) -> int:
        return self.count * math.prod(self.shape)


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that `sequences` requests of `context` tokens each take together with the weights."""

    sequences: int
    context: int
    weights: int
    rope_table: int
    kv: int

    @property
    def total(self) -> int:
        return self.weights + self.rope_table + self.kv


def dtype_of(name: str, config: ModelConfig) -> torch.dtype:
    """The dtype that `--dtype` means for this model. ValueError for a name that is none."""
    if name == "auto":
        return config.dtype
    if name not in DTYPES:
        raise ValueError(f"dtype must be auto, fp32, bf16 or fp16, was {name!r}")
    return DTYPES[name]


def dtype_name(dtype: torch.dtype) -> str:
    """`fp32`, `bf16`, `fp16`: the names that `--dtype` takes."""
    return next((name for name, known in DTYPES.items() if known == dtype), str(dtype).removeprefix("torch."))


def tensor_kinds(config: ModelConfig) -> list[TensorKind]:
    """The parameters, those of equal layers together, in the order of the decoder."""
    shapes: dict[str, tuple[int, ...]] = {}
    counts: Counter[str] = Counter()
    for name, shape in parameter_shapes(config).items():
        room, _, rest = name.partition(".")
        kind = f"layers.*.{rest.partition('.')[2]}" if room == "layers" else name
        shapes[kind] = shape
        counts[kind] += 1
    return [TensorKind(kind, shape, counts[kind]) for kind, shape in shapes.items()]


def memory_plan(config: ModelConfig, dtype: torch.dtype, sequences: int, context: int | None) -> MemoryPlan:
    """`context` None is the model's own. ValueError for no sequence, or a context the model does not have."""
    most = config.max_position_embeddings
    context = most if context is None else context
    if sequences < 1:
        raise ValueError(f"sequences must be 1 or more, was {sequences}")
    if not 1 <= context <= most:
        raise ValueError(f"context must be from 1 to the model's {most} tokens, was {context}")
    table = most * config.rope.rotary_dim(config.head_dim) * torch.float32.itemsize
    kv = sequences * context * config.kv_bytes_per_token(dtype)
    return MemoryPlan(sequences, context, config.num_parameters() * dtype.itemsize, table, kv)


def as_dict(model: str, config: ModelConfig, dtype: torch.dtype, plans: Sequence[MemoryPlan]) -> dict[str, Any]:
    """Everything that `rooflight info MODEL` shows, sizes in bytes."""
    return {
        "model": model,
        "family": config.family,
        "dtype": dtype_name(dtype),
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocab_size,
        "context": config.max_position_embeddings,
        "tied_head": config.tie_word_embeddings,
        "sliding_windows": list(config.sliding_windows),
        "rope": config.rope.rope_type,
        "parameters": config.num_parameters(),
        "parameters_per_layer": config.parameters_per_layer(),
        "weight_bytes_per_token": config.weight_bytes_per_token(dtype),
        "kv_bytes_per_context_token": config.kv_bytes_per_token(dtype),
        "tensors": [
            {"name": kind.name, "shape": list(kind.shape), "count": kind.count, "parameters": kind.parameters}
            for kind in tensor_kinds(config)
        ],
        "memory": [asdict(plan) | {"total": plan.total} for plan in plans],
    }
