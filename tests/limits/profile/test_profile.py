"""Traces of torch.profiler: read in pieces, and explained. Real ones from tiny models on the CPU, the GPU's by hand."""

from __future__ import annotations

import gzip
import json
import os
import tracemalloc
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile, schedule

from rooflight.limits.profile import stream as stream_module
from rooflight.limits.profile.analysis import Profile, analyse, read_profile
from rooflight.limits.profile.cost import Peaks, Work, work_of
from rooflight.limits.profile.intervals import Union, in_order, own_times
from rooflight.limits.profile.reader import Inputs, Kind, read_events
from rooflight.limits.profile.rows import Row
from rooflight.limits.profile.stream import stream_events

Event = dict[str, Any]
CARD = Peaks(read_rate=4e12, flops={"bf16": 8e14, "fp32": 5e13}, node_us=1.0, name="NVIDIA H200")
BF16 = "c10::BFloat16"


def host(name: str, ts: float, dur: float, cat: str = "cpu_op", thread: int = 1, **args: Any) -> Event:
    return {"ph": "X", "cat": cat, "name": name, "pid": 100, "tid": thread, "ts": ts, "dur": dur, "args": args}


def launch(ts: float, correlation: int, name: str = "cudaLaunchKernel", dur: float = 2.0) -> Event:
    return host(name, ts, dur, "cuda_runtime", correlation=correlation)


def kernel(name: str, ts: float, dur: float, correlation: int = 0, *, stream: int = 7, device: int = 0) -> Event:
    args = {"device": device, "stream": stream, "correlation": correlation}
    return {"ph": "X", "cat": "kernel", "name": name, "pid": device, "tid": stream, "ts": ts, "dur": dur, "args": args}


def shaped(dims: list[Any], kind: str = BF16) -> dict[str, Any]:
    return {"Input Dims": dims, "Input type": [kind] * len(dims)}


def save(path: Path, events: list[Any], **head: Any) -> Path:
    data = json.dumps({"schemaVersion": 1, **head, "traceEvents": events, "traceName": "x"}, indent=2).encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


@pytest.fixture
def explained(tmp_path: Path) -> Callable[..., Profile]:
    """Write events, read them, explain them."""

    def explain(events: list[Any], ceilings: Any = None) -> Profile:
        return read_profile(save(tmp_path / "trace.json", events), ceilings)

    return explain


def row_of(profile: Profile, name: str) -> Row:
    (row,) = [row for row in profile.rows if row.name == name]
    return row


# What PyTorch writes


def tiny(model: str) -> torch.nn.Module:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    config = getattr(transformers, f"{model}Config")(**sizes, **heads)
    return getattr(transformers, f"{model}ForCausalLM")(config).eval()  # type: ignore[no-any-return]


def recorded(model: str, path: Path, steps: int = 3) -> Any:
    """A decoder run on 8 tokens a few times; the profiler, and its trace in `path`."""
    decoder, ids = tiny(model), torch.arange(8)[None]
    with (
        torch.inference_mode(),
        profile(
            activities=[ProfilerActivity.CPU],
            record_shapes=True,
            schedule=schedule(wait=0, warmup=1, active=steps, repeat=1),
        ) as p,
    ):
        for _ in range(steps + 1):
            decoder(ids)
            p.step()
    p.export_chrome_trace(str(path))
    return p


