"""Wrong shapes, dtypes and devices in every tensor argument: ValueError before anything is written, naming it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.contract.harness import (
    Target,
    argument,
    copy_args,
    each_target,
    gpu_targets,
    is_clear_refusal,
    plain_dims,
    replaced,
    sweep_args,
    tensor_names,
    untouched,
)


def other_kind(value: torch.Tensor) -> torch.Tensor:
    return value.to(torch.int64 if value.is_floating_point() else torch.float32)


def other_size(value: torch.Tensor) -> torch.Tensor:
    """Float for float, integer for integer, of a width that the operator does not get otherwise."""
    if value.is_floating_point():
        return value.double()
    return value.to(torch.uint8 if value.dtype == torch.bool else torch.int16)


WRONG: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scalar": lambda value: value.flatten()[0].clone(),
    "wider": lambda value: torch.cat((value, value[..., :1]), -1),
    "longer": lambda value: torch.cat((value, value[:1]), 0),
    "deeper": lambda value: value.unsqueeze(0),
    "other_kind": other_kind,
    "other_size": other_size,
    "complex": lambda value: value.to(torch.complex64),
    "meta": lambda value: value.to("meta"),
}
# What is no mistake: an operator that takes any number of rows, any weight dtype, a longer table.
LEGAL = {
    ("decode_attention", "block_table"): {"wider"},
    ("embedding", "ids"): {"scalar", "wider", "longer", "deeper"},
    ("embedding", "weight"): {"wider", "longer", "other_size"},
    ("fused_add_layer_norm", "weight"): {"other_size"},
    ("fused_add_rms_norm", "weight"): {"other_size"},
    ("fused_add_rms_norm_", "weight"): {"other_size"},
    ("layer_norm", "x"): {"longer", "deeper", "other_size"},
    ("layer_norm", "weight"): {"other_size"},
    ("layer_norm_backward", "weight"): {"other_size"},
    ("linear", "x"): {"longer", "deeper"},
    ("prompt_attention", "q"): {"longer"},
    ("prompt_attention", "block_table"): {"wider"},
    ("rms_norm_linear", "x"): {"longer", "deeper"},
    ("rms_norm_swiglu", "x"): {"longer", "deeper"},
    ("prefill_attention", "q"): {"longer"},  # rows beyond the last sequence
    ("prefill_attention", "block_table"): {"wider"},
    ("qk_norm_rope_attention_", "q_weight"): {"other_size"},
    ("qk_norm_rope_attention_", "k_weight"): {"other_size"},
    ("qk_norm_rope_attention_", "cos_sin"): {"longer"},
    ("qk_norm_rope_attention_", "block_table"): {"wider"},
    ("qk_norm_rope_cache_", "q_weight"): {"other_size"},
    ("qk_norm_rope_cache_", "k_weight"): {"other_size"},
    ("qk_norm_rope_cache_", "cos_sin"): {"longer"},
    ("rms_norm", "x"): {"longer", "deeper", "other_size"},
    ("rms_norm", "weight"): {"other_size"},
    ("rms_norm_backward", "weight"): {"other_size"},
    ("rope", "cos_sin"): {"longer"},
    ("rope_", "cos_sin"): {"longer"},
    ("sample", "logits"): {"wider"},
    ("silu_and_mul", "x"): {"longer", "deeper", "other_size", "meta"},
    ("top_logprobs", "logits"): {"wider"},
}
# Two arguments that do not fit each other: the message may name the one that is checked against the other.
PARTNERS = {
    ("decode_attention", "k_cache"): "v_cache",
    ("decode_attention", "seq_lens"): "block_table",
    ("linear", "weight"): "bias",
    ("linear_add_", "x"): "weight",
    ("linear_add_scale_", "x"): "weight",
    ("penalize_logits_", "bias_ids"): "bias_values",
    ("penalize_logits_", "output_counts"): "prompt_mask",
    ("prompt_attention", "k_cache"): "v_cache",
    ("prefill_attention", "k_cache"): "v_cache",
    ("prefill_attention", "seq_lens"): "block_table",
    ("qk_norm_rope_attention_", "k_cache"): "v_cache",
    ("qk_norm_rope_attention_", "seq_lens"): "block_table",
    ("qk_norm_rope_cache_", "k_cache"): "v_cache",
    ("rms_norm_linear", "weight"): "bias",
    ("rms_norm_swiglu", "weight"): "bias",
    ("scaled_linear", "weight"): "bias",
    ("scaled_swiglu", "weight"): "bias",
}


@pytest.mark.parametrize("mistake", WRONG)
@each_target()
def test_every_argument_wrong(target: Target, mistake: str) -> None:
    """The first argument sets what the others must be, so when it is wrong the message may name any of them."""
    op = target.op
    good = sweep_args(op, plain_dims(op), op.dtypes[0])
    names = tensor_names(op, good)
    for name in names:
        if mistake in LEGAL.get((op.name, name), ()):
            continue
        args = copy_args(good, target.device)
        bad = replaced(op, args, name, WRONG[mistake](argument(op, args, name)))
        with pytest.raises(ValueError, match=" must ") as error:
            target.run(bad)
        allowed = names if name == names[0] else [name, PARTNERS.get((op.name, name), name)]
        assert any(is_clear_refusal(str(error.value), each) for each in allowed), f"{name} {mistake}: {error.value}"
        untouched(op, good, args, nothing_written=True)


@each_target()
def test_wrong_arguments_are_refused_on_meta_tensors_too(target: Target) -> None:
    """A compiler traces with fake tensors: it must hear of a mistake when it traces, not when the kernel runs."""
    args = sweep_args(target.op, plain_dims(target.op), target.op.dtypes[0])
    for name in tensor_names(target.op, args):
        meta = copy_args(args, "meta")
        bad = replaced(target.op, meta, name, WRONG["complex"](argument(target.op, meta, name)))
        with pytest.raises(ValueError, match=f"^{name} must "):
            target.run(bad)


@gpu_targets()
def test_br_030_arguments_on_the_host_are_refused(target: Target) -> None:
    good = sweep_args(target.op, plain_dims(target.op), target.op.dtypes[0])
    names = tensor_names(target.op, good)
    if len(names) == 1:
        pytest.skip("one tensor cannot be on two devices")
    for name in names:
        args = copy_args(good, target.device)
        with pytest.raises(ValueError, match=" must ") as error:
            target.run(replaced(target.op, args, name, argument(target.op, good, name)))
        assert any(is_clear_refusal(str(error.value), each) for each in (names if name == names[0] else [name]))
        torch.cuda.synchronize()
