"""The kernel for products of 9 to 256 rows: every epilogue, sizes that fill no tile, clusters of every size, graphs."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.kernels import library
from rooflight.ops import REGISTRY, Make
from tests.contract.harness import (
    Args,
    Results,
    Target,
    assert_right,
    copy_args,
    expect,
    odd_offset,
    poisoned_memory,
    replaced,
    row_slice,
    same_bits,
    untouched,
)
from tests.kernels.graph_nodes import PROGRAMMATIC, edge_types, kernel_names

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(library.load() is not None, reason=f"no compiled kernels here: {library.load()}"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
        reason="warpgroup products are those of compute capability 9",
    ),
]
OF_ROWS = {  # arguments with something for each row
    "rms_norm_linear": ("x",),
    "rms_norm_swiglu": ("x",),
    "linear_add_": ("residual", "x"),
    "linear_add_scale_": ("residual", "scaled", "squares", "x"),
    "scaled_linear": ("x", "squares"),
    "scaled_swiglu": ("x", "squares"),
}
NAMES = tuple(OF_ROWS)
MOST, TILE = 256, 64  # rows
# in_features, out_features. On 132 multiprocessors a tile has 1, 2, 4, 8 and 8, 4, 2 and 1 blocks: first for the steps
# of the depth that there are, then for the tiles. The last ones use memory again.
SHAPES = [(72, 48), (200, 80), (520, 176), (1096, 48), (1096, 1008), (1096, 3088), (1160, 4112), (776, 6480)]
every_name = pytest.mark.parametrize("name", NAMES)
both_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)


def target(name: str) -> Target:
    return Target(REGISTRY[name], "cuda", "cuda")


def inputs(name: str, dtype: torch.dtype, rows: int, shape: tuple[int, int], bias: bool = False) -> Args:
    dims = {"num_tokens": rows, "in_features": shape[0], "out_features": shape[1], "bias": bias}
    return REGISTRY[name].inputs(Make(dtype), **dims)


def on_gpu(name: str, dtype: torch.dtype, rows: int, shape: tuple[int, int], bias: bool = False) -> Args:
    return copy_args(inputs(name, dtype, rows, shape, bias), "cuda")


def of_rows(name: str, args: Args, rows: slice) -> Results:
    """The operator on some rows; what it writes into is a copy."""
    op = REGISTRY[name]
    for argument in OF_ROWS[name]:
        value = dict(op.bind(*args))[argument][rows]
        args = replaced(op, args, argument, copy_args((value,), "cuda")[0] if argument in op.mutated else value)
    return target(name).run(args)


def same(results: Results, others: Results) -> bool:
    return all(same_bits(one, other) for one, other in zip(results, others, strict=True))


def picked(results: Results, rows: slice) -> Results:
    return tuple(result[rows] for result in results)


def captured(call: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        call()
    return graph


def blocks_of_a_tile(name: str, args: Args) -> int:
    """How many of the kernel's blocks share a tile; 0 where it does not serve the call, which is made several times."""
    graph = captured(lambda: target(name).run(args))
    found = [re.search(r"skinny_linear.*Li(\d+)E", name) for name in kernel_names(graph)]
    graph.reset()
    sizes = [int(match[1]) for match in found if match]
    assert len(sizes) <= 1
    return sum(sizes)


@every_name
@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "bias"),
    [*zip((9, 16, 33, 64, 65, 100, 128, 129, 200, 256, 257), [True, False] * 6, strict=False), (33, False), (64, True)],
)
def test_values(name: str, dtype: torch.dtype, rows: int, shape: tuple[int, int], bias: bool) -> None:
    args = inputs(name, dtype, rows, shape, bias)
    used = copy_args(args, "cuda")
    with poisoned_memory():
        results = target(name).run(used)
    assert_right(expect(REGISTRY[name], args), results)
    untouched(REGISTRY[name], args, used)


