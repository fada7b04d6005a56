"""`rooflight ladder decode`: the table, the files, and what it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import ladder
from rooflight.bench.rungs import RUNGS
from rooflight.cli import bench_throughput
from rooflight.cli import ladder as command
from tests.bench.test_ladder import ENVIRONMENT, MACHINE, FakeClimber
from tests.cli.running import invoke, refused


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeClimber:
    """A GPU as far as the command line can see; the folders are below a temporary one."""
    climber: Any = FakeClimber()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(bench_throughput, "gpu_name", lambda: "NVIDIA Test 1")
    monkeypatch.setattr(ladder, "environment_of", lambda device, threads: ENVIRONMENT | {"idle": True})
    monkeypatch.setattr(command, "run", lambda setup, progress: ladder.run(setup, progress, climber, MACHINE))
    return climber


def test_defaults_table_and_files(gpu: FakeClimber) -> None:
    result = invoke("ladder", "decode")
    assert (result.exit_code, result.stderr) == (0, "")
    assert gpu.given == ("random:qwen3-0.6b", "bf16", "cuda", [rung.name for rung in RUNGS], 8320)
    lines = result.stdout.splitlines()
    assert all(len(line) <= 100 for line in lines), max(lines, key=len)
    assert lines[0] == "random:qwen3-0.6b, bf16, one request, 128 tokens out; medians of 3 rounds"
    assert (
        lines[1] == "rungs 1 to 7 run eagerly: the host asks for each operator, and binds them where the wall is host"
    )
    table = [line.split() for line in lines]
    head = next(row for row in table if row[:2] == ["prompt", "rung"])
    assert head == ["prompt", "rung", "tokens/s", "us", "a", "token", "gain", "predicted", "wall", "ops", "MB"]
    naive = next(row for row in table if row[:3] == ["32", "naive", "operators"])
    assert naive[3:] == ["1,000", "1,000", "±10%", "host", "454", "1,220"]
    worse = next(row for row in table if row[:2] == ["fused", "QK/RoPE/append"])
    assert worse[2:7] == ["1,111", "900", "±10%", "0.89x", "slower"]
    assert sum(line.startswith("slower: fused QK/RoPE/append at ") for line in lines) == 3
    assert "slower: fused QK/RoPE/append at 8192 tokens, 0.889x (900 us, rounds 900 to 990)" in lines
    assert "before the run the card was idle" in lines
    data = json.loads(Path("build/bench/test-1/ladder.json").read_text())
    assert data["setup"]["prompts"] == [32, 1024, 8192]
    assert len(data["rows"]) == 3 * len(RUNGS)
    assert data["rungs"][0]["recipe"]["norm"] is False
    with Path("build/bench/test-1/ladder.csv").open() as file:
        row = list(csv.DictReader(file))[1]
    assert (row["rung"], float(row["per_token_us.median"])) == ("fused norm", pytest.approx(800.0))
    assert float(row["expected.time_us"]) > 0


def test_options(gpu: FakeClimber) -> None:
    arguments = ["--model", "random:tiny", "--prompt-tokens", "7", "--max-tokens", "9", "--rounds", "1"]
    result = invoke("ladder", "decode", *arguments, "--dtype", "fp32", "--out", "here")
    assert (result.exit_code, result.stderr) == (0, "")
    assert gpu.given == ("random:tiny", "fp32", "cuda", [rung.name for rung in RUNGS], 16)
    assert sorted(path.name for path in Path("here").iterdir()) == ["ladder-fp32.csv", "ladder-fp32.json"]


def test_wrong_options_are_one_line(gpu: FakeClimber) -> None:
    assert refused("ladder", "decode", "--rounds", "0") == "rounds must be 1 or more, was 0"
    assert refused("ladder", "decode", "--dtype", "int3").startswith("dtype must be one of")
    assert gpu.log == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_without_a_gpu_it_is_refused_in_one_line() -> None:
    line = refused("ladder", "decode")
    assert line == "ladder decode needs a GPU (its rungs are kernels and launches); PyTorch sees none here"


def test_help_without_a_subcommand() -> None:
    assert "decode" in invoke("ladder").stdout
