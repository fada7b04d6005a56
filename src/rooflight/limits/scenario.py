"""A step as it would be with other formats, or cut over several GPUs: the traced calls with their costs changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rooflight.limits.trace import Call, Step
from rooflight.models.config import ModelConfig
from rooflight.ops import Cost

GROUP = 128  # elements that share one FP32 scale in w8 and w4
# Bytes of an element, its share of a scale included.
WEIGHT_FORMATS: Mapping[str, float] = {"as is": 0, "fp8": 1, "w8": 1 + 4 / GROUP, "w4": 0.5 + 4 / GROUP}
KV_FORMATS: Mapping[str, float] = {"as is": 0, "fp8": 1, "int8": 1}  # int8: and one FP32 scale a token and head
KEYS = ("batch", "context", "phase", "gpu", "weights", "head", "kv", "tp")


@dataclass(frozen=True)
class Scenario:
    """What to explain. weights: of the projections in the layers; head: of the one to the vocabulary; tp: GPUs."""

    step: Step
    gpu: str
    weights: str = "as is"
    head: str = "as is"
    kv: str = "as is"
    tp: int = 1

    def check(self, config: ModelConfig) -> None:
        """ValueError, naming key, choices and value, for what cannot be."""
        self.step.check(config)
        for key, formats in (("weights", WEIGHT_FORMATS), ("head", WEIGHT_FORMATS), ("kv", KV_FORMATS)):
            if getattr(self, key) not in formats:
                choices = ", ".join(name for name in formats if name != "as is")
                raise ValueError(f"{key} must be one of {choices}, was {getattr(self, key)!r}")
        if self.tp < 1 or config.num_kv_heads % self.tp or config.intermediate_size % self.tp:
            raise ValueError(f"tp must divide the model's {config.num_kv_heads} KV heads, was {self.tp}")

    def changed(self, text: str) -> Scenario:
        """With the changes of "kv=fp8,head=w8,batch=8". ValueError for an unknown key or a value that is none."""
        scenario = self
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, equals, value = (piece.strip() for piece in part.partition("="))
            if key not in KEYS or not equals:
                raise ValueError(f"what-if must be made of {', '.join(f'{key}=' for key in KEYS)}, had {part!r}")
            scenario = scenario.with_one(key, value)
        return scenario

    def with_one(self, key: str, value: str) -> Scenario:
        """With one of KEYS set to a value as a user types it."""
        changed: Any = value
        if key in ("batch", "context", "tp"):
            try:
                changed = int(value.replace("_", ""))
            except ValueError:
                raise ValueError(f"{key} must be a whole number, was {value!r}") from None
        if key in ("batch", "context", "phase"):
            key, changed = "step", replace(self.step, **{key: changed})
        return replace(self, **{key: changed})


@dataclass(frozen=True)
class Placed:
    """A call with what it costs in a scenario. link_bytes: that leave one GPU."""

    call: Call
    cost: Cost
    link_bytes: float = 0.0


CUT_WHOLE = ("decode_attention", "prefill_attention", "qk_norm_rope_cache_", "silu_and_mul")  # by heads, by columns


def place(calls: Sequence[Call], scenario: Scenario, config: ModelConfig) -> list[Placed]:
    """What one of the scenario's GPUs does, in order, collectives between."""
    placed = []
    for call in calls:
        cost = _cut(_reformatted(call, scenario, config), call, scenario.tp)
        placed.append(Placed(call, cost))
        if scenario.tp > 1 and call.operator == "linear" and call.label in ("o", "down"):
            placed.append(_all_reduce(call, scenario.tp, config))
    return placed


def _reformatted(call: Call, scenario: Scenario, config: ModelConfig) -> Cost:
    saved = 0.0
    size = call.dtype.itemsize
    if call.operator == "linear":
        name = scenario.head if call.label == "head" else scenario.weights
        if name != "as is":
            saved += call.weight_elements * (size - WEIGHT_FORMATS[name])
    if scenario.kv != "as is":
        scale = 4 / config.head_dim if scenario.kv == "int8" else 0
        saved += call.kv_elements * (size - KV_FORMATS[scenario.kv] - scale)
    return replace(call.cost, bytes_read=call.cost.bytes_read - round(saved))


def _cut(cost: Cost, call: Call, tp: int) -> Cost:
    """Projections by their rows or columns, attention by heads; norms and the residual stream stay whole."""
    if tp == 1 or not (call.operator == "linear" or call.operator in CUT_WHOLE):
        return cost
    return replace(
        cost, bytes_read=cost.bytes_read // tp, bytes_written=cost.bytes_written // tp, flops=cost.flops // tp
    )


def _all_reduce(call: Call, tp: int, config: ModelConfig) -> Placed:
    """A ring: each GPU sends all of the tensor but one part, twice."""
    size = call.shape[0] * config.hidden_size * call.dtype.itemsize
    own = replace(call, operator="all_reduce", label=call.label, weight_elements=0, kv_elements=0)
    return Placed(own, Cost(size, size, 0), 2 * (tp - 1) / tp * size)
