"""CUDA graphs whose capture may fail without harm to what follows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def captured(graph: torch.cuda.CUDAGraph, pool: Any, stream: torch.cuda.Stream, mode: str) -> Iterator[None]:
    """`torch.cuda.graph`, after which the current stream is the one of before also if the capture could not begin.

    pool: of its memory. stream: that it is captured on; PyTorch's own is of the GPU that a process captured on first.
    mode: whose calls to the device may break it, as `capture_error_mode`.
    """
    began = False
    with torch.cuda.stream(torch.cuda.current_stream()):
        try:
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=mode):
                began = True
                yield
        except BaseException:
            if not began:
                # PyTorch has it half registered, and would end the process when it is destroyed: it is kept for ever.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(graph))
            raise
