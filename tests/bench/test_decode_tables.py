"""The tables of docs/decode.md, rendered from results of made-up engines."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from rooflight.bench import cases, request, results
from rooflight.bench.cases import Case, CaseSetup
from rooflight.bench.request import RequestSetup
from rooflight.bench.roof import Roof
from rooflight.limits.card import Bandwidth
from tests.bench.fake_engines import FakeEngines

SCRIPTS = Path(__file__).parents[2] / "scripts"
ENVIRONMENT = {
    "device": "NVIDIA Test 1", "driver": "580.1", "cpu": "A CPU", "threads": 3, "torch": "2.99", "triton": "3.9",
    "commit": "abc", "date": "2026-12-01",
}  # fmt: skip


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("decode_tables")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    for run in (request, cases):
        monkeypatch.setattr(run, "missing", lambda peer, device: "not installed" if peer == "transformers" else None)
        monkeypatch.setattr(run, "environment_of", lambda device, threads: ENVIRONMENT)
        monkeypatch.setattr(run, "roof_of", lambda device, threads: ROOF)
    return module


ROOF = Roof("a test's", (Bandwidth(1, 4e12),), {"bf16": 8e14})
MODEL = "random:qwen3-0.6b"


def test_without_results_there_is_no_table(tables: Any) -> None:
    assert tables.TABLES.keys() == {"decode-requests", "decode-throughput", "decode-walls"}
    assert [table() for table in tables.TABLES.values()] == ["", "", ""]


def test_requests(tables: Any, tmp_path: Path) -> None:
    start: Any = FakeEngines(speed={"vllm": 2.0}, unprofiled={"vllm": "nothing seen"})
    peers = ("transformers", "vllm")
    setup = RequestSetup(MODEL, peers, ("bf16", "fp16"), (32, 1024), 128, rounds=1, device="cuda")
    report = request.run(setup, start=start)
    results.write(tmp_path, "request", report.as_data())
    text = tables.request_tables()
    lines = text.splitlines()
    assert lines[0] == "**bf16, 128 tokens out**"
    assert lines[2].startswith("| prompt | engine | first token ms | GPU busy | per token ms | GPU busy | limit ms |")
    ours, peer = report.rows[2:4]
    first, token = ours.first_token_ms.median, ours.per_token_ms.median
    assert lines[6] == (
        f"| 1,024 | rooflight | {first:.1f} | 5.0 | {token:.3f} | 0.500 "
        f"| {ours.limit_ms:.3f} | {ours.of_limit:.0%} | {ours.request_tokens_per_s.median:,.0f} "
        f"| {ours.decode_tokens_per_s.median:,.0f} |  |"
    )
    assert lines[7].split(" | ")[3:6:2] == ["–", "–"]
    assert lines[7].endswith(f"| {peer.first_token_ratio:.2f} / {peer.per_token_ratio:.2f} |")
    assert "**fp16, 128 tokens out**" in lines
    assert "NVIDIA Test 1, driver 580.1; host A CPU, 3 threads" in text
    assert "commit abc, 2026-12-01. Ceilings: a test's." in text
    assert "- rooflight 9.9, bf16, context 1,152, of 16 tokens" in lines
    assert "- transformers: not installed" in lines


def test_walls_by_hand(tables: Any, tmp_path: Path) -> None:
    """1,192,099,840 bytes of weights and 114,688 for a token of the context at 4 TB/s; the head is 311,164,928."""
    start: Any = FakeEngines(speed={"vllm": 2.0})
    setup = RequestSetup(MODEL, ("vllm",), ("bf16", "fp16"), (32, 1024), 128, rounds=1, device="cuda")
    report = request.run(setup, start=start)
    results.write(tmp_path, "request", report.as_data())
    lines = tables.wall_table().splitlines()
    rows = [line for line in lines if line.startswith("| 1,024 ")]
    token = report.rows[2].per_token_ms.median
    keys = (1024 + 64.5) * 114_688 / 4e12 * 1e3
    assert len(rows) == 1  # ours, once
    assert rows[0] == (
        f"| 1,024 | 0.298 | {keys:.3f} | 9% | {token:.3f} | {(0.29802496 + keys) / token:.0%} "
        f"| {token / (token - 311_164_928 / 2 / 4e12 * 1e3):.2f}x |"
    )
    assert "Weights: 1,192.1 MB a token, the head 311.2 of them" in lines[-1]
    assert "they pass the weights at 10,394 tokens" in lines[-1]


def test_throughput(tables: Any, tmp_path: Path) -> None:
    start: Any = FakeEngines(speed={"vllm": 2.0})
    setup = CaseSetup(MODEL, (Case(8, 128, 128), Case(1024, 128, 128)), ("vllm",), rounds=1)
    report = cases.run(setup, start=start)
    results.write(tmp_path, "throughput", report.as_data())
    lines = tables.throughput_table().splitlines()
    ours, peer = report.rows[2:]
    assert lines[0] == "| requests | engine, bf16 | output tok/s | limit | of limit | seconds | ours over its |"
    assert lines[4] == (
        f"| 1,024 × (128 in, 128 out) | rooflight | {ours.tokens_per_s.median:,.0f} "
        f"| {ours.limit_tokens_per_s:,.0f} | {ours.of_limit:.0%} | {ours.wall_s.median:.2f} |  |"
    )
    assert lines[5].endswith(f"| {peer.wall_s.median:.2f} | {peer.ratio:.2f} |")
    assert "operations at 800 TFLOP/s" in lines[7]
    context = "context 256, 17,408 pages, of 16 tokens"
    assert [line for line in lines if line.startswith("- ")] == [
        f"- {who} 9.9, bf16, {context}" for who in ("rooflight", "vllm")
    ]


def test_throughput_in_small_steps(tables: Any, tmp_path: Path) -> None:
    start: Any = FakeEngines()
    all_cases, some = (Case(8, 128, 128), Case(1024, 128, 128)), (Case(1024, 128, 128),)
    results.write(tmp_path, "throughput", cases.run(CaseSetup(MODEL, all_cases, rounds=1), start=start).as_data())
    small = cases.run(CaseSetup(MODEL, some, rounds=1, max_num_batched_tokens=16384), start=start)
    (tmp_path / "small_steps").mkdir()
    results.write(tmp_path / "small_steps", "throughput", small.as_data())
    lines = tables.throughput_table().splitlines()
    assert lines[0] == "| requests | engine, bf16 | output tok/s | limit | of limit | in small steps | seconds |"
    assert lines[2].split(" | ")[5] == ""
    assert lines[3].split(" | ")[5] == f"{small.rows[0].tokens_per_s.median:,.0f}"
    assert "In small steps: output tok/s with 16,384 tokens a step, where prompts take several." in lines[5]
    other = small.as_data()
    other["environment"] = {**other["environment"], "commit": "another"}
    results.write(tmp_path / "small_steps", "throughput", other)
    assert "small steps" not in tables.throughput_table()


def test_without_a_peer_there_is_no_column_for_one(tables: Any, tmp_path: Path) -> None:
    start: Any = FakeEngines()
    requests = request.run(RequestSetup(MODEL, (), ("bf16",), (32,), 128, rounds=3, device="cuda"), start=start)
    results.write(tmp_path, "request", requests.as_data())
    results.write(tmp_path, "throughput", cases.run(CaseSetup(MODEL, (Case(8, 128, 128),)), start=start).as_data())
    for text in (tables.request_tables(), tables.throughput_table()):
        assert "ours |" not in text
        assert "over its" not in text
        assert "No other engine was measured beside it. " in text
        assert "medians of 3 interleaved rounds" in text
        widths = {line.count("|") for line in text.splitlines() if line.startswith("|")}
        assert len(widths) == 1


def test_a_spread_is_told_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    shared = importlib.import_module("tables")
    assert shared.spread({"median": 1200.0, "low": 1080.0, "high": 1260.0}, 0) == "1,200 ±10%"
    assert shared.spread({"median": 2.0, "low": 1.9, "high": 2.5}, 1) == "2.0 ±25%"
    assert shared.spread({"median": 2.0, "low": 2.0, "high": 2.0}, 1) == "2.0"
    assert [shared.medians(rounds) for rounds in (1, 3)] == ["one round", "medians of 3 interleaved rounds"]


def test_the_generator_knows_them() -> None:
    text = (SCRIPTS / "generate_docs.py").read_text()
    assert "**decode_tables.TABLES" in text
    assert '"docs/decode.md"' in text
