"""What only a GPU can show: graphs, streams, a second device, more than 2^31 elements.

After each call an ordinary PyTorch operator runs and the device is synchronised: several faults show only there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rooflight.ops import REGISTRY, Make, Operator
from tests.contract.harness import (
    TARGETS,
    Args,
    Expected,
    Results,
    Target,
    as_param,
    assert_right,
    batch_args,
    copy_args,
    expect,
    gpu_targets,
    of_rows,
    plain_dims,
    rows_of,
    same_bits,
    sweep_args,
    why_not_batch_invariant,
)

LIMIT = 1 << 31


def settle(device: str | torch.device = "cuda") -> None:
    """Synchronise and run an ordinary operator: an error left behind by a launch shows here."""
    torch.cuda.synchronize(device)
    assert torch.nn.functional.pad(torch.ones(3, device=device), (1, 1)).sum().item() == 3


def fill(static: Args, fresh: Args) -> None:
    """New values into the tensors that a graph has captured."""
    for old, new in zip(static, fresh, strict=True):
        if isinstance(old, torch.Tensor):
            old.copy_(new)


def pair_of_args(op: Operator, dtype: torch.dtype) -> tuple[Args, Args]:
    """Two sets of arguments of the same shapes with other values."""
    dims = plain_dims(op)
    return sweep_args(op, dims, dtype, seed=0), sweep_args(op, dims, dtype, seed=1)


def can_be_captured(target: Target) -> bool:
    return target.provider != "ref" or target.op.capturable_reference


@gpu_targets(can_be_captured)
@torch.inference_mode()
def test_br_029_capture_and_replay_with_changed_inputs(target: Target) -> None:
    for dtype in target.op.dtypes:
        first, second = pair_of_args(target.op, dtype)
        expected = target.run_copy(second)
        static = copy_args(first, "cuda")
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            target.run(static)
        torch.cuda.current_stream().wait_stream(warm_up)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = target.run(static)
        for fresh, wanted in ((second, expected), (first, target.run_copy(first)), (second, expected)):
            fill(static, copy_args(fresh, "cuda"))
            graph.replay()
            assert all(map(same_bits, wanted, results)), f"{dtype}"
        settle()


@gpu_targets()
@torch.inference_mode()
def test_br_029_side_stream_behind_a_slow_producer(target: Target) -> None:
    """The inputs are written late on the stream that the operator is called on; a launch elsewhere reads old ones."""
    first, second = pair_of_args(target.op, target.op.dtypes[-1])
    expected = target.run_copy(second)
    target.run_copy(first)  # compile and load before the race
    static, fresh = copy_args(first, "cuda"), copy_args(second, "cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # clock cycles: some 25 ms
        fill(static, fresh)
        results = target.run(static)
    stream.synchronize()
    assert all(map(same_bits, expected, results))
    settle()


@pytest.mark.parametrize("target", [as_param(target) for target in TARGETS if target.device == "cuda"])
@pytest.mark.gpu(count=2)
def test_br_030_second_device(target: Target) -> None:
    """All tensors on cuda:1 while cuda:0 is current: right, and still current afterwards."""
    args = sweep_args(target.op, plain_dims(target.op), target.op.dtypes[-1])
    torch.cuda.set_device(0)
    used = copy_args(args, "cuda:1")
    results = target.run(used)
    assert torch.cuda.current_device() == 0
    assert all(result.device == torch.device("cuda:1") for result in results)
    assert_right(expect(target.op, args), results, "on cuda:1")
    settle("cuda:0")
    settle("cuda:1")


@pytest.mark.parametrize("target", [as_param(target) for target in TARGETS if target.device == "cuda"])
@pytest.mark.gpu(count=2)
def test_br_030_two_gpus_in_one_call_are_refused(target: Target) -> None:
    args = sweep_args(target.op, plain_dims(target.op))
    on_first, on_second = copy_args(args, "cuda:0"), copy_args(args, "cuda:1")
    tensors = [index for index, value in enumerate(args) if isinstance(value, torch.Tensor)]
    for index in tensors[1:]:
        mixed = (*on_first[:index], on_second[index], *on_first[index + 1 :])
        with pytest.raises(ValueError, match=f"^{target.op.arguments[index].name} must be on cuda:0, was cuda:1"):
            target.run(mixed)
    settle()


@gpu_targets()
def test_inputs_are_the_same_on_every_device(target: Target) -> None:
    """Make gives the same values for the same seed, so that devices can be compared."""
    dims = plain_dims(target.op)
    host, device = (target.op.inputs(Make(target.op.dtypes[-1], name), **dims) for name in ("cpu", "cuda"))
    for one, other in zip(host, device, strict=True):
        if isinstance(one, torch.Tensor):
            assert other.is_cuda
            assert same_bits(one, other)
        else:
            assert one == other


# More than 2^31 elements ---------------------------------------------------------------------------------------------


def many_rows(rows: int, **dims: Any) -> Callable[[Operator], Args]:
    """Arguments for so many rows on the GPU, made there: random floats, and a few rows of integers over and over."""

    def build(op: Operator) -> Args:
        small = copy_args(op.inputs(Make(op.dtypes[-1]), **dims), "cuda")
        count = rows_of(small)

        def grow(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.shape[:1] != (count,):
                return value
            if value.is_floating_point() and value.dim() > 1:
                return torch.randn(rows, *value.shape[1:], device="cuda", dtype=value.dtype)
            repeats = -(-rows // count)
            return value.repeat(repeats, *[1] * (value.dim() - 1))[:rows].contiguous()

        return tuple(grow(value) for value in small)

    return build


def large_cache(op: Operator) -> Args:
    """Caches of more than 2^31 elements, with every page that is used in their last part."""
    dims = {"seq_lens": (33, 17, 80), "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    if op.name == "prefill_attention":
        dims["query_lens"] = (33, 3, 80)
    if op.name == "prompt_attention":
        dims = {"num_tokens": 80, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    args = list(copy_args(op.inputs(Make(torch.bfloat16), **dims), "cuda"))
    pages, *shape = args[1].shape
    room = LIMIT // (shape[0] * shape[1] * shape[2]) + 5
    for index in (1, 2):
        cache = torch.zeros(room, *shape, device="cuda", dtype=torch.bfloat16)
        cache[-pages:] = args[index]
        args[index] = cache
    args[3] = args[3] + (room - pages)
    return tuple(args)


def large_slots(op: Operator) -> Args:
    """The write into the last pages of caches of more than 2^31 elements."""
    dims = {"num_tokens": 33, "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    args = list(copy_args(op.inputs(Make(torch.bfloat16), **dims), "cuda"))
    pages, *shape = args[8].shape
    room = LIMIT // (shape[0] * shape[1] * shape[2]) + 5
    args[7] = torch.where(args[7] >= 0, args[7] + (room - pages) * shape[1], -1)
    args[8], args[9] = (torch.zeros(room, *shape, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return tuple(args)


def large_step(op: Operator) -> Args:
    """Attention with the write before it, in the last pages of caches of more than 2^31 elements."""
    dims = {"seq_lens": (33, 17, 80), "num_heads": 4, "num_kv_heads": 2, "head_dim": 128}
    named = op.bind(*copy_args(op.inputs(Make(torch.bfloat16), **dims), "cuda"))
    pages, *shape = named["k_cache"].shape
    room = LIMIT // (shape[0] * shape[1] * shape[2]) + 5
    for name in ("k_cache", "v_cache"):
        cache = torch.zeros(room, *shape, device="cuda", dtype=torch.bfloat16)
        cache[-pages:] = named[name].nan_to_num(0)
        named[name] = cache
    named["block_table"] = named["block_table"] + (room - pages)
    named["slots"] = named["slots"] + (room - pages) * shape[1]
    return tuple(named.values())


def wide_vocabulary(op: Operator) -> Args:
    """Nine rows that together hold more than 2^31 logits."""
    _, *rest = copy_args(op.inputs(Make(), num_seqs=9, vocab_size=7), "cuda")
    return torch.randn(9, LIMIT // 9 + 7, device="cuda") * 3, *rest


# One entry an operator; a new operator without one fails the test below.
LARGE: dict[str, Callable[[Operator], Args]] = {
    "rms_norm": many_rows(LIMIT // 4096 + 3, num_tokens=5, hidden_size=4096),
    "fused_add_rms_norm": many_rows(LIMIT // 4096 + 3, num_tokens=5, hidden_size=4096),
    "fused_add_rms_norm_": many_rows(LIMIT // 4096 + 3, num_tokens=5, hidden_size=4096),
    "rms_norm_backward": many_rows(LIMIT // 4096 + 3, num_tokens=5, hidden_size=4096),
    "layer_norm": many_rows(LIMIT // 4096 + 3, num_tokens=5, hidden_size=4096),
    "fused_add_layer_norm": many_rows(LIMIT // 4096 + 3, num_tokens=5, hidden_size=4096),
    "layer_norm_backward": many_rows(LIMIT // 4096 + 3, num_tokens=5, hidden_size=4096),
    "silu_and_mul": many_rows(LIMIT // 8192 + 3, num_tokens=5, intermediate_size=4096),
    "linear": many_rows(LIMIT // 4096 + 3, num_tokens=5, in_features=4096, out_features=64),
    "rms_norm_linear": many_rows(LIMIT // 4096 + 3, num_tokens=5, in_features=4096, out_features=64),
    "rms_norm_swiglu": many_rows(LIMIT // 4096 + 3, num_tokens=5, in_features=4096, out_features=64),
    "linear_add_": many_rows(LIMIT // 4096 + 3, num_tokens=5, in_features=64, out_features=4096),
    "linear_add_scale_": many_rows(LIMIT // 4096 + 3, num_tokens=5, in_features=64, out_features=4096),
    "scaled_linear": many_rows(LIMIT // 4096 + 3, num_tokens=5, in_features=4096, out_features=64),
    "scaled_swiglu": many_rows(LIMIT // 4096 + 3, num_tokens=5, in_features=4096, out_features=64),
    "embedding": many_rows(LIMIT // 4096 + 3, num_tokens=5, vocab_size=1003, hidden_size=4096),
    "rope": many_rows(LIMIT // 4096 + 3, num_tokens=5, num_heads=32, num_kv_heads=8, head_dim=128),
    "rope_": many_rows(LIMIT // 4096 + 3, num_tokens=5, num_heads=32, num_kv_heads=8, head_dim=128),
    "merge_attention": many_rows(LIMIT // 4096 + 3, num_tokens=5, num_heads=32, head_dim=128),
    "penalize_logits_": many_rows(LIMIT // 152000 + 3, num_seqs=5, vocab_size=152000),
    "top_logprobs": many_rows(LIMIT // 152000 + 3, num_seqs=5, vocab_size=152000, k=5),
    "sample": wide_vocabulary,
    "prefill_attention": large_cache,
    "prompt_attention": large_cache,
    "decode_attention": large_cache,
    "qk_norm_rope_cache_": large_slots,
    "qk_norm_rope_attention_": large_step,
}
LAST_PAGES = (large_cache, large_slots, large_step)
TAIL = 3


def tail_args(op: Operator, args: Args) -> Args:
    """The last rows alone, on memory of their own; caches cut to their last pages."""
    rows = rows_of(args)
    if LARGE[op.name] in LAST_PAGES:
        named = op.bind(*args)
        cut = named["k_cache"].shape[0] - 64
        moved = []
        for name, value in named.items():
            if name in ("k_cache", "v_cache"):
                value = value[cut:].clone()
            elif name == "block_table":
                value = value - cut
            elif name == "slots":
                value = torch.where(value >= 0, value - cut * named["k_cache"].shape[2], -1)
            elif isinstance(value, torch.Tensor):
                value = value.clone()
            moved.append(value)
        return tuple(moved)
    return tuple(a[-TAIL:].clone() if isinstance(a, torch.Tensor) and a.shape[:1] == (rows,) else a for a in args)


def tail_results(op: Operator, args: Args, results: Results) -> Results:
    if LARGE[op.name] in LAST_PAGES:
        pages = op.bind(*args)["k_cache"].shape[0]
        return tuple(r[-64:] if r.shape[0] == pages else r for r in results)
    return tuple(result[-TAIL:] for result in of_rows(op, results))


@pytest.mark.slow
@gpu_targets()
@torch.inference_mode()
def test_more_than_2_31_elements(target: Target) -> None:
    """The last rows, beyond every 32-bit offset, have the bits that they have alone (right where bits may vary)."""
    assert target.op.name in LARGE, f"add {target.op.name} to LARGE"
    free, _ = torch.cuda.mem_get_info()
    if free < 100e9:
        pytest.skip(f"needs 100 GB of free GPU memory, {free / 1e9:.0f} GB there")
    torch.manual_seed(0)
    args = LARGE[target.op.name](target.op)
    tail = tail_args(target.op, args)
    with torch.inference_mode(False):  # compositions of backward operators differentiate
        expected = expect(target.op, tail) if why_not_batch_invariant(target) else None
    alone = of_rows(target.op, target.run(tail))
    results = target.run(args)
    assert max(t.numel() for t in (*args, *results) if isinstance(t, torch.Tensor)) > LIMIT
    results = tail_results(target.op, args, results)
    if expected is None:
        assert all(map(same_bits, alone, results))
    else:
        truths, baselines = (of_rows(target.op, part) for part in (expected.truths, expected.baselines))
        assert_right(Expected(target.op, truths, baselines), results, "beyond 32-bit offsets")
    settle()
    del args, alone, results
    torch.cuda.empty_cache()


@gpu_targets()
def test_results_survive_the_next_call(target: Target) -> None:
    """Results of one call are memory of their own: a second call does not change them."""
    if target.op.mutates:
        pytest.skip("results are the arguments")
    first, second = batch_args(target.op, 5), sweep_args(target.op, plain_dims(target.op), seed=3)
    results = target.run_copy(first)
    kept = tuple(result.clone() for result in results)
    target.run_copy(second)
    settle()
    assert all(map(same_bits, kept, results))


def test_every_operator_has_a_large_case() -> None:
    assert set(LARGE) == set(REGISTRY)
