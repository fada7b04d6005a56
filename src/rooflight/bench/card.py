"""Measure the ceilings of a GPU: memory streams, matrix products, what a launch costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median

import torch

from rooflight.bench import library
from rooflight.bench.device import Closure, CudaDevice, Device
from rooflight.bench.timing import FLUSHED_LAUNCHES, ColdPlan, call_us, difference_us, replay_us
from rooflight.limits.card import Bandwidth, Card

MIB = 2**20
COPIES = tuple(size * MIB for size in (64, 256, 1024, 4096))  # bytes of the buffer that is copied
READS = tuple(size * MIB for size in (256, 1024, 4096))
QUICK_COPIES = (1024 * MIB,)
MATMUL = 8192
NODES = 500  # empty kernels in a graph
REPEATS = 5
HOPS, HOP_BYTES = 64, 65536  # of the chain of loads that measures latency
LAUNCHES = 8  # of a stream in its graph, at least
SHARE = 6  # of the card's memory a buffer may take one SHARE-th

COPY_METHODS: Mapping[str, Callable[[torch.Tensor, torch.Tensor], object]] = {
    "copy_": lambda source, target: target.copy_(source),
    "element-wise kernel": lambda source, target: torch.neg(source, out=target),
}


def measure(device: CudaDevice, full: bool) -> Card:
    """The ceilings of the current card, clocks warmed first. Not full: only what limits of memory-bound operators need.

    Takes about half a second, in full about five.
    """
    properties = torch.cuda.get_device_properties()
    largest = properties.total_memory // SHARE
    device.warm_clocks()
    sizes = [size for size in (COPIES if full else QUICK_COPIES) if size <= largest] or [largest // MIB * MIB]
    copy, copy_method = copy_bandwidths(device, sizes)
    nodes, node_method = _node_us(device, properties.multi_processor_count)
    methods = {"copy": copy_method, "node": node_method}
    if not full:
        return Card(properties.name, device.l2_bytes, copy, node_us=nodes, methods=methods)
    read = tuple(_read_bandwidth(device, size) for size in READS if size <= largest)
    methods["read"] = device.read_method
    matmul, missing = _matmuls(device)
    calls = _launch_costs(device)
    latency = latency_ns(device)
    if library.load()[0] is None:
        missing |= dict.fromkeys(("empty kernel", "latency"), library.load()[1])
    return Card(properties.name, device.l2_bytes, copy, read, matmul, calls, nodes, latency, methods, missing)


def copy_bandwidths(device: Device, sizes: Sequence[int]) -> tuple[tuple[Bandwidth, ...], str]:
    """For each buffer size the rate of the best way to copy; and the name of the way that was best at the largest."""
    points, best = [], ""
    for size in sizes:
        pairs = copy_pairs(device, size)
        rates = {}
        for name, copy in COPY_METHODS.items():
            rates[name] = 2 * size / stream_us(device, [partial(copy, *pair) for pair in pairs]) * 1e6
        best = max(rates, key=lambda name: rates[name])
        points.append(Bandwidth(2 * size, rates[best]))
    return tuple(points), best


def copy_pairs(device: Device, size: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(source, target) pairs of `size` bytes each, as many as it takes to find nothing in the cache."""
    pairs = range(ColdPlan.of(2 * size, device.l2_bytes).sets)
    return [(_random(size, device.name), torch.empty(size // 4, device=device.name)) for _ in pairs]


def _random(size: int, device: str) -> torch.Tensor:
    return torch.rand(size // 4, device=device)


def stream_us(device: Device, closures: Sequence[Closure]) -> float:
    """GPU time of one launch in a graph that rotates through the closures: median of repeated replays."""
    for closure in closures:
        closure()
    launches = list(closures) * -(-LAUNCHES // len(closures))
    graph = device.capture(launches)
    return median(replay_us(device, graph, 1) for _ in range(REPEATS)) / len(launches)


def _read_bandwidth(device: CudaDevice, size: int) -> Bandwidth:
    sets = ColdPlan.of(size, device.l2_bytes).sets
    closures = [partial(device.read, _random(size, device.name)) for _ in range(sets)]
    return Bandwidth(size, size / stream_us(device, closures) * 1e6)


def latency_ns(device: CudaDevice) -> dict[str, float]:
    """Nanoseconds of a load that waits for the one before it: from L2, and from DRAM after a flush.

    Before the flush the chain is loaded to be evicted last: the flush must evict that too.
    """
    kernels, _ = library.load()
    if kernels is None:
        return {}
    chain = torch.zeros(HOPS + 1, HOP_BYTES // 4, dtype=torch.int32, device=device.name)
    chain[:HOPS, 0] = torch.arange(1, HOPS + 1, device=device.name) * chain.shape[1]
    scratch = torch.zeros(1, dtype=torch.int32, device=device.name)
    chase, keep = partial(kernels.chase, chain, HOPS, scratch), partial(kernels.read, chain, scratch, flush=True)
    chase()
    hot = median(replay_us(device, device.capture([chase] * FLUSHED_LAUNCHES)) for _ in range(REPEATS))
    flushes: list[Closure] = [device.flush, keep, device.flush]  # so that `keep` finds the chain in DRAM in both graphs
    flushed = device.capture([*flushes, chase] * FLUSHED_LAUNCHES)
    cold = difference_us(device, flushed, device.capture(flushes * FLUSHED_LAUNCHES), FLUSHED_LAUNCHES)
    device.flushed()
    return {"L2": hot / FLUSHED_LAUNCHES / HOPS * 1e3, "DRAM": cold / HOPS * 1e3}


def _node_us(device: CudaDevice, multiprocessors: int) -> tuple[dict[str, float], str]:
    """GPU time of an empty kernel in a graph, one block of 256 threads on each multiprocessor, by kind."""
    kernels, _ = library.load()
    if kernels is None:
        return {"plain": _graph_us(device, partial(torch.cuda._sleep, 0), NODES)}, "torch.cuda._sleep(0)"
    kinds = {"plain": False, "dependent launch": True}
    launch = {kind: partial(kernels.empty, NODES, multiprocessors, 256, pdl) for kind, pdl in kinds.items()}
    return {kind: _graph_us(device, launch[kind], 1) / NODES for kind in kinds}, "empty kernel"


def _graph_us(device: Device, closure: Closure, launches: int) -> float:
    closure()
    graph = device.capture([closure] * launches)
    return median(replay_us(device, graph) for _ in range(REPEATS)) / launches


def _launch_costs(device: CudaDevice) -> dict[str, float]:
    """Host time to launch one thing that does next to nothing, by kind."""
    value = torch.zeros(1, device=device.name)
    costs = {"PyTorch operator": call_us(device, partial(value.add_, 1), 100)}
    kernels, _ = library.load()
    if kernels is not None:
        costs["empty kernel"] = call_us(device, partial(kernels.empty, 100, 1, 32), 8) / 100
    return costs


def _matmuls(device: CudaDevice) -> tuple[dict[str, float], dict[str, str]]:
    """FLOP/s of a square product by dtype, and by dtype why there is none."""
    rates: dict[str, float] = {}
    missing: dict[str, str] = {}
    precision = torch.get_float32_matmul_precision()
    wide = [torch.randn(MATMUL, MATMUL, device=device.name) for _ in range(2)]
    for name in ("fp32", "tf32", "fp16", "bf16", "fp8"):
        try:
            torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
            product = _product(name, wide)
            product()
            product()
            rates[name] = 2 * MATMUL**3 / median(device.laps_us([product] * REPEATS)) * 1e6
        except (RuntimeError, AttributeError, TypeError) as error:  # older cards have no FP8, or no BF16
            missing[f"matmul {name}"] = str(error).partition("\n")[0]
        finally:
            torch.set_float32_matmul_precision(precision)
    return rates, missing


def _product(name: str, wide: Sequence[torch.Tensor]) -> Closure:
    if name == "fp8":
        a, b = (matrix.to(torch.float8_e4m3fn) for matrix in wide)
        one = torch.ones((), device=a.device)
        return partial(torch._scaled_mm, a, b.t(), one, one, out_dtype=torch.bfloat16)
    a, b = (matrix.to({"fp16": torch.float16, "bf16": torch.bfloat16}.get(name, torch.float32)) for matrix in wide)
    return partial(torch.matmul, a, b)
