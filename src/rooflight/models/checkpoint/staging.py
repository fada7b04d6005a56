"""Bytes of a file to a GPU: read into pinned memory piece by piece; a piece is copied while the next one is read.

A copy straight out of mapped pages would go through the driver's own pinned buffer, and the host would wait for it at
every tensor. One thread reads: from the page cache that is 10 to 20 GB/s, where PyTorch's parallel copy out of mapped
pages fell to 1 GB/s on a host that was busy with something else.
"""

from __future__ import annotations

from io import FileIO

import torch

PIECE = 8 << 20  # bytes; two of them are pinned


class Staging:
    """Two pieces of host memory that take turns. pinned: for a GPU; without it every copy is waited for."""

    def __init__(self, pinned: bool = True, piece: int = PIECE) -> None:
        self._pieces = [torch.empty(piece, dtype=torch.uint8, pin_memory=pinned) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._pinned, self._turn = pinned, 0

    def copy(self, file: FileIO, offset: int, dtype: torch.dtype, out: torch.Tensor) -> None:
        """Values of `dtype` at byte `offset` of the file into `out`, which is contiguous, in the order of its stream.

        The file may be closed afterwards, though the last copies may be under way. They change to the dtype of `out`
        on its device. OSError if the file ends too soon.
        """
        file.seek(offset)
        flat = out.view(-1)
        step = self._pieces[0].numel() // dtype.itemsize
        for start in range(0, flat.numel(), step):
            part = flat[start : start + step]
            piece = self._next_piece()[: part.numel() * dtype.itemsize]
            _fill(piece, file)
            values = piece.view(dtype)
            if dtype != part.dtype:  # else the host would convert them, and copy out of memory that is not pinned
                values = values.to(part.device, non_blocking=self._pinned)
            part.copy_(values, non_blocking=self._pinned)
            if self._pinned:
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(part.device))
                self._copied[self._turn] = event

    def _next_piece(self) -> torch.Tensor:
        """The one that was filled longer ago, once nothing is copied from it any more."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        return self._pieces[self._turn]


def _fill(piece: torch.Tensor, file: FileIO) -> None:
    """Read on until it is full; one call may give less."""
    memory, done = piece.numpy().data, 0
    while done < len(memory):
        count = file.readinto(memory[done:])
        if not count:
            raise OSError(f"the file ends at byte {file.tell()}")
        done += count
