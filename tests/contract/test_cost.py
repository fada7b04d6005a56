"""Costs against bytes counted by hand from the tensors of a call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any

import pytest
import torch

from rooflight.ops import REGISTRY
from tests.contract.harness import Target, batch_args, copy_args, each_target, sweep_args

Named = Mapping[str, Any]


def size(*tensors: torch.Tensor | None) -> int:
    return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def table_rows(args: Named) -> int:
    """The rows of cos_sin that the positions pick, and the positions."""
    return args["positions"].numel() * args["cos_sin"].shape[1] * 4 + size(args["positions"])


def count_attention(args: Named) -> tuple[int, int]:
    """Keys and values that at least one row sees, found by marking them one by one."""
    q, k_cache, window = args["q"], args["k_cache"], args["window"]
    lengths = args["seq_lens"].tolist()
    starts = args["query_starts"].tolist() if "query_starts" in args else list(range(len(lengths) + 1))
    seen = 0
    for index, length in enumerate(lengths):
        rows = starts[index + 1] - starts[index]
        marked = set()
        for row in range(rows):
            last = length - rows + row
            first = max(0, last - window + 1) if window else 0
            marked |= set(range(first, last + 1))
        seen += len(marked)
    key = k_cache.shape[1] * k_cache.shape[3] * k_cache.element_size()
    lse = q.shape[0] * q.shape[1] * 4 if args["return_lse"] else 0
    return size(q, args["block_table"]) + 2 * seen * key, size(q) + lse


def count_step_and_attention(args: Named) -> tuple[int, int]:
    """Keys and values of all tokens but the newest from the cache, those of the newest as they come."""
    read, written = count_attention({**args, "return_lse": False})
    key = args["k_cache"].shape[1] * args["k_cache"].shape[3] * args["k_cache"].element_size()
    read -= 2 * key * sum(length > 0 for length in args["seq_lens"].tolist())
    given = size(args["k"], args["v"], args["q_weight"], args["k_weight"], args["slots"]) + table_rows(args)
    return read + given, written + size(args["k"], args["v"])


def count_logits(args: Named) -> tuple[int, int]:
    everything = size(*(value for value in args.values() if isinstance(value, torch.Tensor)))
    return everything, size(args["logits"])


def count_penalties(args: Named) -> tuple[int, int]:
    """Of the two tables the rows that somebody goes by."""
    read, written = count_logits(args)
    unused = args["output_counts"].shape[0] - args["logits"].shape[0]
    return read - unused * size(args["output_counts"][0], args["prompt_mask"][0]) if unused else read, written


HAND_COUNTS: dict[str, Callable[[Named], tuple[int, int]]] = {
    "rms_norm": lambda a: (size(a["x"], a["weight"]), size(a["x"])),
    "fused_add_rms_norm": lambda a: (size(a["x"], a["residual"], a["weight"]), size(a["x"], a["residual"])),
    "fused_add_rms_norm_": lambda a: (size(a["x"], a["residual"], a["weight"]), size(a["x"], a["residual"])),
    "rms_norm_backward": lambda a: (
        size(a["grad_out"], a["x"], a["weight"], a["grad_residual"]),
        size(a["x"], a["weight"]),
    ),
    "layer_norm": lambda a: (size(a["x"], a["weight"], a["bias"]), size(a["x"])),
    "fused_add_layer_norm": lambda a: (
        size(a["x"], a["residual"], a["weight"], a["bias"]),
        size(a["x"], a["residual"]),
    ),
    "layer_norm_backward": lambda a: (
        size(a["grad_out"], a["x"], a["weight"], a["grad_residual"]),
        size(a["x"], a["weight"], a["weight"]),
    ),
    "silu_and_mul": lambda a: (size(a["x"]), size(a["x"]) // 2),
    "rope": lambda a: (size(a["q"], a["k"]) + table_rows(a), size(a["q"], a["k"])),
    "rope_": lambda a: (size(a["q"], a["k"]) + table_rows(a), size(a["q"], a["k"])),
    "qk_norm_rope_cache_": lambda a: (
        size(a["q"], a["k"], a["v"], a["q_weight"], a["k_weight"], a["slots"]) + table_rows(a),
        size(a["q"], a["k"], a["v"]),
    ),
    "linear": lambda a: (
        size(a["x"], a["weight"], a["bias"]),
        a["x"].shape[0] * a["weight"].shape[0] * a["x"].element_size(),
    ),
    "rms_norm_linear": lambda a: (
        size(a["x"], a["norm_weight"], a["weight"], a["bias"]),
        a["x"].shape[0] * a["weight"].shape[0] * a["x"].element_size(),
    ),
    "rms_norm_swiglu": lambda a: (
        size(a["x"], a["norm_weight"], a["weight"], a["bias"]),
        a["x"].shape[0] * a["weight"].shape[0] * a["x"].element_size() // 2,
    ),
    "linear_add_": lambda a: (size(a["residual"], a["x"], a["weight"], a["bias"]), size(a["residual"])),
    "linear_add_scale_": lambda a: (
        size(a["residual"], a["x"], a["weight"], a["norm_weight"], a["bias"]),
        size(a["residual"], a["scaled"], a["squares"]),
    ),
    "scaled_linear": lambda a: (
        size(a["x"], a["squares"], a["weight"], a["bias"]),
        a["x"].shape[0] * a["weight"].shape[0] * a["x"].element_size(),
    ),
    "scaled_swiglu": lambda a: (
        size(a["x"], a["squares"], a["weight"], a["bias"]),
        a["x"].shape[0] * a["weight"].shape[0] * a["x"].element_size() // 2,
    ),
    "embedding": lambda a: (
        size(a["ids"]) + a["ids"].numel() * size(a["weight"][0]),
        a["ids"].numel() * size(a["weight"][0]),
    ),
    "prefill_attention": count_attention,
    "prompt_attention": lambda a: count_attention(
        {**a, "window": 0, "return_lse": False}
        | {"seq_lens": torch.tensor([a["q"].shape[0]]), "query_starts": torch.tensor([0, a["q"].shape[0]])}
    ),
    "decode_attention": count_attention,
    "qk_norm_rope_attention_": count_step_and_attention,
    "merge_attention": lambda a: (
        size(a["out_a"], a["lse_a"], a["out_b"], a["lse_b"]),
        size(a["out_a"], a["lse_a"]),
    ),
    "penalize_logits_": count_penalties,
    "sample": lambda a: (count_logits(a)[0], a["logits"].shape[0] * 8),
    "top_logprobs": lambda a: (count_logits(a)[0], a["logits"].shape[0] * (4 + 12 * a["k"])),
}


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_bytes_equal_a_hand_count(name: str) -> None:
    """Over the whole sweep and in each dtype; a new operator needs its line in HAND_COUNTS."""
    operator = REGISTRY[name]
    for dtype in operator.dtypes:
        for dims in operator.sweep:
            args = sweep_args(operator, dims, dtype)
            cost = operator.cost_of(*args)
            assert (cost.bytes_read, cost.bytes_written) == HAND_COUNTS[name](operator.bind(*args)), dims
            assert cost.bytes == cost.bytes_read + cost.bytes_written


@each_target()
def test_bytes_do_not_depend_on_the_provider_or_the_device(target: Target) -> None:
    args = batch_args(target.op, 9)
    named = target.op.bind(*copy_args(args, target.device))
    cost = target.op.cost_of(*copy_args(args, target.device))
    assert (cost.bytes_read, cost.bytes_written) == HAND_COUNTS[target.op.name](named)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_costs_grow_with_the_batch(name: str) -> None:
    operator = REGISTRY[name]
    costs = [operator.cost_of(*batch_args(operator, rows)) for rows in (0, 1, 2, 5, 9)]
    for less, more in pairwise(costs):
        assert less.bytes_read < more.bytes_read
        assert less.bytes_written < more.bytes_written
        assert less.flops <= more.flops
    assert costs[-1].unit in ("fp32", "tensor")
    assert costs[0].flops == 0
    assert costs[-1].flops > 0 or name == "embedding"


@pytest.mark.parametrize("name", ["prefill_attention", "decode_attention", "qk_norm_rope_attention_"])
def test_lengths_come_from_hints_where_tensors_have_no_values(name: str) -> None:
    operator = REGISTRY[name]
    args = batch_args(operator, 5)
    named = operator.bind(*args)
    lengths = named["seq_lens"].tolist()
    hints: dict[str, Any] = {"seq_lens": lengths}
    if name == "prefill_attention":
        hints["query_lens"] = named["query_starts"].diff().tolist()
    meta = copy_args(args, "meta")
    assert operator.cost_of(*meta, **hints) == operator.cost_of(*args)
    with pytest.raises(ValueError, match="hints must hold seq_lens"):
        operator.cost_of(*meta)


def test_flops_of_the_matrix_product_and_of_attention() -> None:
    """Two operations a multiply-add: 2 M N K, and 4 D for each visible pair of a head."""
    linear = REGISTRY["linear"]
    cost = linear.cost_of(torch.empty(7, 64), torch.empty(48, 64))
    assert (cost.flops, cost.unit) == (2 * 7 * 48 * 64, "tensor")
    prefill = REGISTRY["prefill_attention"]
    args = sweep_args(prefill, {"seq_lens": (5,), "query_lens": (2,), "num_heads": 4, "head_dim": 64})
    assert prefill.cost_of(*args).flops == 4 * 64 * 4 * (4 + 5)


def test_fused_add_rms_norm_moves_four_tensors_where_its_parts_move_five() -> None:
    """The claim that the fused operator exists for, from the costs alone."""
    rows = torch.empty(1024, 8192, dtype=torch.bfloat16)
    weight = torch.empty(8192, dtype=torch.bfloat16)
    tensor = size(rows)
    fused = REGISTRY["fused_add_rms_norm"].cost_of(rows, rows, weight).bytes - size(weight)
    norm = REGISTRY["rms_norm"].cost_of(rows, weight).bytes - size(weight)
    assert fused == 4 * tensor
    assert norm + 3 * tensor == 5 * tensor
