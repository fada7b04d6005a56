"""What the NVIDIA driver says of the cards here, without making a CUDA context.

PyTorch's own questions initialise CUDA, which takes a second and breaks a later fork; importing a library must not.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Driver:
    """cuda: the newest CUDA that the driver runs, as (major, minor). cards: name and compute capability of each."""

    cuda: tuple[int, int]
    cards: tuple[tuple[str, tuple[int, int]], ...]


@cache
def driver() -> Driver | None:
    """None where there is no NVIDIA driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        version, count = ctypes.c_int(), ctypes.c_uint()
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        cards = tuple(_card(nvml, index) for index in range(count.value))
        return Driver((version.value // 1000, version.value % 1000 // 10), cards)
    finally:
        nvml.nvmlShutdown()


def _card(nvml: ctypes.CDLL, index: int) -> tuple[str, tuple[int, int]]:
    handle, name = ctypes.c_void_p(), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return name.value.decode(errors="replace"), (major.value, minor.value)
