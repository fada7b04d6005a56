"""How many parts decode attention should cut a sequence into: every number, beside the rule's, by batch and context.

The operator is the one that a decode step runs, `qk_norm_rope_attention_`, compiled; its cache is cold.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from rooflight.bench.device import Closure, CudaDevice, Device, gpu_name
from rooflight.bench.environment import describe, describe_gpu
from rooflight.bench.interleaved import ROUNDS, interleaved_us
from rooflight.bench.measurement import Spread
from rooflight.bench.step_operators import BUILDERS
from rooflight.bench.step_providers import Progress, bf16, within
from rooflight.limits.scenario import NAMES, Placed
from rooflight.limits.trace import Step, trace
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import Recipe
from rooflight.ops import AttentionMeta
from rooflight.ops.contract import REGISTRY

OPERATOR, PROVIDER = "qk_norm_rope_attention_", "cuda"
BATCHES = (1, 2, 4, 8, 12, 16, 24, 32, 64)
CONTEXTS = (128, 1024, 4096)
PARTS = (1, 2, 4, 8, 16)
BY_RULE = 0  # in AttentionMeta.splits
HEADS_OF_A_BLOCK = 8  # query heads of a KV head that a block takes: kHeads in csrc/decode_attention_chunks.cuh


@dataclass(frozen=True)
class PartsRow:
    """One batch and context. us: microseconds by the number of parts that was asked for; "0" leaves it to the rule.

    rule: the number that the rule takes. best: the one with the smallest median. loss: of the rule's time over the
    best's, less one; 0 where the rule takes the best.
    """

    batch: int
    context: int
    blocks: int
    rule: int
    best: int
    loss: float
    us: Mapping[str, Spread]


@dataclass(frozen=True)
class PartsReport:
    """multiprocessors: of the card, by which the rule goes."""

    model: str
    environment: Mapping[str, object]
    multiprocessors: int
    rows: tuple[PartsRow, ...]

    def as_data(self) -> dict[str, Any]:
        return {
            "benchmark": "decode_parts",
            "setup": {"model": self.model, "dtype": "bf16", "rounds": ROUNDS},
            "environment": dict(self.environment),
            "multiprocessors": self.multiprocessors,
            "rows": [asdict(row) for row in self.rows],
        }


def run(model: str, progress: Progress = lambda *_: None) -> PartsReport:
    """On the GPU at hand. ValueError without one, or without the compiled kernels."""
    config = bf16(model)
    gpu_name()
    if PROVIDER not in REGISTRY[OPERATOR].providers:
        raise ValueError("parts are those of the compiled kernel, which is not here; `rooflight info` says why")
    environment = {**describe(os.cpu_count() or 1), **describe_gpu()}
    device = CudaDevice()
    device.warm_clocks()
    multiprocessors = torch.cuda.get_device_properties().multi_processor_count
    return PartsReport(model, environment, multiprocessors, tuple(measure(config, multiprocessors, device, progress)))


def measure(config: ModelConfig, multiprocessors: int, device: Device, progress: Progress) -> list[PartsRow]:
    cases = [(batch, context) for batch in BATCHES for context in CONTEXTS]
    one = replace(config, num_layers=1, sliding_windows=config.sliding_windows[:1])
    rows = []
    for index, (batch, context) in enumerate(cases):
        progress(f"measuring parts, batch {batch}", index, len(cases))
        step = Step("decode", batch, context)
        traced = trace(one, step, Recipe(projections=True, attention=True))
        call = next(call for call in traced if call.operator == OPERATOR)
        with torch.inference_mode():
            item = Placed(call, call.cost, NAMES.get(call.dtype, "fp32"))
            launches = BUILDERS[OPERATOR](config, step, item, device)
            asked = (BY_RULE, *PARTS)
            us, refused = interleaved_us(device, {str(parts): in_parts(launches, parts) for parts in asked})
        if refused:
            raise ValueError("; ".join(f"{parts} parts: {why}" for parts, why in refused.items()))
        rows.append(row_of(batch, context, blocks_of(config, batch), multiprocessors, us))
    progress("measuring parts", len(cases), len(cases))
    return rows


def in_parts(launches: Sequence[Closure], parts: int) -> list[Closure]:
    """The same calls with `parts` in their metadata."""
    made: list[Closure] = []
    for launch in launches:
        assert isinstance(launch, partial)
        args = [replace(a, splits=parts) if isinstance(a, AttentionMeta) else a for a in launch.args]
        made.append(partial(within, PROVIDER, partial(launch.func, *args, **launch.keywords)))
    return made


def blocks_of(config: ModelConfig, batch: int) -> int:
    """Of a launch without parts."""
    group = config.num_heads // config.num_kv_heads
    return batch * config.num_kv_heads * -(-group // HEADS_OF_A_BLOCK)


def rule(blocks: int, multiprocessors: int) -> int:
    """`decode_splits` in csrc/decode_attention.cu, for heads of which two blocks share a multiprocessor: up to 128."""
    parts = 1
    while parts < PARTS[-1] and blocks * parts * 2 <= multiprocessors:
        parts *= 2
    return 2 if parts == 1 and blocks <= multiprocessors else parts


def row_of(batch: int, context: int, blocks: int, multiprocessors: int, us: Mapping[str, Spread]) -> PartsRow:
    best = min(PARTS, key=lambda parts: us[str(parts)].median)
    taken = rule(blocks, multiprocessors)
    loss = 0.0 if taken == best else us[str(BY_RULE)].median / us[str(best)].median - 1
    return PartsRow(batch, context, blocks, taken, best, loss, us)
