"""Runs a step's plan on the model: plan -> tensors -> decoder -> logits of the rows that want them -> tokens."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import chain

import numpy as np
import torch

from rooflight.engine.kv_cache import KVCache
from rooflight.engine.launch import Done, Launch
from rooflight.engine.outputs import TokenLogprobs
from rooflight.engine.plan import UNKNOWN, Row, StepPlan
from rooflight.engine.sampler import sample
from rooflight.engine.sequence import Sequence
from rooflight.models.decoder import Decoder
from rooflight.ops import AttentionMeta


class Runner:
    """Owns the model and the KV memory. Nothing outside knows where tensors live.

    ahead: launches that may be in flight while the next one is planned and launched; those of this runner are over at
    once. most_steps: most decode steps of a launch. options_on_device: whether it changes logits and reports
    log-probabilities without the host, so that plans with them may be launched ahead and have several steps.
    On a CPU it packs the decoder's weights, in place.
    """

    ahead = 0
    most_steps = 1
    options_on_device = False

    def __init__(self, decoder: Decoder, cache: KVCache, max_model_len: int) -> None:
        self.decoder = decoder
        self.cache = cache
        self.device = cache.data.device
        self.max_model_len = max_model_len
        if self.device.type == "cpu":
            decoder.pack_weights()
        self._last: dict[int, int] = {}  # by place: the token that it got last

    def launch(self, plan: StepPlan, sampling: Many[Sequence]) -> Launch:
        """Begin a plan; sampling: the sequences of its rows that sample, in their order.

        It runs behind what was launched before. If it raises, nothing has begun: launches in flight go on, and
        `UNKNOWN` still stands for what they give. What counts of a sequence are its parameters and its seed; its tokens
        may be those of some launches ago, unless the plan needs the host or nothing of the sequence is in flight.
        """
        last = dict(self._last)
        drawing = [row for row in plan.rows if row.samples]
        given: list[list[int]] = [[] for _ in drawing]
        reports: list[list[TokenLogprobs | None]] = [[] for _ in drawing]
        prompt_logits: Many[torch.Tensor] = ()
        for step in range(plan.steps):
            rows = [_known(row, step, last) for row in plan.rows if step == 0 or step < plan.gets(row)]
            logits = self.run(StepPlan(tuple(rows)))
            if any(row.every_logit for row in rows):
                logits, prompt_logits = _parts(rows, logits)
            now = [index for index, row in enumerate(drawing) if step < plan.gets(row)]
            if now:
                positions = [row.start + len(row.tokens) for row in rows if row.samples]
                drawn = sample(logits, [sampling[index] for index in now], positions)
                for index, token, report in zip(now, *drawn, strict=True):
                    given[index].append(token)
                    reports[index].append(report)
                    last[drawing[index].place] = token
        self._last = last
        return Done(given, reports, prompt_logits)

    def run(self, plan: StepPlan) -> torch.Tensor:
        """Logits (plan.num_logits, vocab_size) FP32, in the order of the plan's rows and their tokens."""
        ids, positions, slots, meta, wanted = self._tensors(plan)
        rows = self._tensor(wanted) if len(wanted) < len(ids) else None
        hidden = self.decoder(ids, positions, self.cache.layers, slots, meta, plan.is_decode, rows)
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


def _known(row: Row, step: int, last: Mapping[int, int]) -> Row:
    """A row as it is in one of the steps of a launch; last: by place, the token before."""
    if step == 0 and row.tokens[0] != UNKNOWN:
        return row
    # A row without a distribution has no token: whatever it gets from then on is dropped.
    return row._replace(start=row.start + step, tokens=(max(last[row.place], 0),))


def _parts(rows: Many[Row], logits: torch.Tensor) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits to sample from, a copy that may be changed, and those of each row that wants all of its own."""
    parts = logits.split([row.num_logits for row in rows])
    last = [part[-1:] for part, row in zip(parts, rows, strict=True) if row.samples]
    return torch.cat([logits[:0], *last]), [part for part, row in zip(parts, rows, strict=True) if row.every_logit]