@every_name
def test_which_calls_it_serves(name: str) -> None:
    def served(rows: int, shape: tuple[int, int], dtype: torch.dtype = torch.bfloat16) -> bool:
        return blocks_of_a_tile(name, on_gpu(name, dtype, rows, shape)) > 0

    assert [rows for rows in (1, 8, 9, 64, 65, MOST, MOST + 1) if served(rows, (128, 96))] == [9, 64, 65, MOST]
    assert not served(16, (128, 96), torch.float32)
    assert not served(16, (132, 96))  # rows that do not begin at multiples of 16 bytes
    assert not served(16, (128, 88))
    assert served(16, (8, 65536))
    assert not served(16, (8, 65552))
    assert served(64, (1024, 6160))
    assert served(65, (1024, 6144))
    assert not served(65, (1024, 6160))


@every_name
def test_clusters_of_every_size_are_tested(name: str) -> None:
    assert {blocks_of_a_tile(name, on_gpu(name, torch.bfloat16, 16, shape)) for shape in SHAPES} == {1, 2, 4, 8}


@every_name
@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_has_the_same_bits_among_others(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """Of up to 64: with more, fewer blocks share a tile."""
    args = on_gpu(name, dtype, TILE, shape, bias=True)
    together = of_rows(name, args, slice(None))
    for rows in (slice(0, 9), slice(5, 30), slice(23, 64), slice(1, 64)):
        assert same(of_rows(name, args, rows), picked(together, rows)), rows


@every_name
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [61, 190])
def test_runs_are_repeatable(name: str, rows: int, shape: tuple[int, int]) -> None:
    args = on_gpu(name, torch.bfloat16, rows, shape)
    first = of_rows(name, args, slice(None))
    for _ in range(20):
        assert same(of_rows(name, args, slice(None)), first)


def aligned_slice(value: torch.Tensor) -> torch.Tensor:
    """Rows with a stride of their own that begin at multiples of 16 bytes, in a buffer of NaN."""
    buffer = torch.full((len(value) + 64, value.shape[-1] + 24), float("nan"), dtype=value.dtype)
    view = buffer[: len(value), 8 : 8 + value.shape[-1]]
    view.copy_(value)
    return view


@pytest.mark.parametrize("name", ["linear_add_", "linear_add_scale_"])
@both_dtypes
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [9, 33, 64, 177])
def test_rows_with_a_stride(name: str, rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    """What lies beside the rows is neither read nor written; the residual may lie anywhere."""
    op, args = REGISTRY[name], inputs(name, dtype, rows, shape)
    plain = target(name).run_copy(args)
    x = aligned_slice(dict(op.bind(*args))["x"])
    for spread in (aligned_slice, row_slice, odd_offset):
        views = replaced(op, replaced(op, args, "x", x), "residual", spread(args[0]))
        if name == "linear_add_scale_":  # parts with more between them than rows
            views = replaced(op, views, "squares", row_slice(args[2].t()).t())
        assert blocks_of_a_tile(name, copy_args(views, "cuda")) > 0
        used = copy_args(views, "cuda")
        assert same(target(name).run(used), plain)
        untouched(op, views, used)


@every_name
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", [19, 147])
def test_what_lies_behind_the_operands_is_not_read(name: str, rows: int, shape: tuple[int, int]) -> None:
    """Tiles and steps reach beyond the weight, and the columns of the products beyond the rows."""
    op = REGISTRY[name]
    args = inputs(name, torch.bfloat16, rows, shape, bias=True)
    expected = expect(op, args)
    for index, value in enumerate(args):
        if isinstance(value, torch.Tensor):
            buffer = torch.full((value.numel() + 4096,), float("nan"), dtype=value.dtype)
            view = buffer.as_strided(value.shape, value.stride())
            view.copy_(value)
            args = (*args[:index], view, *args[index + 1 :])
    used = copy_args(args, "cuda")
    assert_right(expected, target(name).run(used))
    untouched(op, args, used)


@every_name
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [33, 150])
def test_a_bad_row_spoils_no_other(name: str, rows: int, value: float) -> None:
    args = on_gpu(name, torch.bfloat16, rows, (1096, 176))
    good = of_rows(name, args, slice(None))
    dict(REGISTRY[name].bind(*args))["x"][7, 5] = value
    bad = of_rows(name, args, slice(None))
    assert not any(result[7].isfinite().any() for result in bad)
    for others in (slice(0, 7), slice(8, None)):
        assert same(picked(bad, others), picked(good, others))


