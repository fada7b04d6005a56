"""Gradients: right in FP64, right by the tolerance rule in every dtype and provider, refused where there are none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.ops import REGISTRY, Operator
from tests.contract.harness import (
    TARGETS,
    Args,
    Target,
    argument,
    as_param,
    assert_close,
    copy_args,
    each_target,
    plain_dims,
    small_dims,
    sweep_args,
    tensor_names,
)

DIFFERENTIABLE = [target for target in TARGETS if target.op.backward is not None]
WITHOUT = [target for target in TARGETS if target.op.backward is None and not target.op.mutates]
# Float arguments that no gradient flows to.
CONSTANTS = {("rope", "cos_sin")}
# Operators that round a sum before they use it: where the sum is exact, the composition has their gradient.
ROUNDS_A_SUM = ("fused_add_rms_norm", "fused_add_layer_norm")


def wanted_names(op: Operator, args: Args) -> list[str]:
    return [
        name
        for name in tensor_names(op, args)
        if argument(op, args, name).is_floating_point() and (op.name, name) not in CONSTANTS
    ]


def gradients(
    op: Operator, call: Callable[..., Any], args: Args, upstream: Callable[[int, torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Gradients in every float argument; `upstream` gives those of the results."""
    names = wanted_names(op, args)
    for name in names:
        argument(op, args, name).requires_grad_()
    results = call(*args)
    results = results if isinstance(results, tuple) else (results,)
    torch.autograd.backward(results, [upstream(index, result) for index, result in enumerate(results)])
    return {name: argument(op, args, name).grad for name in names}


def random_upstream(index: int, result: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 + index)
    # Rounded to bf16, so that it is the same number in every dtype.
    return torch.randn(result.shape, generator=generator).bfloat16().to(result.device, result.dtype)


def ones_upstream(index: int, result: torch.Tensor) -> torch.Tensor:
    """What `.sum().backward()` sends: one number, expanded with stride 0 to the result's shape."""
    return torch.ones((), device=result.device, dtype=result.dtype).expand(result.shape)


