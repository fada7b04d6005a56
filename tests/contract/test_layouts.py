"""Views: row-strided slices, odd offsets, transposes and expanded tensors in every argument are right or refused."""

from __future__ import annotations

import pytest
import torch

from rooflight.ops import Operator
from tests.contract.harness import (
    LAYOUTS,
    SUMS_OVER_ROWS,
    Args,
    Expected,
    Target,
    argument,
    assert_right,
    copy_args,
    each_target,
    expect,
    is_clear_refusal,
    odd_dims,
    plain_dims,
    replaced,
    sweep_args,
    tensor_names,
    untouched,
)


def check_right_or_refused(target: Target, args: Args, name: str, what: str, expected: Expected) -> None:
    used = copy_args(args, target.device)
    results, refusal = target.try_run(used)
    if results is None:
        assert target.provider != "ref", f"a reference takes every layout, but: {refusal}"
        assert is_clear_refusal(refusal, name), f"{name} {what}: {refusal}"
        untouched(target.op, args, used, nothing_written=True)
        return
    assert_right(expected, results, f"with {name} {what}")
    if not target.op.mutates:  # compiled code relies on the strides that the fake promised
        assert all(result.is_contiguous() for result in results), f"with {name} {what}"
    untouched(target.op, args, used)


@pytest.mark.parametrize("layout", LAYOUTS)
@each_target()
def test_every_argument_as_a_view(target: Target, layout: str) -> None:
    for dims in (plain_dims(target.op), odd_dims(target.op)):
        args = sweep_args(target.op, dims, target.op.dtypes[-1])
        expected = expect(target.op, args)
        for name in tensor_names(target.op, args):
            view = LAYOUTS[layout](argument(target.op, args, name))
            check_right_or_refused(target, replaced(target.op, args, name, view), name, f"as {layout}", expected)


@pytest.mark.parametrize("layout", ["row_slice", "odd_offset"])
@each_target()
def test_all_arguments_as_views(target: Target, layout: str) -> None:
    for dims in (plain_dims(target.op), odd_dims(target.op)):
        args = sweep_args(target.op, dims, target.op.dtypes[-1])
        for name in tensor_names(target.op, args):
            args = replaced(target.op, args, name, LAYOUTS[layout](argument(target.op, args, name)))
        used = copy_args(args, target.device)
        assert_right(expect(target.op, args), target.run(used), f"with {layout} everywhere")
        untouched(target.op, args, used)


# Arguments that say together where a token's key is: one of them with the first row's values contradicts the others,
# and several rows for one slot have no defined order.
PLACES = {
    "qk_norm_rope_cache_": ("slots",),
    "qk_norm_rope_attention_": ("slots", "block_table", "seq_lens"),
}


def expanded(op: Operator, args: Args, name: str) -> Args:
    value = argument(op, args, name)
    return replaced(op, args, name, value[:1].clone().expand(value.shape))


@each_target()
def test_expanded_arguments(target: Target) -> None:
    """Stride 0: read like any other tensor, but refused where it would be written."""
    args = sweep_args(target.op, plain_dims(target.op), target.op.dtypes[-1])
    for name in tensor_names(target.op, args):
        if name in PLACES.get(target.op.name, ()) or argument(target.op, args, name).shape[0] < 2:
            continue
        same_rows = expanded(target.op, args, name)
        if name in target.op.mutated:
            with pytest.raises(ValueError, match=f"^{name} must not be expanded"):
                target.run(copy_args(same_rows, target.device))
        else:
            check_right_or_refused(target, same_rows, name, "expanded", expect(target.op, same_rows))


# What is called (..., size) in a schema.
@each_target(lambda target: target.op.arguments[0].name in ("x", "grad_out"))
def test_leading_dimensions_fold_into_rows(target: Target) -> None:
    """An operator that takes (..., size) gives for (2, 3, size) what it gives for (6, size)."""
    args = sweep_args(target.op, plain_dims(target.op), target.op.dtypes[-1])
    rows = args[0].shape[0] // 3 * 3
    flat = tuple(a[:rows] if isinstance(a, torch.Tensor) and a.shape[:1] == args[0].shape[:1] else a for a in args)
    deep = tuple(
        a.unflatten(0, (rows // 3, 3)) if isinstance(a, torch.Tensor) and a.shape[:1] == (rows,) else a for a in flat
    )
    for place, (one, other) in enumerate(zip(target.run_copy(flat), target.run_copy(deep), strict=True)):
        if place not in SUMS_OVER_ROWS.get(target.op.name, ()):
            assert other.shape[:2] == (rows // 3, 3)
            other = other.flatten(0, 1)
        assert torch.equal(one, other)
