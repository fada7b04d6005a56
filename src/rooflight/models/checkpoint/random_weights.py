"""`random:<preset>`: models of published shapes with seeded weights and no files.

Values are uniform with the variance that keeps activations near 1: 1 / fan_in for a matrix, less for the two that
write into the residual stream, so that it does not grow with depth. Each tensor has its own generator, seeded by
its name: a tensor's values depend neither on the others nor on the order of loading. They are drawn on the CPU in
FP32, so that they are the same (up to one rounding) on every device and in every dtype.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from rooflight.models.checkpoint.base import CheckpointError, TensorInfo
from rooflight.models.config import ModelConfig, RopeConfig

PREFIX = "random:"
_VALUES_AT_ONCE = 4_000_000

_QWEN3_0_6B = ModelConfig(
    family="qwen3",
    vocab_size=151_936,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=40_960,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1_000_000.0),
    tie_word_embeddings=True,
    qk_norm=True,
    qkv_bias=False,
    o_bias=False,
    mlp_bias=False,
    sliding_windows=(0,) * 28,
    dtype=torch.bfloat16,
    bos_id=151_643,
    eos_ids=(151_645, 151_643),
)

_LLAMA_3_2_1B = replace(
    _QWEN3_0_6B,
    family="llama",
    vocab_size=128_256,
    hidden_size=2048,
    intermediate_size=8192,
    num_layers=16,
    num_heads=32,
    head_dim=64,
    max_position_embeddings=131_072,
    rms_norm_eps=1e-5,
    rope=RopeConfig("llama3", 500_000.0, factor=32.0, original_max_position_embeddings=8192),
    qk_norm=False,
    sliding_windows=(0,) * 16,
    bos_id=128_000,
    eos_ids=(128_001, 128_008, 128_009),
)

PRESETS: dict[str, ModelConfig] = {
    "qwen3-0.6b": _QWEN3_0_6B,
    "qwen3-1.7b": replace(_QWEN3_0_6B, hidden_size=2048, intermediate_size=6144),
    "qwen3-4b": replace(
        _QWEN3_0_6B,
        hidden_size=2560,
        intermediate_size=9728,
        num_layers=36,
        num_heads=32,
        sliding_windows=(0,) * 36,
    ),
    "qwen3-8b": replace(
        _QWEN3_0_6B,
        hidden_size=4096,
        intermediate_size=12_288,
        num_layers=36,
        num_heads=32,
        sliding_windows=(0,) * 36,
        tie_word_embeddings=False,
    ),
    "llama-3.2-1b": _LLAMA_3_2_1B,
    "smollm2-135m": replace(
        _LLAMA_3_2_1B,
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        max_position_embeddings=8192,
        rope=RopeConfig(theta=100_000.0),
        sliding_windows=(0,) * 30,
        bos_id=1,
        eos_ids=(2,),
    ),
    # For tests: every part of Qwen3 in 175,040 parameters. No end token, so lengths are the caller's.
    "tiny": replace(
        _QWEN3_0_6B,
        vocab_size=1000,
        hidden_size=64,
        intermediate_size=160,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        sliding_windows=(0,) * 2,
        dtype=torch.float32,
        bos_id=None,
        eos_ids=(),
    ),
}


def preset(name: str) -> ModelConfig:
    """The config of a preset, with or without its `random:` prefix. CheckpointError lists the known ones."""
    short = name.removeprefix(PREFIX)
    if short not in PRESETS:
        raise CheckpointError(f"unknown preset {PREFIX}{short}; known: {', '.join(PREFIX + key for key in PRESETS)}")
    return PRESETS[short]


class RandomCheckpoint:
    """Seeded values for the tensors `shapes` (name to shape, Hugging Face names), made when they are read."""

    def __init__(self, name: str, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> None:
        self._name, self._seed = name, seed
        self._residual_scale = 1 / math.sqrt(2 * config.num_layers)
        self._tensors = {
            tensor: TensorInfo(shape, config.dtype, "random", math.prod(shape) * config.dtype.itemsize, name)
            for tensor, shape in shapes.items()
        }

    @property
    def name(self) -> str:
        return self._name

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read_into(self, name: str, out: torch.Tensor) -> None:
        centre, std = self._distribution(name)
        half_width = std * math.sqrt(3)  # of a uniform distribution with that standard deviation
        generator = torch.Generator("cpu").manual_seed(_seed_of(self._seed, name))
        step = max(1, _VALUES_AT_ONCE // max(1, math.prod(out.shape[1:])))
        for row in range(0, out.shape[0], step):
            rows = out[row : row + step]
            values = torch.empty(rows.shape, dtype=torch.float32, device="cpu")
            rows.copy_(values.uniform_(centre - half_width, centre + half_width, generator=generator))

    def _distribution(self, name: str) -> tuple[float, float]:
        """(mean, standard deviation) by the tensor's place in the decoder."""
        shape = self._tensors[name].shape
        if name.endswith("norm.weight"):
            return 1.0, 0.1
        if name.endswith(".bias"):
            return 0.0, 0.02
        std = 1 / math.sqrt(shape[-1])
        if "o_proj" in name or "down_proj" in name:
            std *= self._residual_scale
        return 0.0, std


def _seed_of(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # manual_seed takes a signed 64-bit number