def composed_gradients(
    op: Operator, args: Args, compute: torch.dtype, upstream: Callable[..., torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Autograd through the composition, computed in `compute` throughout."""
    wide = tuple(
        value.to(compute) if isinstance(value, torch.Tensor) and value.is_floating_point() else value for value in args
    )
    return gradients(op, lambda *values: op.composition(*values, compute=compute), wide, upstream)


def check_gradients(
    target: Target, args: Args, upstream: Callable[..., torch.Tensor], call: Callable[..., Any] | None = None
) -> None:
    op = target.op
    got = gradients(op, call or target.overload, copy_args(args, target.device), upstream)
    truth, baseline = (composed_gradients(op, args, dtype, upstream) for dtype in (torch.float64, torch.float32))
    for name, gradient in got.items():
        assert gradient.dtype == argument(op, args, name).dtype
        assert_close(gradient, truth[name], baseline[name], op.tolerance, f"{target} gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("target", [as_param(target) for target in DIFFERENTIABLE])
def test_gradients_agree_with_fp64(target: Target, dtype: torch.dtype) -> None:
    """Every dims of the sweep. The fused additions normalise the rounded sum: their truth starts from exact sums."""
    for dims in target.op.sweep:
        args = sweep_args(target.op, dims, dtype)
        if target.op.name in ROUNDS_A_SUM:
            args = (args[0], torch.zeros_like(args[1]), *args[2:])
        check_gradients(target, args, random_upstream)


@pytest.mark.parametrize("target", [as_param(target) for target in DIFFERENTIABLE])
def test_br_021_expanded_upstream_gradient(target: Target) -> None:
    """`op(...).sum().backward()` sends a gradient with stride 0; so does `expand`."""
    for dtype in target.op.dtypes:
        args = sweep_args(target.op, plain_dims(target.op), dtype)
        if target.op.name in ROUNDS_A_SUM:
            args = (args[0], torch.zeros_like(args[1]), *args[2:])
        check_gradients(target, args, ones_upstream)
        used = copy_args(args, target.device)
        for name in wanted_names(target.op, used):
            argument(target.op, used, name).requires_grad_()
        results = target.overload(*used)
        sum(r.sum() for r in (results if isinstance(results, tuple) else (results,))).backward()
        again = gradients(target.op, target.overload, copy_args(args, target.device), ones_upstream)
        for name, gradient in again.items():
            assert torch.equal(argument(target.op, used, name).grad, gradient)


@pytest.mark.parametrize("target", [as_param(target) for target in DIFFERENTIABLE])
def test_gradients_of_results_that_are_not_used(target: Target) -> None:
    """Only the first result goes into the loss: the gradients of the others arrive as zeros or not at all."""
    args = sweep_args(target.op, small_dims(target.op), torch.float32)

    def first_only(index: int, result: torch.Tensor) -> torch.Tensor:
        return random_upstream(index, result) if index == 0 else torch.zeros_like(result)

    expected = gradients(target.op, target.overload, copy_args(args, target.device), first_only)
    used = copy_args(args, target.device)
    for name in expected:
        argument(target.op, used, name).requires_grad_()
    results = target.overload(*used)
    first = results[0] if isinstance(results, tuple) else results
    first.backward(random_upstream(0, first))
    for name, gradient in expected.items():
        found = argument(target.op, used, name).grad
        assert (found is None and not gradient.any()) or torch.equal(found, gradient)


@pytest.mark.parametrize("target", [as_param(target) for target in DIFFERENTIABLE])
def test_each_gradient_alone(target: Target) -> None:
    """One argument needs a gradient, the others do not: the same bits as when all do."""
    args = sweep_args(target.op, small_dims(target.op), torch.float32)
    together = gradients(target.op, target.overload, copy_args(args, target.device), random_upstream)
    for name, expected in together.items():
        used = copy_args(args, target.device)
        argument(target.op, used, name).requires_grad_()
        results = target.overload(*used)
        results = results if isinstance(results, tuple) else (results,)
        with_gradient = [(i, r) for i, r in enumerate(results) if r.requires_grad]
        torch.autograd.backward([r for _, r in with_gradient], [random_upstream(i, r) for i, r in with_gradient])
        assert torch.equal(argument(target.op, used, name).grad, expected)


@pytest.mark.parametrize("target", [as_param(t) for t in DIFFERENTIABLE if t.provider == "ref"])
def test_gradcheck_of_references(target: Target) -> None:
    """The formula of the gradient against finite differences, in float64."""
    args = copy_args(sweep_args(target.op, small_gradient_dims(target.op), torch.float64), target.device)
    names = wanted_names(target.op, args)
    wanted = [argument(target.op, args, name).clone().requires_grad_() for name in names]

    def call(*values: torch.Tensor) -> Any:
        by_name = dict(zip(names, values, strict=True))
        named = target.op.bind(*args)
        return target.overload(*(by_name.get(name, value) for name, value in named.items()))

    assert torch.autograd.gradcheck(call, wanted, fast_mode=False)


def small_gradient_dims(op: Operator) -> dict[str, Any]:
    """At most a few dozen elements, since finite differences take one call for each."""
    limits = {"num_tokens": 3, "hidden_size": 5, "intermediate_size": 3, "head_dim": 6, "rotary_dim": 4}
    return {key: min(value, limits.get(key, value)) for key, value in plain_dims(op).items()}


@pytest.mark.parametrize("target", [as_param(t) for t in DIFFERENTIABLE if t.provider != "ref"])
def test_gradients_of_kernels_equal_the_reference(target: Target) -> None:
    for dtype in target.op.dtypes:
        args = sweep_args(target.op, plain_dims(target.op), dtype)
        kernel = gradients(target.op, target.overload, copy_args(args, target.device), random_upstream)
        reference = gradients(target.op, target.op.providers["ref"], copy_args(args, target.device), random_upstream)
        for name in reference:
            torch.testing.assert_close(kernel[name], reference[name])


@each_target(lambda target: target in WITHOUT)
def test_operators_without_a_gradient_say_so(target: Target) -> None:
    """NotImplementedError that names the operator, never a silent None."""
    args = copy_args(sweep_args(target.op, plain_dims(target.op)), target.device)
    floats = wanted_names(target.op, args)
    for name in floats:
        argument(target.op, args, name).requires_grad_()
    results = target.overload(*args)
    results = results if isinstance(results, tuple) else (results,)
    floating = [r for r in results if r.is_floating_point()]
    if not floating:
        assert all(not r.requires_grad for r in results)
        return
    assert floats
    with pytest.raises(NotImplementedError, match=rf"rooflight::{target.op.name}\.{target.provider} has no gradient"):
        sum(r.sum() for r in floating).backward()


def mutate_in_place(value: torch.Tensor) -> None:
    """Overwrite a saved tensor through an operator of ours, as a runtime would: rows of value become their norm."""
    with torch.no_grad():
        rows = value.detach().view(-1, value.shape[-1])
        ops.fused_add_rms_norm_(rows, torch.zeros_like(rows), torch.ones_like(rows[0]) * 3)


@pytest.mark.parametrize("mutate", [mutate_in_place, lambda value: value.detach().add_(1)], ids=["ours", "add_"])
@pytest.mark.parametrize("target", [as_param(target) for target in DIFFERENTIABLE])
def test_saved_then_mutated_raises(target: Target, mutate: Callable[[torch.Tensor], None]) -> None:
    """A tensor that backward reads must not change before it: autograd's version counter must see our writes too."""
    args = sweep_args(target.op, plain_dims(target.op), torch.float32)
    expected = gradients(target.op, target.overload, copy_args(args, target.device), random_upstream)
    names = wanted_names(target.op, args)
    raised = 0
    changeable: Sequence[str] = [*names, "result"]
    for changed in changeable:
        used = copy_args(args, target.device)
        for name in names:
            argument(target.op, used, name).requires_grad_()
        results = target.overload(*used)
        results = results if isinstance(results, tuple) else (results,)
        mutate(results[-1] if changed == "result" else argument(target.op, used, changed))
        complaint = ""
        try:
            torch.autograd.backward(results, [random_upstream(i, r) for i, r in enumerate(results)])
        except RuntimeError as error:
            complaint = str(error)
        if complaint:
            assert "modified by an inplace operation" in complaint
            raised += 1
        else:  # the changed tensor is not one that backward needs
            assert all(torch.equal(argument(target.op, used, name).grad, expected[name]) for name in names)
    saves_nothing = {"rope"}  # the gradient of a rotation needs the table and the positions alone
    assert raised > 0 or target.op.name in saves_nothing


def test_saved_table_then_mutated_raises() -> None:
    rope = REGISTRY["rope"]
    q, k, table, positions, interleaved = copy_args(sweep_args(rope, plain_dims(rope)))
    q_out, k_out = ops.rope(q.requires_grad_(), k.requires_grad_(), table, positions)
    table.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        (q_out.sum() + k_out.sum()).backward()
    assert interleaved is False
