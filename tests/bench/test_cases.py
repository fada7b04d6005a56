"""Throughput by cases: what a case is, its limit, turns of made-up engines, and one real run on a tiny model."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from rooflight.bench import cases, results
from rooflight.bench.cases import GPU_CASES, Case, CaseReport, CaseSetup, limit_seconds, run
from rooflight.bench.measurement import Room
from rooflight.bench.roof import Roof, cpu_roof, prompt_flops
from rooflight.limits.card import Bandwidth
from rooflight.models.load import load_config
from tests.bench.fake_engines import TOKEN, FakeEngines

FLAT = Roof("a test", (Bandwidth(1, 4e12),), {"bf16": 8e14})


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "missing", lambda peer, device: None)
    monkeypatch.setattr(cases, "environment_of", lambda device, threads: {"device": "NVIDIA Test 1"})
    monkeypatch.setattr(cases, "roof_of", lambda device, threads: FLAT)


def measured(start: FakeEngines, **changes: Any) -> CaseReport:
    given = {"cases": (Case(2, 8, 4), Case(3, 16, 4)), "peers": ("vllm",), "rounds": 2}
    return run(CaseSetup("random:qwen3-0.6b", **given | changes), start=start)  # type: ignore[arg-type]


def test_cases_by_their_text() -> None:
    assert [Case.parse(text) for text in ("8:128:128", "64:128:128", "256:512:128", "1024:128:128")] == [*GPU_CASES]
    assert Case.parse("3:1:2").text == "3:1:2"


@pytest.mark.parametrize(
    "text", ["", "8", "8:128", "8:128:", "8:128:128:1", "0:8:8", "8:0:8", "8:8:1", "-1:8:8", "8x8x8"]
)
def test_what_is_no_case_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=f"^case must be N:IN:OUT such as 8:128:128, OUT 2 or more, was '{text}'$"):
        Case.parse(text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "fp9"}, "dtype must be one of fp32, bf16, fp16, was 'fp9'"),
        ({"rounds": 0}, "rounds must be 1 or more, was 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1 or more, was 0"),
        ({"num_pages": 0}, "num_pages must be 1 or more, was 0"),
        ({"cases": ()}, "case must be given at least once"),
        ({"peers": ("transformers",)}, "peer must be one of vllm, each once, was transformers"),
        ({"peers": ("vllm", "vllm")}, "peer must be one of vllm, each once, was vllm, vllm"),
    ],
)
def test_setup_refuses_what_it_cannot_measure(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        CaseSetup(None, **arguments)


def test_the_limit_by_hand() -> None:
    """Three prompts of 10 tokens, then two steps at a mean context of 11.5."""
    config, case = load_config("random:qwen3-0.6b"), Case(3, 10, 3)
    step = (config.weight_bytes_per_token() + 3 * 11.5 * config.kv_bytes_per_token()) / 4e12
    prompts = 3 * prompt_flops(config, 10) / 8e14
    assert limit_seconds(config, "bf16", case, FLAT) == pytest.approx(prompts + 2 * step)
    assert limit_seconds(config, "bf16", case, cpu_roof(1e10)) == 2 * config.weight_bytes_per_token() / 1e10


def test_the_limit_of_a_large_case_is_where_arithmetic_puts_it() -> None:
    """256 x (512, 128) on the H200: 60,000 tokens/s without the prompts, a weights-and-KV floor found elsewhere."""
    config, case = load_config("random:qwen3-0.6b"), Case(256, 512, 128)
    seconds = limit_seconds(config, "bf16", case, Roof("", (Bandwidth(1, 4.44e12),)))
    assert 256 * 128 / seconds == pytest.approx(62_000, rel=0.05)


@pytest.mark.usefixtures("a_gpu")
def test_engines_take_turns_with_room_for_the_largest_case() -> None:
    start = FakeEngines()
    report = measured(start)
    room = Room(max_model_len=20, num_pages=9, max_num_seqs=3, max_num_batched_tokens=3 * 16)
    assert [(who, given) for who, *_, given in start.started] == [("rooflight", room), ("vllm", room)]
    order = ["vllm", "rooflight", "rooflight", "vllm", "vllm", "rooflight"]
    assert start.log == [(who, "serve", tokens) for tokens in (16, 48) for who in order]
    assert report.engines["rooflight bf16"] == {
        "version": "9.9", "max_model_len": 20, "num_pages": 9, "page_size": 16
    }  # fmt: skip
    given = measured(start, max_num_seqs=2, max_num_batched_tokens=64, num_pages=5).setup.room
    assert given == Room(20, 5, 2, 64)


def test_a_step_holds_the_prompts_of_the_largest_case_up_to_a_limit() -> None:
    def step(*given: Case, **options: Any) -> int | None:
        return CaseSetup("random:tiny", given, **options).room.max_num_batched_tokens

    assert step(Case(3, 16, 4), Case(2, 30, 4)) == 60
    assert step(Case(1024, 512, 128)) == cases.GPU_STEP
    assert step(Case(1024, 512, 128), max_num_batched_tokens=77) == 77
    assert step(Case(3, 16, 4), device="cpu") is None


@pytest.mark.usefixtures("a_gpu")
def test_rates_limits_and_ratios() -> None:
    report = measured(FakeEngines(speed={"vllm": 1.5}))
    ours, vllm = report.rows[2:]
    assert (ours.engine, ours.requests, ours.prompt_tokens, ours.max_tokens) == ("rooflight", 3, 16, 4)
    assert ours.tokens_per_s.high == pytest.approx(12 / ours.wall_s.low)
    assert ours.wall_s.low == pytest.approx(4 * TOKEN, rel=0.03)
    limit = 12 / limit_seconds(load_config("random:qwen3-0.6b"), "bf16", Case(3, 16, 4), FLAT)
    assert ours.limit_tokens_per_s == vllm.limit_tokens_per_s == pytest.approx(limit)
    assert ours.of_limit == pytest.approx(ours.tokens_per_s.median / limit)
    assert ours.ratio is None
    assert vllm.ratio == ours.tokens_per_s.median / vllm.tokens_per_s.median == pytest.approx(1.5, rel=0.03)
    assert (report.flops, report.read_bandwidth, report.origin) == (8e14, 4e12, "a test")


@pytest.mark.usefixtures("a_gpu")
def test_a_peer_that_dies_is_named_and_left_out() -> None:
    report = measured(FakeEngines(dies={"vllm": 4}))
    assert [(row.engine, row.requests) for row in report.rows] == [("rooflight", 2), ("vllm", 2), ("rooflight", 3)]
    assert report.absent == {"vllm bf16": "vllm ended with code -9: out of memory"}


def test_progress_counts_the_rounds(a_gpu: None) -> None:
    seen: list[tuple[int, int]] = []
    setup = CaseSetup("random:qwen3-0.6b", cases=(Case(2, 8, 4), Case(3, 16, 4)), rounds=2)
    run(setup, lambda what, done, of: seen.append((done, of)), FakeEngines())
    assert seen == [(done, 6) for done in (0, 0, 1, 2, 3, 4, 5, 6)]


def test_a_run_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "roof_of", lambda device, threads: cpu_roof(20e9))
    setup = CaseSetup("random:tiny", (Case(5, 7, 3),), ("vllm",), "fp32", rounds=3, device="cpu")
    report = run(setup)
    (row,) = report.rows
    assert (row.engine, row.requests) == ("rooflight", 5)
    assert report.absent["vllm"] in ("not installed", "runs on a GPU only")
    assert row.tokens_per_s.median == pytest.approx(15 / row.wall_s.median)
    assert 0 < row.of_limit < 1
    assert report.flops is None
    facts = report.engines["rooflight fp32"]
    assert (facts["max_model_len"], facts["num_pages"], facts["max_num_seqs"]) == (10, 10, 5)
    as_json, as_csv = results.write(tmp_path, "throughput", report.as_data())
    data = json.loads(as_json.read_text())
    assert data["setup"]["cases"] == [{"requests": 5, "prompt_tokens": 7, "max_tokens": 3}]
    assert (data["environment"]["device"], data["flops"]) == ("cpu", None)
    with as_csv.open() as file:
        (line,) = csv.DictReader(file)
    assert float(line["tokens_per_s.median"]) == row.tokens_per_s.median
