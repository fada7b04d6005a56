"""Hub names: which files are fetched, and one clear line where the hub cannot help."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.utils import filter_repo_objects

from rooflight.models import CheckpointError, load_config, load_model
from rooflight.models.checkpoint import hub
from tests.models import tiny

REPOSITORY = [
    ".gitattributes",
    "README.md",
    "LICENSE",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "vocab.json",
    "model.safetensors",
    "model-00001-of-00002.safetensors",
    "model.safetensors.index.json",
    "consolidated.safetensors",
    "pytorch_model.bin",
    "model-q4.gguf",
    "onnx/model.onnx",
    "runs/events.out",
]


@pytest.fixture
def snapshots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Answers every download with a tiny model; returns the calls."""
    folder = tiny.save(tiny.reference_model("qwen3"), tmp_path / "snapshot")
    calls: list[dict[str, Any]] = []

    def download(name: str, **kwargs: Any) -> str:
        calls.append({"name": name} | kwargs)
        return str(folder)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return calls


def fetched(call: dict[str, Any]) -> list[str]:
    return list(filter_repo_objects(REPOSITORY, allow_patterns=call["allow_patterns"]))


def test_a_model_fetches_what_decoder_and_tokenizer_need(snapshots: list[dict[str, Any]]) -> None:
    loaded = load_model("owner/name")
    assert (loaded.source, snapshots[0]["name"]) == ("owner/name", "owner/name")
    assert isinstance(loaded.tokenizer_files, Path)
    assert fetched(snapshots[0]) == [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "chat_template.json",
        "additional_chat_templates/tool_use.jinja",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
    ]


def test_a_cache_that_holds_only_the_config_is_not_taken_for_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's library answers with what was fetched for `info` when it cannot reach the hub."""
    (tmp_path / "config.json").write_text("{}")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **_: str(tmp_path))
    assert one_line("owner/name").startswith("owner/name: no model*.safetensors on the Hugging Face Hub, or it")


def test_a_config_fetches_no_weights(snapshots: list[dict[str, Any]]) -> None:
    assert load_config("owner/name").family == "qwen3"
    assert fetched(snapshots[0]) == ["config.json", "generation_config.json"]


def one_line(name: str) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_model(name)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith("to use local files, pass a folder with config.json and *.safetensors, or a .gguf file")
    return message


def test_an_unreachable_hub_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nothing listens there
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "owner/name: the Hugging Face Hub cannot be reached" in one_line("owner/name")


def test_offline_mode_is_one_clear_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    assert "owner/name: the Hugging Face Hub cannot be reached" in one_line("owner/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("RepositoryNotFoundError", "no such model on the Hugging Face Hub, or it is private"),
        ("GatedRepoError", "its owner asks for a licence; accept it"),
        ("HfHubHTTPError", "the Hugging Face Hub cannot be reached (went wrong)"),
    ],
)
def test_refusals_of_the_hub_are_one_line(error: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(name: str, **kwargs: Any) -> str:
        kind = getattr(huggingface_hub.errors, error)
        failure = kind.__new__(kind)  # its constructor wants a response
        failure.args = ("went wrong\nand more",)
        raise failure

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert message in one_line("owner/name")


def test_names_that_the_hub_cannot_have_are_refused() -> None:
    with pytest.raises(CheckpointError, match="not a model name of the form owner/name"):
        hub.fetch("a/b/c")
