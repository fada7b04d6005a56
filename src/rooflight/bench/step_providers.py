"""Every provider of the operators of a step, at the sizes of its steps: which one a card should take.

Tensors are as in `step_operators`: what a step reads from memory is cold, what the operator before has written is hot.
Host time does not count, since steps are graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch

from rooflight import ops
from rooflight.bench.device import Closure, CudaDevice, Device
from rooflight.bench.environment import describe, describe_gpu
from rooflight.bench.interleaved import ROUNDS, interleaved_us
from rooflight.bench.measurement import Spread
from rooflight.bench.step_operators import BUILDERS, sets_of, shortened
from rooflight.bench.step_report import card_here
from rooflight.limits.ceilings import Ceilings
from rooflight.limits.laws import bound_of
from rooflight.limits.scenario import NAMES, Placed
from rooflight.limits.trace import PLAIN, Call, Step, trace
from rooflight.models.config import ModelConfig
from rooflight.models.load import load_config
from rooflight.models.recipe import Recipe
from rooflight.ops.contract import PREFERENCE, REGISTRY

TRACED = (  # as a decoder calls them
    "qk_norm_rope_attention_", "decode_attention", "prefill_attention", "qk_norm_rope_cache_", "silu_and_mul", "rope_",
    "embedding", "sample",
)  # fmt: skip
RECIPES = (PLAIN, Recipe(rope=False), Recipe(projections=True, attention=True))  # which call all of them
REFERENCES = ("embedding",)  # whose reference is one kernel of PyTorch
STEPS = (
    *(Step("decode", batch, context) for batch, context in ((1, 1024), (8, 1024), (64, 1024), (256, 512))),
    *(Step("prefill", 1, tokens) for tokens in (512, 4096)),
)
BIASES = 16  # entries of the list that a row has, as many as the engine makes room for at first
MOST_TABLES = 2**31  # bytes of the counts and masks that penalties go through
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class ProviderRow:
    """One provider of one call. Microseconds; phase, batch and context as in `Step`."""

    operator: str
    phase: str
    batch: int
    context: int
    provider: str
    us: Spread
    bytes: int
    limit_us: float
    wall: str


@dataclass(frozen=True)
class ProvidersReport:
    """ceilings: where those of the limits are from. missing: providers without a figure, and why."""

    model: str
    environment: Mapping[str, object]
    ceilings: str
    rows: tuple[ProviderRow, ...]
    missing: Mapping[str, str]

    def as_data(self) -> dict[str, Any]:
        return {
            "benchmark": "step_providers",
            "setup": {"model": self.model, "dtype": "bf16", "rounds": ROUNDS},
            "environment": dict(self.environment),
            "ceilings": self.ceilings,
            "rows": [asdict(row) for row in self.rows],
            "missing": dict(self.missing),
        }


def run(model: str, progress: Progress = lambda *_: None) -> ProvidersReport:
    """On the GPU at hand. ValueError without one, or without its ceilings."""
    config, card = bf16(model), card_here()
    environment = {**describe(os.cpu_count() or 1), **describe_gpu()}
    device = CudaDevice()
    device.warm_clocks()
    rows, missing = measure(config, card, device, progress)
    return ProvidersReport(model, environment, f"{card.name}, {card.origin}", tuple(rows), missing)


def bf16(model: str) -> ModelConfig:
    return replace(load_config(model), dtype=torch.bfloat16)


def measure(
    config: ModelConfig, card: Ceilings, device: Device, progress: Progress
) -> tuple[list[ProviderRow], dict[str, str]]:
    """Rows, and providers without a figure."""
    found, rows = list(calls(config)), []
    missing: dict[str, str] = {}
    for index, (step, call) in enumerate(found):
        progress(f"measuring {call.operator}", index, len(found))
        item = Placed(call, call.cost, NAMES.get(call.dtype, "fp32"))
        with torch.inference_mode():
            launches = (BUILDERS | OTHERS)[call.operator](config, step, item, device)
            names = providers_of(call.operator)
            times, refused = interleaved_us(
                device, {name: [partial(within, name, launch) for launch in launches] for name in names}
            )
        limit = bound_of(call, call.cost, item.format, card)
        size = step.phase, step.batch, step.context
        for name, us in times.items():
            rows.append(ProviderRow(call.operator, *size, name, us, call.cost.bytes, limit.limit_us, limit.wall))
        missing |= {f"{call.operator}.{name}, {' '.join(map(str, size))}": why for name, why in refused.items()}
        if not names:
            missing[call.operator] = "no kernel of it is here; `rooflight info` says why"
    progress("measuring operators", len(found), len(found))
    return rows, missing


def providers_of(operator: str) -> list[str]:
    """Those that are here; the reference where it is one kernel."""
    there = [name for name in PREFERENCE if name in REGISTRY[operator].providers]
    return [name for name in there if name != "ref" or operator in REFERENCES]


def within(provider: str, launch: Closure) -> object:
    with ops.backend(provider):
        return launch()


def calls(config: ModelConfig) -> Iterator[tuple[Step, Call]]:
    """Each operator with every size once that the steps have, operators together."""
    most = config.max_position_embeddings - 1
    short = shortened(config)
    steps = [replace(step, context=min(step.context, most)) for step in STEPS]
    traced = {step: _traced(short, step) for step in steps}
    for operator in TRACED:
        seen = set()
        for step in steps:
            call = traced[step].get(operator)
            if call is not None and (call.shape, call.cost) not in seen:
                seen.add((call.shape, call.cost))
                yield step, call
    for step in steps:
        if step.phase == "decode":
            yield step, _penalties_call(config, step)


def _traced(config: ModelConfig, step: Step) -> dict[str, Call]:
    """The first call of each operator."""
    found: dict[str, Call] = {}
    for recipe in RECIPES:
        for call in trace(config, step, recipe):
            found.setdefault(call.operator, call)
    return found


def _silu_and_mul(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    x = torch.randn(*item.call.shape, device=device.name, dtype=item.call.dtype)
    return [partial(ops.silu_and_mul, x)]


def _rope(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    tokens, heads = item.call.shape[0], [config.num_heads, config.num_kv_heads, config.num_kv_heads]
    packed = torch.randn(tokens, sum(heads), config.head_dim, device=device.name, dtype=item.call.dtype)
    q, k, _ = packed.split_with_sizes(heads, dim=1)
    angles = torch.rand(tokens, config.rope.rotary_dim(config.head_dim) // 2, device=device.name)
    table = torch.cat((angles.cos(), angles.sin()), 1)  # turned again and again, heads keep their length
    return [partial(ops.rope_, q, k, table, torch.arange(tokens, device=device.name))]


def _penalties_call(config: ModelConfig, step: Step) -> Call:
    shape = step.batch, config.vocab_size
    args = _penalties(shape, step.batch, "meta")
    cost = REGISTRY["penalize_logits_"].cost_of(*args, torch.empty(step.batch, dtype=torch.int64, device="meta"))
    return Call("penalize_logits_", "", None, shape, torch.float32, cost)


def _penalties(shape: tuple[int, int], places: int, device: str) -> tuple[Any, ...]:
    """All but the places: logits, which the head has just written, and what each of `places` sequences has."""
    rows, vocab_size = shape
    counts = torch.zeros(places, vocab_size, dtype=torch.int32, device=device)
    seen = torch.zeros(places, vocab_size, dtype=torch.bool, device=device)
    counts[:, ::97], seen[:, ::89] = 1, True
    # Signs alternate, so that logits stay what they are however often they are gone through.
    penalties = [torch.full((rows,), value, device=device) for value in (1.0, 1e-3, -1e-3)]
    ids = torch.arange(BIASES, device=device).expand(rows, -1).contiguous()
    return torch.zeros(shape, device=device), counts, seen, *penalties, ids, torch.zeros(rows, BIASES, device=device)


def _penalize(config: ModelConfig, step: Step, item: Placed, device: Device) -> list[Closure]:
    rows, vocab_size = item.call.shape
    each = rows * vocab_size * (torch.int32.itemsize + torch.bool.itemsize)
    sets = max(2, min(sets_of(each, device.l2_bytes), MOST_TABLES // each))
    args = _penalties((rows, vocab_size), sets * rows, device.name)
    places = torch.arange(sets * rows, device=device.name).view(sets, rows)
    return [lambda mine=mine: ops.penalize_logits_(*args, mine) for mine in places]  # type: ignore[misc]


OTHERS: dict[str, Callable[[ModelConfig, Step, Placed, Device], list[Closure]]] = {
    "silu_and_mul": _silu_and_mul,
    "rope_": _rope,
    "penalize_logits_": _penalize,
}
