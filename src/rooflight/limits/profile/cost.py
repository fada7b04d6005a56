"""Bytes and FLOPs of an operator in a trace, from the shapes of its arguments, and the time that they must take.

Least amounts throughout, so that the time is a limit: each argument is read once, each result written once, elements
that an expanded argument repeats count once, and whatever the shapes do not tell counts as nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rooflight.limits.profile import families
from rooflight.limits.profile.reader import Inputs

# Names of types in traces, after "c10::": our name and the bytes of an element.
_TYPES = {
    "double": ("fp64", 8),
    "float": ("fp32", 4),
    "BFloat16": ("bf16", 2),
    "Half": ("fp16", 2),
    "Float8_e4m3fn": ("fp8", 1),
    "Float8_e5m2": ("fp8", 1),
    "signed char": ("int8", 1),
    "unsigned char": ("uint8", 1),
    "bool": ("bool", 1),
    "short int": ("int16", 2),
    "short": ("int16", 2),
    "int": ("int32", 4),
    "long int": ("int64", 8),
    "long": ("int64", 8),
    "long long": ("int64", 8),
}
_LONG_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
# Products by name, without "aten::" and leading underscores: how many arguments come before the two factors.
_PRODUCTS = {"mm": 0, "int_mm": 0, "scaled_mm": 0, "bmm": 0, "mv": 0, "matmul": 0, "linear": 0}
_PRODUCTS |= {"addmm": 1, "addmm_activation": 1, "baddbmm": 1, "addmv": 1}
_RESULT_SIZES = {"int_mm": 4, "scaled_mm": 2}  # bytes of an element where it is not that of the factors
_HEADS_LAST = ("flash_attention_forward", "efficient_attention_forward")  # (batch, length, heads, head_dim)
# Families whose functional operators write a result as large as their largest argument.
_SAME_SIZE = (families.NORM, families.ACTIVATION, families.COPY, families.ELEMENTWISE)
_STREAMING = (*_SAME_SIZE, families.REDUCTION, families.SAMPLING, families.FUSED)
_TOO_MANY = 1 << 50  # elements; not of this world, and sums of them must stay numbers
_ENDLESS = 1e15  # bytes of a stream so long that its start does not matter


@dataclass(frozen=True)
class Peaks:
    """What a card does at most: bytes read per second, FLOP/s by format ("bf16", "fp32", …).

    node_us: microseconds of a kernel that does nothing. launch_us: of a launch on the host; 0 if it is not known.
    """

    read_rate: float
    flops: Mapping[str, float] = field(default_factory=dict)
    node_us: float = 1.0
    launch_us: float = 0.0
    name: str = ""

    @staticmethod
    def of(ceilings: Any) -> Peaks | None:
        """From any object with `read_rate`, a number or a function of a stream's bytes, and `flops`; None from None."""
        if ceilings is None or isinstance(ceilings, Peaks):
            return ceilings
        rate = ceilings.read_rate(_ENDLESS) if callable(ceilings.read_rate) else ceilings.read_rate
        node, launch = (float(getattr(ceilings, name, usual)) for name, usual in (("node_us", 1.0), ("launch_us", 0.0)))
        return Peaks(float(rate), dict(ceilings.flops), node, launch, str(getattr(ceilings, "name", "")))

    def times(self, work: Work) -> tuple[float, float]:
        """Microseconds in memory and in computing; no time for a format whose rate is not known."""
        rate = self.flops.get(work.dtype) or self.flops.get(_LONG_NAMES.get(work.dtype, ""), math.inf)
        return work.bytes / self.read_rate * 1e6, work.flops / rate * 1e6


@dataclass(frozen=True)
class Work:
    """What one call has to move and to compute, and the format of its values."""

    bytes: float
    flops: float = 0.0
    dtype: str = ""


@dataclass(frozen=True)
class _Tensor:
    shape: tuple[int, ...]
    dtype: str
    element: int
    stored: int  # elements, those that an expanded tensor repeats counted once

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.stored * self.element


def work_of(operator: str, inputs: Inputs) -> Work | None:
    """The work of one call of an operator; None where shapes do not tell it."""
    namespace, _, name = operator.rpartition("::")
    tensors = _tensors(inputs)
    if not tensors:
        return None
    native = namespace in ("aten", "rooflight")
    family = families.operator_family(operator)
    if native and family == families.MATMUL:
        return _product(name.strip("_"), tensors)
    if native and family == families.ATTENTION:
        return _attention(name.strip("_"), tensors)
    if native and name == "embedding":
        return _embedding(tensors)
    # A fused gather is given whole tables, of which it reads some rows; so is rotation, and paged caches likewise.
    if family not in _STREAMING or "embedding" in name or "index" in name or "cache" in name:
        return None
    return Work(_streamed(name, family, native, tensors), 0.0, tensors[0].dtype)


