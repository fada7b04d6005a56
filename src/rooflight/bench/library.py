"""The compiled kernels that only measuring needs: an empty one, a read of a whole buffer, older norm kernels."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch

PATH = Path(__file__).parent / "lib" / "librooflight_bench.so"
VERSIONS = (1, 2, 3, 4, 5)
_DTYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}


class BenchLibrary:
    """Each method launches on PyTorch's current stream and raises RuntimeError with CUDA's error number."""

    def __init__(self, path: Path) -> None:
        """OSError if the file cannot be loaded, AttributeError if it is another library."""
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._library = ctypes.CDLL(str(path))
        names = ("rl_empty", "rl_read", "rl_unmark", "rl_chase", "rl_version")
        self._empty, self._read, self._unmark, self._chase, self._version = (
            getattr(self._library, name) for name in names
        )
        self._empty.argtypes = [pointer, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int]
        self._read.argtypes = [pointer, pointer, size, pointer, ctypes.c_int]
        self._unmark.argtypes = [pointer, pointer, size]
        self._chase.argtypes = [pointer, pointer, ctypes.c_int, pointer]
        self._version.argtypes = [pointer, ctypes.c_int, ctypes.c_int, pointer, pointer, pointer]
        self._version.argtypes += [ctypes.c_long, ctypes.c_int, ctypes.c_float]

    def empty(self, count: int, grid: int, block: int, pdl: bool = False) -> None:
        """`count` kernels that do nothing, with programmatic dependent launch if `pdl`."""
        _check(self._empty(_stream(), count, grid, block, int(pdl)))

    def read(self, data: torch.Tensor, out: torch.Tensor, flush: bool = False) -> None:
        """Read all of `data` (contiguous) once, in one kernel. out: four bytes of scratch on the same device.

        flush: also evict lines of L2 that were loaded to be evicted last. The lines of `data` are then marked so
        themselves, until `unmark`.
        """
        _check(self._read(_stream(), data.data_ptr(), data.nbytes, out.data_ptr(), int(flush)))

    def unmark(self, data: torch.Tensor) -> None:
        """Let L2 treat the lines of `data` (aligned to 128 bytes) like others again after flushes."""
        _check(self._unmark(_stream(), data.data_ptr(), data.nbytes))

    def chase(self, data: torch.Tensor, hops: int, out: torch.Tensor) -> None:
        """Follow `hops` indices through data (INT32), starting at 0, each load waiting for the one before it.

        out: four bytes of scratch.
        """
        _check(self._chase(_stream(), data.data_ptr(), hops, out.data_ptr()))

    def version(self, number: int, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """`fused_add_rms_norm_` as version `number` of the kernel did it. Contiguous tensors of one dtype."""
        if not x.dtype == residual.dtype == weight.dtype:
            raise ValueError(f"weight must be {x.dtype} as x for the older versions, was {weight.dtype}")
        width = x.shape[-1]
        pointers = (tensor.data_ptr() for tensor in (x, residual, weight))
        _check(self._version(_stream(), number, _DTYPES[x.dtype], *pointers, x.numel() // width, width, eps))


@cache
def load() -> tuple[BenchLibrary | None, str]:
    """The library, or None; and one line on it."""
    if not PATH.exists():
        return None, "the bench library is not built (make kernels)"
    try:
        return BenchLibrary(PATH), "the compiled bench library"
    except (OSError, AttributeError) as error:
        return None, f"the bench library cannot be loaded: {error}"


def _stream() -> int:
    return torch.cuda.current_stream().cuda_stream


def _check(code: int) -> None:
    if code:
        raise RuntimeError(f"the bench library's launch failed with CUDA error {code}")
