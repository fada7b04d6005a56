"""Devices that a model can be on, and what is said when one has too little memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

LEAST_CAPABILITY = 8, 0  # BF16 and asynchronous copies; the kernels use both
# Beside torch.OutOfMemoryError: CUDA and Triton, cuBLAS, PyTorch's allocator of the CPU.
SIGNS = "out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory"


def check_device(device: str | torch.device) -> torch.device:
    """The device, if operators run on it; ValueError with the choices of this machine if not."""
    place, reason = None, ""
    with suppress(RuntimeError, TypeError):  # no device by that name
        place = torch.device(device)
    if place is not None and place.type in ("cpu", "cuda"):
        try:
            torch.empty(0, device=place)
        except (RuntimeError, AssertionError) as error:  # the latter from a build of torch without CUDA
            reason = f" ({str(error).splitlines()[0].split('. ')[0]})"
        else:
            _check_capability(place)
            return place
    choices = ", ".join(["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))])
    raise ValueError(f"device must be one that this machine has ({choices}), was {str(device)!r}{reason}")


def _check_capability(place: torch.device) -> None:
    if place.type != "cuda":
        return
    have = torch.cuda.get_device_capability(place)
    if have < LEAST_CAPABILITY:
        least, found = (".".join(map(str, numbers)) for numbers in (LEAST_CAPABILITY, have))
        raise ValueError(
            f"device must be cpu or a GPU of compute capability {least} or later, was {str(place)!r}, "
            f"{torch.cuda.get_device_name(place)}, of {found}"
        )


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Running out of memory in here is a ValueError with this message and what the device said."""
    try:
        yield
    except RuntimeError as error:
        said = _shortage(error)
        if said is None:
            raise
        raise ValueError(f"{message} ({said})") from None


def _shortage(error: BaseException | None) -> str | None:
    """The beginning of what a device says that has no memory left; None for other errors.

    The end of a graph's capture may fail over an error in it and hide it: those before count too.
    """
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError) or any(sign in str(error) for sign in SIGNS):
            return ". ".join((str(error).splitlines() or [""])[0].split(". ")[:2]).rstrip(". ")
        error = error.__cause__ or error.__context__
    return None
