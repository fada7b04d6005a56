"""GPU-busy time: the union of what a trace says a GPU did, and the decode part as a difference of two requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import busy as module
from rooflight.bench import worker
from rooflight.bench.busy import busy_seconds, measure_busy
from rooflight.bench.measurement import Busy


def event(category: str, start: float, duration: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "name": "k", "ts": start, "dur": duration, "pid": 0, "tid": 7}


def write(path: Path, *events: dict[str, Any]) -> Path:
    path.write_text(json.dumps({"traceEvents": list(events)}))
    return path


def test_what_overlaps_counts_once_and_host_time_not_at_all(tmp_path: Path) -> None:
    trace = write(
        tmp_path / "trace.json",
        event("kernel", 100, 10),
        event("gpu_memcpy", 95, 10),  # before and into the kernel; not sorted
        event("kernel", 102, 3),
        event("gpu_memset", 200, 5),
        event("cuda_runtime", 0, 1000),
        event("cpu_op", 0, 1000),
        event("gpu_user_annotation", 0, 1000),
    )
    assert busy_seconds(trace) == pytest.approx(20e-6)


@pytest.mark.parametrize("events", [[], [event("cpu_op", 0, 5)]])
def test_a_trace_without_gpu_work_is_refused(events: list[dict[str, Any]], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the profiler saw no work of a GPU in the engine's process$"):
        busy_seconds(write(tmp_path / "trace.json", *events))


def test_decoding_is_what_more_tokens_add(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[int] = []

    def seconds(work: Any) -> float:
        work()
        return 0.5 + 0.25 * (ran[-1] - 1)

    monkeypatch.setattr(module, "_busy_seconds", seconds)
    assert measure_busy(ran.append, tokens=4) == Busy(0.5, 0.25)
    assert ran == [1, 5, 1, 5]  # not profiled first: what is loaded once is no part of a request


class Engine:
    def complete(self, prompt: list[int], max_tokens: int) -> None:
        self.last = (prompt, max_tokens)

    def run(self, prompt: list[int], max_tokens: int) -> None:
        pytest.fail("a timed run may be more than one request")


def test_a_worker_answers_with_the_times_or_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = Engine()
    monkeypatch.setattr(module, "_busy_seconds", lambda work: work() or 0.5)
    answer = worker.reply(engine, {"do": "busy", "prompt": [1, 2], "tokens": 16}, "cuda")
    assert answer == {"first_token": 0.5, "per_token": 0.0}
    assert engine.last == ([1, 2], 17)

    def fails(work: Any) -> float:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED\nsecond line")

    monkeypatch.setattr(module, "_busy_seconds", fails)
    assert worker.reply(engine, {"do": "busy", "prompt": [1], "tokens": 4}, "cuda") == {
        "absent": "CUPTI_ERROR_NOT_INITIALIZED"
    }
    assert worker.reply(engine, {"do": "busy", "prompt": [1], "tokens": 4}, "cpu") == {
        "absent": "there is no GPU in this run"
    }


@pytest.mark.gpu
def test_a_product_is_as_long_as_its_events() -> None:
    matrix = torch.randn(4096, 4096, device="cuda", dtype=torch.float16)

    def run(tokens: int) -> None:
        for _ in range(tokens):
            matrix @ matrix

    found = measure_busy(run, tokens=20)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run(20)
    end.record()
    end.synchronize()
    assert found.per_token == pytest.approx(start.elapsed_time(end) / 20 * 1e-3, rel=0.2)
