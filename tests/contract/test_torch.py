"""Operators as PyTorch citizens: opcheck, torch.compile, torch.export, meta and fake tensors, empty batches."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from rooflight import ops
from tests.contract.harness import (
    Args,
    Target,
    batch_args,
    copy_args,
    describe,
    each_target,
    plain_dims,
    public,
    results_of,
    rows_of,
    same_bits,
    small_dims,
    sweep_args,
    zero_dims,
)

BATCHES = (0, 1, 2, 5, 9)
# Dynamo always gives 0 and 1 their own graph; then one with a symbol, and one more where a second size starts to vary.
MOST_COMPILATIONS = 4


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def with_gradients(args: Args) -> Args:
    for value in args:
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_()
    return args


@each_target()
def test_br_028_opcheck(target: Target) -> None:
    """Schema (what is written, what aliases), fake against real, autograd registration, dynamic shapes."""
    torch.library.opcheck(target.overload, copy_args(sweep_args(target.op, small_dims(target.op)), target.device))


@each_target(lambda target: target.op.backward is not None)
def test_opcheck_with_gradient_inputs(target: Target) -> None:
    args = copy_args(sweep_args(target.op, small_dims(target.op)), target.device)
    torch.library.opcheck(target.overload, with_gradients(args))


@each_target()
def test_br_034_compiled_equals_eager_at_every_batch_size(target: Target) -> None:
    """Through the public function, fullgraph, with few compilations."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(public(target.op, target.provider), fullgraph=True, backend=counter)
    for rows in BATCHES:
        args = batch_args(target.op, rows)
        used = copy_args(args, target.device)
        results = results_of(target.op, used, compiled(*used))
        for eager, other in zip(target.run_copy(args), results, strict=True):
            assert same_bits(eager, other), f"{rows} rows"
    assert counter.frame_count <= MOST_COMPILATIONS


@each_target()
def test_br_034_export(target: Target) -> None:
    function = public(target.op, target.provider)

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return function(*args)

    args = batch_args(target.op, 5)
    program = torch.export.export(Module(), copy_args(args, target.device))
    used = copy_args(args, target.device)
    results = results_of(target.op, used, program.module()(*used))
    assert all(map(same_bits, target.run_copy(args), results))


@each_target()
def test_fake_tensors_give_the_shapes_of_real_ones(target: Target) -> None:
    for dims in target.op.sweep:
        args = sweep_args(target.op, dims)
        real = target.run_copy(args)
        copies, mode = copy_args(args, target.device), FakeTensorMode()
        fakes = tuple(mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in copies)
        with mode:
            results = target.run(fakes)
        for one, other in zip(real, results, strict=True):
            assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device), describe(dims)


@each_target()
def test_meta_tensors_give_meta_tensors(target: Target) -> None:
    """Shapes alone, through the public function, as for a model whose weights are not there."""
    for rows in BATCHES:
        args = batch_args(target.op, rows)
        results = target.run_public(copy_args(args, "meta"))
        assert all(result.is_meta for result in results)
        assert [r.shape for r in results] == [r.shape for r in target.run_copy(args)]


@each_target()
def test_br_017_zero_rows_then_an_ordinary_operator(target: Target) -> None:
    args = copy_args(sweep_args(target.op, zero_dims(target.op), target.op.dtypes[-1]), target.device)
    results = target.run_public(args)
    plain = target.run_copy(sweep_args(target.op, plain_dims(target.op), target.op.dtypes[-1]))
    for empty, full in zip(results, plain, strict=True):
        if empty.numel() == 0:  # a cache is an argument with its own size
            assert empty.shape[0] == 0
            assert empty.shape[1:] == full.shape[1:]
            assert empty.dtype == full.dtype
    padded = torch.nn.functional.pad(torch.ones(2, 3, device=target.device), (1, 1))
    assert padded.sum().item() == 6
    assert padded.shape == (2, 5)


@each_target()
def test_public_function_and_overload_agree(target: Target) -> None:
    args = batch_args(target.op, 5)
    used = copy_args(args, target.device)
    assert all(map(same_bits, target.run_copy(args), target.run_public(used)))


@pytest.mark.parametrize("name", sorted(ops.REGISTRY))
def test_public_function_is_documented(name: str) -> None:
    function = getattr(ops, name)
    assert name in ops.__all__
    assert function.__doc__
    assert "backend" in function.__annotations__


@pytest.mark.parametrize("name", sorted(ops.REGISTRY))
def test_overloads_share_schema_and_tags(name: str) -> None:
    operator = ops.REGISTRY[name]
    schemas = {str(o._schema).replace(f".{provider}", "") for provider, o in operator.providers.items()}
    assert len(schemas) == 1
    for overload in operator.providers.values():
        assert torch.Tag.pt2_compliant_tag in overload.tags
        if operator.mutates:
            assert len(overload._schema.returns) == 0
    assert operator.mutates == name.endswith("_")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this PyTorch has no torch.distributed")
