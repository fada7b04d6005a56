"""Logits -> one token a sequence, by each sequence's own parameters."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from rooflight import ops
from rooflight.engine.scheduler import Sequence


def sample_tokens(logits: torch.Tensor, sequences: Many[Sequence]) -> list[int]:
    """logits (len(sequences), vocab_size) FP32 -> token ids; `ops.NO_TOKEN` for a row without a distribution.

    The draw of a sequence depends on its logits, its seed and how many tokens it has, and on nothing else.
    """
    for row, sequence in enumerate(sequences):
        if sequence.num_generated < sequence.params.min_tokens:
            logits[row, list(sequence.end_ids)] = float("-inf")
    if all(sequence.params.temperature == 0 for sequence in sequences):
        greedy = torch.zeros(len(sequences), device=logits.device)
        columns = [greedy, greedy.int(), greedy + 1, greedy, greedy.long(), greedy.long()]
    else:
        options = [
            (
                min(s.params.temperature, torch.finfo(torch.float32).max),  # FP32 infinity would make NaN of -inf
                min(s.params.top_k, logits.shape[1]),  # any whole number is allowed, int32 is not enough for it
                s.params.top_p,
                s.params.min_p,
                s.seed,
                len(s.tokens),
            )
            for s in sequences
        ]
        dtypes = (torch.float32, torch.int32, torch.float32, torch.float32, torch.int64, torch.int64)
        columns = [
            torch.tensor(column, dtype=dtype, device=logits.device)
            for column, dtype in zip(zip(*options, strict=True), dtypes, strict=True)
        ]
    return ops.sample(logits, *columns).tolist()
