"""How compiled kernels get into a graph: which of them may begin while the kernel before them ends."""

from __future__ import annotations

import pytest
import torch

from rooflight.kernels import library
from rooflight.ops import REGISTRY, Make, rms_norm, rms_norm_backward
from tests.kernels.graph_nodes import PROGRAMMATIC, edge_types, shared_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(library.load() is not None, reason=f"no compiled kernels here: {library.load()}"),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability()[0] < 9,
        reason="launches overlap from compute capability 9 on",
    ),
]


def captured(x: torch.Tensor, *steps: str) -> torch.cuda.CUDAGraph:
    """A graph of norms and of PyTorch's kernels."""
    weight = torch.randn(x.shape[-1], device="cuda")
    actions = {"norm": lambda: rms_norm(x, weight, 1e-6, backend="cuda"), "other": lambda: x.add_(1)}
    for action in actions.values():
        action()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        for step in steps:
            actions[step]()
    return graph


@pytest.mark.parametrize(
    ("steps", "overlapping"),
    [
        (("norm",), []),
        (("norm", "norm", "norm"), [PROGRAMMATIC, PROGRAMMATIC]),
        (("other", "norm"), [0]),
        (("norm", "other", "norm"), [0, 0]),
    ],
)
def test_only_a_kernel_behind_one_of_ours_overlaps(steps: tuple[str, ...], overlapping: list[int]) -> None:
    """Behind a kernel that does not let the next one start, an overlapping launch takes longer than an ordinary one."""
    graph = captured(torch.randn(4, 1024, device="cuda"), *steps)
    assert edge_types(graph) == overlapping


@pytest.mark.parametrize(("share", "missing", "helps"), [(2, 0, True), (2, 60, True), (2, 100, False), (1, 0, False)])
def test_blocks_that_settle_early_settle_evenly(share: int, missing: int, helps: bool) -> None:
    """An overlapped launch takes shared memory so that no multiprocessor holds more blocks than its share."""
    device = torch.cuda.get_device_properties()
    rows = share * device.multi_processor_count - missing * device.multi_processor_count // 132
    x = torch.randn(rows, 4096, device="cuda").bfloat16()
    weight = torch.randn(4096, device="cuda").bfloat16()
    expected = rms_norm(x, weight, 1e-6, backend="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        rms_norm(x, weight, 1e-6, backend="cuda")
        second = rms_norm(x, weight, 1e-6, backend="cuda")
    first_bytes, second_bytes = shared_bytes(graph)
    assert first_bytes == 0
    per_block = second_bytes + 1024
    assert (second_bytes > 0) == helps
    if helps:
        assert share * per_block <= device.shared_memory_per_multiprocessor < (share + 1) * (per_block + 1024)
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(second, expected)


def test_the_second_kernel_of_an_operator_overlaps_the_first() -> None:
    x, grad, weight = (torch.randn(*size, device="cuda") for size in ((8, 1024), (8, 1024), (1024,)))
    rms_norm_backward(grad, x, weight, 1e-6, backend="cuda")
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.graph(graph):
        x.add_(1)
        rms_norm_backward(grad, x, weight, 1e-6, backend="cuda")
    assert edge_types(graph) == [0, PROGRAMMATIC]


@pytest.mark.parametrize("name", ["embedding", "rope", "rope_"])
def test_gathers_and_rotations_overlap_too(name: str) -> None:
    op = REGISTRY[name]
    args = op.inputs(Make(torch.float32, "cuda"), **op.sweep[-1])
    x, weight = torch.randn(4, 1024, device="cuda"), torch.randn(1024, device="cuda")
    step, graph = op.providers["cuda"], torch.cuda.CUDAGraph(keep_graph=True)
    rms_norm(x, weight, 1e-6, backend="cuda")
    step(*args)
    with torch.cuda.graph(graph):
        rms_norm(x, weight, 1e-6, backend="cuda")
        step(*args)
    assert edge_types(graph) == [PROGRAMMATIC]


def test_a_node_of_an_earlier_capture_is_not_what_comes_before() -> None:
    """Its address may be used again."""
    for _ in range(5):
        captured(torch.randn(4, 1024, device="cuda"), "norm").reset()
        graph = captured(torch.randn(4, 1024, device="cuda"), "other", "norm")
        assert edge_types(graph) == [0]
        graph.reset()


def test_captures_of_two_streams_do_not_mix() -> None:
    x, weight, other = (torch.randn(*size, device="cuda") for size in ((4, 1024), (1024,), (4, 1024)))
    expected = rms_norm(x, weight, 1e-6, backend="cuda")
    graph, side = torch.cuda.CUDAGraph(keep_graph=True), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        rms_norm(x, weight, 1e-6, backend="cuda")
        side.wait_stream(main)
        with torch.cuda.stream(side):
            rms_norm(other, weight, 1e-6, backend="cuda")  # behind the first norm, but on another stream
        one = rms_norm(x, weight, 1e-6, backend="cuda")  # behind it as well, though another was captured since
        main.wait_stream(side)
        two = rms_norm(x, weight, 1e-6, backend="cuda")  # behind two
    assert edge_types(graph) == [0, 0, 0, 0]
    graph.instantiate()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(one, expected)
    assert torch.equal(two, expected)


def test_attention_with_its_step_starts_early_behind_a_product_but_not_behind_what_writes_a_cache() -> None:
    """It reads the cache before it waits: the writer, or one that overlaps it, must have ended."""
    attention, writer = (REGISTRY[name] for name in ("qk_norm_rope_attention_", "qk_norm_rope_cache_"))
    given = attention.inputs(Make(torch.bfloat16, "cuda"), (40, 3), head_dim=128)
    many = attention.inputs(Make(torch.bfloat16, "cuda"), (17,) * 192, head_dim=128)
    heads = many[2].shape[1]
    assert 192 * heads > 2 * torch.cuda.get_device_properties("cuda").multi_processor_count
    _, q, k, v, *step = given[:11]
    x, weight = torch.randn(2, 1024, device="cuda").bfloat16(), torch.randn(1024, device="cuda").bfloat16()
    calls = {
        "norm": lambda: rms_norm(x, weight, 1e-6, backend="cuda"),
        "attention": lambda: attention.providers["cuda"](*given),
        "many": lambda: attention.providers["cuda"](*many),  # whose blocks wait before they read, but not for their end
        "in place": lambda: writer.providers["cuda"](q, k, v, *step, 1e-6),
    }
    for names, expected in (
        (("norm", "attention"), [PROGRAMMATIC]),
        (("attention", "attention"), [PROGRAMMATIC]),
        (("in place", "attention"), [0]),
        (("in place", "norm", "attention"), [0, PROGRAMMATIC]),
        (("norm", "many", "norm"), [PROGRAMMATIC, PROGRAMMATIC]),
        (("many", "many"), [PROGRAMMATIC]),
        (("many", "attention"), [0]),
        (("many", "norm", "attention"), [0, PROGRAMMATIC]),
    ):
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        for name in names:
            calls[name]()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            for name in names:
                calls[name]()
        assert edge_types(graph) == expected, names
        graph.reset()