@pytest.mark.parametrize("model", ["Llama", "Qwen3"])
def test_transformers_on_the_cpu(model: str, tmp_path: Path) -> None:
    profiler = recorded(model, tmp_path / "trace.json")
    found = read_profile(tmp_path / "trace.json")
    assert (found.on_gpu, found.kernels, found.devices, found.unusable) == (False, 0, (), 0)
    assert [step.name for step in found.steps] == ["ProfilerStep#1", "ProfilerStep#2", "ProfilerStep#3"]
    assert 0 < found.busy_us <= found.wall_us
    assert sum(step.busy_us for step in found.steps) <= found.busy_us * 1.001
    families = {family.name: family for family in found.families}
    assert {"matmul", "attention", "element-wise", "embedding/gather", "activation"} <= set(families)
    assert sum(family.share for family in found.families) == pytest.approx(1)

    # Own times are those of PyTorch's own table. One thread: together they are what the operators cover.
    own = {event.key: event.self_cpu_time_total for event in profiler.key_averages() if event.key.startswith("aten")}
    assert {row.name: row.total_us for row in found.rows} == pytest.approx(own, rel=0.01, abs=3)
    assert sum(row.total_us for row in found.rows) == pytest.approx(found.busy_us, rel=1e-6)

    # 8 tokens, 2 layers of q, k, v, o, gate, up, down, then the head, 3 times.
    weights = 2 * (64 * (64 + 32 + 32 + 64) + 3 * 64 * 96) + 64 * 128
    products = row_of(found, "aten::mm")
    assert products.calls == 45
    assert products.known in (44, 45)  # once in a hundred runs one product came without its shapes; why is not known
    assert products.flops is not None
    assert products.flops * products.known == pytest.approx(3 * 2 * 8 * weights, rel=0 if products.known == 45 else 0.2)
    assert row_of(found, "aten::linear").known == 0  # it leaves the work to mm


def test_packed_and_plain_say_the_same(tmp_path: Path) -> None:
    recorded("Llama", tmp_path / "trace.json.gz", steps=1)
    packed = tmp_path / "trace.json.gz"
    assert packed.read_bytes()[:2] == b"\x1f\x8b"
    plain = tmp_path / "plain"  # the content decides, not the name
    plain.write_bytes(gzip.decompress(packed.read_bytes()))
    assert read_profile(packed) == read_profile(plain)


# The GPU's traces, by hand


def test_busy_is_the_union_over_streams(explained: Callable[..., Profile]) -> None:
    found = explained(
        [
            host("aten::add", 0, 10),
            kernel("a", 10, 20, stream=7),
            kernel("b", 20, 20, stream=8),  # half of it beside the first
            {**kernel("Memcpy HtoD (Pinned -> Device)", 60, 10), "cat": "gpu_memcpy"},
            host("ProfilerStep#4", 0, 50, "user_annotation"),
            host("cudaStreamSynchronize", 70, 30, "cuda_runtime"),
            kernel("c", 10, 5, device=1),
        ]
    )
    assert (found.wall_us, found.busy_us, found.host_share) == (100, 40, pytest.approx(0.6))
    assert (found.kernels, found.copies, found.operators) == (3, 1, 1)
    first, second = found.devices
    assert (first.name, first.streams, first.kernels, first.busy_us) == ("0", 2, 2, 40)
    assert (first.gaps, first.longest_gap_us) == (3, 30)
    assert (second.name, second.busy_us, second.gaps, second.longest_gap_us) == ("1", 5, 2, 85)
    assert [(step.name, step.duration_us, step.busy_us) for step in found.steps] == [("ProfilerStep#4", 50, 30)]
    assert found.launches.waiting_us == 30
    assert found.verdict.kind == "host"
    assert found.verdict.text.startswith("Host: the GPU was idle for 60% of the wall time, in 3 gaps of up to 30.0 µs.")


def test_a_busy_gpu_is_judged_by_its_walls(explained: Callable[..., Profile]) -> None:
    # A decode product of 4096 x 4096 in bf16: 33.57 MB, 8.39 us at 4 TB/s.
    mm = shaped([[1, 4096], [4096, 4096]])
    found = explained([host("aten::mm", 0, 5, **mm), launch(1, 5), kernel("nvjet_tst", 4, 12, 5)], CARD)
    row = row_of(found, "nvjet_tst")
    moved = 2 * (4096 + 4096**2 + 4096)
    assert (row.family, row.wall, row.operators, row.bytes) == ("matmul", "memory", ("aten::mm",), moved)
    assert row.flops == 2 * 4096**2
    assert row.limit_us == pytest.approx(moved / 4e12 * 1e6)
    assert row.at_limit == pytest.approx(row.limit_us / 12)
    assert row.rate(row.bytes) == pytest.approx(moved / 12e-6)
    assert (found.verdict.kind, found.ceilings) == ("memory", "NVIDIA H200")
    assert "nvjet_tst alone took 100%, at 70% of its memory limit." in found.verdict.text
    assert found.verdict.text.endswith("By wall: memory 100%.")