def _streamed(name: str, family: str, native: bool, tensors: Sequence[_Tensor]) -> int:
    read = sum(tensor.bytes for tensor in tensors)
    if not native or name in ("copy_", "fill_", "zero_"):
        return read  # others' operators are given their results as arguments
    if name.endswith("_"):
        return read + tensors[0].bytes
    if family in _SAME_SIZE or "softmax" in name:
        return read + max(tensor.elements for tensor in tensors) * tensors[0].element
    return read


def _product(name: str, tensors: Sequence[_Tensor]) -> Work | None:
    skipped = _PRODUCTS.get(name)
    if skipped is None or len(tensors) < skipped + 2:
        return None
    left, right = tensors[skipped : skipped + 2]
    sides = _sides(left.shape, right.shape[::-1] if name == "linear" else right.shape)
    if sides is None:
        return None
    batch, m, k, n = sides
    written = batch * m * n * _RESULT_SIZES.get(name, left.element)
    return Work(sum(tensor.bytes for tensor in tensors) + written, 2.0 * batch * m * k * n, left.dtype)


def _sides(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, int, int, int] | None:
    """Batch, m, k, n of the product of (..., m, k) and (..., k, n), (k, n) or (k,); None if they do not fit."""
    if not left or not right or left[-1] != (right[-2] if len(right) > 1 else right[0]):
        return None
    n = right[-1] if len(right) > 1 else 1
    if len(right) <= 2:
        return 1, math.prod(left[:-1]), left[-1], n
    batch = max(math.prod(left[:-2]), math.prod(right[:-2]))
    return batch, left[-2] if len(left) > 1 else 1, left[-1], n


def _attention(name: str, tensors: Sequence[_Tensor]) -> Work | None:
    """Of PyTorch's own: queries, keys and values are the first three.

    Where queries and keys are equally long the mask may be causal, and only half the products count. With packed
    sequences lengths are not in the shapes, and no product counts.
    """
    if "attention" not in name or len(tensors) < 3:
        return None
    query, key, value = tensors[:3]
    if not len(query.shape) == len(key.shape) == len(value.shape) or len(query.shape) not in (3, 4):
        return None
    result = query.elements * query.element
    moved = query.bytes + key.bytes + value.bytes + result
    if len(query.shape) == 3:
        return Work(moved, 0.0, query.dtype)
    place = 1 if name in _HEADS_LAST else 2
    length, context = query.shape[place], key.shape[place]
    causal = 0.5 if length == context > 1 else 1.0
    return Work(moved, 4.0 * query.elements * context * causal, query.dtype)


def _embedding(tensors: Sequence[_Tensor]) -> Work | None:
    """Rows of a table: aten's first argument, our second. Only the rows asked for are read."""
    table = next((tensor for tensor in tensors[:2] if len(tensor.shape) == 2 and "int" not in tensor.dtype), None)
    if table is None or len(tensors) < 2:
        return None
    ids = tensors[1] if table is tensors[0] else tensors[0]
    return Work(ids.bytes + 2.0 * ids.elements * table.shape[1] * table.element, 0.0, table.dtype)


def _tensors(inputs: Inputs) -> list[_Tensor]:
    """The arguments that are tensors. A list of tensors has no types in a trace: then none at all."""
    if not isinstance(inputs.dims, list) or not isinstance(inputs.types, list):
        return []
    strides = inputs.strides if isinstance(inputs.strides, list) else []
    found = []
    for place, (dims, name) in enumerate(zip(inputs.dims, inputs.types, strict=False)):
        if name == "TensorList":
            return []
        kind = _TYPES.get(str(name).removeprefix("c10::"))
        if kind is None or not _sizes(dims):
            continue
        steps = strides[place] if place < len(strides) and _sizes(strides[place], len(dims)) else [1] * len(dims)
        stored = math.prod(size for size, step in zip(dims, steps, strict=True) if step or not size)
        if math.prod(dims) >= _TOO_MANY:
            return []
        found.append(_Tensor(tuple(dims), *kind, stored))
    return found


def _sizes(values: Any, count: int | None = None) -> bool:
    if not isinstance(values, list) or count not in (None, len(values)):
        return False
    return all(type(value) is int and 0 <= value < _TOO_MANY for value in values)
