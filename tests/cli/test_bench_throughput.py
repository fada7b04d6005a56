"""`rooflight bench throughput`: refusals, and what a small run prints and writes."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from rooflight.bench import throughput
from rooflight.cli import bench_throughput
from tests.cli.running import invoke, refused

TINY = ["bench", "throughput", "--model", "random:tiny", "--threads", "1", "--device", "cpu"]
SMALL = ["--requests", "4", "--prompt-tokens", "uniform:4-9", "--max-tokens", "fixed:3", "--rounds", "2"]


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throughput, "cpu_read_bandwidth", lambda threads: 12.3e9)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--dtype", "fp9"], "dtype must be one of fp32, bf16, fp16, was 'fp9'"),
        (["--requests", "0"], "requests must be 1 or more, was 0"),
        (["--rate", "0"], "rate must be a number of requests a second, above 0, was 0"),
        (["--rate", "nan"], "rate must be a number of requests a second, above 0, was nan"),
        (
            ["--prompt-tokens", "gauss:3"],
            "prompt_tokens must be N, fixed:N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA, was 'gauss:3'",
        ),
        (["--max-tokens", "1"], "max_tokens must be 2 or more tokens, was '1'"),
        (["--threads", "-1"], "threads must be from 1 to 1024, was -1"),
        (["--device", "gpu"], "device must be one of auto, cpu, cuda, was 'gpu'"),
        (["--case", "8:128"], "case must be N:IN:OUT such as 8:128:128, OUT 2 or more, was '8:128'"),
        (["--case", "0:8:8"], "case must be N:IN:OUT such as 8:128:128, OUT 2 or more, was '0:8:8'"),
        (["--case", "1:8:1"], "case must be N:IN:OUT such as 8:128:128, OUT 2 or more, was '1:8:1'"),
        (["--case", "1:8:8", "--rate", "3"], "rate cannot be combined with cases"),
        (["--case", "1:8:8", "--one-by-one"], "one_by_one cannot be combined with cases"),
        (["--case", "1:8:8", "--peer", "transformers"], "peer must be one of vllm, each once, was transformers"),
        (["--case", "1:4000:97"], "the longest prompt and max_tokens must fit the context of 4096 tokens, were 4000"),
        (["--peer", "vllm"], "peer needs cases to run beside ours: --case N:IN:OUT"),
        (["--rounds", "x"], "Invalid value for '--rounds': "),
        (["--model", "nowhere"], "'nowhere' is no folder"),
        (["--max-tokens", "5000"], "prompt_tokens and max_tokens must fit the context of 4096 tokens together"),
        (["--num-pages", "1", "--max-tokens", "64"], "the request may need "),
    ],
)
def test_bad_values_are_one_line(arguments: list[str], line: str, tmp_path: Path) -> None:
    assert refused(*TINY, "--out", tmp_path, *arguments).startswith(line)


def test_a_results_folder_that_cannot_be_written_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_throughput, "run", lambda *_: pytest.fail("measured although nothing can be kept"))
    file = tmp_path / "file"
    file.touch()
    assert refused(*TINY, "--out", file) == f"{file}: File exists"


def test_a_run_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke(*TINY, *SMALL, "--one-by-one", "--out", tmp_path / "new")
    assert result.exit_code == 0
    as_json, as_csv = tmp_path / "new/throughput.json", tmp_path / "new/throughput.csv"
    data = json.loads(as_json.read_text())
    together, alone = data["rows"]
    lines = result.stdout.splitlines()
    assert lines[0] == f"4 requests, all at once: {together['prompt_tokens']} tokens in, 12 out"
    assert lines[1] == "fp32, 1 threads, memory read at 12.3 GB/s"
    assert lines[2] == "medians (least-most) of 2 rounds; times: p50 / p90 / p99 of the requests"
    assert lines[-3] == f"together over one by one: {together['over_one_by_one']:.2f}x"
    assert lines[-2:] == [f"wrote {as_json}", f"wrote {as_csv}"]
    assert max(map(len, lines[:-2])) <= 80
    table = {line[:22].strip(): line[22:].split() for line in lines}
    assert table["tokens a step"] == ["4", "(4-4)", "1", "(1-1)"]
    assert table["steps"] == ["3", "12"]
    assert table["preemptions"] == ["0", "0"]
    assert table["most KV pages"] == ["4", "1"]
    assert table["of limit, while busy"] == [f"{row['of_limit']:.0%}" for row in (together, alone)]
    assert [len(table[name]) for name in ("first token ms", "per token ms", "latency ms")] == [10, 10, 10]
    assert data["setup"]["max_tokens"] == "fixed:3"
    with as_csv.open() as file:
        assert [line["steps.median"] for line in csv.DictReader(file)] == ["3.0", "12.0"]


def test_a_run_of_arrivals(tmp_path: Path) -> None:
    result = invoke(*TINY, *SMALL, "--rate", "200", "--seed", "7", "--dtype", "bf16", "--out", tmp_path)
    assert result.exit_code == 0
    assert result.stdout.startswith("4 requests, 200 a second: ")
    assert "one by one" not in result.stdout
    data = json.loads((tmp_path / "throughput-bf16.json").read_text())
    assert (data["setup"]["rate"], data["setup"]["seed"], data["setup"]["dtype"]) == (200.0, 7, "bf16")
    assert [row["mode"] for row in data["rows"]] == ["together"]


def test_numbers_show_three_digits_that_count() -> None:
    shown = [bench_throughput._number(value) for value in (0.0, 1.0, 1.234, 12.34, 123.4, 12345.6, 64.0)]
    assert shown == ["0", "1", "1.23", "12.3", "123", "12,346", "64"]
