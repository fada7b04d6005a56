"""What the machine at hand allows an engine: how fast its memory is read and matrices are multiplied.

A decode step reads the weights once and the cached keys and values of all its sequences; a prompt costs the operations
of its products. On a GPU both count. On a CPU the weights alone do, as they always have in its results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from rooflight.bench.ceiling import cpu_read_bandwidth
from rooflight.bench.device import gpu_name
from rooflight.bench.environment import gpu_folder
from rooflight.bench.ops import measure_card
from rooflight.limits.card import Bandwidth
from rooflight.limits.ceilings import ceilings, known, stream_rate
from rooflight.models.config import ModelConfig

DEVICES = ("auto", "cpu", "cuda")
MILLISECONDS = 1e3


@dataclass(frozen=True)
class Roof:
    """read: rates of streams, by their bytes. flops: by dtype ("bf16"), empty on a CPU. origin: whose figures."""

    origin: str
    read: tuple[Bandwidth, ...]
    flops: Mapping[str, float] = field(default_factory=dict)
    counts_kv: bool = True

    @property
    def read_bandwidth(self) -> float:
        """Bytes per second of the best stream."""
        return max(point.rate for point in self.read)

    def step_seconds(self, config: ModelConfig, dtype: torch.dtype, contexts: float, sequences: int = 1) -> float:
        """Of a decode step of so many sequences, each with `contexts` tokens in its cache."""
        moved: float = config.weight_bytes_per_token(dtype)
        if self.counts_kv:
            moved += sequences * kv_bytes(config, dtype, contexts)
        return moved / stream_rate(self.read, moved)

    def prompt_seconds(self, config: ModelConfig, dtype: str, tokens: int, sequences: int = 1) -> float:
        """Of the operations of so many prompts of `tokens` each; 0 where products were not measured."""
        rate = self.flops.get(dtype)
        return sequences * prompt_flops(config, tokens) / rate if rate else 0.0


def chosen_device(name: str) -> str:
    """ "cpu" or "cuda" for one of `DEVICES`; ValueError for others and for a GPU that is not there."""
    there = torch.cuda.is_available()
    if name not in DEVICES:
        raise ValueError(f"device must be one of {', '.join(DEVICES)}, was {name!r}")
    if name == "cuda" and not there:
        raise ValueError("device must be one that this machine has (cpu), was 'cuda'")
    return name if name != "auto" else "cuda" if there else "cpu"


def roof_of(device: str, threads: int) -> Roof:
    """Of the CPU, measured now; of the GPU, from its measured ceilings, which are measured now if we have none."""
    if device == "cpu":
        return cpu_roof(cpu_read_bandwidth(threads))
    key = gpu_folder(gpu_name())
    if key in known() and ceilings(key).measured:
        card = ceilings(key)
        return Roof(f"{card.name}, {card.origin}", card.read, card.flops)
    measured = measure_card()
    return Roof(f"{measured.name}, measured before the run", measured.read, measured.matmul)


def cpu_roof(bandwidth: float) -> Roof:
    return Roof("measured before the run", (Bandwidth(1, bandwidth),), counts_kv=False)


def kv_bytes(config: ModelConfig, dtype: torch.dtype, context: float) -> float:
    """Of keys and values that a step reads for a sequence of so many tokens: of a sliding window, those within it."""
    layer = config.kv_bytes_per_token(dtype) / config.num_layers
    return sum(layer * (min(context, window) if window else context) for window in config.sliding_windows)


def prompt_flops(config: ModelConfig, tokens: int) -> float:
    """Of a whole prompt: every projection, attention to itself and what is before, and logits of the last position.

    That position alone needs what the last layer has behind its attention. The attention itself counts for all, as it
    does in a step.
    """
    behind = config.hidden_size * (config.num_heads * config.head_dim + 3 * config.intermediate_size)  # o, and the MLP
    products = 2 * (config.num_layers * config.parameters_per_layer() * tokens - behind * (tokens - 1))
    head = 2 * config.vocab_size * config.hidden_size
    pairs = sum(_pairs(tokens, window) for window in config.sliding_windows)
    return products + head + 4 * config.num_heads * config.head_dim * pairs


def _pairs(tokens: int, window: int) -> int:
    """Of a query and a key that it sees."""
    width = min(window or tokens, tokens)
    return width * (width + 1) // 2 + (tokens - width) * width
