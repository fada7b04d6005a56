"""What every kind of checkpoint offers: a list of its tensors, and reading one of them into a given place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple, Protocol

import torch


class CheckpointError(ValueError):
    """A model's files are missing, damaged or not what its config says. Names the file and, if any, the tensor."""


class TensorInfo(NamedTuple):
    """One tensor as its file's header describes it; nothing has been read yet.

    `dtype` is what the values are stored as, None for a quantised or unreadable type; `type_name` is the file's
    own word for it; `refused` says why it cannot be read, empty if it can. `begin` is the byte of the file at which
    its values begin, where they lie there as they are.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype | None
    type_name: str
    num_bytes: int
    file: str
    refused: str = ""
    begin: int = 0


class Checkpoint(Protocol):
    """A set of named tensors. Iterating over `tensors` gives them in the order in which reading is cheapest."""

    @property
    def name(self) -> str:
        """How errors call the whole of it: a folder, a file, a preset."""
        ...

    @property
    def tensors(self) -> Mapping[str, TensorInfo]: ...

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Copies tensor `name` into `out`, which has its shape, any floating dtype and any device."""
        ...


def stored_dtype(tensors: Mapping[str, TensorInfo]) -> torch.dtype | None:
    """The dtype most bytes are stored in; None if that is a quantised type or there is no tensor."""
    sizes: Counter[torch.dtype | None] = Counter()
    for info in tensors.values():
        sizes[info.dtype] += info.num_bytes
    return sizes.most_common(1)[0][0] if sizes else None
