"""Runs a step's plan on the model: plan -> tensors -> decoder -> logits of the rows that want them."""

from __future__ import annotations

import torch

from rooflight.engine.kv_cache import KVCache
from rooflight.engine.scheduler import StepPlan
from rooflight.models.decoder import Decoder
from rooflight.ops import AttentionMeta


class Runner:
    """Owns the model and the KV memory. Nothing outside knows where tensors live.

    On a CPU it packs the decoder's weights, in place.
    """

    def __init__(self, decoder: Decoder, cache: KVCache, max_model_len: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = cache.data.device
        self.max_model_len = max_model_len
        if self.device.type == "cpu":
            decoder.pack_weights()

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits (rows that sample, vocab_size) FP32, in the order of the plan's rows."""
        ids, positions, slots, meta, last = self._tensors(plan)
        decode = plan.is_decode
        hidden = self.decoder(ids, positions, self.cache.layers, slots, meta, decode)
        if len(last) < len(ids):
            hidden = hidden[self._tensor(last, torch.int64)]
        return self.decoder.logits(hidden)

    def _tensors(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMeta, list[int]]:
        page_size = self.cache.page_size
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        last: list[int] = []
        for row in plan.rows:
            where = range(row.start, row.start + len(row.tokens))
            ids.extend(row.tokens)
            positions.extend(where)
            slots.extend(row.pages[p // page_size] * page_size + p % page_size for p in where)
            starts.append(len(ids))
            if row.samples:
                last.append(len(ids) - 1)
        lengths = [row.start + len(row.tokens) for row in plan.rows]
        widest = max(len(row.pages) for row in plan.rows)
        table = [[*row.pages, *[0] * (widest - len(row.pages))] for row in plan.rows]
        longest_query = max(len(row.tokens) for row in plan.rows)
        meta = AttentionMeta(
            self._tensor(table, torch.int32),
            self._tensor(lengths, torch.int32),
            self._tensor(starts, torch.int32),
            longest_query,
            max(lengths),
        )
        tensors = (self._tensor(values, torch.int64) for values in (ids, positions, slots))
        return next(tensors), next(tensors), next(tensors), meta, last

    def _tensor(self, values: object, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype).to(self.device)
