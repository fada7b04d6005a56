"""Memory of the paged KV cache: one tensor, allocated once. Which page belongs to whom is the scheduler's business."""

from __future__ import annotations

import torch

from rooflight.models.config import ModelConfig


class KVCache:
    """Keys and values of every layer, (num_layers, 2, num_pages, num_kv_heads, page_size, head_dim).

    Memory is not cleared: attention never reads a slot that was not written.
    """

    def __init__(
        self, config: ModelConfig, num_pages: int, page_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        shape = (config.num_layers, 2, num_pages, config.num_kv_heads, page_size, config.head_dim)
        self.page_size = page_size
        self.num_pages = num_pages
        self.data = torch.empty(shape, dtype=dtype, device=device)
        self.layers = [(layer[0], layer[1]) for layer in self.data]

    @property
    def bytes(self) -> int:
        return self.data.numel() * self.data.element_size()


class PagePool:
    """Free pages by number. Taking more than there are is the caller's error."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked for, {len(self._free)} of {self.num_pages} are free")
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(reversed(pages))
