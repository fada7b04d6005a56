"""Every operator of a step alone on the GPU, at sizes from which laws are fitted.

What a step reads from memory is cold here: a graph goes through enough weights, or caches of keys and values, to exceed
three times L2. What the operator before it has just written is hot: all launches share it. So a launch costs what it
costs in a step, its overlap with the launch before it included, but between operators of its own kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from statistics import median
from typing import Any

import torch

from rooflight import ops
from rooflight.bench.device import FLUSH_FACTOR, Closure, CudaDevice, Device, Graph
from rooflight.bench.timing import replay_us
from rooflight.limits.ceilings import Ceilings
from rooflight.limits.explanation import placed_calls
from rooflight.limits.laws import Point, bound_of
from rooflight.limits.scenario import COLLECTIVES, PRODUCTS, Placed, Scenario
from rooflight.limits.trace import PAGE_SIZE, Step
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import Recipe

# Steps whose operators are measured: sizes beside those that are asked for.
DECODES = ((1, 256), (4, 2048), (8, 512), (1, 4096), (16, 512), (32, 2048), (128, 256), (48, 4096))
PREFILLS = (48, 384, 1536, 4096)
ATTENTIONS = {"decode_attention", "prefill_attention", "qk_norm_rope_attention_"}
MOST_SETS = 256
GRAPH_US, MOST_LAUNCHES, ROUNDS = 2000.0, 1000, 5
Progress = Callable[[str, int, int], None]


def measure(
    config: ModelConfig, card: Ceilings, phases: Sequence[str], progress: Progress, recipe: Recipe | None = None
) -> list[Point]:
    """A point for each operator and size; of the model, and of one half as wide, since a rate shows in two sizes.

    recipe: of the decoder that runs; None: what serves on such a card.
    """
    device = CudaDevice()
    device.warm_clocks()
    calls = list(_calls(config, card, phases, recipe))
    points = []
    with torch.inference_mode():
        for index, (model, step, item) in enumerate(calls):
            call = item.call
            progress(f"measuring {call.operator} {call.label}", index, len(calls))
            limit = bound_of(call, item.cost, item.format, card)
            us = time_us(device, closures(model, step, item, device))
            points.append(Point(call.operator, call.label, call.shape, limit.memory_us, limit.compute_us, us))
    progress("measuring operators", len(calls), len(calls))
    return points


def _calls(
    config: ModelConfig, card: Ceilings, phases: Sequence[str], recipe: Recipe | None
) -> Iterator[tuple[ModelConfig, Step, Placed]]:
    """Of every step, each call once that is not like one before it. No attention of a model with windows, whose layers
    differ: its limit will have to do."""
    builders = BUILDERS.keys() - (ATTENTIONS if any(config.sliding_windows) else set())
    most = config.max_position_embeddings - 1
    steps = [Step("decode", batch, min(context, most)) for batch, context in DECODES if "decode" in phases]
    steps += [Step("prefill", 1, min(tokens, most)) for tokens in PREFILLS if "prefill" in phases]
    seen = set()
    short = shortened(config)
    for model in (short, halved(short)):
        for step in steps:
            for item in placed_calls(model, Scenario(step, card.key), recipe):
                key = item.call.operator, item.call.label, item.call.shape, item.cost
                if key not in seen and item.call.operator in builders:
                    seen.add(key)
                    yield model, step, item


def shortened(config: ModelConfig) -> ModelConfig:
    """Of two layers, since they take time and are alike, but that the last has fewer rows of a prompt."""
    layers = min(config.num_layers, 2)
    return replace(config, num_layers=layers, sliding_windows=config.sliding_windows[:layers])


def halved(config: ModelConfig) -> ModelConfig:
    """The widths of the products halved."""
    return replace(config, hidden_size=config.hidden_size // 2, intermediate_size=config.intermediate_size // 2)


def time_us(device: Device, launches: Sequence[Closure]) -> float:
    """Of one launch among many in a graph that goes through `launches` again and again."""
    graph, count = long_graph(device, launches)
    return median(replay_us(device, graph) for _ in range(ROUNDS)) / count


def long_graph(device: Device, launches: Sequence[Closure]) -> tuple[Graph, int]:
    """A graph that goes through `launches` again and again for about GRAPH_US, and how many launches it has."""
    for launch in launches[:2]:
        launch()
    once = replay_us(device, device.capture(launches), 1)
    turns = max(1, min(round(GRAPH_US / max(once, 1e-3)), MOST_LAUNCHES // len(launches)))
    return device.capture(list(launches) * turns), turns * len(launches)


def sets_of(size: int, l2_bytes: int) -> int:
    """How many arguments of `size` bytes a graph goes through so that none is in L2 when its turn comes."""
    return min(FLUSH_FACTOR * l2_bytes // max(size, 1) + 2, MOST_SETS)


def closures(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    """Calls of the operator, with tensors of its own sizes on the device."""
    return BUILDERS[item.call.operator](config, step, item, device)


def _randn(item: Placed, device: Device, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, device=device.name, dtype=item.call.dtype)


def _product(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    call = item.call
    heads = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    wide, inner = config.hidden_size, config.intermediate_size
    given, out = {
        "qkv": (wide, heads),
        "o": (config.num_heads * config.head_dim, wide),
        "gate_up": (wide, 2 * inner),
        "down": (inner, wide),
        "head": (wide, config.vocab_size),
    }[call.label]
    rows = call.shape[0]
    sets = sets_of(given * out * call.dtype.itemsize, device.l2_bytes)
    weights = [_randn(item, device, out, given) * given**-0.5 for _ in range(sets)]
    x, norm, residual = _randn(item, device, rows, given), _randn(item, device, given), _randn(item, device, rows, out)
    next_norm, left = _randn(item, device, out), ops.empty_scaled(residual)  # for the product behind
    squares = torch.ones_like(ops.empty_scaled(x)[1])
    run: Callable[[torch.Tensor], object] = {
        "linear": lambda weight: ops.linear(x, weight),
        "rms_norm_linear": lambda weight: ops.rms_norm_linear(x, norm, weight),
        "rms_norm_swiglu": lambda weight: ops.rms_norm_swiglu(x, norm, weight),
        "linear_add_": lambda weight: ops.linear_add_(residual, x, weight),
        "scaled_linear": lambda weight: ops.scaled_linear(x, squares, weight),
        "scaled_swiglu": lambda weight: ops.scaled_swiglu(x, squares, weight),
        "linear_add_scale_": lambda weight: ops.linear_add_scale_(residual, *left, x, weight, next_norm),
    }[call.operator]
    return [lambda weight=weight: run(weight) for weight in weights]  # type: ignore[misc]


def _decode_attention(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    caches, tables = _cache(config, step, item, device)
    q = _randn(item, device, step.batch, config.num_heads, config.head_dim)
    lengths = torch.full((step.batch,), step.length, dtype=torch.int32, device=device.name)
    metas = [ops.AttentionMeta(table, lengths, lengths, 1, step.length) for table in tables]
    return [lambda meta=meta: ops.decode_attention(q, *caches, meta) for meta in metas]  # type: ignore[misc]


def _prefill_attention(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    caches, tables = _cache(config, step, item, device, cold=False)
    tokens = step.batch * step.new_tokens
    q = _randn(item, device, tokens, config.num_heads, config.head_dim)
    lengths = torch.full((step.batch,), step.length, dtype=torch.int32, device=device.name)
    starts = torch.arange(step.batch + 1, dtype=torch.int32, device=device.name) * step.new_tokens
    meta = ops.AttentionMeta(tables[0], lengths, starts, step.new_tokens, step.length)
    return [lambda: ops.prefill_attention(q, *caches, meta)]


def _cache(
    config: ModelConfig, step: Step, item: Placed, device: Device, cold: bool = True
) -> tuple[tuple[torch.Tensor, torch.Tensor], Sequence[torch.Tensor]]:
    """Keys and values, and block tables each of which has its own pages of them."""
    pages = step.batch * -(-step.length // PAGE_SIZE)
    page = config.num_kv_heads * PAGE_SIZE * config.head_dim
    sets = sets_of(2 * pages * page * item.call.dtype.itemsize, device.l2_bytes) if cold else 1
    shape = sets * pages, config.num_kv_heads, PAGE_SIZE, config.head_dim
    caches = _randn(item, device, *shape), _randn(item, device, *shape)
    order = torch.randperm(sets * pages, device=device.name).to(torch.int32)
    return caches, list(order.view(sets, step.batch, -1))


def _heads(config: ModelConfig, step: Step, item: Placed, device: Device) -> tuple[Any, Any, Any, Any, Any, Any, Any]:
    """q, k and v as a packed projection gives them, norms of heads, angles, and a position for each token."""
    tokens = step.batch * step.new_tokens
    heads = [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    q, k, v = _randn(item, device, tokens, sum(heads), config.head_dim).split_with_sizes(heads, dim=1)
    q_norm, k_norm = (_randn(item, device, config.head_dim) if config.qk_norm else None for _ in range(2))
    table = torch.randn(tokens, config.rope.rotary_dim(config.head_dim), device=device.name)
    return q, k, v, q_norm, k_norm, table, torch.arange(tokens, device=device.name)


def _rope_cache(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    q, k, v, q_norm, k_norm, table, slots = _heads(config, step, item, device)
    shape = -(-slots.numel() // PAGE_SIZE), config.num_kv_heads, PAGE_SIZE, config.head_dim
    k_cache, v_cache = (_randn(item, device, *shape) for _ in range(2))
    return [lambda: ops.qk_norm_rope_cache_(q, k, v, q_norm, k_norm, table, slots, slots, k_cache, v_cache, 1e-6)]


def _step_attention(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    caches, tables = _cache(config, step, item, device)
    q, k, v, q_norm, k_norm, angles, positions = _heads(config, step, item, device)
    out = _randn(item, device, step.batch, config.num_heads, config.head_dim)
    given = out, q, k, v, q_norm, k_norm, angles, positions
    lengths = torch.full((step.batch,), step.length, dtype=torch.int32, device=device.name)
    launches: list[Closure] = []
    for table in tables:
        page, offset = divmod(step.length - 1, PAGE_SIZE)
        slots = table[:, page].long() * PAGE_SIZE + offset
        meta = ops.AttentionMeta(table, lengths, lengths, 1, step.length)
        launches.append(partial(ops.qk_norm_rope_attention_, *given, slots, *caches, meta, 1e-6))
    return launches


def _embedding(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    table = _randn(item, device, config.vocab_size, config.hidden_size)
    count = step.batch * step.new_tokens
    many = [torch.randint(config.vocab_size, (count,), device=device.name) for _ in range(16)]
    return [lambda ids=ids: ops.embedding(ids, table) for ids in many]  # type: ignore[misc]


def _sample(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    rows = step.batch
    logits = torch.randn(rows, config.vocab_size, device=device.name)
    zeros = {dtype: torch.zeros(rows, dtype=dtype, device=device.name) for dtype in (torch.float32, torch.int32)}
    floats, shorts, longs = zeros[torch.float32], zeros[torch.int32], torch.arange(rows, device=device.name)
    return [lambda: ops.sample(logits, floats, shorts, floats, floats, longs, longs)]  # as the runner's greedy rows


def _to_float(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    logits = _randn(item, device, *item.call.shape)
    return [logits.float]


def _index(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    hidden = _randn(item, device, *item.call.shape)
    wanted = torch.arange(step.batch, device=device.name)
    return [lambda: hidden[wanted]]


BUILDERS: dict[str, Callable[[ModelConfig, Step, Placed, Device], list[Closure]]] = {
    **dict.fromkeys(PRODUCTS, _product),
    "decode_attention": _decode_attention,
    "prefill_attention": _prefill_attention,
    "qk_norm_rope_attention_": _step_attention,
    "qk_norm_rope_cache_": _rope_cache,
    "embedding": _embedding,
    "sample": _sample,
    "_to_copy": _to_float,
    "index": _index,
}
assert not set(COLLECTIVES) & set(BUILDERS)