def test_br_034_dtensor_is_refused_with_one_clear_message() -> None:
    """No operator has a sharding rule yet: a DTensor is refused by PyTorch, which names the operator and the reason."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for name, operator in sorted(ops.REGISTRY.items()):
            args = sweep_args(operator, plain_dims(operator))
            rows = rows_of(args)
            sharded = list(args)
            for index, value in enumerate(args):
                if isinstance(value, torch.Tensor):
                    placement = Shard(0) if value.shape[:1] == (rows,) else Replicate()
                    sharded[index] = distribute_tensor(value, mesh, [placement])
            with pytest.raises(NotImplementedError, match=rf"rooflight\.{name}\.ref does not have a sharding strategy"):
                operator.providers["ref"](*sharded)
    finally:
        torch.distributed.destroy_process_group()


def test_br_028_compiled_in_place_on_views_of_one_tensor() -> None:
    """Views of one buffer, written inside a graph that also reads their neighbours."""

    def step(x: torch.Tensor, r: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ops.fused_add_rms_norm_(x[0], r[0], weight)
        return x[1] + x[0] + r.sum(0)

    generator = torch.Generator().manual_seed(0)
    x, r = (torch.randn(2, 5, 16, generator=generator) for _ in range(2))
    weight = torch.randn(16, generator=generator)
    eager_args, compiled_args = copy_args((x, r, weight)), copy_args((x, r, weight))
    eager = step(*eager_args)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled_args)
    assert torch.equal(eager, compiled)
    for one, other in zip(eager_args, compiled_args, strict=True):
        assert torch.equal(one, other)
    assert torch.equal(eager_args[0][1], x[1])
    total = x[0] + r[0]
    assert torch.equal(eager_args[1][0], total)
    torch.testing.assert_close(eager_args[0][0], torch.nn.functional.rms_norm(total, (16,), weight, 1e-6))


@pytest.mark.parametrize("shared", ["one_buffer", "one_matrix"])
def test_br_028_compiled_in_place_on_aliasing_inputs(shared: str) -> None:
    """x and residual are views of one tensor and come into the graph as two inputs."""

    def inputs() -> tuple[torch.Tensor, torch.Tensor]:
        buffer = torch.arange(64.0).view(4, 16) / 7
        return (buffer[:2], buffer[2:]) if shared == "one_buffer" else (buffer[:, :8], buffer[:, 8:])

    def step(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        ops.fused_add_rms_norm_(x, residual, torch.ones_like(x[0]))
        return x * 2

    eager_args, compiled_args = inputs(), inputs()
    eager = step(*eager_args)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(*compiled_args)
    assert torch.equal(eager, compiled)
    assert all(map(torch.equal, eager_args, compiled_args))


def test_compiled_code_follows_the_backend_context() -> None:
    """Dynamo guards on the choice, so a graph never runs a provider that is no longer asked for."""
    operator = ops.REGISTRY["fused_add_rms_norm"]
    if "triton" not in operator.providers:
        pytest.skip("Triton is not installed")
    seen: list[str] = []

    def spy(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.extend(str(node.target) for node in graph.graph.nodes if "rooflight" in str(node.target))
        return graph

    compiled = torch.compile(lambda *args: ops.fused_add_rms_norm(*args), fullgraph=True, backend=spy)
    args = sweep_args(operator, small_dims(operator))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    on_device = copy_args(args, device)
    for choice in ("ref", "triton", "ref"):
        with ops.backend(choice):
            compiled(*on_device)
    assert seen == ["rooflight.fused_add_rms_norm.ref", "rooflight.fused_add_rms_norm.triton"]


def decoder_piece(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, table: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Operators of ours, functional and in place, with ordinary ones between them for the compiler to fuse."""
    out, total = ops.fused_add_rms_norm(x * 2, residual, weight)
    q, k = ops.rope((out + 1).unflatten(-1, (4, 16)), out.unflatten(-1, (4, 16)), table, positions)
    gated = ops.silu_and_mul(torch.cat((q, k), -1).flatten(1))
    fresh, rest = gated.detach() + 3, gated.detach() - 1
    ops.fused_add_rms_norm_(fresh, rest, weight.detach())
    return gated + fresh * rest, total


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_inductor_equals_eager_with_gradients(device: str) -> None:
    if device == "cpu" and not any(map(shutil.which, ("g++", "clang++", "c++"))):
        pytest.skip("no C++ compiler, which Inductor needs on the CPU")
    generator = torch.Generator().manual_seed(0)
    x, residual = (torch.randn(5, 64, generator=generator) for _ in range(2))
    weight, table = torch.randn(64, generator=generator), torch.randn(9, 16, generator=generator)
    args = x, residual, weight, table, torch.tensor([0, 8, 3, 3, 1])
    outputs = []
    for function in (decoder_piece, torch.compile(decoder_piece, fullgraph=True)):
        used = copy_args(args, device)
        wanted = with_gradients(used[:3])
        out, total = function(*used)
        (out.pow(2).sum() + total.pow(3).sum()).backward()
        outputs.append([out, total, *(value.grad for value in wanted)])
    for eager, compiled in zip(*outputs, strict=True):
        # Looser than the default: the compiler's exp rounds otherwise, and two norms stand behind it.
        torch.testing.assert_close(eager, compiled, rtol=1e-5, atol=1e-5 * eager.detach().abs().max().item())
