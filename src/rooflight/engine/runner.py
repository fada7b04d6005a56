"""Runs a step's plan on the model: plan -> tensors -> decoder -> logits of the rows that want them."""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch

from rooflight.engine.kv_cache import KVCache
from rooflight.engine.plan import StepPlan
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
        """Logits (plan.num_logits, vocab_size) FP32, in the order of the plan's rows and their tokens."""
        ids, positions, slots, meta, wanted = self._tensors(plan)
        hidden = self.decoder(ids, positions, self.cache.layers, slots, meta, plan.is_decode)
        if len(wanted) < len(ids):
            hidden = hidden[self._tensor(wanted)]
        return self.decoder.logits(hidden)

    def _tensors(self, plan: StepPlan) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionMeta, np.ndarray]:
        """Through NumPy: a list in PyTorch's hands costs several times as much."""
        rows, size = plan.rows, self.cache.page_size
        lengths = np.array([len(row.tokens) for row in rows])
        starts = np.array([row.start for row in rows])
        pages = np.array([len(row.pages) for row in rows])
        table = np.zeros((len(rows), pages.max()), np.int32)  # page 0 where a row has no more; nobody reads it
        table[np.arange(table.shape[1]) < pages[:, None]] = np.fromiter(chain.from_iterable(r.pages for r in rows), int)
        ends = np.zeros(len(rows) + 1, np.int32)
        np.cumsum(lengths, out=ends[1:])
        owner = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(ends[-1]) + (starts - ends[:-1])[owner]
        slots = table[owner, positions // size].astype(np.int64) * size + positions % size
        counts = np.array([row.num_logits for row in rows])
        wanted = np.flatnonzero(np.arange(ends[-1]) >= (ends[1:] - counts)[owner])
        seq_lens = (starts + lengths).astype(np.int32)
        meta = AttentionMeta(
            self._tensor(table),
            self._tensor(seq_lens),
            self._tensor(ends),
            int(lengths.max()),
            int(seq_lens.max()),
        )
        ids = np.fromiter(chain.from_iterable(row.tokens for row in rows), np.int64, int(ends[-1]))
        return self._tensor(ids), self._tensor(positions), self._tensor(slots), meta, wanted

    def _tensor(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values).to(self.device)
