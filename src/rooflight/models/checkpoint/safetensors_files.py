"""safetensors: one file, or shards with an index.

The header is checked against the file's size before anything is mapped: a cut shard that is mapped anyway reads
as zeros or kills the process at the first touch (vllm-metal and vmlx-swift report the first). The bytes
themselves are read by the `safetensors` library, which maps the file; those for a GPU by `staging`.

Format: 8 bytes little-endian header length, a JSON header `{name: {dtype, shape, data_offsets}}`, then the data
without holes (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from rooflight.models.checkpoint.base import CheckpointError, TensorInfo
from rooflight.models.checkpoint.staging import Staging

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MAX_HEADER_BYTES = 100_000_000  # the library's own limit
_READABLE = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Others may lie in a file but no decoder takes them; their size is not checked.


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of one file in the order of their bytes. CheckpointError if header and file disagree."""
    size = path.stat().st_size
    if size == 0:
        raise CheckpointError(f"{path}: the file is empty")
    with path.open("rb") as file:
        start = file.read(8)
        if start == b"version ":
            raise CheckpointError(f"{path}: this is a Git LFS pointer, not the weights; run `git lfs pull`")
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else size
        if length > min(size - 8, _MAX_HEADER_BYTES):
            raise CheckpointError(f"{path}: the header claims {length} bytes, the file has {size}")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda item: tuple(item[1]["data_offsets"]))
        return _check_entries(path, entries, 8 + length, size)
    except CheckpointError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
        reason = f"{type(error).__name__}: {error}"  # its repr would hold the whole header
        raise CheckpointError(f"{path}: the header is not valid ({reason})") from error


def _check_entries(path: Path, entries: list[tuple[str, Any]], data: int, size: int) -> dict[str, TensorInfo]:
    """data: the byte at which the values begin."""
    tensors: dict[str, TensorInfo] = {}
    data_bytes, expected_begin = size - data, 0
    for name, entry in entries:
        begin, end = (int(offset) for offset in entry["data_offsets"])
        shape = tuple(int(dim) for dim in entry["shape"])
        type_name = str(entry["dtype"])
        dtype = _READABLE.get(type_name)
        if begin != expected_begin or end < begin or min(shape, default=0) < 0:
            raise CheckpointError(f"{path}: tensor {name} has shape {shape} at bytes {begin} to {end}, not valid")
        if dtype is not None and end - begin != math.prod(shape) * dtype.itemsize:
            needed = math.prod(shape) * dtype.itemsize
            raise CheckpointError(f"{path}: tensor {name} needs {needed} bytes, its header gives {end - begin}")
        if end > data_bytes:
            raise CheckpointError(
                f"{path}: the file is cut off: tensor {name} ends at data byte {end}, the file has {data_bytes}"
            )
        refused = "" if dtype is not None else f"type {type_name}; readable: {', '.join(_READABLE)}"
        tensors[name] = TensorInfo(shape, dtype, type_name, end - begin, str(path), refused, data + begin)
        expected_begin = end
    if expected_begin != data_bytes:
        extra = data_bytes - expected_begin
        raise CheckpointError(f"{path}: {extra} bytes follow the last tensor; the file is not what its header says")
    return tensors


def find_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a model folder, and the index's map from tensor to file name (empty without one)."""
    if (folder / SINGLE).is_file():
        return [folder / SINGLE], {}
    index_path = folder / INDEX
    if index_path.is_file():
        try:
            weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
            names = sorted(set(weight_map.values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index_path}: not a valid index ({type(error).__name__}: {error})") from error
        for name in names:
            if not (folder / name).is_file():
                first = next(tensor for tensor, file in weight_map.items() if file == name)
                raise CheckpointError(f"{index_path}: shard {name} is missing (it holds tensor {first})")
        return [folder / name for name in names], weight_map
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found, {}
    if found:
        listed = ", ".join(path.name for path in found)
        raise CheckpointError(f"{folder}: neither {SINGLE} nor {INDEX}, so it is not clear which to read: {listed}")
    raise CheckpointError(f"{folder}: no .safetensors file (.bin and .pth files are not read)")


class SafetensorsCheckpoint:
    """The weights of a model folder. All headers are read and checked here; data only by `read_into`."""

    def __init__(self, folder: Path) -> None:
        files, weight_map = find_files(folder)
        self._tensors: dict[str, TensorInfo] = {}
        for path in files:
            for tensor, info in read_header(path).items():
                if tensor in self._tensors:
                    other = self._tensors[tensor].file
                    raise CheckpointError(f"{path}: tensor {tensor} is in {other} as well")
                self._tensors[tensor] = info
        for tensor, shard in weight_map.items():
            if tensor not in self._tensors:
                raise CheckpointError(f"{folder / shard}: tensor {tensor} is missing (named by {folder / INDEX})")
        self._folder = folder
        self._open_path = ""
        self._open_file: Any = None
        self._staging: Staging | None = None

    @property
    def name(self) -> str:
        return str(self._folder)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def read_into(self, name: str, out: torch.Tensor) -> None:
        path = self._tensors[name].file
        try:
            if out.is_cuda:
                self._stage(self._tensors[name], out)
                return
            if path != self._open_path:  # one shard mapped at a time
                self._open_file, self._open_path = None, ""
                self._open_file, self._open_path = safe_open(path, framework="pt", device="cpu"), path
            out.copy_(self._open_file.get_tensor(name))
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path}: tensor {name} cannot be read: {error}") from error

    def _stage(self, info: TensorInfo, out: torch.Tensor) -> None:
        assert info.dtype is not None  # what has none was refused
        if self._staging is None:
            self._staging = Staging()
        with open(info.file, "rb", buffering=0) as file:
            self._staging.copy(file, info.begin, info.dtype, out)
