"""A measuring process from the inside, and the measurement of the ceilings, on a device that is made up."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rooflight.bench import card, contenders, library
from rooflight.bench.ops_worker import OpsWorker
from rooflight.limits.card import Card
from tests.bench.fake_device import COLD_RATE, HOT_RATE, NODE_US, FakeDevice

CASE = {"operator": "fused_add_rms_norm", "dtype": "bf16", "num_tokens": 8, "hidden_size": 64, "seed": 0}
PROPERTIES = SimpleNamespace(name="NVIDIA Test 1", total_memory=2**20, multi_processor_count=4, L2_cache_size=10_000)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    made = FakeDevice()
    monkeypatch.setattr("rooflight.bench.ops_worker.CudaDevice", lambda: made)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: PROPERTIES)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 0)
    return made


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    """A bench library whose empty kernels run on that device."""

    def empty(count: int, grid: int, block: int, pdl: bool = False) -> None:
        for _ in range(count):
            device.launch({}, host_us=2.0, fixed_us=-0.25 if pdl else 0.0)

    def chase(data: torch.Tensor, hops: int, out: torch.Tensor) -> None:
        device.launch({"chain": hops * 10}, host_us=2.0, fixed_us=-NODE_US)

    def read(data: torch.Tensor, out: torch.Tensor, flush: bool = False) -> None:
        device.launch({"chain": card.HOPS * 10}, host_us=2.0)

    stand_in = SimpleNamespace(empty=empty, chase=chase, read=read)
    monkeypatch.setattr(library, "load", lambda: (stand_in, "made up"))


def answer(worker: OpsWorker, **message: Any) -> dict[str, Any]:
    reply: dict[str, Any] = json.loads(json.dumps(worker.answer(message)))  # it must be plain data
    return reply


@torch.inference_mode()
def test_a_case_from_start_to_release(device: FakeDevice) -> None:
    worker = OpsWorker(["rooflight", "rooflight again", "eager", "vllm"])
    ready = worker.ready()
    assert ready["ready"] == ["rooflight", "rooflight again", "eager"]
    assert list(ready["absent"]) == ["vllm"]
    assert (ready["device"], ready["l2_bytes"]) == ("NVIDIA Test 1", 10_000)
    assert answer(worker, do="warm", case=CASE) == {}
    prepared = answer(worker, do="prepare", case=CASE, names=ready["ready"])
    traffic = 4 * 8 * 64 * 2 + 64 * 2
    assert (prepared["bytes"], prepared["broken"]) == (traffic, False)
    assert prepared["cold_method"] == "rotation of 9 sets"
    assert prepared["reasons"] == {"rooflight": None, "rooflight again": None, "eager": None}
    assert prepared["versions"]["eager"] == f"torch {torch.__version__}"
    assert set(answer(worker, do="round", name="rooflight")) == {"call_us", "hot_us", "cold_us"}
    samples = answer(worker, do="event_round", name="eager")
    assert {name: len(values) for name, values in samples.items()} == {"event_hot_us": 50, "event_cold_us": 50}
    assert answer(worker, do="release") == {}
    lost = answer(worker, do="round", name="rooflight")
    assert lost == {"error": "ValueError: prepare comes first", "broken": False}


@torch.inference_mode()
def test_what_goes_wrong_is_an_answer(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = OpsWorker(["rooflight", "eager"])
    assert "do must be one of" in answer(worker, do="dance")["error"]
    good = contenders.bind

    def breaking(name: str, operator: str, args: tuple[Any, ...]) -> Any:
        if name == "eager":
            device.working = False
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return good(name, operator, args)

    monkeypatch.setattr("rooflight.bench.cell.Cell.__init__.__defaults__", (breaking,))
    prepared = answer(worker, do="prepare", case=CASE, names=["rooflight", "eager"])
    assert prepared["reasons"]["eager"].startswith("RuntimeError: CUDA error: an illegal")
    assert prepared["broken"] is True


def copies_on(monkeypatch: pytest.MonkeyPatch, device: FakeDevice) -> None:
    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        device.launch({str(tensor.data_ptr()): tensor.numel() * 4 for tensor in (source, target)})

    monkeypatch.setattr(card, "COPY_METHODS", {"copy_": copy})


def test_the_quick_ceilings_are_what_limits_need(
    device: FakeDevice, kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_on(monkeypatch, device)
    monkeypatch.setattr(card, "QUICK_COPIES", (4096,))
    reply = answer(OpsWorker([]), do="card", full=False)
    measured = Card.from_data(reply)
    assert measured.copy_bandwidth == pytest.approx(8192 / (8192 / COLD_RATE + NODE_US) * 1e6)
    assert measured.node_us == {"plain": pytest.approx(NODE_US), "dependent launch": pytest.approx(NODE_US - 0.25)}
    assert measured.methods == {"copy": "copy_", "node": "empty kernel"}
    assert (measured.name, measured.l2_bytes) == ("NVIDIA Test 1", 10_000)


def test_all_ceilings(device: FakeDevice, kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    copies_on(monkeypatch, device)
    monkeypatch.setattr(card, "COPIES", (4096, 8192, 2**30))  # the last is more than a share of the card's memory
    monkeypatch.setattr(card, "READS", (16384,))
    monkeypatch.setattr(card, "MATMUL", 16)
    product = card._product

    def timed(name: str, wide: Any) -> Any:
        if name == "fp8":
            raise RuntimeError("no FP8 here\nand a page of words")
        run = product(name, wide)
        return lambda: (run(), device.launch({}))

    monkeypatch.setattr(card, "_product", timed)
    precision = torch.get_float32_matmul_precision()
    measured = card.measure(device, full=True)  # type: ignore[arg-type]
    assert [point.bytes for point in measured.copy] == [8192, 16384]
    assert [point.rate for point in measured.read] == [pytest.approx(16384 / (16384 / COLD_RATE + NODE_US) * 1e6)]
    assert measured.methods["read"] == "fake read"  # not how it flushes
    assert list(measured.matmul) == ["fp32", "tf32", "fp16", "bf16"]
    assert measured.call_us["empty kernel"] == pytest.approx(2.0)
    assert measured.call_us["PyTorch operator"] == 0.0  # it ran on the CPU, unseen by the made-up clock
    per_hop = {"L2": 10 / HOT_RATE * 1e3, "DRAM": 10 / COLD_RATE * 1e3}
    assert measured.latency_ns == {place: pytest.approx(time) for place, time in per_hop.items()}
    assert measured.missing == {"matmul fp8": "no FP8 here"}
    assert torch.get_float32_matmul_precision() == precision


def test_without_the_library_the_ceilings_say_what_stood_in(
    device: FakeDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies_on(monkeypatch, device)
    monkeypatch.setattr(card, "QUICK_COPIES", (4096,))
    monkeypatch.setattr(library, "load", lambda: (None, "not built"))
    monkeypatch.setattr("torch.cuda._sleep", lambda cycles: device.launch({}))
    measured = card.measure(device, full=False)  # type: ignore[arg-type]
    assert measured.methods["node"] == "torch.cuda._sleep(0)"
    assert measured.node_us == {"plain": pytest.approx(NODE_US)}