def test_the_residual_beside_x_in_one_buffer() -> None:
    """Rows of both alternate in memory; the same memory is refused."""
    args = on_gpu("linear_add_", torch.bfloat16, 33, (264, 264))
    (plain,) = of_rows("linear_add_", args, slice(None))
    buffer = torch.cat((args[1], args[0]), 1)
    x, residual = buffer[:, :264], buffer[:, 264:]
    ops.linear_add_(residual, x, *args[2:], backend="cuda")
    assert same_bits(residual, plain)
    assert same_bits(x, args[1])
    with pytest.raises(ValueError, match="residual must not be x, which is read meanwhile"):
        ops.linear_add_(x, x, *args[2:], backend="cuda")


@pytest.mark.parametrize("which", ["weight", "bias"])
@every_name
def test_weights_in_pieces_are_left_to_pytorch(name: str, which: str) -> None:
    op, args = REGISTRY[name], inputs(name, torch.bfloat16, 16, (128, 96), bias=True)
    value = dict(op.bind(*args))[which]
    spread = torch.full((*value.shape[:-1], 2 * value.shape[-1]), float("nan"), dtype=value.dtype)[..., ::2]
    spread.copy_(value)
    used = copy_args(replaced(op, args, which, spread), "cuda")
    assert_right(expect(op, args), target(name).run(used))
    assert blocks_of_a_tile(name, used) == 0


def test_gates_of_every_size() -> None:
    """A gate of one nonzero weight: also where its exponential is huge or infinite."""
    gates = torch.tensor([-3e38, -200, -88.5, -88, -87.5, -87, -20, -1, -0.0, 0, 1e-30, 1, 20, 88, 200, 3e38])
    width = 64  # so that a row with a one alone is eight after the norm
    weight, x = torch.zeros(2 * len(gates), width), torch.zeros(16, width)
    weight[: len(gates), 3], weight[len(gates) :, 3], x[:, 3] = gates / 8, 1 / 16, 1
    args = copy_args(tuple(t.bfloat16() for t in (x, torch.ones(width), weight)), "cuda")
    result = ops.rms_norm_swiglu(*args, eps=0.0, backend="cuda").cpu()
    gate, up = (8 * weight[:, 3].bfloat16().double()).chunk(2)
    truth = (gate / (1 + torch.exp(-gate)) * up).expand(16, -1)
    torch.testing.assert_close(result.double(), truth, rtol=2.0**-7, atol=1e-38)