def test_a_kernel_may_beat_a_limit_of_memory(explained: Callable[..., Profile]) -> None:
    events = [host("aten::mm", 0, 5, **shaped([[1, 4096], [4096, 4096]])), launch(1, 5), kernel("nvjet", 4, 6, 5)]
    found = explained(events, CARD)
    assert row_of(found, "nvjet").at_limit == pytest.approx(1.4, abs=0.01)
    assert "in less time than its memory limit: its data came out of a cache." in found.verdict.text


def test_each_wall(explained: Callable[..., Profile]) -> None:
    square = shaped([[4096, 4096], [4096, 4096]])
    found = explained(
        [
            *(host("aten::mm", 0, 5, **square), launch(1, 1), kernel("gemm_a", 10, 200, 1)),
            *(host("aten::mm", 10, 5, **shaped([[1, 64], [64, 64]])), launch(11, 2), kernel("gemm_b", 210, 20, 2)),
            *(host("aten::add", 20, 5, **shaped([[64], [64]])), launch(21, 3), kernel("elementwise", 230, 2.5, 3)),
            *(host("mine::op", 30, 5, **square), launch(31, 4), kernel("mystery", 240, 100, 4)),
            *(host("aten::mm", 40, 5), launch(41, 5), kernel("gemm_c", 340, 100, 5)),  # without shapes
            kernel("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", 440, 100),
            {**kernel("Memcpy DtoH (Device -> Pageable)", 540, 10), "cat": "gpu_memcpy"},
        ],
        CARD,
    )
    walls = {row.name: row.wall for row in found.rows}
    assert (
        walls.pop("ncclDevKernel_AllReduce_Sum_bf16_RING_LL") == walls.pop("Memcpy DtoH (Device -> Pageable)") == "link"
    )
    assert walls == {
        "gemm_a": "compute",
        "gemm_b": "launch",  # its work takes less than an empty kernel
        "elementwise": "launch",  # shorter than 3 us
        "mystery": "unknown",
        "gemm_c": "unknown",
    }
    first = row_of(found, "gemm_a")
    assert first.limit_us == pytest.approx(2 * 4096**3 / 8e14 * 1e6)
    assert (row_of(found, "gemm_b").limit_us, row_of(found, "gemm_b").at_limit) == (1.0, 0.05)
    assert row_of(found, "mystery").limit_us is None
    assert [row.total_us for row in found.rows] == sorted((row.total_us for row in found.rows), reverse=True)


def test_kernels_shorter_than_their_launches(explained: Callable[..., Profile]) -> None:
    events = [launch(0, 1, dur=6.0), kernel("short", 10, 5, 1), launch(10, 2, dur=6.0), kernel("long", 20, 9, 2)]
    found = explained(events)
    assert {row.name: row.wall for row in found.rows} == {"short": "launch", "long": "unknown"}
    assert (found.launches.calls, found.launches.graphs, found.launches.call_us) == (2, 0, 6.0)


def test_without_ceilings_bytes_and_flops_stay(explained: Callable[..., Profile]) -> None:
    events = [host("aten::mm", 0, 5, **shaped([[2, 8], [8, 4]])), launch(1, 5), kernel("gemm", 4, 12, 5)]
    row = row_of(explained(events), "gemm")
    assert (row.bytes, row.flops, row.limit_us, row.at_limit, row.wall) == (
        2 * (16 + 32 + 8),
        128,
        None,
        None,
        "unknown",
    )


def test_who_launched_a_kernel(explained: Callable[..., Profile]) -> None:
    nested = [
        host("aten::linear", 0, 20, **{"External id": 1}),
        host("aten::mm", 2, 10, **{"External id": 2}),
        host("cuLaunchKernelEx", 3, 5, "cuda_driver", correlation=50),
        host("aten::add", 4, 4, thread=2, **{"External id": 50}),
    ]
    by_time = kernel("by time", 30, 10, 50)
    by_time["args"]["External id"] = 50  # some versions write the correlation there: not the operator with that id
    by_id = kernel("by id", 40, 10, 99)
    by_id["args"]["External id"] = 1
    graph = [launch(14, 60, "cudaGraphLaunch"), kernel("of a graph", 50, 10, 60)]
    bare = [launch(25, 70), kernel("outside", 60, 10, 70), kernel("alone", 70, 10, 80)]
    found = explained([*nested, by_time, by_id, *graph, *bare])
    assert {row.name: row.operators for row in found.rows} == {
        "by time": ("aten::mm",),
        "by id": ("aten::linear",),
        "of a graph": (),
        "outside": (),
        "alone": (),
    }
    assert (found.launches.calls, found.launches.graphs) == (3, 1)


