"""Weights on their way to a GPU: every value arrives, whatever the pieces and the place in the file.

Without a GPU the same code runs with memory that is not pinned and copies that are done when they return.
"""

from __future__ import annotations

from io import FileIO
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.models import CheckpointError, load_model
from rooflight.models.checkpoint.safetensors_files import SafetensorsCheckpoint
from rooflight.models.checkpoint.staging import Staging
from tests.models import tiny

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def staged(path: Path, offset: int, dtype: torch.dtype, out: torch.Tensor, staging: Staging) -> None:
    with path.open("rb", buffering=0) as file:
        staging.copy(file, offset, dtype, out)


@pytest.mark.parametrize("piece", [16, 104, 1 << 16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_arrive(dtype: torch.dtype, piece: int, tmp_path: Path) -> None:
    """From a place that no dtype is aligned to, in one piece and in many, as they are and cast."""
    values = torch.randn(37, 11, generator=torch.Generator().manual_seed(0)).to(dtype)
    path = tmp_path / "file"
    path.write_bytes(b"xyz" + values.view(torch.uint8).numpy().tobytes() + b"behind")
    staging = Staging(pinned=False, piece=piece)
    whole = torch.full((41, 11), 9.0, dtype=dtype)
    staged(path, 3, dtype, whole.narrow(0, 2, 37), staging)
    assert torch.equal(whole[2:39], values)
    assert torch.equal(whole[[0, 1, 39, 40]], torch.full((4, 11), 9.0, dtype=dtype))
    for other in DTYPES:
        out = torch.empty(37, 11, dtype=other)
        staged(path, 3, dtype, out, staging)
        assert torch.equal(out, values.to(other))
    staged(path, 3, dtype, torch.empty(0, 11, dtype=dtype), staging)


def test_a_file_that_ends_too_soon_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(39))
    with pytest.raises(OSError, match="the file ends at byte 39"):
        staged(path, 0, torch.float32, torch.empty(10), Staging(pinned=False))


def test_short_reads_go_on(tmp_path: Path) -> None:
    class Short(FileIO):
        def readinto(self, memory: Any) -> int:
            return super().readinto(memory[:7])

    path = tmp_path / "file"
    path.write_bytes(bytes(range(200)))
    out = torch.empty(50, dtype=torch.int32)
    with Short(path) as file:
        Staging(pinned=False).copy(file, 0, torch.int32, out)
    assert out.view(torch.uint8).tolist() == list(range(200))


def test_a_piece_is_not_filled_again_while_it_is_copied(tmp_path: Path) -> None:
    """Both pieces in turn, each only after the copy from it: when that is waited for, its bytes are still the old."""
    path = tmp_path / "file"
    path.write_bytes(bytes(range(1, 65)))
    staging = Staging(pinned=False, piece=16)
    seen: list[tuple[int, int]] = []

    class Copy:
        def __init__(self, index: int) -> None:
            self.index = index

        def synchronize(self) -> None:
            seen.append((self.index, int(staging._pieces[self.index][0])))

    staging._copied = [Copy(0), Copy(1)]  # type: ignore[list-item]
    for piece in staging._pieces:
        piece.fill_(0)
    staged(path, 0, torch.uint8, torch.empty(64, dtype=torch.uint8), staging)
    assert seen == [(1, 0), (0, 0), (1, 1), (0, 17)]


def test_a_checkpoint_stages_what_it_also_maps(tmp_path: Path) -> None:
    """Every tensor of every shard: the header's places are those of the bytes."""
    folder = tiny.save(tiny.reference_model("qwen3").bfloat16(), tmp_path / "model", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    checkpoint = SafetensorsCheckpoint(folder)
    checkpoint._staging = Staging(pinned=False, piece=4096)
    for name, info in checkpoint.tensors.items():
        mapped, read = torch.empty(info.shape), torch.full(info.shape, float("nan"))
        checkpoint.read_into(name, mapped)
        checkpoint._stage(info, read)
        assert torch.equal(read, mapped)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["auto", "fp32"])
def test_a_model_on_a_gpu_is_that_on_the_cpu(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With pieces so small that both are in turn many times for most tensors."""
    monkeypatch.setattr(Staging, "__init__", _with_small_pieces(Staging.__init__))
    folder = tiny.save(tiny.reference_model("qwen3").bfloat16(), tmp_path / "model")
    expected = dict(load_model(folder, dtype=dtype).decoder.named_parameters())
    actual = dict(load_model(folder, dtype=dtype, device="cuda").decoder.named_parameters())
    assert actual.keys() == expected.keys()
    for name, parameter in actual.items():
        assert parameter.is_cuda
        assert torch.equal(parameter.cpu(), expected[name]), name


@pytest.mark.gpu
def test_many_large_tensors_arrive_on_a_gpu(tmp_path: Path) -> None:
    values = torch.randn(12, 3 << 20, generator=torch.Generator().manual_seed(1)).bfloat16()  # 6 MiB a row
    path = tmp_path / "file"
    path.write_bytes(values.view(torch.uint8).numpy().tobytes())
    out = torch.zeros_like(values, device="cuda")
    staging = Staging()
    staged(path, 0, torch.bfloat16, out, staging)
    assert torch.equal(out.cpu(), values)
    out.zero_()
    for row in range(12):
        staged(path, row * values[0].nbytes, torch.bfloat16, out[row], staging)
    assert torch.equal(out.cpu(), values)


@pytest.mark.gpu
def test_a_file_that_vanishes_is_named(tmp_path: Path) -> None:
    folder = tiny.save(tiny.reference_model("qwen3"), tmp_path / "model")
    checkpoint = SafetensorsCheckpoint(folder)
    (folder / "model.safetensors").unlink()
    name, info = next(iter(checkpoint.tensors.items()))
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: tensor {name} cannot be read: "):
        checkpoint.read_into(name, torch.empty(info.shape, device="cuda"))


def _with_small_pieces(usual):  # type: ignore[no-untyped-def]
    return lambda self, pinned=True, piece=1024: usual(self, pinned, piece)
