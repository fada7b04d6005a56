"""`rooflight bench`: help, refusals, and the table of a run; the measuring itself is tested in tests/bench."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from rooflight.bench.measurement import Spread
from rooflight.bench.request import RequestReport, RequestSetup
from rooflight.bench.request_rows import RequestRow
from rooflight.cli import bench
from tests.cli.running import invoke, refused


def row(engine: str, per_token: float, ratio: float | None) -> RequestRow:
    first, token = Spread(20.0, 19.0, 24.0), Spread(per_token, per_token - 0.5, per_token + 1)
    same = None if ratio is None else 6
    request, decode = Spread(180.0, 170.0, 190.0), Spread(1e3 / per_token, 1e3 / (per_token + 1), 1e3)
    return RequestRow(engine, "1.2", "fp32", 4, 6, first, token, 2.0, ratio, ratio, same, request, decode, ratio)


def measured(setup: RequestSetup, progress: Callable[[str, int, int], None]) -> RequestReport:
    progress("loading", 0, 2)
    rows = (row("rooflight", 4.0, None), row("transformers", 5.0, 1.25))
    return RequestReport(setup, {"threads": setup.threads}, 12.3e9, rows, {})


def without_a_peer(setup: RequestSetup, progress: Callable[[str, int, int], None]) -> RequestReport:
    rows = (row("rooflight", 4.0, None),)
    return RequestReport(setup, {}, 12.3e9, rows, {"transformers": "not installed"})


def test_bare_shows_the_help() -> None:
    bare, asked = invoke("bench"), invoke("bench", "--help")
    assert (bare.exit_code, bare.stderr, asked.exit_code) == (0, "", 0)
    assert bare.stdout.split() == asked.stdout.split()
    assert "request" in bare.stdout
    shown = invoke("bench", "request", "-h")
    assert shown.exit_code == 0
    for option in ("--peer", "--dtype", "--prompt-tokens", "--rounds", "--threads", "--out", "--device"):
        assert option in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--rounds", "0"], "rounds must be 1 or more, was 0"),
        (["--max-tokens", "1"], "max_tokens must be 2 or more to time a token, was 1"),
        (["--prompt-tokens", "0"], "prompts must be lengths of 1 or more, was (0,)"),
        (["--dtype", "fp9"], "dtype must be one of fp32, bf16, fp16, was 'fp9'"),
        (["--threads", "-1"], "threads must be from 1 to 1024, was -1"),
        (["--threads", "99999"], "threads must be from 1 to 1024, was 99999"),
        (["--peer", "vlm"], "peer must be one of transformers, vllm, each once, was vlm"),
        (["--device", "gpu"], "device must be one of auto, cpu, cuda, was 'gpu'"),
        (["--max-num-batched-tokens", "0"], "max_num_batched_tokens must be 1 or more, was 0"),
        (["--rounds", "x"], "Invalid value for '--rounds': "),
        (["--model", "nowhere"], "'nowhere' is no folder"),
        (["--model", "random:tiny", "--max-tokens", "5000"], "the longest prompt and max_tokens must fit the context"),
    ],
)
def test_bad_values_are_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    assert refused("bench", "request", "--device", "cpu", "--out", tmp_path, *arguments).startswith(line)


def test_an_unknown_benchmark_is_one_line() -> None:
    assert refused("bench", "sing") == "No such command 'sing' (see `rooflight bench --help`)"


def test_a_results_folder_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "run", lambda *_: pytest.fail("measured although the results cannot be kept"))
    file = tmp_path / "file"
    file.touch()
    assert refused("bench", "request", "--out", file) == f"{file}: File exists"
    assert refused("bench", "request", "--out", file / "below") == f"{file / 'below'}: Not a directory"
    monkeypatch.setattr("os.access", lambda path, mode: not mode & os.W_OK)
    assert refused("bench", "request", "--out", tmp_path) == f"{tmp_path}: Permission denied"


def test_the_table_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run", measured)
    monkeypatch.setenv("COLUMNS", "160")
    arguments = ["--model", "random:tiny", "--peer", "transformers", "--threads", "2", "--device", "cpu"]
    result = invoke("bench", "request", *arguments, "--out", tmp_path / "new")
    assert result.exit_code == 0
    assert "2 threads, memory read at 12.3 GB/s" in result.stdout
    cells = [line.strip("│┃").replace("┃", "│").split("│") for line in result.stdout.splitlines()]
    table = {line[0].strip(): [cell.strip() for cell in line[1:]] for line in cells if len(line) == 9}
    assert table["engine"][-1] == "ours faster by"
    assert table["rooflight 1.2"] == ["fp32", "4", "20 (19-24)", "4.0 (3.5-5.0)", "2.0", "50%", "250.0", ""]
    assert table["transformers 1.2"][-3:] == ["40%", "200.0", "1.25x / 1.25x"]
    as_json, as_csv = tmp_path / "new/request.json", tmp_path / "new/request.csv"
    assert f"wrote {as_json}\nwrote {as_csv}\n" in result.stdout
    data = json.loads(as_json.read_text())
    assert data["setup"]["threads"] == 2
    assert data["setup"]["peers"] == ["transformers"]
    with as_csv.open() as file:
        assert [line["per_token_ms.median"] for line in csv.DictReader(file)] == ["4.0", "5.0"]


def test_a_peer_that_is_not_there_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "run", without_a_peer)
    result = invoke("bench", "request", "--peer", "transformers", "--device", "cpu", "--out", tmp_path)
    assert result.exit_code == 0
    assert "\ntransformers: not installed\n" in result.stdout
