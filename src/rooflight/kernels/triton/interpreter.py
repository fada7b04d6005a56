"""Repair of bf16 in Triton's CPU interpreter, so that kernels can be tested on a machine without a GPU.

Three faults: a store of FP32 as bf16 truncates instead of rounding (seen in Triton 3.6 and 3.9), `tl.dot` multiplies
the raw bits of bf16 operands (3.6 and 3.9), and a denormal bf16 that is loaded becomes another value in FP32 (3.9).
With the repair rounding is bit-exact to nearest even. Races, atomics under contention, programmatic launches and TMA
cannot be tested in the interpreter.

And one that costs time: at every call of a function within a kernel it replaces the language anew, half of the time of
a kernel with many small functions. Once a launch is enough.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt


def round_to_bf16(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """FP32 to the bits of bf16, nearest even; every NaN becomes the quiet NaN 0x7FC0."""
    bits = np.ascontiguousarray(values).view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    rounded[np.isnan(values)] = 0x7FC0
    return rounded


def repair() -> None:
    """Patch the interpreter of this process; calling it again changes nothing."""
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter._convert_float
    if getattr(original, "repaired", False):
        return

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if source == tl.float32 and target == tl.bfloat16:
            floats = np.frombuffer(values.tobytes(), np.float32).reshape(values.shape)
            return round_to_bf16(floats)
        if source == tl.bfloat16 and target == tl.float32:
            return (np.frombuffer(values.tobytes(), np.uint16).astype(np.uint32) << 16).reshape(values.shape)
        return original(values, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, c: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        product = np.matmul(upcast(a), upcast(b), dtype=c.data.dtype)
        return interpreter.TensorHandle(product + c.data, c.dtype.scalar)

    def upcast(operand: Any) -> Any:
        narrow = operand.dtype.is_bf16() or (operand.dtype.is_floating() and operand.dtype.primitive_bitwidth == 8)
        if narrow:
            bits = convert(operand.data, operand.dtype, tl.float32, None)
            return bits.view(np.float32).reshape(operand.data.shape)
        return operand.data.astype(np.float32) if operand.data.dtype.kind == "f" else operand.data

    convert.repaired = True  # type: ignore[attr-defined]
    interpreter._convert_float = convert
    interpreter.InterpreterBuilder.create_dot = dot
    _replace_the_language_once(interpreter)


def _replace_the_language_once(interpreter: Any) -> None:
    """A launch replaces it and puts it back at its end; what calls within do again until then is dropped."""
    replace, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    seen = cache(lambda fn: frozenset(id(value) for value in fn.__globals__.values() if inspect.ismodule(value)))
    replaced: set[frozenset[int]] = set()  # in this launch, by the modules that a function sees

    def replace_once(fn: Any) -> Any:
        if seen(fn) in replaced:
            return interpreter._LangPatchScope()
        replaced.add(seen(fn))
        return replace(fn)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        replaced.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang = replace_once
    interpreter.GridExecutor.__call__ = launch_afresh
