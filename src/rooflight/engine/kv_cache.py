"""Memory of the paged KV cache: one tensor, allocated once. Which page is whose is the scheduler's business."""

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
