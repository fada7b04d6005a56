"""Numbers for the device, gathered on the host and sent in one copy.

A step needs a dozen small arrays. Each sent by itself costs as much as all together, and one that is not in pinned
memory makes the host wait for everything that runs. The device side stays where it is, as graphs need it; the host side
takes turns, so that the next step can be written down while the last one's copy is still to come.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

ALIGNMENT = 16  # bytes: what vector loads ask for
TURNS = 3  # one launch running, one waiting behind it, one being written down

Columns = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def _spans(columns: Columns) -> tuple[dict[str, tuple[int, int]], int]:
    """Where the bytes of each array begin and end in a buffer that has them all, and its size."""
    spans, total = {}, 0
    for name, (shape, dtype) in columns.items():
        size = int(np.prod(shape)) * dtype.itemsize
        spans[name] = total, total + size
        total += -(-size // ALIGNMENT) * ALIGNMENT
    return spans, total


def _views(buffer: torch.Tensor, columns: Columns) -> dict[str, torch.Tensor]:
    spans, _ = _spans(columns)
    return {
        name: buffer[spans[name][0] : spans[name][1]].view(dtype).view(shape)
        for name, (shape, dtype) in columns.items()
    }


def send(arrays: Mapping[str, np.ndarray], device: torch.device) -> dict[str, torch.Tensor]:
    """Arrays of any sizes, new on the device, in one copy that nobody waits for.

    PyTorch gives the pinned memory to nobody else before the copy has run.
    """
    columns = {name: (array.shape, torch.from_numpy(array).dtype) for name, array in arrays.items()}
    source = torch.empty(_spans(columns)[1], dtype=torch.uint8, pin_memory=device.type == "cuda")
    for name, view in _views(source, columns).items():
        view.numpy()[...] = arrays[name]
    return _views(source.to(device, non_blocking=True), columns)


class Upload:
    """Named arrays of given shapes and dtypes in one buffer.

    device: the tensors there. `begin` gives the host's arrays of this turn (with what an earlier turn left in them),
    `send` copies them, behind what the current stream has to do.
    """

    def __init__(self, columns: Columns, device: torch.device) -> None:
        _, total = _spans(columns)
        self._target = torch.zeros(total, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._sources = [torch.zeros(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(TURNS)]
        self.device = _views(self._target, columns)
        self._host = [{name: view.numpy() for name, view in _views(s, columns).items()} for s in self._sources]
        self._sent = [torch.cuda.Event() if pinned else None for _ in range(TURNS)]
        self._turn = 0

    def begin(self) -> dict[str, np.ndarray]:
        self._turn = (self._turn + 1) % TURNS
        sent = self._sent[self._turn]
        if sent is not None:
            sent.synchronize()  # long ago, unless launches were forgotten and others made in their place
        return self._host[self._turn]

    def send(self) -> None:
        self._target.copy_(self._sources[self._turn], non_blocking=True)
        sent = self._sent[self._turn]
        if sent is not None:
            sent.record(torch.cuda.current_stream(self._target.device))


class Download:
    """An array, token ids say, on its way back; takes turns like `Upload`.

    The host's side has the shape of what is copied: into a part of a larger one the copy would make the host wait.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> None:
        pinned = device.type == "cuda"
        self._turns = [torch.zeros(shape, dtype=dtype, pin_memory=pinned) for _ in range(TURNS)]
        self._events = [torch.cuda.Event() if pinned else None for _ in range(TURNS)]
        self._device = device
        self._turn = 0

    def begin(self) -> torch.Tensor:
        """Where this turn's numbers are to be copied, without waiting."""
        self._turn = (self._turn + 1) % TURNS
        return self._turns[self._turn]

    def end(self) -> Arrival:
        """All copies of this turn are asked for."""
        event = self._events[self._turn]
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
        return Arrival(self._turns[self._turn].numpy(), event)


class Arrival:
    """Numbers that will be there once the device has got so far."""

    def __init__(self, numbers: np.ndarray, event: torch.cuda.Event | None) -> None:
        self._numbers, self._event = numbers, event

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers
