"""Measured ceilings of the machine at hand, the limits that figures are printed next to."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch


def cpu_read_bandwidth(threads: int, megabytes: int = 512, rounds: int = 7) -> float:
    """Bytes per second that `threads` threads read from memory: the best of repeated sums over FP32 data.

    The data is far larger than the last-level cache, so every round reads it from memory.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = torch.ones(megabytes * 1_000_000 // 4)
        ones = torch.ones(1000)
        matrix = data.view(-1, 1000)
        best = 0.0
        reads: tuple[Callable[[], object], ...] = (lambda: torch.sum(data), lambda: torch.mv(matrix, ones))
        for _ in range(rounds):
            for read in reads:
                start = time.perf_counter()
                read()
                best = max(best, data.numel() * 4 / (time.perf_counter() - start))
        return best
    finally:
        torch.set_num_threads(before)
