"""What a captured CUDA graph holds, as the driver tells it: kinds of edges, kernels' names and shared memory."""

from __future__ import annotations

import ctypes

import torch

PROGRAMMATIC = 1  # CUgraphDependencyType


class EdgeData(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ubyte) for name in ("from_port", "to_port", "type")] + [
        ("reserved", ctypes.c_ubyte * 5)
    ]


class KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS"""

    _fields_ = [
        ("function", ctypes.c_void_p),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_uint),
        *((name, ctypes.c_void_p) for name in ("parameters", "extra", "kernel", "context")),
    ]


def edge_types(graph: torch.cuda.CUDAGraph) -> list[int]:
    """Of every edge of a captured graph, sorted."""
    get = ctypes.CDLL("libcuda.so.1").cuGraphGetEdges_v2
    handle = ctypes.c_void_p(graph.raw_cuda_graph())
    count = ctypes.c_size_t()
    assert get(handle, None, None, None, ctypes.byref(count)) == 0
    if count.value == 0:
        return []
    ends = [(ctypes.c_void_p * count.value)() for _ in range(2)]
    data = (EdgeData * count.value)()
    assert get(handle, *ends, data, ctypes.byref(count)) == 0
    return sorted(edge.type for edge in data)


def kernel_nodes(graph: torch.cuda.CUDAGraph) -> list[KernelNode]:
    """Copies and fills are none."""
    driver = ctypes.CDLL("libcuda.so.1")
    handle, count = ctypes.c_void_p(graph.raw_cuda_graph()), ctypes.c_size_t()
    assert driver.cuGraphGetNodes(handle, None, ctypes.byref(count)) == 0
    nodes = (ctypes.c_void_p * count.value)()
    assert driver.cuGraphGetNodes(handle, nodes, ctypes.byref(count)) == 0
    found = []
    for node in nodes:
        into = KernelNode()
        if driver.cuGraphKernelNodeGetParams_v2(ctypes.c_void_p(node), ctypes.byref(into)) == 0:
            found.append(into)
    return found


def shared_bytes(graph: torch.cuda.CUDAGraph) -> list[int]:
    """Dynamic shared memory of every kernel of a captured graph, sorted."""
    return sorted(node.shared_bytes for node in kernel_nodes(graph))


def kernel_names(graph: torch.cuda.CUDAGraph) -> list[str]:
    """As the compiler has them."""
    driver, names = ctypes.CDLL("libcuda.so.1"), []
    for node in kernel_nodes(graph):
        name = ctypes.c_char_p()
        if node.function:
            assert driver.cuFuncGetName(ctypes.byref(name), ctypes.c_void_p(node.function)) == 0
        else:
            assert driver.cuKernelGetName(ctypes.byref(name), ctypes.c_void_p(node.kernel)) == 0
        names.append((name.value or b"").decode())
    return names
