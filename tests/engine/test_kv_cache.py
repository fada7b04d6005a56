from __future__ import annotations

import pytest
import torch

from rooflight.engine.kv_cache import KVCache, PagePool
from rooflight.models.load import load_config


def test_pages_are_taken_once_and_come_back() -> None:
    pool = PagePool(5)
    first, second = pool.take(2), pool.take(3)
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert pool.free == 0
    pool.give_back(first)
    assert pool.free == 2
    assert sorted(pool.take(2)) == sorted(first)


def test_taking_more_than_is_free_takes_nothing_and_says_the_numbers() -> None:
    pool = PagePool(4)
    pool.take(1)
    with pytest.raises(RuntimeError, match="4 pages asked for, 3 of 4 are free"):
        pool.take(4)
    assert pool.free == 3
    assert pool.take(0) == []


def test_the_same_history_gives_the_same_pages() -> None:
    """Runs are repeatable down to the slots: the first pages go first, those given back last are reused first."""
    pool = PagePool(6)
    a, b = pool.take(2), pool.take(2)
    assert (a, b) == ([0, 1], [2, 3])
    pool.give_back(a)
    assert pool.take(3) == [0, 1, 4]


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
