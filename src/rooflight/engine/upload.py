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


class Upload:
    """Named arrays of given shapes and dtypes in one buffer.

    device: the tensors there. `begin` gives the host's arrays of this turn (with what an earlier turn left in them),
    `send` copies them, behind what the current stream has to do.
    """

    def __init__(self, columns: Columns, device: torch.device) -> None:
        sizes = {name: int(np.prod(shape)) * dtype.itemsize for name, (shape, dtype) in columns.items()}
        places, total = {}, 0
        for name, size in sizes.items():
            places[name] = total
            total += -(-size // ALIGNMENT) * ALIGNMENT
        self._target = torch.zeros(total, dtype=torch.uint8, device=device)
        pinned = device.type == "cuda"
        self._sources = [torch.zeros(total, dtype=torch.uint8, pin_memory=pinned) for _ in range(TURNS)]

        def views(buffer: torch.Tensor) -> dict[str, torch.Tensor]:
            return {
                name: buffer[places[name] : places[name] + sizes[name]].view(dtype).view(shape)
                for name, (shape, dtype) in columns.items()
            }

        self.device = views(self._target)
        self._host = [{name: view.numpy() for name, view in views(source).items()} for source in self._sources]
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
    """Token ids (steps, rows) on their way back; takes turns like `Upload`.

    The host's side has the shape of what is copied: into a part of a larger one the copy would make the host wait.
    """

    def __init__(self, steps: int, rows: int, device: torch.device) -> None:
        pinned = device.type == "cuda"
        self._turns = [torch.zeros(steps, rows, dtype=torch.int64, pin_memory=pinned) for _ in range(TURNS)]
        self._events = [torch.cuda.Event() if pinned else None for _ in range(TURNS)]
        self._device = device
        self._turn = 0

    def begin(self) -> torch.Tensor:
        """Where this turn's tokens are to be copied, without waiting."""
        self._turn = (self._turn + 1) % TURNS
        return self._turns[self._turn]

    def end(self) -> Arrival:
        """All copies of this turn are asked for."""
        event = self._events[self._turn]
        if event is not None:
            event.record(torch.cuda.current_stream(self._device))
        return Arrival(self._turns[self._turn].numpy(), event)


class Arrival:
    """Tokens that will be there once the device has got so far."""

    def __init__(self, tokens: np.ndarray, event: torch.cuda.Event | None) -> None:
        self._tokens, self._event = tokens, event

    def wait(self) -> np.ndarray:
        if self._event is not None:
            self._event.synchronize()
        return self._tokens
