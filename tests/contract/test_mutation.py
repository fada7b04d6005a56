"""Operators that write into their arguments, seen from autograd (BR-031's in-place kind)."""

from __future__ import annotations

import pytest
import torch

from tests.contract.harness import (
    Target,
    argument,
    copy_args,
    each_target,
    plain_dims,
    same_bits,
    sweep_args,
    tensor_names,
)

in_place_targets = each_target(lambda target: target.op.mutates)


@in_place_targets
def test_br_031_arguments_that_require_gradients_are_refused(target: Target) -> None:
    """Each float argument, written or not, on a leaf and on a tensor made from one; nothing is written."""
    args = sweep_args(target.op, plain_dims(target.op))
    for name in tensor_names(target.op, args):
        if not argument(target.op, args, name).is_floating_point():
            continue
        for leaf in (True, False):
            used = copy_args(args, target.device)
            value = argument(target.op, used, name).requires_grad_()
            bad = used if leaf else tuple(value * 1 if argument is value else argument for argument in used)
            with pytest.raises(ValueError, match=f"^{name} must not require gradients"):
                target.run(bad)
            assert all(same_bits(a, b) for a, b in zip(args, used, strict=True) if isinstance(a, torch.Tensor))


@in_place_targets
def test_br_031_results_are_written_where_gradients_are_off(target: Target) -> None:
    args = sweep_args(target.op, plain_dims(target.op))
    expected = target.run_copy(args)
    for mode in (torch.no_grad, torch.inference_mode):
        used = copy_args(args, target.device)
        for name in tensor_names(target.op, args):
            if argument(target.op, used, name).is_floating_point():
                argument(target.op, used, name).requires_grad_()
        with mode():
            results = target.run(used)
        assert all(map(same_bits, expected, results))
    with torch.inference_mode():  # tensors made in there have no version counter at all
        assert all(map(same_bits, expected, target.run_copy(args)))


@in_place_targets
def test_version_counters_tell_autograd_of_every_write(target: Target) -> None:
    """Written arguments count up, all others stay; with no_grad and with zero rows too."""
    args = sweep_args(target.op, plain_dims(target.op))
    for recording in (True, False):
        # Fresh tensors: views of one buffer share its counter.
        used = tuple(a.clone().to(target.device) if isinstance(a, torch.Tensor) else a for a in args)
        before = {name: argument(target.op, used, name)._version for name in tensor_names(target.op, args)}
        with torch.set_grad_enabled(recording):
            target.run(used)
        for name, version in before.items():
            grown = argument(target.op, used, name)._version - version
            assert (grown > 0) == (name in target.op.mutated), name


@in_place_targets
def test_br_031_a_saved_tensor_overwritten_by_an_in_place_operator_raises(target: Target) -> None:
    """An ordinary PyTorch operator saved the tensor that ours overwrites: backward must not use the new values."""
    args = sweep_args(target.op, plain_dims(target.op))
    for name in target.op.mutated:
        used = tuple(a.clone().to(target.device) if isinstance(a, torch.Tensor) else a for a in args)
        value = argument(target.op, used, name)
        factor = torch.ones_like(value, requires_grad=True)
        product = factor * value  # saves value
        target.run(used)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.sum().backward()


@in_place_targets
def test_br_031_probabilities_are_as_before_when_their_copy_is_overwritten(target: Target) -> None:
    """A copy may be overwritten freely: the gradient of what it was copied from is the one without the call."""
    args = sweep_args(target.op, plain_dims(target.op))
    used = copy_args(args, target.device)
    name = target.op.mutated[0]
    leaf = argument(target.op, used, name).clone().requires_grad_()
    loss = torch.softmax(leaf.flatten(), 0).pow(2).sum()
    copied = tuple(leaf.detach().clone() if value is argument(target.op, used, name) else value for value in used)
    target.run(copied)
    loss.backward()
    again = argument(target.op, copy_args(args, target.device), name).clone().requires_grad_()
    torch.softmax(again.flatten(), 0).pow(2).sum().backward()
    assert torch.equal(leaf.grad, again.grad)
