"""`rooflight bench ops`, `card`, `all` and `self-test`: refusals, tables and files; no GPU, a made-up measurement."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import ops, plots, self_test
from rooflight.bench.ops_setup import OPERATORS
from rooflight.bench.rows import OpsReport
from rooflight.cli import bar, bench_ops
from rooflight.limits.card import Card
from tests.bench.fake_processes import CARD, FakeProcesses
from tests.cli.running import invoke, refused

NO_GPU = "this needs a GPU, and PyTorch sees none here"


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeProcesses:
    """A GPU as far as the command line can see; the folders are below a temporary one."""
    start = FakeProcesses(
        speed={"eager": 2.0, "rooflight again": 1.01},
        absent={"vllm": "not installed"},
        wrong={"quack": "wrong: result 1 is off by 0.5, accepted is 0.02"},
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(bench_ops, "gpu_name", lambda: CARD.name)
    monkeypatch.setattr(bench_ops, "run", lambda *args, **kwargs: ops.run(*args, start=start, **kwargs))
    monkeypatch.setattr(bench_ops, "measure_card", lambda: ops.measure_card(start))
    return start


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("command", ["ops", "card", "all", "self-test"])
def test_without_a_gpu_it_is_one_line(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert refused("bench", command) == NO_GPU
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["linear"], "operator must be one of rms_norm, fused_add_rms_norm, "),
        (["--dtype", "fp8"], "dtype must be one of fp32, fp16, bf16, was 'fp8'"),
        (["--shape", "256"], "shape must be TOKENSxWIDTH such as 256x4096, was '256'"),
        (["--shape", "0x8"], "shape must be TOKENSxWIDTH, both 1 or more, was 0x8"),
        (["--contender", "nobody"], "contender must be one of rooflight, rooflight again, "),
        (["--rounds", "0"], "rounds must be 1 or more, was 0"),
        (["--protocol", "x"], "protocol must be one of graph, event, both, was 'x'"),
    ],
)
def test_bad_values_are_one_line(arguments: list[str], line: str) -> None:
    assert refused("bench", "ops", *arguments).startswith(line)


def test_help_names_the_options() -> None:
    shown = invoke("bench", "ops", "-h")
    assert shown.exit_code == 0
    for option in ("--dtype", "--shape", "--contender", "--rounds", "--protocol", "--whole-grid", "--out"):
        assert option in shown.stdout


def test_a_folder_that_cannot_be_written_is_refused_before_the_run(
    processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    assert refused("bench", "ops", "--out", "there") == "there: Permission denied"
    assert processes.started == []


def test_the_table_and_the_files_of_a_run(processes: FakeProcesses, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    arguments = ["fused_add_rms_norm", "--dtype", "bf16", "--shape", "256x4096", "--shape", "1x1024", "--rounds", "1"]
    result = invoke("bench", "ops", *arguments)
    assert result.exit_code == 0
    assert "fused_add_rms_norm bf16, us; limit: copy at 4.00 TB/s, launch 0.70 us" in result.stdout
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "256x4096 2.10 memory rooflight 10.00 ±0% 2.00 ±0% 5.00 ±0% 42% 30.00 7.00" in lines
    assert "1x1024 0.70 launch rooflight 10.00 ±0% 2.00 ±0% 5.00 ±0% 14% 30.00 7.00" in lines
    assert "eager 20.00 ±0% 4.00 ±0% 10.00 ±0% 21% 30.00 7.00 2.00 / 2.00 / 2.00" in lines
    assert any(line.startswith("tie band (ours against itself, at worst): call 1.0%, hot 1.0%") for line in lines)
    assert "quack at 256x4096, 1x1024: wrong: result 1 is off by 0.5, accepted is 0.02" in lines
    assert "vllm: not installed" in lines
    assert any(line.startswith("before the run the card was ") for line in lines)
    folder = Path("build/bench/test-1")  # below the current folder
    for ending in ("json", "csv", "png"):
        assert f"wrote {folder / f'fused_add_rms_norm.{ending}'}" in result.stdout
    report = OpsReport.from_data(json.loads((folder / "fused_add_rms_norm.json").read_text()))
    assert report.setup["shapes"] == [[256, 4096], [1, 1024]]
    assert {row.shape for row in report.rows} == {"256x4096", "1x1024"}


def test_hot_shares_are_shown_where_the_cache_cannot_have_helped(processes: FakeProcesses) -> None:
    arguments = ["rms_norm", "--dtype", "bf16", "--shape", "16384x4096", "--protocol", "graph", "--contender", "eager"]
    result = invoke("bench", "ops", *arguments)
    assert "1342%, hot 3355%" in result.stdout  # made-up times
    assert "ev. hot" not in result.stdout


def test_without_matplotlib_the_plots_are_named_as_missing(
    processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "missing", lambda: "matplotlib is not installed")
    result = invoke("bench", "ops", "rms_norm", "--shape", "1x8", "--out", "here")
    assert "no plots: matplotlib is not installed" in result.stdout
    assert sorted(path.name for path in Path("here").iterdir()) == ["rms_norm.csv", "rms_norm.json"]


def test_the_ceilings_of_the_card(processes: FakeProcesses) -> None:
    full = {**CARD.as_data(), "methods": {"copy": "copy_", "node": "empty kernel", "read": "read kernel"}}
    full |= {"matmul": {"bf16": 7.9e14}, "missing": {"matmul fp8": "none"}, "read": [{"bytes": 2**32, "rate": 4.6e12}]}
    processes.answers["rooflight"] = lambda message: full if message["do"] == "card" else None
    result = invoke("bench", "card")
    assert result.exit_code == 0
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "copy, 2,048 MiB moved (copy_) 4.00 TB/s" in lines
    assert "read, 4,096 MiB moved (read kernel) 4.60 TB/s" in lines
    assert "matrix product bf16 790 TFLOP/s" in lines
    assert "graph node, plain (empty kernel) 0.80 us" in lines
    assert "matmul fp8: none" in lines
    path = Path("build/bench/test-1/card.json")
    assert f"wrote {path}" in lines
    assert Card.load(path).read_bandwidth == 4.6e12


def test_everything_goes_into_the_results_of_the_card(
    processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plots, "missing", lambda: "not wanted")  # seven plots take seconds
    processes.answers["rooflight"] = lambda message: (
        {**CARD.as_data(), "methods": {"copy": "copy_", "node": "empty kernel"}} if message["do"] == "card" else None
    )
    result = invoke("bench", "all")
    assert result.exit_code == 0
    folder = Path("results/test-1")
    names = {path.name for path in folder.iterdir()}
    expected = {f"{operator}.{ending}" for operator in OPERATORS for ending in ("json", "csv")}
    assert names == expected | {"card.json"}
    assert processes.asked("card") == ["rooflight"]
    runs = {json.loads((folder / f"{operator}.json").read_text())["run"] for operator in OPERATORS}
    assert len(runs) == 1


def test_the_self_test_says_what_failed(processes: FakeProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts = [self_test.Verdict("copy", True, "99%"), self_test.Verdict("slowed by 5 %", False, "hot +2%")]
    monkeypatch.setattr(self_test, "run", lambda progress: verdicts)
    result = invoke("bench", "self-test")
    assert result.exit_code == 1
    assert result.stdout == "passed  copy: 99%\nFAILED  slowed by 5 %: hot +2%\n"
    assert result.stderr == "rooflight: the harness does not measure what it says: slowed by 5 %\n"
    monkeypatch.setattr(self_test, "run", lambda progress: verdicts[:1])
    assert invoke("bench", "self-test").exit_code == 0


def test_where_no_terminal_is_progress_is_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock: Any = iter([0.0, 1.0, 11.0, 11.0, 12.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    progress = bar._lines()
    for done in range(3):
        progress("rms_norm", done, 9)
    assert capsys.readouterr().err == "rms_norm: 1 of 9\n"
