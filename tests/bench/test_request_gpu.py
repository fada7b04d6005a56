"""`bench request` as on a GPU, with made-up engines: turns, limits, GPU-busy times, and peers that fail."""

from __future__ import annotations

from typing import Any

import pytest

from rooflight.bench import request
from rooflight.bench.measurement import Room
from rooflight.bench.request import RequestReport, RequestSetup, run
from rooflight.bench.roof import Roof
from rooflight.limits.card import Bandwidth
from rooflight.models.load import load_config
from tests.bench.fake_engines import FIRST, TOKEN, FakeEngines

PEERS = ("transformers", "vllm")


@pytest.fixture(autouse=True)
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "missing", lambda peer, device: None)
    monkeypatch.setattr(request, "environment_of", lambda device, threads: {"device": "NVIDIA Test 1"})
    monkeypatch.setattr(request, "roof_of", lambda device, threads: Roof("a test", (Bandwidth(1, 4e12),)))


def measured(start: FakeEngines, **changes: Any) -> RequestReport:
    given = {"prompts": (32, 1024), "max_tokens": 9, "rounds": 2, "dtypes": ("bf16",), "peers": PEERS}
    return run(RequestSetup("random:qwen3-0.6b", device="cuda", **given | changes), start=start)  # type: ignore[arg-type]


def test_engines_take_turns_and_are_profiled_after_all_rounds() -> None:
    start = FakeEngines()
    measured(start)
    there, back = ["rooflight", *PEERS], [*PEERS[::-1], "rooflight"]
    timed = [(who, tokens) for who, what, tokens in start.log if what == "run"]
    assert timed == [(who, tokens) for tokens in (32, 1024) for who in (*back, *there, *back)]
    assert [what for _, what, _ in start.log] == ["run"] * 18 + ["busy"] * 6
    assert start.log[18:] == [(who, "busy", tokens) for tokens in (32, 1024) for who in there]
    assert start.open == []


def test_the_context_is_the_longest_request() -> None:
    start = FakeEngines()
    report = measured(start, max_num_batched_tokens=77)
    room = Room(max_model_len=1033, max_num_batched_tokens=77)
    model = "random:qwen3-0.6b"
    assert start.started == [(who, model, "bf16", "cuda", 1, room) for who in ("rooflight", *PEERS)]
    assert report.engines["vllm bf16"]["max_model_len"] == 1033


def test_limit_rates_and_ratios() -> None:
    report = measured(FakeEngines(speed={"vllm": 2.0}))
    config = load_config("random:qwen3-0.6b")
    ours, _, vllm = report.rows[3:]
    moved = config.weight_bytes_per_token() + (1024 + 9 / 2) * config.kv_bytes_per_token()
    assert ours.limit_ms == vllm.limit_ms == pytest.approx(moved / 4e12 * 1e3)
    assert (ours.engine, vllm.engine, vllm.version, vllm.prompt_tokens) == ("rooflight", "vllm", "9.9", 1024)
    assert ours.first_token_ms.low == pytest.approx(FIRST * 1e3, rel=0.03)
    assert ours.per_token_ms.low >= TOKEN * 1e3 * 0.999
    total = ours.first_token_ms.median + 8 * ours.per_token_ms.median
    assert ours.request_tokens_per_s.median == pytest.approx(9e3 / total, rel=1e-3)
    assert ours.decode_tokens_per_s.median == pytest.approx(1e3 / ours.per_token_ms.median, rel=1e-3)
    assert (vllm.first_token_ratio, vllm.per_token_ratio, vllm.request_ratio) == pytest.approx((2, 2, 2), rel=0.02)
    assert vllm.same_tokens is None  # every engine has random weights of its own


def test_gpu_busy_times_or_why_there_are_none() -> None:
    rows = measured(FakeEngines(unprofiled={"vllm": "the profiler saw no work"})).rows
    ours, vllm = rows[0], rows[2]
    assert (ours.busy_first_token_ms, ours.busy_per_token_ms, ours.busy_absent) == (5.0, 0.5, None)
    assert (vllm.busy_first_token_ms, vllm.busy_per_token_ms) == (None, None)
    assert vllm.busy_absent == "the profiler saw no work"


def test_few_tokens_are_profiled_and_no_more_than_were_asked_for() -> None:
    for max_tokens, profiled in ((128, 16), (9, 8)):
        start = FakeEngines()
        measured(start, max_tokens=max_tokens)
        assert set(start.profiled) == {profiled}


def test_a_peer_that_cannot_be_loaded_is_named_and_left_out() -> None:
    report = measured(FakeEngines(unloadable={"vllm": "no memory"}), dtypes=("bf16", "fp16"))
    assert report.absent == {
        "vllm bf16": "vllm could not load the model: no memory",
        "vllm fp16": "vllm could not load the model: no memory",
    }
    assert [row.engine for row in report.rows] == ["rooflight", "transformers"] * 4


@pytest.mark.parametrize(("dies", "rows"), [(1, 0), (4, 1), (6, 2), (7, 2)])
def test_a_peer_that_dies_keeps_the_rows_that_it_has(dies: int, rows: int) -> None:
    """With two prompts, a warm-up and two rounds of each: within the first, within the second, while it is profiled."""
    start = FakeEngines(dies={"vllm": dies})
    report = measured(start)
    assert report.absent == {"vllm bf16": "vllm ended with code -9: out of memory"}
    found = [row for row in report.rows if row.engine == "vllm"]
    assert len(found) == rows
    if rows == 2:
        assert found[1].busy_absent == "the engine ended before it was profiled"
    assert len([row for row in report.rows if row.engine == "rooflight"]) == 2
    assert start.open == []


def test_ours_must_run() -> None:
    for start in (FakeEngines(unloadable={"rooflight": "no"}), FakeEngines(dies={"rooflight": 2})):
        with pytest.raises(ChildProcessError, match=r"^rooflight "):
            measured(start)
        assert start.open == []


def test_the_context_of_the_model_is_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request, "roof_of", lambda device, threads: pytest.fail("measured"))
    with pytest.raises(ValueError, match="must fit the context of 40960 tokens, were 40952 and 9"):
        measured(FakeEngines(), prompts=(40_952,))