def scaled_chain_step(residual: torch.Tensor, norm: torch.Tensor, weights: Any, hidden: int, left: Any) -> Any:
    """A layer whose norms are half in the product in front of them; left: by the layer before."""
    projection, output, gate_up, down = weights
    if left is None:
        wide = ops.rms_norm_linear(residual, norm, projection, backend="cuda")
    else:
        wide = ops.scaled_linear(*left, projection, backend="cuda")
    left = ops.empty_scaled(residual)
    ops.linear_add_scale_(residual, *left, wide[:, hidden // 2 : -hidden // 2], output, norm, backend="cuda")
    gated = ops.scaled_swiglu(*left, gate_up, backend="cuda")
    left = ops.empty_scaled(residual)
    ops.linear_add_scale_(residual, *left, gated, down, norm, backend="cuda")
    return left


def chain_step(residual: torch.Tensor, norm: torch.Tensor, weights: Any, hidden: int, left: Any) -> None:
    projection, output, gate_up, down = weights
    wide = ops.rms_norm_linear(residual, norm, projection, backend="cuda")
    ops.linear_add_(residual, wide[:, hidden // 2 : -hidden // 2], output, backend="cuda")
    gated = ops.rms_norm_swiglu(residual, norm, gate_up, backend="cuda")
    ops.linear_add_(residual, gated, down, backend="cuda")


@pytest.mark.parametrize(("step", "norms"), [(chain_step, 24), (scaled_chain_step, 1)], ids=["norms", "scaled"])
@both_dtypes
@pytest.mark.parametrize("rows", [9, 40, 64, 100, 256])
def test_a_chain_in_a_graph_has_the_bits_of_single_launches(
    rows: int, dtype: torch.dtype, step: Callable[..., Any], norms: int
) -> None:
    """Each kernel starts while the one before it ends, and reads, adds to and overwrites what that one has used."""
    layers, hidden, inner = 12, 1024, 1536
    make = Make(dtype, "cuda")

    def weight(salt: int, outputs: int, width: int) -> torch.Tensor:
        return make.randn(outputs, width, scale=width**-0.5, salt=salt)

    shapes = ((2 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner))
    weights = [[weight(10 * layer + i, *shape) for i, shape in enumerate(shapes, 2)] for layer in range(layers)]
    norm, start = 1 + make.randn(hidden, scale=0.2), make.randn(rows, hidden, salt=1)
    residual = torch.empty_like(start)

    def chain() -> None:
        left = None
        for own in weights:
            left = step(residual, norm, own, hidden, left)

    residual.copy_(start)
    chain()
    expected = residual.clone()
    graph = captured(chain)
    assert sum("skinny_linear" in name for name in kernel_names(graph)) == 4 * layers
    assert edge_types(graph) == [PROGRAMMATIC] * (4 * layers + norms - 1)
    graph.instantiate()
    for _ in range(20):
        residual.copy_(start)
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(residual, expected)


@pytest.mark.parametrize("rows", [9, 40, 64, 100, 256])
def test_a_norm_in_two_halves_is_the_norm(rows: int) -> None:
    """Against FP64: no further from it than the norm by itself, which is as near as BF16 is."""
    hidden, inner = 1024, 1536
    make = Make(torch.bfloat16, "cuda")
    norm, residual, x = (
        1 + make.randn(hidden, scale=0.2),
        make.randn(rows, hidden, salt=1),
        make.randn(rows, inner, salt=2),
    )
    down, projection = (
        make.randn(hidden, inner, scale=inner**-0.5, salt=3),
        make.randn(2048, hidden, scale=0.03, salt=4),
    )
    exact = residual.double() + x.double() @ down.double().T
    exact = exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + 1e-6) * norm.double() @ projection.double().T
    errors = []
    for step in (ops.linear_add_scale_, ops.linear_add_):
        own, left = residual.clone(), ops.empty_scaled(residual)
        if step is ops.linear_add_:
            step(own, x, down, backend="cuda")
            found = ops.rms_norm_linear(own, norm, projection, backend="cuda")
        else:
            step(own, *left, x, down, norm, backend="cuda")
            found = ops.scaled_linear(*left, projection, backend="cuda")
        errors.append(float((found.double() - exact).square().mean().sqrt()))
    scale = float(exact.square().mean().sqrt())
    assert errors[0] < 1.1 * errors[1]
    assert errors[1] < 2.0**-8 * scale


def test_the_rule_of_the_decoder_is_that_of_the_kernel() -> None:
    """What `scaled_rows` promises is served."""
    for shape in ((128, 96), (1024, 6144), (1024, 6160), (132, 96), (128, 88), (8, 65536), (8, 65552)):
        for rows in (8, 9, 64, 65, MOST, MOST + 1):
            served = [
                blocks_of_a_tile(name, on_gpu(name, torch.bfloat16, rows, shape)) > 0
                for name in ("scaled_linear", "scaled_swiglu", "linear_add_scale_")
            ]
            assert served == [rows in ops.scaled_rows([shape[::-1]])] * 3, (rows, shape)
