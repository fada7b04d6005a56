"""BR-042: files that are cut, empty, inconsistent or absent stop the load and are named; so is the tensor."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from rooflight.models import CheckpointError, load_model
from rooflight.models.checkpoint.safetensors_files import SafetensorsCheckpoint, read_header
from tests.models import tiny


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 in shards with an index."""
    folder = tmp_path_factory.mktemp("sharded")
    tiny.save(tiny.reference_model("qwen3"), folder, max_shard_size="350KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    return folder


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    return tiny.save(tiny.reference_model("qwen3"), tmp_path / "model")


def last_shard(folder: Path) -> Path:
    return sorted(folder.glob("*.safetensors"))[-1]


def cut(path: Path, keep: int) -> None:
    path.write_bytes(path.read_bytes()[:keep])


def with_header(path: Path, change: Callable[[dict[str, dict[str, object]]], None]) -> None:
    """Rewrites the header of a file and leaves its data."""
    raw = path.read_bytes()
    length = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


def test_sharded_equals_transformers(saved: Path) -> None:
    expected = tiny.reference_logits(tiny.reference_model("qwen3"), tiny.prompt(20))
    actual = tiny.decoder_logits(load_model(saved).decoder, tiny.prompt(20))
    assert tiny.relative_error(actual, expected) < 1e-5


@pytest.mark.parametrize("removed", ["100 bytes", "half"])
def test_br_042_a_cut_shard_is_named_with_its_first_lost_tensor(sharded: Path, removed: str) -> None:
    path = last_shard(sharded)
    size = path.stat().st_size
    lost = list(read_header(path))[-1]
    cut(path, size - 100 if removed == "100 bytes" else size // 2)
    with pytest.raises(CheckpointError, match=rf"{path.name}: the file is cut off: tensor \S+ ends at") as caught:
        load_model(sharded)
    if removed == "100 bytes":
        assert lost in str(caught.value)


def test_br_042_an_empty_file_is_named(sharded: Path) -> None:
    cut(last_shard(sharded), 0)
    with pytest.raises(CheckpointError, match=rf"{last_shard(sharded).name}: the file is empty"):
        load_model(sharded)


@pytest.mark.parametrize("claimed", [2 * 10**6, 10**9, 2**63, 2**64 - 1])
def test_br_042_a_header_longer_than_the_file_is_refused_unread(single: Path, claimed: int) -> None:
    path = single / "model.safetensors"
    path.write_bytes(struct.pack("<Q", claimed) + path.read_bytes()[8:])
    with pytest.raises(CheckpointError, match=rf"model.safetensors: the header claims {claimed} bytes, the file has"):
        load_model(single)


def test_br_042_a_missing_shard_is_named_with_a_tensor(sharded: Path) -> None:
    path = last_shard(sharded)
    path.unlink()
    with pytest.raises(CheckpointError, match=rf"index.json: shard {path.name} is missing \(it holds tensor \S+\)"):
        load_model(sharded)


def test_br_042_a_tensor_that_only_the_index_knows_is_named_with_its_shard(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.layers.9.extra"] = last_shard(sharded).name
    index.write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=rf"{last_shard(sharded).name}: tensor model.layers.9.extra is missing"):
        load_model(sharded)


def test_br_042_a_damaged_index_is_named(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    for content in ("{", "[]", '{"weight_map": 3}', "{}"):
        index.write_text(content)
        with pytest.raises(CheckpointError, match=r"index\.json: not a valid index"):
            load_model(sharded)


@given(share=st.floats(0, 1, exclude_max=True))
def test_br_042_a_cut_at_any_place_is_an_error_that_names_the_file(
    share: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "cut-anywhere"
    if not folder.exists():
        save_file({"a": torch.ones(5, 7), "b": torch.zeros(3, dtype=torch.bfloat16)}, folder.with_suffix(".whole"))
        folder.mkdir()
    whole = folder.with_suffix(".whole").read_bytes()
    path = folder / "model.safetensors"
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: "):
        SafetensorsCheckpoint(folder)


def test_trailing_bytes_are_refused(single: Path) -> None:
    path = single / "model.safetensors"
    path.write_bytes(path.read_bytes() + b"1234")
    with pytest.raises(CheckpointError, match="4 bytes follow the last tensor"):
        load_model(single)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"shape": [64, 64]}, "tensor model.norm.weight needs 16384 bytes, its header gives 256"),
        ({"shape": [-64]}, r"tensor model.norm.weight has shape \(-64,\) at bytes"),
        ({"shape": "64"}, "tensor model.norm.weight needs 96 bytes"),
        ({"shape": None}, "the header is not valid"),
        ({"data_offsets": [0, 256]}, "not valid"),
        ({"data_offsets": [2**40, 2**40 + 256]}, "not valid"),
        ({"data_offsets": 3}, "the header is not valid"),
    ],
)
def test_senseless_headers_are_refused(single: Path, entry: dict[str, object], message: str) -> None:
    path = single / "model.safetensors"
    with_header(path, lambda header: header["model.norm.weight"].update(entry))
    with pytest.raises(CheckpointError, match=message):
        load_model(single)


@pytest.mark.parametrize("text", [b"not json", b"[1]", b'{"a": 1}', b"\xff\xfe"])
def test_headers_that_are_not_headers_are_refused(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: the header is not valid"):
        SafetensorsCheckpoint(tmp_path)


def test_a_git_lfs_pointer_is_recognised(single: Path) -> None:
    (single / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(CheckpointError, match=r"model\.safetensors: this is a Git LFS pointer"):
        load_model(single)


def test_a_tensor_in_two_shards_is_refused(sharded: Path) -> None:
    first, *_, last = sorted(sharded.glob("*.safetensors"))
    tensors = load_file(first)
    name = next(iter(tensors))
    save_file(load_file(last) | {name: tensors[name]}, last)
    with pytest.raises(CheckpointError, match=rf"{last.name}: tensor {name} is in .*{first.name} as well"):
        load_model(sharded)


def test_types_that_no_decoder_takes_are_refused_by_name(single: Path) -> None:
    path = single / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
    save_file(tensors, path)
    with pytest.raises(
        CheckpointError, match=r"model\.safetensors: tensor model.norm.weight cannot be read: type F8_E4M3"
    ):
        load_model(single)


def test_which_file_is_meant_must_be_clear(single: Path) -> None:
    path = single / "model.safetensors"
    other = path.rename(single / "weights.safetensors")
    assert list(SafetensorsCheckpoint(single).tensors)
    shutil.copy(other, single / "again.safetensors")
    with pytest.raises(CheckpointError, match=r"not clear which to read: again.safetensors, weights.safetensors"):
        load_model(single)
    for file in single.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"no \.safetensors file"):
        load_model(single)
