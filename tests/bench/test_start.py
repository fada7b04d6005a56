"""Starts: the model that is written, real processes once, and what is made of their answers."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import results, start
from rooflight.bench.start import COLD, WARM, Start, StartSetup
from rooflight.bench.start_model import write_preset
from rooflight.bench.start_worker import grouped
from rooflight.models.load import load_model

SCRIPTS = Path(__file__).parents[2] / "scripts"
ENVIRONMENT = {
    "device": "NVIDIA Test 1", "driver": "580.1", "cpu": "A CPU", "torch": "2.99", "triton": "3.9", "commit": "abc",
    "date": "2026-12-01",
}  # fmt: skip


def test_a_written_preset_is_the_preset(tmp_path: Path) -> None:
    drawn, read = load_model("random:tiny"), load_model(write_preset("random:tiny", tmp_path))
    assert read.config == drawn.config
    expected = dict(drawn.decoder.named_parameters())
    actual = dict(read.decoder.named_parameters())
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[name], expected[name]) for name in expected)


def test_a_start_in_a_process_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts are all there, none is negative, and they add up to the whole."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    model = write_preset("random:tiny", tmp_path)
    kernels = tmp_path / "kernels"
    kernels.mkdir()
    found = start.launch(str(model), "cpu", True, kernels)
    names = ["interpreter", "import torch", "import rooflight", "weights", "tokenizer", "KV cache", "rest"]
    assert list(found.parts) == names
    assert min(found.parts.values()) >= 0
    assert sum(found.parts.values()) == pytest.approx(found.ready)
    assert found.parts["import torch"] > 0.1
    assert found.parts["rest"] < found.ready / 2
    assert found.ready < found.first_token < start.PATIENCE
    assert found.compiled == 0
    assert {path.name.partition(".")[0] for path in kernels.rglob("*.pyc")} >= {"start_worker", "llm", "storage"}


def test_a_start_that_fails_says_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    message = r"^the started process could not get ready: CheckpointError: .*config.json: must hold a JSON object"
    with pytest.raises(ChildProcessError, match=message):
        start.launch(str(tmp_path), "cpu", True, tmp_path)


@pytest.mark.parametrize(("errors", "words"), [("Traceback\nBoom: it broke\n", "Boom: it broke"), ("", "no message")])
def test_a_process_that_dies_is_told_with_its_last_words(errors: str, words: str) -> None:
    with pytest.raises(ChildProcessError, match=f"^the started process ended with code -9: {words}$"):
        start.answer("", errors, -9)


def test_parts_of_the_graph_runner_are_grouped() -> None:
    seconds = {
        "weights": 1.0,
        "KV cache": 0.25,
        "first prompt steps": 2.0,
        "prompt graphs": 3.0,
        "first decode steps": 4.0,
        "decode graphs": 5.0,
    }
    assert grouped(seconds) == {"weights": 1.0, "KV cache": 0.25, "first steps": 6.0, "graphs": 8.0}


class FakeStarts:
    """Cold starts take 10, 30 and 20 s, warm ones a tenth; every cold one compiles three kernels into its folder."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, bool, int]] = []
        self.folders: list[Path] = []
        self._seconds = iter((10.0, 30.0, 20.0))
        self._cold = 0.0

    def __call__(self, model: str, device: str, skip_tokenizer: bool, kernels: Path) -> Start:
        there = start.compiled(kernels)
        self.seen.append((Path(model).name, device, skip_tokenizer, there))
        self.folders.append(kernels)
        if there == 0:
            self._cold = next(self._seconds)
            for index in range(3):
                (kernels / f"{index}.cubin").touch()
        ready = self._cold if there == 0 else self._cold / 10
        parts: Mapping[str, float] = {"import torch": ready / 4, "rest": ready * 3 / 4}
        return Start(ready, ready + 1, parts, start.compiled(kernels) - there)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeStarts]:
    starts = FakeStarts()
    monkeypatch.setattr(start, "launch", starts)
    monkeypatch.setattr(start, "describe_gpu", lambda: ENVIRONMENT)
    yield starts
    assert not any(folder.exists() for folder in starts.folders)


def test_rounds_are_a_cold_start_and_a_warm_one_in_its_folder(fake: FakeStarts) -> None:
    steps: list[tuple[str, int, int]] = []
    report = start.run(StartSetup("random:tiny", rounds=3), lambda *step: steps.append(step))
    assert fake.seen == [("model", "cpu", True, 0), ("model", "cpu", True, 3)] * 3
    assert fake.folders[0] == fake.folders[1]
    assert len(set(fake.folders)) == 3
    cold, warm = report.rows
    assert (cold.cache, warm.cache) == (COLD, WARM)
    assert (cold.ready_s.median, cold.ready_s.low, cold.ready_s.high) == (20.0, 10.0, 30.0)
    assert (warm.ready_s.median, warm.first_token_s.median) == (2.0, 3.0)
    assert cold.parts_s == {"import torch": 5.0, "rest": 15.0}
    assert (cold.compiled, warm.compiled) == (3, 0)
    assert (cold.goal_s, cold.within_goal) == (None, None)
    assert "random:tiny from a safetensors file of" in report.weights
    assert [step[1] for step in steps] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert {step[2] for step in steps} == {7}


def test_goals_hold_on_a_gpu(fake: FakeStarts) -> None:
    report = start.run(StartSetup("random:tiny", "cuda", rounds=2))
    cold, warm = report.rows
    assert (cold.goal_s, cold.ready_s.median, cold.within_goal) == (20.0, 20.0, True)
    assert sum(cold.parts_s.values()) == 10.0  # of two starts, the quicker
    assert (warm.goal_s, warm.ready_s.median, warm.within_goal) == (5.0, 2.0, True)
    late = start.row_of(WARM, [Start(5.01, 6.0, {"rest": 5.01}, 0)], 5.0)
    assert late.within_goal is False


def test_files_with_a_tokenizer_load_it(tmp_path: Path) -> None:
    folder = write_preset("random:tiny", tmp_path)
    assert start.prepare(str(folder), tmp_path) == (str(folder), f"{folder}, without tokenizer", True)
    (folder / "tokenizer.json").touch()
    assert start.prepare(str(folder), tmp_path) == (str(folder), f"{folder}, with its tokenizer", False)


def test_the_table(fake: FakeStarts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    tables: Any = importlib.import_module("start_tables")
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.TABLES["decode-start"]() == ""
    report = start.run(StartSetup("random:tiny", "cuda", rounds=3))
    as_json, as_csv = results.write(tmp_path, "start", report.as_data())
    assert json.loads(as_json.read_text())["rows"][1]["within_goal"] is True
    assert "parts_s.import torch" in as_csv.read_text().splitlines()[0]
    lines = tables.start_table().splitlines()
    assert lines[0] == "| seconds | cold caches | warm caches |"
    assert lines[2:8] == [
        "| import torch | 5.00 | 0.50 |",
        "| rest | 15.00 | 1.50 |",
        "| **ready** | 20.00 (10.00–30.00) | 2.00 (1.00–3.00) |",
        "| goal | 20 | 5 |",
        "| first token | 21.00 (11.00–31.00) | 3.00 (2.00–4.00) |",
        "| kernels compiled | 3 | 0 |",
    ]
    assert "medians (least–most) of 3 rounds" in lines[-1]
    assert "NVIDIA Test 1, driver 580.1; host A CPU" in lines[-1]
    assert "**start_tables.TABLES" in (SCRIPTS / "generate_docs.py").read_text()
