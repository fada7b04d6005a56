"""Where the time of a step must go: every operator's limit and wall, the step's, and the memory that it takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from rooflight.limits.bounds import Bound, bound, memory_us
from rooflight.limits.ceilings import Ceilings, ceilings
from rooflight.limits.scenario import KV_FORMATS, WEIGHT_FORMATS, Placed, Scenario, place
from rooflight.limits.trace import Call, Step, trace
from rooflight.models.config import ModelConfig

LABELLED = ("linear", "all_reduce")
SHARE = 0.9  # of the memory beside the weights that a cache may take
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Row:
    """Calls of one operator that are alike, together. Times in microseconds; intensity in operations a byte."""

    operator: str
    label: str
    shape: tuple[int, ...]
    calls: int
    bytes: int
    flops: int
    intensity: float
    memory_us: float
    compute_us: float
    launch_us: float
    link_us: float
    wall: str
    limit_us: float
    share: float

    @property
    def name(self) -> str:
        return f"{self.operator} {self.label}".strip()


@dataclass(frozen=True)
class Memory:
    """Bytes on each GPU. largest_batch: sequences of this length that fit; 0 if not even the weights do."""

    weights: int
    kv: int
    workspace: int
    rope_table: int
    card: int
    largest_batch: int

    @property
    def total(self) -> int:
        return self.weights + self.kv + self.workspace + self.rope_table

    @property
    def fits(self) -> bool:
        return self.total <= self.card


@dataclass(frozen=True)
class Explanation:
    """A step of a model on a card.

    stream_us: the limit of the step, everything overlapped with everything. graph_us: one kernel after the other, each
    at its own limit. host_us: the time in which a host without a graph can launch them. weight_bytes, kv_bytes: read
    in the step. crossing: tokens of context of one sequence at which a decode step reads as much KV as weights.
    """

    model: str
    scenario: Scenario
    dtype: str
    card: Ceilings
    rows: tuple[Row, ...]
    bytes: int
    flops: int
    weight_bytes: int
    kv_bytes: int
    kv_bytes_per_token: float
    crossing: float
    launches: int
    stream_us: float
    stream_wall: str
    graph_us: float
    host_us: float
    memory: Memory

    @property
    def tokens(self) -> int:
        """Tokens that a step works on: one a sequence in decode, the prompts' in prefill."""
        return self.scenario.step.batch * self.scenario.step.new_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.stream_us * 1e6

    @property
    def ridge(self) -> float:
        """Operations a byte from which the card's matrix units, and not its memory, are the wall."""
        return self.card.flops[self.card.unit("tensor", self.dtype)] / self.card.read_rate(self.bytes)

    def as_data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        data = asdict(self)
        data["card"] = {k: v for k, v in data["card"].items() if k not in ("read", "fractions")}
        data["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        return data | {"tokens_per_s": self.tokens_per_s, "ridge": self.ridge}


def explain(model: str, config: ModelConfig, scenario: Scenario) -> Explanation:
    """Explain one step. `config.dtype` is what the model would run in. ValueError for a step that cannot be."""
    scenario.check(config)
    card = ceilings(scenario.gpu)
    placed = place(_traced(config, scenario.step), scenario, config)
    total = sum(p.cost.bytes for p in placed)
    bounds = [_bound(p, card, total) for p in placed]
    graph = sum(b.limit_us for b in bounds)
    walls = {
        "memory": memory_us(
            sum(p.cost.bytes_read for p in placed), sum(p.cost.bytes_written for p in placed), card, total
        ),
        "compute": sum(b.compute_us for b in bounds),
        "link": sum(b.link_us for b in bounds),
        "launch": card.node_us,
    }
    wall = max(walls, key=lambda name: walls[name])
    weights = _weights_read(placed, scenario)
    per_token = kv_bytes_per_token(config, scenario)
    return Explanation(
        model=model,
        scenario=scenario,
        dtype=NAMES.get(config.dtype, str(config.dtype)),
        card=card,
        rows=_rows(placed, bounds, graph),
        bytes=total,
        flops=sum(p.cost.flops for p in placed),
        weight_bytes=weights,
        kv_bytes=round(sum(p.call.kv_elements for p in placed) * per_token / _kv_elements(config)),
        kv_bytes_per_token=per_token,
        crossing=weights / per_token,
        launches=len(placed),
        stream_us=walls[wall],
        stream_wall=wall,
        graph_us=graph,
        host_us=len(placed) * card.call_us,
        memory=memory_plan(config, scenario, placed, card),
    )


@lru_cache(maxsize=64)
def _traced(config: ModelConfig, step: Step) -> tuple[Call, ...]:
    return tuple(trace(config, step))


def _bound(placed: Placed, card: Ceilings, total: int) -> Bound:
    found = bound(placed.cost, NAMES.get(placed.call.dtype, "fp32"), card, stream=total)
    return Bound(found.memory_us, found.compute_us, found.launch_us, placed.link_bytes / card.link_rate * 1e6)


def _rows(placed: Sequence[Placed], bounds: Sequence[Bound], graph: float) -> tuple[Row, ...]:
    """Alike are calls of one operator with one shape and cost; of a product, also with one weight."""
    groups: dict[tuple[Any, ...], list[tuple[Placed, Bound]]] = {}
    for item, limit in zip(placed, bounds, strict=True):
        label = item.call.label if item.call.operator in LABELLED else ""
        groups.setdefault((item.call.operator, label, item.call.shape, item.cost), []).append((item, limit))
    rows = []
    for (operator, label, shape, cost), members in groups.items():
        count, one = len(members), members[0][1]
        rows.append(
            Row(
                operator=operator,
                label=label,
                shape=shape,
                calls=count,
                bytes=count * cost.bytes,
                flops=count * cost.flops,
                intensity=cost.flops / max(cost.bytes, 1),
                memory_us=count * one.memory_us,
                compute_us=count * one.compute_us,
                launch_us=count * one.launch_us,
                link_us=count * one.link_us,
                wall=one.wall,
                limit_us=count * one.limit_us,
                share=count * one.limit_us / graph,
            )
        )
    return tuple(rows)


def _weights_read(placed: Sequence[Placed], scenario: Scenario) -> int:
    return round(
        sum(p.call.weight_elements * _weight_size(p.call, scenario) for p in placed if p.call.weight_elements)
        / scenario.tp
    )


def _weight_size(call: Call, scenario: Scenario) -> float:
    name = scenario.head if call.label == "head" else scenario.weights
    return WEIGHT_FORMATS[name] if call.operator == "linear" and name != "as is" else call.dtype.itemsize


def _kv_elements(config: ModelConfig) -> int:
    return config.kv_bytes_per_token(config.dtype) // config.dtype.itemsize


def kv_bytes_per_token(config: ModelConfig, scenario: Scenario) -> float:
    """Of all layers, on each GPU."""
    size = KV_FORMATS[scenario.kv] or config.dtype.itemsize
    scale = 4 / config.head_dim if scenario.kv == "int8" else 0
    return _kv_elements(config) * (size + scale) / scenario.tp


def memory_plan(config: ModelConfig, scenario: Scenario, placed: Sequence[Placed], card: Ceilings) -> Memory:
    """Weights, the cache of the scenario's sequences and the largest intermediate results, on each GPU."""
    step = scenario.step
    weights = _weights_read(placed, scenario)
    if not config.tie_word_embeddings:
        weights += config.vocab_size * config.hidden_size * config.dtype.itemsize  # looked up, not read
    table = config.max_position_embeddings * config.rope.rotary_dim(config.head_dim) * torch.float32.itemsize
    per_token = kv_bytes_per_token(config, scenario)
    workspace = max(
        p.cost.bytes
        - round(p.call.weight_elements * _weight_size(p.call, scenario) / scenario.tp)
        - round(p.call.kv_elements * per_token / _kv_elements(config))
        for p in placed
    )
    each = step.length * per_token + workspace / step.batch
    left = SHARE * (card.memory_bytes - weights - table)
    kv = round(step.batch * step.length * per_token)
    return Memory(weights, kv, workspace, table, card.memory_bytes, max(0, int(left // each)))
