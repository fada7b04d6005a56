"""`rooflight bench request` and `throughput` as on a GPU, with made-up engines: defaults, tables, files, refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import cases, request, throughput
from rooflight.bench.roof import Roof
from rooflight.cli import bench, bench_throughput
from rooflight.limits.card import Bandwidth
from tests.bench.fake_engines import FakeEngines
from tests.cli.running import invoke, refused

QWEN = ["--model", "random:qwen3-0.6b"]
ROOF = Roof("a test", (Bandwidth(1, 4e12),), {"bf16": 8e14})
ENVIRONMENT = {"device": "NVIDIA Test 1", "cpu": "A CPU", "idle": True}


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeEngines:
    """A GPU as far as the command line can see; the folders are below a temporary one."""
    start: Any = FakeEngines(speed={"vllm": 2.0}, unprofiled={"vllm": "the profiler saw no work"})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(bench_throughput, "gpu_name", lambda: "NVIDIA Test 1")
    for module in (request, cases):
        monkeypatch.setattr(module, "missing", lambda peer, device: "not installed" if peer == "transformers" else None)
        monkeypatch.setattr(module, "environment_of", lambda device, threads: ENVIRONMENT)
        monkeypatch.setattr(module, "roof_of", lambda device, threads: ROOF)
    monkeypatch.setattr(bench, "run", lambda setup, progress: request.run(setup, progress, start))
    monkeypatch.setattr(bench_throughput, "run_cases", lambda setup, progress: cases.run(setup, progress, start))
    return start


def test_requests_with_the_defaults_of_a_gpu(engines: FakeEngines) -> None:
    result = invoke("bench", "request", *QWEN, "--peer", "vllm", "--peer", "transformers", "--rounds", "2")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(Path("build/bench/test-1/request.json").read_text())
    setup = data["setup"]
    assert (setup["prompts"], setup["max_tokens"], setup["dtypes"]) == ([32, 128, 1024, 4096, 8192], 128, ["bf16"])
    assert {given[3] for given in engines.started} == {"cuda"}
    lines = result.stdout.splitlines()
    assert lines[0] == "one request, 128 tokens out, greedy: medians of 2 rounds (±: the farthest)"
    assert lines[1] == "memory read at 4.00 TB/s (a test)"
    assert max(map(len, lines)) <= 100
    shown = [line.split() for line in lines]
    row, beside = data["rows"][:2]
    ours = next(words for words in shown if words[:2] == ["32", "rooflight"])
    first, token = row["first_token_ms"]["median"], row["per_token_ms"]["median"]
    assert [ours[place] for place in (2, 4, 5, 7, 8)] == [
        f"{first:.1f}", "5.0", f"{token:.3f}", "0.500", f"{row['limit_ms']:.3f}"
    ]  # fmt: skip
    rates = [f"{row[f'{kind}_tokens_per_s']['median']:.0f}" for kind in ("request", "decode")]
    assert ours[9:] == [f"{row['limit_ms'] / token:.0%}", *rates]
    peer = next(words for words in shown if words[:1] == ["vllm"])
    assert (peer[3], peer[-1]) == ("-", f"{beside['first_token_ratio']:.2f}/{beside['per_token_ratio']:.2f}")
    assert "vllm, bf16, 8192 tokens: not profiled: the profiler saw no work" in lines
    assert "rooflight bf16 (9.9): context 8320, of 16 tokens" in lines
    assert "transformers: not installed" in lines
    assert "before the run the card was idle" in lines
    assert lines[-2:] == [f"wrote build/bench/test-1/request.{kind}" for kind in ("json", "csv")]


def test_another_dtype_has_its_own_file(engines: FakeEngines) -> None:
    for command in ("request", "throughput"):
        assert invoke("bench", command, *QWEN, "--dtype", "fp16", "--rounds", "1").exit_code == 0
        assert Path(f"build/bench/test-1/{command}-fp16.json").exists()
        assert not Path(f"build/bench/test-1/{command}.json").exists()


def test_throughput_with_the_defaults_of_a_gpu(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = invoke("bench", "throughput", *QWEN, "--peer", "vllm")
    assert (result.exit_code, result.stderr) == (0, "")
    data = json.loads(Path("build/bench/test-1/throughput.json").read_text())
    assert [(row["requests"], row["prompt_tokens"], row["max_tokens"]) for row in data["rows"][::2]] == [
        (8, 128, 128), (64, 128, 128), (256, 512, 128), (1024, 128, 128)
    ]  # fmt: skip
    assert engines.started[0][2:4] == ("bf16", "cuda")
    lines = result.stdout.splitlines()
    assert lines[:2] == [
        "N requests at once, IN tokens in, OUT out; bf16, medians of 3 rounds",
        "limit: memory read at 4,000.0 GB/s, products at 800 TFLOP/s (a test)",
    ]
    shown = next(line for line in lines if line.split()[:1] == ["256:512:128"])
    row = data["rows"][4]
    assert shown.split()[1:] == [
        "rooflight", f"{row['tokens_per_s']['median']:,.0f}", shown.split()[3],
        f"{row['limit_tokens_per_s']:,.0f}", f"{row['of_limit']:.0%}", f"{row['wall_s']['median']:.2f}",
    ]  # fmt: skip
    assert max(len(line) for line in lines if not line.startswith("rooflight bf16")) <= 80
    assert f"{data['rows'][5]['ratio']:.2f}x" in lines[lines.index(shown) + 1]


def test_cases_that_are_asked_for(engines: FakeEngines, tmp_path: Path) -> None:
    arguments = ["--case", "3:20:4", "--case", "1:5:2", "--max-num-seqs", "2", "--out", tmp_path / "there"]
    assert invoke("bench", "throughput", *QWEN, *arguments).exit_code == 0
    data = json.loads((tmp_path / "there/throughput.json").read_text())
    assert [row["requests"] for row in data["rows"]] == [3, 1]
    assert engines.started[0][5].max_num_seqs == 2


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--device", "cuda", "--rate", "3"], "rate cannot be combined with a GPU, which runs cases (--case N:IN:OUT)"),
        (["--device", "cuda", "--requests", "3"], "requests cannot be combined with a GPU, which runs cases"),
        (["--case", "1:8:8", "--max-tokens", "8"], "max_tokens cannot be combined with cases"),
        (["--peer", "transformers"], "peer must be one of vllm, each once, was transformers"),
        (["--case", "1:40900:128"], "the longest prompt and max_tokens must fit the context of 40960 tokens"),
    ],
)
def test_bad_values_are_one_line(engines: FakeEngines, arguments: list[str], line: str) -> None:
    assert refused("bench", "throughput", *QWEN, *arguments).startswith(line)
    assert engines.started == []


def test_random_lengths_run_on_the_cpu(engines: FakeEngines, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(throughput, "cpu_read_bandwidth", lambda threads: 1e10)
    monkeypatch.setattr(throughput, "describe", lambda threads: ENVIRONMENT)
    lengths = ["--requests", "2", "--prompt-tokens", "4", "--max-tokens", "3", "--rounds", "1", "--threads", "1"]
    assert invoke("bench", "throughput", "--model", "random:tiny", *lengths, "--out", tmp_path).exit_code == 0
    data = json.loads((tmp_path / "throughput.json").read_text())
    assert (data["environment"]["device"], data["setup"]["dtype"]) == ("cpu", "fp32")
    assert engines.started == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("command", ["request", "throughput"])
def test_without_a_gpu_it_is_one_line(command: str, tmp_path: Path) -> None:
    line = "device must be one that this machine has (cpu), was 'cuda'"
    assert refused("bench", command, "--device", "cuda", "--out", tmp_path / "new") == line
    assert not (tmp_path / "new").exists()


def test_cases_on_the_cpu_have_a_file_of_their_own(tmp_path: Path) -> None:
    arguments = ["--model", "random:tiny", "--device", "cpu", "--threads", "1", "--rounds", "1", "--case", "2:4:3"]
    result = invoke("bench", "throughput", *arguments, "--out", tmp_path)
    assert result.exit_code == 0
    assert "prompts not counted (measured before the run)" in result.stdout
    data = json.loads((tmp_path / "throughput-cases.json").read_text())
    assert [row["tokens_per_s"]["median"] > 0 for row in data["rows"]] == [True]
    assert data["environment"]["device"] == "cpu"