def test_the_longest_kernel_stands_for_an_operator(explained: Callable[..., Profile]) -> None:
    """A split product writes partial sums that another kernel adds up: the work must not count twice."""
    mm = host("aten::mm", 0, 20, **shaped([[1, 4096], [4096, 4096]]))
    found = explained(
        [mm, launch(1, 1), launch(5, 2), kernel("nvjet_splitK", 10, 30, 1), kernel("splitKreduce_kernel", 40, 5, 2)],
        CARD,
    )
    assert row_of(found, "nvjet_splitK").known == 1
    assert (row_of(found, "splitKreduce_kernel").known, row_of(found, "splitKreduce_kernel").wall) == (0, "unknown")


def test_copies_within_the_card_have_a_limit(explained: Callable[..., Profile]) -> None:
    copy = {**kernel("Memcpy DtoD (Device -> Device)", 0, 100), "cat": "gpu_memcpy"}
    copy["args"]["bytes"] = 10**8
    row = row_of(explained([copy], CARD), "Memcpy DtoD (Device -> Device)")
    assert (row.wall, row.bytes, row.limit_us) == ("memory", 2e8, pytest.approx(50))


def test_ceilings_of_any_kind() -> None:
    class Ours:
        name, flops, node_us = "card", {"bf16": 1.0}, 0.5

        def read_rate(self, size: float) -> float:
            return 1e12 if size > 1e9 else 1e11

    assert Peaks.of(Ours()) == Peaks(1e12, {"bf16": 1.0}, 0.5, 0.0, "card")
    plain = SimpleNamespace(read_rate=2e12, flops={"bfloat16": 1e15})
    assert Peaks.of(plain) == Peaks(2e12, {"bfloat16": 1e15})
    assert Peaks.of(plain).times(Work(2e6, 1e9, "bf16")) == pytest.approx((1.0, 1.0))  # type: ignore[union-attr]
    assert Peaks.of(None) is None
    assert Peaks(1e12, {}).times(Work(1e6, 1e9, "fp8")) == (1.0, 0.0)


def test_own_times_of_cpu_operators(explained: Callable[..., Profile]) -> None:
    found = explained(
        [
            host("aten::matmul", 0, 100, **shaped([[8, 8], [8, 8]], "float")),
            host("aten::mm", 10, 80, **shaped([[8, 8], [8, 8]], "float")),
            host("aten::empty", 20, 2),
            host("aten::silu", 50, 100, thread=2, **shaped([[1000]], "float")),
            host("forward", 0, 200, "user_annotation"),
            host("module.py(1): forward", 0, 5000, "python_function"),
        ]
    )
    assert {row.name: row.total_us for row in found.rows} == {
        "aten::mm": 78,
        "aten::matmul": 20,
        "aten::empty": 2,
        "aten::silu": 100,
    }
    assert (found.wall_us, found.busy_us, found.host_share) == (200, 150, 0.25)
    assert {row.name: (row.known, row.wall) for row in found.rows}["aten::empty"] == (0, "dispatch")
    assert (row_of(found, "aten::mm").flops, row_of(found, "aten::silu").bytes) == (1024, 8000)
    assert found.verdict.text.startswith("No GPU: activation took 50%")


# Bytes and FLOPs


@pytest.mark.parametrize(
    ("operator", "dims", "kind", "expected"),
    [
        ("aten::mm", [[2, 3], [3, 5]], BF16, Work(2 * (6 + 15 + 10), 60, "bf16")),
        ("aten::addmm", [[5], [2, 3], [3, 5]], "float", Work(4 * (5 + 6 + 15 + 10), 60, "fp32")),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], "c10::Half", Work(2 * 7 * (6 + 15 + 10), 420, "fp16")),
        ("aten::linear", [[4, 2, 3], [5, 3], [5]], BF16, Work(2 * (24 + 15 + 5 + 40), 240, "bf16")),
        ("rooflight::linear", [[2, 3], [5, 3]], BF16, Work(2 * (6 + 15 + 10), 60, "bf16")),
        ("aten::matmul", [[7, 2, 3], [7, 3, 5]], BF16, Work(2 * 7 * 31, 420, "bf16")),
        ("aten::mv", [[2, 3], [3]], BF16, Work(2 * (6 + 3 + 2), 12, "bf16")),
        ("aten::_scaled_mm", [[2, 16], [16, 8]], "c10::Float8_e4m3fn", Work(32 + 128 + 2 * 16, 512, "fp8")),
        ("aten::mm", [[2, 3], [4, 5]], BF16, None),
        ("aten::convolution", [[1, 2, 3], [3, 2, 1]], BF16, None),
        # Prefill may be causal: half the products. Decode has all. Packed sequences do not say.
        ("aten::_flash_attention_forward", [[1, 6, 2, 4]] * 3, BF16, Work(2 * 4 * 48, 4 * 48 * 6 / 2, "bf16")),
        (
            "aten::scaled_dot_product_attention",
            [[1, 4, 1, 8], [1, 2, 9, 8], [1, 2, 9, 8]],
            BF16,
            Work(2 * (32 + 144 + 144 + 32), 4 * 32 * 9, "bf16"),
        ),
        ("aten::_flash_attention_forward", [[6, 2, 4]] * 3, BF16, Work(2 * 4 * 48, 0, "bf16")),
        ("vllm::unified_attention", [[6, 2, 4]] * 3, BF16, None),  # its cache is not in the shapes
        ("aten::add", [[4, 8], [8]], BF16, Work(2 * (32 + 8 + 32), 0, "bf16")),
        ("aten::add_", [[4, 8], [8]], BF16, Work(2 * (32 + 8 + 32), 0, "bf16")),
        ("aten::copy_", [[32], [32]], BF16, Work(2 * 64, 0, "bf16")),
        ("aten::sum", [[4, 8]], "float", Work(128, 0, "fp32")),
        ("_C::rms_norm", [[4, 8], [4, 8], [8]], BF16, Work(2 * 72, 0, "bf16")),  # the result is an argument
        ("_C::rotary_embedding", [[4], [4, 8], [4096, 8]], BF16, None),  # a table of which little is read
        ("aten::cat", [[[4, 8], [4, 8]], []], "TensorList", None),
        ("aten::relu", [[0, 8]], BF16, Work(0, 0, "bf16")),
        ("aten::relu", [[-1, 8]], BF16, None),
        ("aten::relu", [[2**60, 2**60]], BF16, None),
        ("aten::relu", "nonsense", BF16, None),
    ],
)
def test_work(operator: str, dims: Any, kind: str, expected: Work | None) -> None:
    assert work_of(operator, Inputs(dims, [kind] * len(dims), None)) == expected


def test_work_of_embeddings_and_expanded_tensors() -> None:
    assert work_of("aten::embedding", Inputs([[1000, 8], [3]], ["float", "long int"], None)) == Work(
        24 + 2 * 96, 0, "fp32"
    )
    assert work_of("rooflight::embedding", Inputs([[3], [1000, 8]], ["int", BF16], None)) == Work(
        12 + 2 * 48, 0, "bf16"
    )
    assert work_of("aten::sum", Inputs([[100, 8]], ["float"], [[0, 1]])) == Work(32, 0, "fp32")


# Files that are no traces


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is empty"),
        (b" \n\t ", "is empty"),
        (gzip.compress(b"", mtime=0), "is empty"),
        (b"hello", "is not JSON: it begins with 'h'"),
        (bytes(range(256)) * 50, "is not JSON"),
        (b'{"traceEvents": [{"ph": "X"} {"ph": "X"}]}', "is not JSON: ] expected, '{' found"),
        (b'{"traceEvents": [{"ph": X}' + b" " * 50, "is not JSON: Expecting value"),
        (b'{"traceEvents" []}', "is not JSON: : expected"),
        (b'{"traceEvents": []} trailing', "something stands behind its end"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "too deeply nested"),
        (b'{"a": ' + b"1" * 5000 + b"}", "is not JSON"),
        (b'{"a": 1, "b": [1, 2]}', "has no traceEvents"),
        (b"{}", "has no traceEvents"),
        (b'{"traceEvents": {"a": 1}}', "traceEvents must be a list"),
        (b'{"traceEvents": []}', "no operators or kernels with durations"),
        (b"[1, 2, null]", "no operators or kernels with durations (3 without usable times)"),
        (b'{"traceEvents": [{"ph": "i", "cat": "cpu_op", "name": "x", "ts": 1}]}', "no operators or kernels"),
        (b'{"traceEvents": [{"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1}]}', "(1 without usable times)"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": NaN}]}', "(1 without usable times)"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": -4}]}', "(1 without usable times)"),
        (b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": "now", "dur": true}]}', "(1 without usable times)"),
        (
            b'{"traceEvents": [{"ph": "X", "cat": "kernel", "ts": 1, "dur": 1' + b"0" * 400 + b"}]}",
            "without usable times",
        ),
    ],
)
def test_bad_files(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_bytes(content)
    with pytest.raises(ValueError) as caught:
        read_profile(path)
    message = str(caught.value)
    assert message.startswith(f"{path} ")
    assert says in message
    assert "\n" not in message


def good() -> bytes:
    return json.dumps({"traceEvents": [host('aten::"mm"\n\\é', 0.25, 1e1), kernel("k", 1, 2)], "last": [1]}).encode()


@pytest.mark.parametrize("packed", [False, True])
def test_a_file_that_is_cut_anywhere(packed: bool, tmp_path: Path) -> None:
    data = gzip.compress(good(), mtime=0) if packed else good()
    path = tmp_path / "cut.json"
    for length in range(1, len(data)):
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"is cut|is not JSON|is damaged|is empty") as caught:
            read_profile(path)
        assert "is cut" in str(caught.value) or length < 3 or packed


def test_a_damaged_gzip_file(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(good() * 1, mtime=0))
    path = tmp_path / "bad.json.gz"
    for place in (len(data) - 6, len(data) // 2):  # the check sum; the content
        broken = bytearray(data)
        broken[place] ^= 0xFF
        path.write_bytes(broken)
        with pytest.raises(ValueError, match=r"bad\.json\.gz is (a damaged gzip file|not JSON|cut)"):
            read_profile(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_profile(tmp_path / "missing.json")
    with pytest.raises(IsADirectoryError):
        read_profile(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe is no regular file"):
        read_profile(tmp_path / "pipe")


def test_one_endless_value_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "LONGEST", 1000)
    monkeypatch.setattr(stream_module, "CHUNK", 100)
    path = tmp_path / "long.json"
    path.write_text('{"traceEvents": ["' + "x" * 5000 + '"]}')
    with pytest.raises(ValueError, match="one value has more than 1,000 characters"):
        read_profile(path)


def test_odd_events_do_no_harm(explained: Callable[..., Profile]) -> None:
    odd = [
        {"ph": "X", "cat": ["cpu_op"], "name": 3, "ts": 0, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": None, "ts": 0, "dur": 1, "args": "none", "pid": [1], "tid": {}},
        {**host("aten::mm", 5, 1), "args": {"Input Dims": {"a": 1}, "External id": 2**70, "correlation": "x"}},
        {**kernel("\ud800 lone", 0, 0), "cat": "Kernel"},  # as PyTorch before 1.12 called it
        [],
    ]
    found = explained(odd)
    assert (found.kernels, found.operators, found.unusable) == (1, 2, 1)


# Reading in pieces


@given(
    st.lists(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
            lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(max_size=4), values, max_size=3),
            max_leaves=8,
        ),
        max_size=6,
    ),
    st.integers(1, 40),
    st.sampled_from([None, 1]),
    st.booleans(),
)
def test_pieces_of_any_size_give_what_json_gives(
    tmp_path_factory: pytest.TempPathFactory, values: list[Any], chunk: int, indent: int | None, ascii_only: bool
) -> None:
    path = tmp_path_factory.getbasetemp() / "pieces.json"
    data = {"before": values, "traceEvents": values, "after": 1.5}
    path.write_text(json.dumps(data, indent=indent, ensure_ascii=ascii_only), encoding="utf-8", errors="replace")
    seen: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream_module, "CHUNK", chunk)
        read = list(stream_events(path, None, seen.__setitem__))
    whole = json.loads(path.read_text(encoding="utf-8"))
    assert read == whole.pop("traceEvents")
    assert seen == whole


