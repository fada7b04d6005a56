"""The throughput benchmark: what it refuses, how many pages it takes, and real runs on a tiny model."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import drive as driving
from rooflight.bench import results, throughput
from rooflight.bench.measurement import Spread
from rooflight.bench.throughput import Quantiles, ThroughputSetup, run
from rooflight.bench.workload import Ask
from rooflight.engine import memory
from rooflight.engine.metrics import Percentiles
from rooflight.models.load import load_config

BANDWIDTH = 20e9
WEIGHTS = 700_160  # bytes that a step of random:tiny reads in FP32


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "cpu_read_bandwidth", lambda threads: BANDWIDTH)


def tiny(**changes: Any) -> ThroughputSetup:
    lengths = {"requests": 5, "prompt_tokens": "uniform:4-20", "max_tokens": "6", "rounds": 2}
    return ThroughputSetup("random:tiny", **lengths | changes)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "fp9"}, "dtype must be one of fp32, bf16, fp16, was 'fp9'"),
        ({"requests": 0}, "requests must be 1 or more, was 0"),
        ({"max_num_seqs": 0}, "max_num_seqs must be 1 or more, was 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be 1 or more, was -1"),
        ({"num_pages": 0}, "num_pages must be 1 or more, was 0"),
        ({"threads": 0}, "threads must be 1 or more, was 0"),
        ({"rounds": 0}, "rounds must be 1 or more, was 0"),
        ({"seed": -1}, "seed must be from 0 to"),
        ({"seed": 2**63}, "seed must be from 0 to"),
        ({"rate": 0.0}, "rate must be a number of requests a second, above 0, was 0"),
        ({"rate": math.inf}, "rate must be a number of requests a second, above 0, was inf"),
        ({"rate": math.nan}, "rate must be a number of requests a second, above 0, was nan"),
        ({"prompt_tokens": "some"}, "prompt_tokens must be N, fixed:N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA"),
        ({"max_tokens": "uniform:1-9"}, "max_tokens must be 2 or more tokens"),
        ({"max_tokens": 1}, "max_tokens must be 2 or more tokens, was '1'"),
    ],
)
def test_setup_refuses_what_it_cannot_measure(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        ThroughputSetup(None, **arguments)


def test_requests_beyond_the_context_are_refused_before_anything_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "cpu_read_bandwidth", lambda threads: pytest.fail("measured"))
    with pytest.raises(ValueError, match="must fit the context of 4096 tokens together, were 4000 and 97"):
        run(tiny(prompt_tokens=4000, max_tokens=97))


def test_quantiles_are_medians_over_rounds_in_milliseconds() -> None:
    rounds = [Percentiles(0.001 * n, 0.002 * n, 0.003 * n, 9) for n in (3, 1, 2)]
    found = Quantiles.of(rounds)
    assert (found.p50.median, found.p50.low, found.p50.high) == pytest.approx((2.0, 1.0, 3.0))
    assert (found.p90.median, found.p99.high) == pytest.approx((4.0, 9.0))


def test_one_run_both_ways(tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    threads = torch.get_num_threads()
    report = run(tiny(one_by_one=True), lambda *told: seen.append(told))
    assert torch.get_num_threads() == threads
    assert seen[-1] == ("together, round 2 of 2", 26, 26)  # 5 requests, warmed up and twice both ways, and one alone
    assert [done for _, done, of in seen if of == 26] == list(range(27))
    together, alone = report.rows
    for row in report.rows:
        assert (row.requests, row.output_tokens) == (5, 30)
        assert row.tokens_per_s.median == pytest.approx(6 * row.requests_per_s.median)
        assert 0 < row.tokens_per_s.low <= row.tokens_per_s.high
        assert row.limit_tokens_per_s == pytest.approx(row.mean_batch.median * BANDWIDTH / WEIGHTS)
        assert 0 < row.of_limit < 1
        assert 0.5 < row.busy.low <= row.busy.high <= 1
        assert row.preemptions.high == 0
        assert 0 < row.first_token_ms.p50.median <= row.first_token_ms.p99.median <= row.latency_ms.p99.median
    assert 5 * 4 <= together.prompt_tokens == alone.prompt_tokens <= 5 * 20
    assert (together.steps, together.mean_batch) == (Spread(6, 6, 6), Spread(5, 5, 5))
    assert (alone.steps, alone.mean_batch) == (Spread(30, 30, 30), Spread(1, 1, 1))
    assert together.over_one_by_one == together.tokens_per_s.median / alone.tokens_per_s.median
    assert alone.over_one_by_one is None
    as_json, as_csv = results.write(tmp_path, "throughput", report.as_data())
    data = json.loads(as_json.read_text())
    assert data["setup"]["prompt_tokens"] == "uniform:4-20"
    assert data["environment"]["max_model_len"] == 4096
    with as_csv.open() as file:
        rows = list(csv.DictReader(file))
    assert [row["mode"] for row in rows] == ["together", "one by one"]
    assert float(rows[0]["latency_ms.p90.median"]) == together.latency_ms.p90.median


def test_modes_take_turns_and_get_the_same_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[int | None, list[Ask]]] = []
    serve = driving.drive

    def watched(engine: Any, asks: Sequence[Ask], most_open: int | None = None, ended: Any = None) -> driving.Round:
        turns.append((most_open, list(asks)))
        return serve(engine, asks, most_open, ended)

    monkeypatch.setattr(driving, "drive", watched)
    run(tiny(one_by_one=True, rate=500.0, rounds=3))
    warm, lone, *measured = turns
    assert {ask.arrival for ask in warm[1]} == {0.0}
    assert lone[1] == warm[1][:1]
    assert [most_open for most_open, _ in measured] == [None, 1, 1, None, None, 1]
    assert all(asks == measured[0][1] for _, asks in measured)
    assert [ask.prompt for ask in measured[0][1]] == [ask.prompt for ask in warm[1]]
    assert measured[0][1][-1].arrival > 0


def test_requests_that_arrive_slowly_leave_the_engine_idle() -> None:
    (row,) = run(tiny(requests=4, rate=20.0, rounds=1, max_tokens=2)).rows
    assert row.busy.median < 0.9
    assert row.over_one_by_one is None
    assert row.of_limit > row.tokens_per_s.median / row.limit_tokens_per_s  # of the busy time


def test_the_pool_has_room_for_those_that_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("random:tiny")
    asks = [Ask([1] * n, 17, 0.0) for n in (1, 16, 32, 17)]  # 17, 32, 48 and 33 tokens cached: 2, 2, 3 and 3 pages
    pages = throughput._pages
    assert pages(tiny(), config, asks) == 10 + 4
    assert pages(tiny(max_num_seqs=2), config, asks) == 6 + 2
    assert pages(tiny(max_num_batched_tokens=1), config, asks) == 3 + 1
    page = 16 * config.kv_bytes_per_token(torch.float32)
    weights = config.num_parameters() * 4
    monkeypatch.setattr(memory, "free_bytes", lambda device: math.ceil((weights + 5 * page) / memory.SHARE))
    assert pages(tiny(), config, asks) == 5
    monkeypatch.setattr(memory, "free_bytes", lambda device: 0)
    assert pages(tiny(), config, asks) == 3  # for the engine to refuse, with both numbers


def test_the_pool_of_a_run_is_written_down_and_may_be_given() -> None:
    report = run(tiny(num_pages=4, prompt_tokens=14, max_tokens=30, requests=2, rounds=1))
    assert report.environment["num_pages"] == 4
    assert report.rows[0].preemptions.median > 0
    assert report.rows[0].peak_pages.high <= 4
