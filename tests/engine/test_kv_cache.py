from __future__ import annotations

import pytest
import torch

from rooflight.engine.kv_cache import KVCache
from rooflight.models.load import load_config


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_is_what_the_config_says_and_layers_are_views_of_it(dtype: torch.dtype) -> None:
    config = load_config("random:tiny")
    cache = KVCache(config, num_pages=3, page_size=8, dtype=dtype, device=torch.device("cpu"))
    assert cache.bytes == 3 * 8 * config.kv_bytes_per_token(dtype)
    assert len(cache.layers) == config.num_layers
    cache.data.zero_()
    keys, values = cache.layers[1]
    assert keys.shape == values.shape == (3, config.num_kv_heads, 8, config.head_dim)
    values.fill_(1)
    assert cache.data.sum() == values.numel()
    assert cache.data[1, 1].sum() == values.numel()
