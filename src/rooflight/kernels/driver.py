"""What the NVIDIA driver says of the cards here, without making a CUDA context.

PyTorch's own questions initialise CUDA, which takes a second and breaks a later fork; importing a library must not.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class Driver:
    """cuda: the newest CUDA that the driver runs, as (major, minor). cards: name and compute capability of each."""

    cuda: tuple[int, int]
    cards: tuple[tuple[str, tuple[int, int]], ...]


@cache
def driver() -> Driver | None:
    """None where there is no NVIDIA driver. Cards that CUDA_VISIBLE_DEVICES hides are not there."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        return _ask(nvml) if nvml.nvmlInit_v2() == 0 else None
    except (OSError, AttributeError):  # no library, or one without a function that is asked
        return None


def _ask(nvml: ctypes.CDLL) -> Driver:
    try:
        version, count = ctypes.c_int(), ctypes.c_uint()
        nvml.nvmlSystemGetCudaDriverVersion_v2(ctypes.byref(version))
        nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
        cards = [card for index in range(count.value) if (card := _card(nvml, index)) is not None]
        return Driver((version.value // 1000, version.value % 1000 // 10), tuple(cards))
    finally:
        nvml.nvmlShutdown()


def _card(nvml: ctypes.CDLL, index: int) -> tuple[str, tuple[int, int]] | None:
    """Name and compute capability; None for a card that is hidden or cannot be opened."""
    handle, name, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
    major, minor = ctypes.c_int(), ctypes.c_int()
    if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)) != 0:
        return None
    nvml.nvmlDeviceGetName(handle, name, len(name))
    nvml.nvmlDeviceGetUUID(handle, uuid, len(uuid))
    if not visible(index, uuid.value.decode(), os.environ.get("CUDA_VISIBLE_DEVICES")):
        return None
    nvml.nvmlDeviceGetCudaComputeCapability(handle, ctypes.byref(major), ctypes.byref(minor))
    return name.value.decode(errors="replace"), (major.value, minor.value)


def visible(index: int, uuid: str, allowed: str | None) -> bool:
    """Whether CUDA_VISIBLE_DEVICES, a list of numbers or of beginnings of UUIDs, lets a card be seen."""
    if allowed is None:
        return True
    entries = [entry.strip() for entry in allowed.split(",")]
    return any(entry == str(index) or (entry.startswith("GPU-") and uuid.startswith(entry)) for entry in entries)
