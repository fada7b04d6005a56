"""A step as it would be with other formats, or cut over several GPUs: the traced calls with their costs changed."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from rooflight.limits.ceilings import ceilings
from rooflight.limits.trace import Call, Step
from rooflight.models.config import ModelConfig
from rooflight.ops import Cost
from rooflight.ops.scaled_linear import squares_parts

GROUP = 128  # elements that share one FP32 scale in w8 and w4
# Bytes of an element, its share of a scale included.
WEIGHT_FORMATS: Mapping[str, float] = {"as is": 0, "fp8": 1, "w8": 1 + 4 / GROUP, "w4": 0.5 + 4 / GROUP}
KV_FORMATS: Mapping[str, float] = {"as is": 0, "fp8": 1, "int8": 1}  # int8: and one FP32 scale a token and head
KEYS = ("batch", "context", "phase", "gpu", "weights", "head", "kv", "compute", "tp")
COMPUTE_FORMATS = ("as is", "fp8", "int8")  # of both sides of the projections


@dataclass(frozen=True)
class Scenario:
    """What to explain. weights: of the projections in the layers; head: of the one to the vocabulary; tp: GPUs.

    compute: the format in which projections multiply, both sides stored in it; else that of the activations. The
    cache is written in the model's own format, which is little beside what is read.
    """

    step: Step
    gpu: str
    weights: str = "as is"
    head: str = "as is"
    kv: str = "as is"
    compute: str = "as is"
    tp: int = 1

    def check(self, config: ModelConfig) -> None:
        """ValueError, naming key, choices and value, for what cannot be."""
        self.step.check(config)
        card = ceilings(self.gpu)
        formats: Collection[str]
        for key, formats in (
            ("weights", WEIGHT_FORMATS),
            ("head", WEIGHT_FORMATS),
            ("kv", KV_FORMATS),
            ("compute", [name for name in COMPUTE_FORMATS if name == "as is" or name in card.flops]),
        ):
            if getattr(self, key) not in formats:
                choices = ", ".join(name for name in formats if name != "as is")
                raise ValueError(f"{key} must be one of {choices}, was {getattr(self, key)!r}")
        cut = {"KV heads": config.num_kv_heads, "columns of the MLP": config.intermediate_size}
        for what, count in cut.items():
            if self.tp < 1 or count % self.tp:
                raise ValueError(f"tp must divide the model's {count:,} {what}, was {self.tp}")

    def changed(self, text: str) -> Scenario:
        """With the changes of "kv=fp8,head=w8,batch=8". ValueError for an unknown key or a value that is none."""
        scenario = self
        for part in (part.strip() for part in text.split(",")):
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
    """A call with what it costs on one of the scenario's GPUs. format: of its products. link_bytes: that leave it.

    weight_bytes and kv_bytes are read, and in the cost.
    """

    call: Call
    cost: Cost
    format: str
    weight_bytes: float = 0.0
    kv_bytes: float = 0.0
    link_bytes: float = 0.0


COLLECTIVES = ("all_reduce", "all_gather")
SUMS = ("linear_add_", "linear_add_scale_")
PRODUCTS = (  # with one of the projections' weights
    "linear", "rms_norm_linear", "rms_norm_swiglu", "scaled_linear", "scaled_swiglu", *SUMS,
)  # fmt: skip
BY_ROWS = ("o", "down")  # projections whose input is cut, and not their output
BY_HEADS = (  # cut whole
    "decode_attention", "prefill_attention", "qk_norm_rope_attention_", "qk_norm_rope_cache_", "silu_and_mul",
)  # fmt: skip
NAMES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


def place(calls: Sequence[Call], scenario: Scenario, config: ModelConfig) -> list[Placed]:
    """What each of the scenario's GPUs does, in order; collectives only where there is somebody to talk to."""
    placed = []
    for call in calls:
        if call.operator in COLLECTIVES:
            if scenario.tp > 1:
                placed.append(_collective(call, scenario.tp))
        elif call.operator in PRODUCTS:
            placed.append(_product(call, scenario))
        else:
            placed.append(_other(call, scenario, config))
    return placed


def kv_element_bytes(config: ModelConfig, scenario: Scenario) -> float:
    """Of the cache, with its share of a scale."""
    if scenario.kv == "as is":
        return config.dtype.itemsize
    return KV_FORMATS[scenario.kv] + (4 / config.head_dim if scenario.kv == "int8" else 0)


def _product(call: Call, scenario: Scenario) -> Placed:
    """A projection: weights cut by columns or rows, in their format, its input in the format of the product.

    A norm in front takes its input and its own weight as they are; so does a sum behind what it adds to.
    """
    tp, size = scenario.tp, call.dtype.itemsize
    name = scenario.head if call.label == "head" else scenario.weights
    element: float = size if name == "as is" else WEIGHT_FORMATS[name]
    computed, format_ = size, NAMES.get(call.dtype, "fp32")
    if scenario.compute != "as is":
        computed, format_ = 1, scenario.compute
        element = min(element, 1)
    normed = call.operator.startswith("rms_norm")
    norm = call.shape[-1] if normed or call.operator == "linear_add_scale_" else 0
    weights = norm * size + (call.weight_elements - norm) * element / tp
    given: float = call.cost.bytes_read - call.weight_elements * size
    added = prod(call.shape) * size if call.operator in SUMS else 0  # the residual
    if call.operator.startswith("scaled_"):  # sums of squares stay as they are
        added = prod(call.shape[:-1]) * squares_parts(call.shape[-1]) * torch.float32.itemsize
    given = given if normed else added + (given - added) * computed / size
    rows = call.label in BY_ROWS
    cost = replace(
        call.cost,
        bytes_read=round(weights + (given / tp if rows else given)),
        bytes_written=call.cost.bytes_written if rows else call.cost.bytes_written // tp,
        flops=call.cost.flops // tp,
    )
    return Placed(call, cost, format_, weights)


def _other(call: Call, scenario: Scenario, config: ModelConfig) -> Placed:
    tp = scenario.tp if call.operator in BY_HEADS else 1
    size, weights = call.dtype.itemsize, float(call.weight_elements * call.dtype.itemsize)
    kv = call.kv_elements * kv_element_bytes(config, scenario) / tp
    read = (call.cost.bytes_read - call.kv_elements * size) / tp + kv
    cost = replace(
        call.cost, bytes_read=round(read), bytes_written=call.cost.bytes_written // tp, flops=call.cost.flops // tp
    )
    return Placed(call, cost, NAMES.get(call.dtype, "fp32"), weights if tp == 1 else weights / tp, kv)


def _collective(call: Call, tp: int) -> Placed:
    """A ring: each GPU sends all of the tensor but one part, twice to sum it up, once to put it together."""
    times = 2 if call.operator == "all_reduce" else 1
    sent = times * (tp - 1) / tp * call.cost.bytes_written
    read = call.cost.bytes_read if call.operator == "all_reduce" else call.cost.bytes_read // tp
    return Placed(call, replace(call.cost, bytes_read=read), NAMES.get(call.dtype, "fp32"), link_bytes=sent)
