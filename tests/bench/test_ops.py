"""A run of operators: what is measured, in which order, and what happens when a contender or its process fails."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import ops as operators
from rooflight.bench import results, self_test
from rooflight.bench.crew import COMPILED, Crew, crews, start_process
from rooflight.bench.measurement import Spread
from rooflight.bench.ops import measure_card, run
from rooflight.bench.ops_setup import OPERATORS, SHORT_GRID, OpsSetup
from rooflight.bench.process import WorkerProcess
from rooflight.bench.rows import COLD, HOT, OpRow, OpsReport, by_shape, ratio, tie_bands
from rooflight.bench.summary import against_ours, compared
from rooflight.bench.timing import EVENT_ROUNDS
from tests.bench.fake_processes import CARD, FakeProcesses

ONE = {"operators": ("rms_norm",), "dtypes": ("bf16",), "shapes": ((256, 4096),)}


def setup(**parts: Any) -> OpsSetup:
    return OpsSetup(**{**ONE, **parts})


def rows_of(report: OpsReport) -> dict[str, OpRow]:
    return {row.contender: row for row in report.rows}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounds": 0}, "rounds must be 1 or more, was 0"),
        ({"protocol": "all"}, "protocol must be one of graph, event, both, was 'all'"),
        ({"dtypes": ("fp8",)}, "dtype must be one of fp32, fp16, bf16, was 'fp8'"),
        ({"operators": ("linear",)}, "operator must be one of rms_norm, .*, was 'linear'"),
        ({"shapes": ((0, 4096),)}, "shape must be TOKENSxWIDTH, both 1 or more, was 0x4096"),
        ({"contenders": ("nobody",)}, "contender must be one of .*, was 'nobody'"),
    ],
)
def test_setup_refuses_what_it_cannot_measure(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        OpsSetup(**arguments)


def test_by_default_the_grid_is_whole_for_three_operators_and_short_for_the_others() -> None:
    cases = OpsSetup().cases()
    shapes = {name: [(c.num_tokens, c.hidden_size) for c in cases if c.operator == name] for name in OPERATORS}
    grid = [(tokens, width) for tokens in (1, 32, 256, 1024, 16384) for width in (1024, 4096, 8192)]
    for name in OPERATORS:
        whole = name in ("rms_norm", "fused_add_rms_norm", "fused_add_rms_norm_")
        dtypes = 2 if name in ("rms_norm", "fused_add_rms_norm") else 1
        assert shapes[name] == (grid if whole else list(SHORT_GRID)) * dtypes, name
    assert len(OpsSetup(whole_grid=True, dtypes=("fp32",)).cases()) == len(grid) * len(OPERATORS)
    assert len(OpsSetup(dtypes=("bf16", "bf16"), shapes=((1, 8), (1, 8)), operators=("rms_norm",)).cases()) == 1


def test_contenders_take_turns_in_alternating_order() -> None:
    start = FakeProcesses()
    run(setup(contenders=("rooflight", "eager", "liger"), rounds=3), start=start)
    assert start.started == [("rooflight", "eager"), ("rooflight again",), ("liger",)]
    order = ["rooflight", "eager", "rooflight again", "liger"]
    assert start.asked("round") == order + order[::-1] + order
    assert start.asked("event_round") == (order + order[::-1]) * 2 + order
    assert EVENT_ROUNDS == 5
    whats = [what for what, _ in start.log]
    assert whats[0] == "card"
    assert set(whats[1:4]) == {"warm"}
    assert set(whats[4:7]) == {"prepare"}
    assert set(whats[-3:]) == {"release"}
    assert sorted(start.closed) == ["liger", "rooflight", "rooflight again"]


def test_rows_hold_medians_limits_and_the_environment() -> None:
    start = FakeProcesses(speed={"liger": 2.0})
    report = run(setup(contenders=("rooflight", "liger")), start=start)
    ours, liger = rows_of(report)["rooflight"], rows_of(report)["liger"]
    assert ours.cold_us == Spread(5.0, 5.0, 5.0)
    assert ours.event_cold_us == Spread(7.0, 6.0, 8.0)  # of all samples
    traffic = 4 * 256 * 4096 * 2
    assert (ours.bytes, ours.wall, ours.cold_method) == (traffic, "memory", "rotation of 2 sets")
    assert ours.limit_us == pytest.approx(traffic / 4.0e12 * 1e6)
    assert ours.at_limit_cold == pytest.approx(ours.limit_us / 5.0)
    assert ours.at_limit_hot == pytest.approx(ours.limit_us / 2.0)
    assert liger.at_limit_cold == pytest.approx(ours.limit_us / 10.0)
    assert {row.run for row in report.rows} == {report.run}
    assert report.card.name == CARD.name
    assert {"cpu", "torch", "commit", "date", "driver", "idle", "l2_bytes", "seconds"} <= set(report.environment)
    assert report.card.environment == report.environment


@pytest.mark.parametrize(
    ("protocol", "measured"),
    [("graph", {"call_us", "hot_us", "cold_us"}), ("event", {"event_hot_us", "event_cold_us"})],
)
def test_one_protocol_alone(protocol: str, measured: set[str]) -> None:
    report = run(setup(contenders=("eager",), protocol=protocol), start=FakeProcesses())
    (row,) = report.rows
    assert {name for name in OpRow.__dataclass_fields__ if name.endswith("_us") and row.time(name) is not None} == (
        measured | {"limit_us"}
    )


def test_an_absent_peer_is_listed_with_its_reason() -> None:
    start = FakeProcesses(absent={"vllm": "not installed", "rooflight.cuda": "not built"})
    report = run(setup(contenders=("rooflight", "rooflight.cuda", "vllm")), start=start)
    assert report.absent == {"vllm": "not installed", "rooflight.cuda": "not built"}
    assert list(rows_of(report)) == ["rooflight", "rooflight again"]
    with pytest.raises(ValueError, match="none of the contenders can run here: vllm: not installed"):
        run(setup(contenders=("vllm",)), start=start)


def test_a_peer_without_the_operator_is_listed_and_a_wrong_one_is_a_row_without_figures() -> None:
    start = FakeProcesses(wrong={"quack": "has no such operator", "liger": "wrong: result 1 is off by 3"})
    report = run(setup(contenders=("eager", "liger", "quack")), start=start)
    assert report.absent == {"quack rms_norm bf16": "has no such operator"}
    assert rows_of(report)["liger"].error == "wrong: result 1 is off by 3"
    assert rows_of(report)["liger"].cold_us is None
    assert rows_of(report)["eager"].error is None
    assert set(start.asked("round")) == {"eager"}


def dies(on: str, after: int = 0) -> Any:
    count = 0

    def answer(message: Mapping[str, Any]) -> dict[str, Any] | None:
        nonlocal count
        count += message["do"] == on
        if message["do"] == on and count > after:
            raise ChildProcessError("liger ended with code -11: no message")
        return None

    return answer


def test_a_process_that_dies_costs_its_contender_and_starts_anew_twice() -> None:
    start = FakeProcesses(answers={"liger": dies("round", after=2)})
    shapes = ((1, 8), (2, 8), (3, 8), (4, 8))
    report = run(setup(contenders=("eager", "liger"), shapes=shapes), start=start)
    errors = [row.error for row in report.rows if row.contender == "liger"]
    assert errors[:3] == ["liger ended with code -11: no message"] * 3
    assert errors[3] == "its process failed too often, at last: liger ended with code -11: no message"
    assert start.started.count(("liger",)) == 3
    assert all(row.error is None and row.call_us for row in report.rows if row.contender == "eager")


def test_a_process_that_empties_the_cache_in_another_way_is_not_compared_cold() -> None:
    """Its row says how, and neither a ratio nor the summary puts its cold time beside ours."""
    start = FakeProcesses(speed={"liger": 0.5})
    usual = FakeProcesses()(("liger",)).usual

    def other_flush(message: Mapping[str, Any]) -> dict[str, Any] | None:
        return {**usual(message), "cold_method": "flush by torch.sum"} if message["do"] == "prepare" else None

    start.answers["liger"] = other_flush
    rows = rows_of(run(setup(contenders=("rooflight", "liger")), start=start))
    assert rows["liger"].cold_method == "flush by torch.sum"
    with pytest.raises(ValueError, match="cold_method must be the same"):
        ratio(rows["liger"], rows["rooflight"], COLD)
    assert against_ours(rows["liger"], rows["rooflight"]) == "0.50 / 0.50 / -"
    assert [cell.contender for cell in compared(list(rows.values()), HOT)] == ["liger"]
    assert compared(list(rows.values()), COLD) == []


def test_an_error_that_breaks_a_process_takes_its_other_contenders_along_for_this_case() -> None:
    start = FakeProcesses(answers={"eager": lambda m: {"error": "RuntimeError: illegal address", "broken": True}})
    report = run(setup(contenders=("rooflight", "eager"), shapes=((1, 8), (2, 8))), start=start)
    first, second = by_shape(report.rows).values()
    assert first["eager"].error == second["eager"].error == "RuntimeError: illegal address"
    assert first["rooflight"].error == "lost with eager, which failed in the same process"
    assert len(start.started) == 3  # ours again has its own, and the second case began with a new one


def test_an_error_that_breaks_nothing_ends_one_contender() -> None:
    start = FakeProcesses(answers={"eager": lambda m: {"error": "ValueError: no", "broken": False}})
    report = run(setup(contenders=("rooflight", "eager")), start=start)
    assert rows_of(report)["eager"].error == "ValueError: no"
    assert rows_of(report)["rooflight"].error is None


def test_the_process_fails_while_it_prepares() -> None:
    start = FakeProcesses(answers={"liger": dies("prepare")})
    report = run(setup(contenders=("eager", "liger")), start=start)
    assert rows_of(report)["liger"].error == "liger ended with code -11: no message"
    report = run(setup(contenders=("liger",)), start=FakeProcesses(answers={"liger": dies("prepare")}))
    assert report.rows == ()
    assert report.absent == {"rms_norm bf16 256x4096": "liger: liger ended with code -11: no message"}


def test_the_default_provider_is_not_measured_twice_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(operators.REGISTRY["rms_norm"].active, "cuda", "triton")
    assert "rooflight.triton" not in rows_of(run(setup(), start=FakeProcesses()))
    asked = setup(contenders=("rooflight", "rooflight.triton"))
    assert "rooflight.triton" in rows_of(run(asked, start=FakeProcesses()))


def test_compiled_is_spread_over_processes_that_share_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 16)
    assert len(crews([COMPILED], 90, FakeProcesses())) == 6
    assert len(crews([COMPILED], 1, FakeProcesses())) == 1
    members = crews(["eager", COMPILED], 9, FakeProcesses())
    assert [[index for index in range(9) if member.serves(index)] for member in members] == [
        list(range(9)),
        [0, 3, 6],
        [1, 4, 7],
        [2, 5, 8],
    ]
    start = FakeProcesses()
    shapes = tuple((tokens, 8) for tokens in range(1, 10))
    report = run(setup(contenders=("eager", COMPILED), shapes=shapes), start=start)
    assert [row.contender for row in report.rows] == ["eager", COMPILED] * 9
    assert start.asked("warm").count(COMPILED) == 9


def test_progress_ends_with_everything_done() -> None:
    steps: list[tuple[str, int, int]] = []
    shapes = ((1, 8), (2, 8))
    run(setup(contenders=("eager",), shapes=shapes), lambda *step: steps.append(step), start=FakeProcesses())
    assert steps[0][0] == "starting"
    assert ("compiling", 2, 2) in steps
    assert steps[-1] == ("done", 2, 2)


def test_each_operator_is_handed_over_when_it_is_complete() -> None:
    kept: list[OpsReport] = []
    asked = setup(operators=("rms_norm", "layer_norm"), contenders=("eager",), dtypes=("bf16", "fp16"))
    report = run(asked, finished=kept.append, start=FakeProcesses())
    assert [[(row.operator, row.dtype) for row in part.rows] for part in kept] == [
        [("rms_norm", "bf16"), ("rms_norm", "fp16")],
        [("layer_norm", "bf16"), ("layer_norm", "fp16")],
    ]
    assert kept[0].rows + kept[1].rows == report.rows
    assert {part.run for part in kept} == {report.run}


def test_the_tie_band_is_how_far_ours_is_from_itself_at_worst() -> None:
    start = FakeProcesses(speed={"rooflight again": 1.02})
    report = run(setup(contenders=("rooflight",), protocol="graph"), start=start)
    band = tie_bands(report.rows)[("rms_norm", "bf16")]
    assert band == {name: pytest.approx(0.02) for name in ("call_us", "hot_us", "cold_us")}


def test_results_on_disk_hold_every_column_and_read_back(tmp_path: Path) -> None:
    start = FakeProcesses(wrong={"liger": "wrong: off"}, absent={"vllm": "not installed"})
    report = run(setup(contenders=("rooflight", "liger", "vllm"), protocol="graph"), start=start)
    as_json, as_csv = results.write(tmp_path, "rms_norm", report.as_data())
    data = json.loads(as_json.read_text())
    assert OpsReport.from_data(data).rows == report.rows
    assert OpsReport.from_data(data).card == report.card
    assert data["absent"] == {"vllm": "not installed"}
    assert data["tie_bands"] == {"rms_norm bf16": {"call_us": 0.0, "hot_us": 0.0, "cold_us": 0.0}}
    with as_csv.open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 3
    columns = {"run", "operator", "dtype", "num_tokens", "hidden_size", "contender", "version", "bytes", "limit_us"}
    columns |= {"wall", "cold_method", "at_limit_hot", "at_limit_cold", "error"}
    for time in ("call_us", "hot_us", "cold_us", "event_hot_us", "event_cold_us"):
        columns |= {f"{time}.{part}" for part in ("median", "low", "high")}
    assert set(lines[0]) == columns
    assert float(lines[0]["cold_us.median"]) == 5.0
    assert lines[0]["event_hot_us.median"] == ""
    assert lines[2]["error"] == "wrong: off"
    with pytest.raises(ValueError, match="benchmark must be ops, was 'request'"):
        OpsReport.from_data({"benchmark": "request"})


def test_the_card_alone() -> None:
    start = FakeProcesses()
    card = measure_card(start)
    assert card.copy == CARD.copy
    assert "driver" in card.environment
    assert start.log == [("card", "rooflight")]
    assert start.closed == ["rooflight"]


def test_a_process_that_does_not_answer_is_ended() -> None:
    sleep = ["-n", "1", "-r", "1", "import time; time.sleep(60)"]
    with WorkerProcess("sleeper", "timeit", sleep, patience=0.1) as process:
        with pytest.raises(ChildProcessError, match=r"sleeper did not answer for 0.1 s"):
            process.receive()
        assert process._process.wait(timeout=10) == -9


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_the_real_process_says_that_there_is_no_gpu() -> None:
    with Crew(["rooflight", "eager"], start_process) as member:
        member.wait()
        reason = "ValueError: this needs a GPU, and PyTorch sees none here"
        assert member.absent == {"rooflight": reason, "eager": reason}
        assert member.names == ()


# With other tests on the GPU at the same time nothing can be measured.
alone = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="measures: needs the GPU alone (pytest -n 0)")


@alone
@pytest.mark.gpu
def test_the_harness_measures_what_it_says() -> None:
    assert [verdict for verdict in self_test.run() if not verdict.passed] == []


@alone
@pytest.mark.gpu
def test_one_real_run() -> None:
    few = OpsSetup(
        ("rms_norm", "fused_add_rms_norm_"), ("bf16",), ((32, 1024), (1024, 4096)), ("rooflight", "eager"), 3
    )
    report = run(few)
    assert len(report.rows) == 4 * 3
    for row in report.rows:
        assert row.error is None
        times = [row.call_us, row.hot_us, row.cold_us, row.event_hot_us, row.event_cold_us]
        assert all(time is not None and 0 < time.low <= time.median <= time.high for time in times)
        assert row.hot_us is not None
        assert row.cold_us is not None
        assert row.hot_us.median < row.cold_us.median
        assert row.at_limit_cold is not None
        assert row.at_limit_cold < 1.05
