"""What a decoder is: the figures that fix every shape, and what follows from them.

A `ModelConfig` is made from a checkpoint's own description (`hf_config`, `gguf_config`) or from a preset
(`checkpoint.random_weights`). Everything derived here comes from `shapes.parameter_shapes`, the same list that
the decoder allocates and that the loader fills, so a printed figure cannot differ from what is in memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rooflight.models import shapes

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
# No model comes near these; a damaged file that does must not allocate or loop first.
MAX_SIZE = 2**31 - 1
MAX_LAYERS = 10_000


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding, complete: nothing is looked up elsewhere when the table is made.

    `attention_factor` multiplies cos and sin (YaRN; 1.0 otherwise). `frequency_divisors`, when not empty, divides
    each inverse frequency (the `rope_freqs.weight` tensor of a GGUF file, which stands for llama3 scaling).
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    frequency_divisors: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            known = ", ".join(ROPE_TYPES)
            raise ValueError(f"rope type must be one of {known}, was {self.rope_type!r}")
        for name in ("theta", "factor", "attention_factor", "beta_fast", "beta_slow"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"rope {name} must be finite and greater than 0, was {value}")
        if not all(math.isfinite(divisor) and divisor > 0 for divisor in self.frequency_divisors):
            raise ValueError("rope frequency_divisors must be finite and greater than 0, one was not")
        if not 0 < self.partial_rotary_factor <= 1:
            raise ValueError(f"partial_rotary_factor must be in (0, 1], was {self.partial_rotary_factor}")
        if self.rope_type == "yarn" and self.theta <= 1:
            raise ValueError(f"rope theta must be greater than 1 for yarn, was {self.theta}")
        if self.rope_type in ("llama3", "yarn") and self.original_max_position_embeddings < 1:
            trained = self.original_max_position_embeddings
            raise ValueError(f"rope original_max_position_embeddings must be at least 1, was {trained}")
        if self.rope_type == "llama3" and not self.high_freq_factor > self.low_freq_factor > 0:
            raise ValueError(
                "rope low_freq_factor must be positive and below high_freq_factor, "
                f"were {self.low_freq_factor} and {self.high_freq_factor}"
            )

    def rotary_dim(self, head_dim: int) -> int:
        """How many leading dimensions of a head are rotated (the rest pass through)."""
        # The epsilon keeps a product like 0.29 * 100 = 28.999... from losing a dimension.
        return int(head_dim * self.partial_rotary_factor + 1e-6)


@dataclass(frozen=True)
class ModelConfig:
    """One decoder. `sliding_windows` has one entry a layer, 0 for full attention; W sees itself and W-1 before."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool
    qk_norm: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    sliding_windows: tuple[int, ...]
    dtype: torch.dtype
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"{name} must be at least 1, was {value}")
        if self.num_heads % self.num_kv_heads != 0:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads, were {self.num_heads} and {self.num_kv_heads}"
            )
        rotary_dim = self.rope.rotary_dim(self.head_dim)
        if rotary_dim < 2 or rotary_dim % 2 != 0:
            raise ValueError(f"the rotated part of head_dim {self.head_dim} must be even, was {rotary_dim}")
        if not (math.isfinite(self.rms_norm_eps) and self.rms_norm_eps >= 0):
            raise ValueError(f"rms_norm_eps must be finite and not negative, was {self.rms_norm_eps}")
        if len(self.sliding_windows) != self.num_layers:
            was = len(self.sliding_windows)
            raise ValueError(f"sliding_windows must have one entry for each of {self.num_layers} layers, had {was}")
        if min(self.sliding_windows) < 0:
            raise ValueError(f"sliding_windows must not be negative, was {min(self.sliding_windows)}")
        divisors = len(self.rope.frequency_divisors)
        if divisors not in (0, rotary_dim // 2):
            raise ValueError(f"rope frequency_divisors must have {rotary_dim // 2} entries, had {divisors}")

    def num_parameters(self) -> int:
        """Parameters of the whole model; a tied head is counted once."""
        return sum(math.prod(shape) for shape in shapes.parameter_shapes(self).values())

    def parameters_per_layer(self) -> int:
        """Parameters of one decoder layer (all layers are alike)."""
        return sum(math.prod(shape) for shape in shapes.layer_shapes(self).values())

    def weight_bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of weights that one decode step reads at `dtype` (default: the model's own).

        Everything except an untied embedding, of which a step reads one row a sequence (ignored). A tied one is
        the head and is read once.
        """
        embedding = 0 if self.tie_word_embeddings else self.vocab_size * self.hidden_size
        return (self.num_parameters() - embedding) * (dtype or self.dtype).itemsize

    def kv_bytes_per_token(self, dtype: torch.dtype | None = None) -> int:
        """Bytes of keys and values that one context token keeps in all layers (sliding windows not deducted)."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * (dtype or self.dtype).itemsize
