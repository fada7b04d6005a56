"""GGUF: one file with metadata, vocabulary and weights.

Plain types are copied, Q8_0, Q4_0 and Q4_1 are dequantised by the `gguf` library, half a million values at a time,
straight into the packed parameters. Others are refused by name when the file is opened for its weights.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch

from rooflight.models.checkpoint.base import CheckpointError, TensorInfo
from rooflight.models.checkpoint.gguf_header import TensorEntry, read_gguf_header

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_QUANTISED = ("Q8_0", "Q4_0", "Q4_1")
_VALUES_AT_ONCE = 500_000  # 2 MB of FP32 between file and parameter; malloc may keep a few such blocks for itself


class GgufFile:
    """One GGUF file, mapped. The header is read and every tensor's place checked against the file's size here."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            with path.open("rb") as file:
                # A private writable mapping: torch.from_numpy warns about read-only memory. Nothing is written.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError as error:  # mmap refuses a file of zero bytes
            raise CheckpointError(f"{path}: the file is empty") from error
        header = read_gguf_header(path, self._data)
        self._metadata = header.metadata
        self._starts: dict[str, int] = {}
        self._tensors: dict[str, TensorInfo] = {}
        if self._metadata.get("split.count", 1) not in (0, 1):
            raise CheckpointError(f"{path}: one part of a split GGUF file; join them with `llama-gguf-split --merge`")
        for entry in sorted(header.tensors, key=lambda entry: entry.offset):
            self._add(entry, header.data_start)

    def _add(self, entry: TensorEntry, data_start: int) -> None:
        name, shape = entry.name, entry.shape
        if name in self._tensors:
            raise CheckpointError(f"{self._path}: tensor {name} is in the file twice")
        try:
            kind = gguf.GGMLQuantizationType(entry.type_id)
            type_name, (block_values, block_bytes) = kind.name, gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            type_name, block_values, block_bytes = f"number {entry.type_id}", 1, 0
        if min(shape, default=0) < 1 or shape[-1] % block_values != 0:
            raise CheckpointError(f"{self._path}: tensor {name} has shape {shape}, not valid for type {type_name}")
        num_bytes = math.prod(shape) // block_values * block_bytes
        start = data_start + entry.offset
        if start + num_bytes > len(self._data):
            raise CheckpointError(
                f"{self._path}: the file is cut off: tensor {name} ends at byte {start + num_bytes}, "
                f"the file has {len(self._data)}"
            )
        readable = type_name in _PLAIN or type_name in _QUANTISED
        refused = "" if readable else f"type {type_name}; readable: {', '.join((*_PLAIN, *_QUANTISED))}"
        self._starts[name] = start
        self._tensors[name] = TensorInfo(shape, _PLAIN.get(type_name), type_name, num_bytes, str(self._path), refused)

    @property
    def name(self) -> str:
        return str(self._path)

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        return self._tensors

    def metadata(self) -> dict[str, Any]:
        """Keys as in the file, values as plain Python (int, float, bool, str and lists of these)."""
        return self._metadata

    def values(self, name: str) -> list[float]:
        """A small tensor as a flat list."""
        info = self._tensors[name]
        out = torch.empty(info.shape, dtype=torch.float32)
        self.read_into(name, out)
        return [float(value) for value in out.flatten().tolist()]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        info, start = self._tensors[name], self._starts[name]
        if info.dtype is not None:
            count = math.prod(info.shape)
            out.copy_(torch.frombuffer(self._data, dtype=info.dtype, count=count, offset=start).view(info.shape))
            return
        kind = gguf.GGMLQuantizationType[info.type_name]
        num_rows = math.prod(info.shape[:-1])
        packed = np.frombuffer(self._data, np.uint8, info.num_bytes, start).reshape(num_rows, -1)
        rows_out = out.view(num_rows, info.shape[-1])
        step = max(1, _VALUES_AT_ONCE // info.shape[-1])
        for row in range(0, num_rows, step):
            values = gguf.quants.dequantize(packed[row : row + step], kind)
            rows_out[row : row + step].copy_(torch.from_numpy(values))
