"""What the decoder needs from the ranks that share its weights; alone, nothing.

The decoder calls these where tensor parallelism has to exchange data: after the row-cut projections (o, down) and
a vocabulary-cut embedding (sum), and behind a vocabulary-cut head (concatenation).
"""

from __future__ import annotations

from typing import Protocol

import torch


class Communicator(Protocol):
    """One rank of a tensor-parallel group."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over ranks; may be written into `tensor`."""
        ...

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """The ranks' tensors joined along `dim`, in the order of ranks."""
        ...


class SingleRank:
    """The group of one: every exchange is its input."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return tensor
