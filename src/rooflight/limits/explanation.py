"""Where the time of a step must go: every operator's limit and wall, the step's, and the memory that it takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

import torch

from rooflight.limits.bounds import Bound, bound, memory_us
from rooflight.limits.ceilings import Ceilings, ceilings
from rooflight.limits.scenario import NAMES, PRODUCTS, Placed, Scenario, kv_element_bytes, place
from rooflight.limits.trace import PAGE_SIZE, PLAIN, Call, Step, trace
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import Recipe, on_gpu

SHARE = 0.9  # of the memory beside the weights that a cache and its work may take


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
    """Bytes on each GPU; kv in whole pages. largest_batch: sequences of this length that fit; 0 if not even one does.

    A tenth of what the weights leave is kept free, for what is not counted here.
    """

    batch: int
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
        return self.batch <= self.largest_batch


@dataclass(frozen=True)
class Explanation:
    """A step of a model on a card.

    stream_us: the limit of the step, everything overlapped with everything. graph_us: one kernel after the other, each
    at its own limit. host_us: the time in which a host without a graph can launch them. weight_bytes, kv_bytes: read
    in the step. crossing: tokens of context at which one sequence's KV weigh what is read of weights; None if windows
    keep them below. ridge: operations a byte from which compute is the wall, with this step's share of writes.
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
    crossing: float | None
    ridge: float
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

    def as_data(self) -> dict[str, Any]:
        """Everything, for JSON."""
        data = asdict(self)
        data["card"] = {k: v for k, v in data["card"].items() if k not in ("read", "fractions")}
        data["memory"] |= {"total": self.memory.total, "fits": self.memory.fits}
        return data | {"tokens_per_s": self.tokens_per_s}


def explain(model: str, config: ModelConfig, scenario: Scenario, recipe: Recipe | None = None) -> Explanation:
    """Explain one step. `config.dtype` is what the model would run in. ValueError for a step that cannot be.

    recipe: of the decoder; None: what serves on such a card.
    """
    scenario.check(config)
    card = ceilings(scenario.gpu)
    placed = placed_calls(config, scenario, recipe)
    total = sum(p.cost.bytes for p in placed)
    bounds = [_bound(p, card, total) for p in placed]
    graph = sum(b.limit_us for b in bounds)
    units = {"cores": 0.0, "matrix units": 0.0}  # these work at the same time
    for p, b in zip(placed, bounds, strict=True):
        units["cores" if card.unit(p.cost.unit, p.format) == "fp32" else "matrix units"] += b.compute_us
    walls = {
        "memory": memory_us(
            sum(p.cost.bytes_read for p in placed), sum(p.cost.bytes_written for p in placed), card, total
        ),
        "compute": max(units.values()),
        "link": sum(b.link_us for b in bounds),
        "launch": card.node_us,
    }
    wall = max(walls, key=lambda name: walls[name])
    weights = round(sum(p.weight_bytes for p in placed))
    per_token = kv_bytes_per_token(config, scenario)
    product = NAMES.get(config.dtype, "fp32") if scenario.compute == "as is" else scenario.compute
    return Explanation(
        model=model,
        scenario=scenario,
        dtype=NAMES.get(config.dtype, str(config.dtype)),
        card=card,
        rows=_rows(placed, bounds, graph),
        bytes=total,
        flops=sum(p.cost.flops for p in placed),
        weight_bytes=weights,
        kv_bytes=round(sum(p.kv_bytes for p in placed)),
        kv_bytes_per_token=per_token,
        crossing=_crossing(weights, per_token, config),
        ridge=card.flops[card.unit("tensor", product)] * walls["memory"] / 1e6 / total,
        launches=len(placed),
        stream_us=walls[wall],
        stream_wall=wall,
        graph_us=graph,
        host_us=len(placed) * card.call_us,
        memory=memory_plan(config, scenario, placed, card),
    )


def placed_calls(config: ModelConfig, scenario: Scenario, recipe: Recipe | None = None) -> list[Placed]:
    """Every call of a step in order, of the decoder that a GPU runs; of several GPUs, the one with collectives.

    recipe: of the decoder of a GPU alone; None: what serves on such a card.
    """
    if scenario.tp > 1:
        recipe = PLAIN
    elif recipe is None:
        recipe = on_gpu(config.dtype, ceilings(scenario.gpu).scales)
    return place(_traced(config, scenario.step, recipe), scenario, config)


@lru_cache(maxsize=64)
def _traced(config: ModelConfig, step: Step, recipe: Recipe) -> tuple[Call, ...]:
    return tuple(trace(config, step, recipe))


def name_of(call: Call) -> str:
    """What tables call it: a product by its weight too."""
    return f"{call.operator} {_label(call)}".strip()


def _label(call: Call) -> str:
    return call.label if call.operator in PRODUCTS else ""


def _bound(placed: Placed, card: Ceilings, total: int) -> Bound:
    found = bound(placed.cost, placed.format, card, stream=total)
    return Bound(found.memory_us, found.compute_us, found.launch_us, placed.link_bytes / card.link_rate * 1e6)


def _rows(placed: Sequence[Placed], bounds: Sequence[Bound], graph: float) -> tuple[Row, ...]:
    """Alike are calls of one operator with one shape and cost; of a product, also with one weight."""
    groups: dict[tuple[Any, ...], list[tuple[Placed, Bound]]] = {}
    for item, limit in zip(placed, bounds, strict=True):
        groups.setdefault((item.call.operator, _label(item.call), item.call.shape, item.cost), []).append((item, limit))
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


def kv_bytes_per_token(config: ModelConfig, scenario: Scenario) -> float:
    """Of all layers, on each GPU."""
    elements = config.kv_bytes_per_token(config.dtype) // config.dtype.itemsize
    return elements * kv_element_bytes(config, scenario) / scenario.tp


def _crossing(weights: float, per_token: float, config: ModelConfig) -> float | None:
    """Where sum over layers of min(context, window) passes the weights."""
    layers = config.num_layers
    tokens = weights / (per_token / layers)  # of one layer
    windows = sorted(window or math.inf for window in config.sliding_windows)
    spent = 0.0
    for number, window in enumerate(windows):
        context = (tokens - spent) / (layers - number)
        if context <= window:
            return context
        spent += window
    return None


def memory_plan(config: ModelConfig, scenario: Scenario, placed: Sequence[Placed], card: Ceilings) -> Memory:
    """Weights, the cache of the scenario's sequences and the largest intermediate results, on each GPU."""
    step = scenario.step
    weights = round(sum(p.weight_bytes for p in placed))
    if not config.tie_word_embeddings:  # looked up, not read
        weights += config.vocab_size * config.hidden_size * config.dtype.itemsize // scenario.tp
    table = config.max_position_embeddings * config.rope.rotary_dim(config.head_dim) * torch.float32.itemsize
    workspace = max(p.cost.bytes - round(p.weight_bytes + p.kv_bytes) for p in placed)
    slots = -(-step.length // PAGE_SIZE) * PAGE_SIZE
    each = slots * kv_bytes_per_token(config, scenario)
    left = SHARE * (card.memory_bytes - weights - table)
    largest = max(0, int(left // (each + workspace / step.batch)))
    return Memory(step.batch, weights, round(step.batch * each), workspace, table, card.memory_bytes, largest)
