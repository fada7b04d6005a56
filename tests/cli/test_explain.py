"""`rooflight explain MODEL` from the outside."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch

from rooflight.limits.explanation import explain
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.checkpoint.base import CheckpointError
from rooflight.models.load import load_config
from tests.cli.running import invoke, refused


def test_a_page_with_every_answer() -> None:
    result = invoke("explain", "random:qwen3-0.6b", "--context", "0", "--what-if", "kv=fp8,head=w8")
    assert result.exit_code == 0
    for words in (
        "NVIDIA H200",
        "measured, commit",
        "Step limit",
        "Launch wall",
        "112 KiB",
        "10,394 tokens",
        "1,192.1 MB",
    ):
        assert words in result.stdout
    for words in (
        "rms_norm_swiglu gate_up",
        "qk_norm_rope_attention_",
        "What if",
        "kv=fp8,head=w8",
        "1. Phase.",
        "4. Own kernel.",
    ):
        assert words in result.stdout
    assert all(len(line) <= 80 for line in result.stdout.splitlines()[2:])


def test_json_has_the_same_figures() -> None:
    result = invoke("explain", "random:qwen3-0.6b", "--context", "0", "--json", "--what-if", "batch=8")
    data = json.loads(result.stdout)
    assert data["weight_bytes"] == 1_192_099_840
    known = explain("random:qwen3-0.6b", load_config("random:qwen3-0.6b"), Scenario(Step("decode", 1, 0), "h200"))
    assert data["stream_us"] == pytest.approx(known.stream_us)
    assert [piece["step"] for piece in data["advice"]] == ["phase", "parallelism", "precision", "own kernel"]
    assert data["what_if"][0]["gain"] > 5


@pytest.mark.parametrize("model", ["random:qwen3-0.6b", "random:qwen3-8b", "random:llama-3.2-1b", None])
def test_three_seconds_and_no_weights(model: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once everything is imported; and nothing as large as a weight is ever made where memory is."""
    if model is None:
        try:
            load_config(None)
        except CheckpointError as error:
            pytest.skip(str(error))
    invoke("explain", "random:tiny")
    empty = torch.empty

    def watched(*args: Any, **kwargs: Any) -> torch.Tensor:
        made = empty(*args, **kwargs)
        assert made.is_meta or made.numel() < 1_000_000
        return made

    monkeypatch.setattr(torch, "empty", watched)
    start = time.process_time()  # the machine is shared
    result = invoke("explain", *([model] if model else []))
    assert result.exit_code == 0
    assert time.process_time() - start < 3


def test_a_card_that_was_not_measured_says_so() -> None:
    result = invoke("explain", "random:tiny", "--gpu", "rtx4090")
    assert "data sheet, times the fraction of it that the NVIDIA H200 reached" in result.stdout


def test_what_does_not_fit_is_said() -> None:
    result = invoke("explain", "random:qwen3-8b", "--gpu", "l4", "--batch", "100000", "--context", "8192")
    assert result.exit_code == 0
    assert "does not fit" in result.stdout


def test_fp32_models_are_explained_in_bf16() -> None:
    assert json.loads(invoke("explain", "random:tiny", "--json").stdout)["dtype"] == "bf16"
    assert json.loads(invoke("explain", "random:tiny", "--json", "--dtype", "fp32").stdout)["dtype"] == "fp32"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["random:nope"], "known: random:qwen3-0.6b"),
        (["random:tiny", "--gpu", "h300"], "gpu must be one of a100, b200"),
        (["random:tiny", "--phase", "train"], "phase must be one of decode, prefill"),
        (["random:tiny", "--what-if", "foo=1"], "what-if must be made of batch=, context="),
        (["random:tiny", "--batch", "0"], "batch must be from 1"),
        (["random:tiny", "--context", "1000000"], "context must be from 0 to 4,095"),
        (["random:tiny", "--dtype", "fp3"], "dtype must be auto, fp32, bf16 or fp16"),
        (["random:tiny", "--trace", "x.json"], "--trace explains a file"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], words: str) -> None:
    assert words in refused("explain", *arguments)