@pytest.mark.parametrize("packed", [False, True])
def test_a_large_file_takes_little_memory(packed: bool, tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    events = [host("aten::mm", 3.0 * i, 2.0, thread=i % 4, **shaped([[1, 64], [64, 64]])) for i in range(1000)]
    piece = ",\n".join(json.dumps({**event, "pad": "x" * 800}) for event in events).encode()
    with gzip.open(path, "wb", compresslevel=1) if packed else path.open("wb") as file:
        file.write(b'{"deviceProperties": [{"name": "NVIDIA H200"}], "traceEvents": [\n')
        file.write(b",\n".join([piece] * 28))
        file.write(b"]}")
    shown: list[tuple[int, int]] = []
    tracemalloc.start()
    read = read_events(path, lambda done, size: shown.append((done, size)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert packed or path.stat().st_size > 28e6
    assert (len(read), read.gpus, len(read.names), len(read.shapes)) == (28_000, ["NVIDIA H200"], 1, 1)
    assert peak < 12e6  # two chunks of text, and some sixty bytes an event
    assert shown == sorted(shown)
    assert {size for _, size in shown} == {path.stat().st_size}
    assert shown[-1][0] == path.stat().st_size
    assert len(shown) > 10


# Intervals

SPANS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=12)


@given(SPANS, st.integers(0, 45), st.integers(0, 45))
def test_a_union_covers_what_any_interval_covers(spans: list[tuple[int, int]], low: int, high: int) -> None:
    union = Union(sorted((float(start), float(start + length)) for start, length in spans))
    covered = {tick for start, length in spans for tick in range(start, start + length)}
    assert union.length == len(covered)
    assert union.between(low, high) == len([tick for tick in covered if low <= tick < high])
    assert sum(union.gaps(0, 50)) == 50 - len(covered)
    assert all(gap > 0 for gap in union.gaps(0, 50))


def owned(spans: list[tuple[float, float]]) -> tuple[list[float], list[int]]:
    starts, durations = array("d", [start for start, _ in spans]), array("d", [length for _, length in spans])
    own, parents = array("d", [0.0] * len(spans)), array("q", [-1] * len(spans))
    own_times(starts, durations, in_order(starts, durations, range(len(spans))), own, parents)
    return list(own), list(parents)


@given(SPANS)
def test_own_times_share_out_what_is_covered(spans: list[tuple[int, int]]) -> None:
    """Nested neatly or not, each instant belongs to one event."""
    own, _ = owned([(float(start), float(length)) for start, length in spans])
    union = Union(sorted((float(start), float(start + length)) for start, length in spans))
    assert sum(own) == union.length
    assert all(0 <= time <= length for time, (_, length) in zip(own, spans, strict=True))


@st.composite
def trees(draw: st.DrawFn, start: int = 0, length: int = 64) -> list[tuple[int, int, int]]:
    """Neatly nested (start, duration, place of the parent), parents first."""
    found = [(start, length, -1)]
    if length >= 4:
        at = start
        for _ in range(draw(st.integers(0, 3))):
            at += draw(st.integers(0, length // 4))
            size = draw(st.integers(1, length // 2))
            if at + size > start + length:
                break
            offset = len(found)
            for child_start, child_length, parent in draw(trees(at, size)):
                found.append((child_start, child_length, parent + offset if parent >= 0 else 0))
            at += size
    return found


@given(trees())
def test_own_time_is_the_duration_without_the_children(tree: list[tuple[int, int, int]]) -> None:
    own, parents = owned([(float(start), float(length)) for start, length, _ in tree])
    for place, (_, length, parent) in enumerate(tree):
        children = sum(size for _, size, above in tree if above == place)
        assert own[place] == length - children
        assert parents[place] == parent


def test_kinds_and_columns(tmp_path: Path) -> None:
    path = save(tmp_path / "t.json", [host("aten::mm", 1.5, 2), launch(2, 9), kernel("k", 3, 4, 9, stream=20)])
    events = read_events(path)
    assert [Kind(kind) for kind in events.kind] == [Kind.OPERATOR, Kind.RUNTIME, Kind.KERNEL]
    assert list(events.correlation) == [-1, 9, 9]
    assert events.lanes[events.lane[2]] == ("0", "20")
    assert (events.end(0), events.name_of(2)) == (3.5, "k")
    assert analyse(events).wall_us == 5.5
