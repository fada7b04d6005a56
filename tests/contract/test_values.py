"""Every implementation against FP64 by the tolerance rule, over its sweep and awkward inputs, and what else holds for
results: their layout, that nothing else is written, that memory which was never filled is never read."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from rooflight.ops import Make, Operator
from tests.contract.harness import (
    TARGETS,
    Args,
    Target,
    as_param,
    assert_right,
    copy_args,
    describe,
    each_target,
    expect,
    of_rows,
    plain_dims,
    poisoned_memory,
    rows_of,
    same_bits,
    sweep_args,
    untouched,
    why_not_batch_invariant,
)

# NumPy speaks up in Triton's interpreter where the inputs hold NaN and infinities.
pytestmark = pytest.mark.filterwarnings("ignore:(invalid value|overflow) encountered:RuntimeWarning")

# Which special values have no defined result.
NO_INFINITY = {
    "prefill_attention": "an infinite score has no softmax: out is NaN, and LSE NaN or inf",
    "decode_attention": "as for prefill_attention",
    "prompt_attention": "as for prefill_attention",
    "layer_norm_backward": "what an infinite gradient leaves in its row, NaN or inf, hangs on the order of subtraction",
}


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def sweep_cases() -> list[Any]:
    return [
        as_param(target, dtype, dims, label=f"{dtype_name(dtype)}-{describe(dims)}")
        for target in TARGETS
        for dtype in target.op.dtypes
        for dims in target.op.sweep
    ]


def awkward_cases() -> list[Any]:
    return [
        as_param(target, dtype, make, label=f"{dtype_name(dtype)}-{name}")
        for target in TARGETS
        for dtype in target.op.dtypes
        for name, make in target.op.awkward.items()
    ]


def all_inputs(op: Operator, dtype: torch.dtype) -> list[Args]:
    return [sweep_args(op, dims, dtype) for dims in op.sweep] + [f(Make(dtype)) for f in op.awkward.values()]


def takes_floats(target: Target) -> bool:
    return torch.float16 in target.op.dtypes


@pytest.mark.parametrize(("target", "dtype", "dims"), sweep_cases())
def test_sweep_agrees_with_fp64(target: Target, dtype: torch.dtype, dims: dict[str, Any]) -> None:
    args = sweep_args(target.op, dims, dtype)
    assert_right(expect(target.op, args), target.run_copy(args))


@pytest.mark.parametrize(("target", "dtype", "make"), awkward_cases())
def test_awkward_inputs_agree_with_fp64(target: Target, dtype: torch.dtype, make: Callable[[Make], Args]) -> None:
    args = make(Make(dtype))
    assert_right(expect(target.op, args), target.run_copy(args), by_row=True)


@each_target(lambda target: takes_floats(target) and target.op.arguments[0].name != "ids")
def test_special_values_stand_where_they_stand_in_fp64(target: Target) -> None:
    """NaN, infinities, zeros and a denormal, each in one row of the first argument: no other row may change."""
    specials = [float("nan"), 0.0, -0.0, torch.finfo(torch.bfloat16).smallest_normal / 2]
    if target.op.name not in NO_INFINITY:
        specials += [float("inf"), float("-inf")]
    dims = plain_dims(target.op)
    for dtype in target.op.dtypes:
        args = sweep_args(target.op, dims, dtype)
        for row, special in enumerate(specials[: rows_of(args)]):
            args[0][row].flatten()[-1:].fill_(special)
            args[0][row].reshape(-1)[args[0][row].numel() // 2] = special
        assert_right(expect(target.op, args), target.run_copy(args), "with special values")


@each_target(takes_floats)
def test_float64_inputs_are_computed_in_float64(target: Target) -> None:
    for args in all_inputs(target.op, torch.float64):
        results, refusal = target.try_run(copy_args(args, target.device))
        if results is None:
            assert target.provider != "ref", "a reference takes float64, so that gradcheck works"
            assert "torch.float64" in refusal
            return
        assert_right(expect(target.op, args), results, "in float64")


@each_target()
def test_results_have_the_layout_that_the_fake_promises(target: Target) -> None:
    for args in all_inputs(target.op, target.op.dtypes[-1]):
        results = target.run_copy(args)
        if target.op.mutates:
            continue  # results are the arguments; `untouched` below looks at what is written
        fakes = target.run(copy_args(args, "meta"))
        for result, fake in zip(results, fakes, strict=True):
            assert (result.shape, result.dtype, result.stride()) == (fake.shape, fake.dtype, fake.stride())
            assert result.is_contiguous()
            assert result.device.type == target.device


@each_target()
def test_only_what_the_schema_names_is_written(target: Target) -> None:
    for args in all_inputs(target.op, target.op.dtypes[-1]):
        used = copy_args(args, target.device)
        results = target.run(used)
        untouched(target.op, args, used)
        if not target.op.mutates:
            storages = {a.untyped_storage().data_ptr() for a in used if isinstance(a, torch.Tensor) and a.numel()}
            assert not storages & {r.untyped_storage().data_ptr() for r in results if r.numel()}


@each_target()
def test_uninitialised_memory_is_never_read(target: Target) -> None:
    for args in all_inputs(target.op, target.op.dtypes[-1]):
        with poisoned_memory():
            results = target.run_copy(args)
        assert_right(expect(target.op, args), results, "in poisoned memory")


def one_by_one(target: Target, args: Args) -> tuple[torch.Tensor, ...]:
    """The results of a batch, got from one call for each row (for each sequence, in prefill)."""
    used = copy_args(args, target.device)
    named = target.op.bind(*used)
    rows = rows_of(args)
    if "query_starts" in named:
        starts = named["query_starts"].tolist()
        spans = list(pairwise(starts))
    else:
        spans = [(row, row + 1) for row in range(rows)]
    parts = []
    for index, (start, stop) in enumerate(spans):
        row_args = []
        for name, value in named.items():
            if name == "query_starts":
                row_args.append(torch.tensor([0, stop - start], dtype=torch.int32, device=target.device))
            elif name in ("block_table", "seq_lens"):
                row_args.append(value[index : index + 1])
            elif isinstance(value, torch.Tensor) and value.shape[:1] == (rows,):
                row_args.append(value[start:stop])
            else:
                row_args.append(value)
        parts.append(of_rows(target.op, target.run(tuple(row_args))))
    if target.op.mutates:
        return tuple(named[name] for name in target.op.mutated)
    return tuple(torch.cat(pieces) for pieces in zip(*parts, strict=True))


@each_target()
def test_a_row_has_the_same_bits_alone_and_in_a_batch(target: Target) -> None:
    if reason := why_not_batch_invariant(target):
        pytest.skip(reason)
    dtype = target.op.dtypes[-1]
    batches = [sweep_args(target.op, dims, dtype) for dims in target.op.sweep]
    batches += [sweep_args(target.op, plain_dims(target.op), other) for other in target.op.dtypes[:-1]]
    for args in batches:
        if rows_of(args) > 1:
            results = of_rows(target.op, target.run_copy(args))
            for batch, alone in zip(results, one_by_one(target, args), strict=True):
                assert same_bits(batch, alone), f"{args[0].dtype} {tuple(args[0].shape)}"
