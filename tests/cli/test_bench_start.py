"""`rooflight bench start`: refusals, and what a run prints and writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rooflight.bench import start
from rooflight.bench.start import Start
from rooflight.cli import bench_start
from tests.cli.running import invoke, refused

TINY = ["bench", "start", "--model", "random:tiny", "--device", "cpu"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rounds", "0"], "rounds must be 1 or more, was 0"),
        (["--rounds", "x"], "Invalid value for '--rounds': "),
        (["--device", "gpu"], "device must be one of auto, cpu, cuda, was 'gpu'"),
        (["--model", "nowhere"], "'nowhere' is no folder"),
        (["--model", "random:nothing"], "unknown preset random:nothing"),
    ],
)
def test_bad_values_are_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    assert refused(*TINY, "--out", tmp_path, *arguments).startswith(line)


def test_a_results_folder_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_start, "run", lambda *_: pytest.fail("measured although nothing can be kept"))
    file = tmp_path / "file"
    file.touch()
    assert refused(*TINY, "--out", file) == f"{file}: File exists"


def test_a_start_that_fails_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PROGRAM", "raise SystemExit('no luck')")
    assert refused(*TINY, "--out", tmp_path) == "the started process ended with code 1: no luck"
    assert not list(tmp_path.iterdir())


def test_a_start_that_hangs_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start, "PROGRAM", "import time; time.sleep(60)")
    monkeypatch.setattr(start, "PATIENCE", 0.1)
    line = "the started process did not get to its first token in 0.1 s"
    assert refused(*TINY, "--out", tmp_path) == line


def test_what_is_printed_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch(*_: object) -> Start:
        return Start(1.5, 1.75, {"import torch": 1.0, "rest": 0.5}, 0)

    monkeypatch.setattr(start, "launch", launch)
    monkeypatch.setattr(start, "GOALS", {"cold": 20.0, "warm": 1.0})
    result = invoke(*TINY, "--rounds", "2", "--out", tmp_path)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith("random:tiny from a safetensors file of ")
    table = {line[:16].strip(): line[16:].split() for line in lines}
    assert table["import torch"] == ["1.000", "1.000"]
    assert table["rest"] == ["0.500", "0.500"]
    assert table["ready"] == ["1.50", "(1.50-1.50)"] * 2
    assert table["first token"] == ["1.75", "(1.75-1.75)"] * 2
    assert "within" not in result.stdout  # goals are a GPU's
    assert lines[-2:] == [f"wrote {tmp_path / 'start.json'}", f"wrote {tmp_path / 'start.csv'}"]
    data = json.loads((tmp_path / "start.json").read_text())
    assert (data["benchmark"], data["setup"]["rounds"], data["environment"]["device"]) == ("start", 2, "cpu")


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(4.99, "after 4.99 s: within 5 s"), (5.01, "after 5.01 s: NOT within 5 s")],
)
def test_the_verdict(seconds: float, words: str) -> None:
    row = start.row_of("warm", [Start(seconds, 6.0, {"rest": seconds}, 0)], 5.0)
    assert bench_start._verdict(row) == f"ready with a warm cache {words}"
