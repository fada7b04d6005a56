"""The request benchmark: what it computes, what it refuses, and one real run on a tiny checkpoint."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import pytest
import torch

from rooflight.bench import results
from rooflight.bench.measurement import RequestTiming, Room, Spread
from rooflight.bench.ours import RooflightContender
from rooflight.bench.process import ContenderProcess, missing
from rooflight.bench.request import RequestSetup, random_prompt, run
from rooflight.bench.request_rows import leading_equal
from rooflight.models.load import load_config
from tests.models.tiny import reference_model, save


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    save(reference_model("qwen3"), path)
    return path


def test_spread_is_median_and_extremes_in_the_unit_asked_for() -> None:
    assert Spread.of([0.003, 0.001, 0.002], 1e3) == Spread(median=2.0, low=1.0, high=3.0)


def test_time_per_token_leaves_the_first_token_out() -> None:
    timing = RequestTiming(first_token=1.0, total=2.5, tokens=(1, 2, 3, 4))
    assert timing.per_token == pytest.approx(0.5)
    assert timing.request_rate == pytest.approx(1.6)


def test_prompts_are_the_same_for_the_same_seed() -> None:
    assert random_prompt(1000, 5, 0) == random_prompt(1000, 5, 0) != random_prompt(1000, 5, 1)
    assert all(0 <= token < 7 for token in random_prompt(7, 100, 0))


def test_leading_equal_counts_up_to_the_first_difference() -> None:
    assert [leading_equal((1, 2, 3), other) for other in ((1, 2, 3), (1, 9, 3), (9, 2, 3))] == [3, 1, 0]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"rounds": 0}, "rounds must be 1 or more, was 0"),
        ({"threads": 0}, "threads must be 1 or more, was 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be 1 or more, was 0"),
        ({"max_tokens": 1}, "max_tokens must be 2 or more"),
        ({"prompts": ()}, "prompts must be lengths"),
        ({"prompts": (0,)}, "prompts must be lengths"),
        ({"dtypes": ("fp9",)}, "dtype must be one of fp32, bf16, fp16, was 'fp9'"),
        ({"peers": ("vlm",)}, "peer must be one of transformers, vllm, each once, was vlm"),
        ({"peers": ("rooflight",)}, "peer must be one of transformers, vllm, each once, was rooflight"),
        ({"peers": ("transformers",) * 2}, "each once, was transformers, transformers"),
    ],
)
def test_setup_refuses_what_it_cannot_measure(arguments: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        RequestSetup(model=None, **arguments)  # type: ignore[arg-type]


def test_a_peer_that_is_not_installed_is_named_and_not_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert missing("transformers") == "not installed"
    setup = RequestSetup(str(folder), peers=("transformers",), prompts=(4,), max_tokens=2, rounds=1)
    report = run(setup)
    assert report.absent == {"transformers": "not installed"}
    assert [row.engine for row in report.rows] == ["rooflight"]


def test_a_request_beyond_the_context_is_refused_before_anything_is_measured(folder: Path) -> None:
    context = load_config(str(folder)).max_position_embeddings
    message = f"must fit the context of {context} tokens, were {context - 5} and 6"
    with pytest.raises(ValueError, match=message):
        run(RequestSetup(str(folder), prompts=(3, context - 5), max_tokens=6))


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "below"):
        with pytest.raises(OSError, match=re.escape(str(folder))):
            results.prepare(folder)
    monkeypatch.setattr("os.access", lambda path, mode: False)  # to the super-user every folder is open
    with pytest.raises(PermissionError, match=r"Permission denied: .*results"):
        results.prepare(tmp_path / "results")


def test_a_model_that_cannot_be_loaded_ends_with_the_workers_words(tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"rooflight could not load the model: .*config.json"):
        ContenderProcess("rooflight", str(tmp_path), "fp32", "cpu", 1)


def test_a_contender_that_has_died_is_an_error_with_its_name(folder: Path) -> None:
    """Not a broken pipe, which the command line takes for a reader that has gone and passes over in silence."""
    with ContenderProcess("rooflight", str(folder), "fp32", "cpu", 1) as process:
        process._process.kill()
        process._process.wait()
        with pytest.raises(ChildProcessError, match=r"^rooflight ended with code -9: "):
            process.run([1, 2], 2)


def test_a_process_has_the_room_asked_for_and_says_why_it_has_no_gpu_times() -> None:
    with ContenderProcess("rooflight", "random:tiny", "fp32", "cpu", 1, Room(max_model_len=48, num_pages=5)) as process:
        assert (process.facts["max_model_len"], process.facts["num_pages"]) == (48, 5)
        assert process.facts["load_seconds"] > 0
        assert process.busy([1, 2], 4) == "there is no GPU in this run"
        assert len(process.run([1, 2], 3).tokens) == 3
        assert process.serve([[1, 2], [3]], 3) > 0


def test_one_run_beside_transformers(folder: Path, tmp_path: Path) -> None:
    setup = RequestSetup(str(folder), ("transformers",), ("fp32",), prompts=(5, 20), max_tokens=6, rounds=2)
    steps: list[tuple[int, int]] = []
    report = run(setup, lambda what, done, of: steps.append((done, of)))
    assert steps[-1] == (6, 6)
    assert [(row.engine, row.prompt_tokens) for row in report.rows] == [
        ("rooflight", 5),
        ("transformers", 5),
        ("rooflight", 20),
        ("transformers", 20),
    ]
    limit = load_config(str(folder)).weight_bytes_per_token(torch.float32) / report.read_bandwidth * 1e3
    for ours, peer in (report.rows[:2], report.rows[2:]):
        assert peer.same_tokens == peer.new_tokens == 6  # greedy in FP32: the same model was measured
        assert peer.per_token_ratio == pytest.approx(peer.per_token_ms.median / ours.per_token_ms.median)
        assert ours.per_token_ratio is None
        assert ours.limit_ms == pytest.approx(limit)
        assert 0 < ours.per_token_ms.low <= ours.per_token_ms.median <= ours.per_token_ms.high
        assert ours.tokens_per_second == pytest.approx(1e3 / ours.per_token_ms.median)
        assert ours.of_limit == pytest.approx(limit / ours.per_token_ms.median)
        assert ours.decode_tokens_per_s.low == pytest.approx(1e3 / ours.per_token_ms.high)
        least = ours.first_token_ms.low + 5 * ours.per_token_ms.low
        most = ours.first_token_ms.high + 5 * ours.per_token_ms.high
        assert 5.99e3 / most < ours.request_tokens_per_s.low <= ours.request_tokens_per_s.high < 6.01e3 / least
        assert ours.request_ratio is None
        assert peer.request_ratio == ours.request_tokens_per_s.median / peer.request_tokens_per_s.median
        assert (ours.busy_per_token_ms, ours.busy_absent) == (None, "there is no GPU in this run")
    as_json, as_csv = results.write(tmp_path, "request", report.as_data())
    data = json.loads(as_json.read_text())
    with as_csv.open() as file:
        rows = list(csv.DictReader(file))
    assert float(rows[1]["per_token_ms.median"]) == data["rows"][1]["per_token_ms"]["median"]
    assert rows[0]["per_token_ratio"] == ""
    assert (data["environment"]["threads"], data["environment"]["device"]) == (1, "cpu")
    ours = data["engines"]["rooflight fp32"]
    assert (ours["num_pages"] * ours["page_size"], ours["prefix_cache"]) == (ours["max_model_len"], False)
    assert ours["graph_buckets"] == []
    assert set(data["engines"]) == {"rooflight fp32", "transformers fp32"}


def test_our_rounds_run_the_whole_prompt_every_time() -> None:
    """The rounds repeat their prompts; taken from the prefix cache, a first token would cost next to nothing."""
    ours = RooflightContender("random:tiny", "fp32", "cpu")
    for _ in range(3):
        ours.run([5] * 100, 2)
    metrics = ours.llm.engine.metrics()
    assert (metrics.prompt_tokens, metrics.cached_tokens) == (300, 0)
