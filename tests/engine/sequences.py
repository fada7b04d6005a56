"""Sequences and logits for tests of the sampler."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest
import torch

from rooflight import SamplingParams, ops
from rooflight.engine.sequence import Sequence as EngineSequence

INF = float("inf")


def sequence(
    generated: int | Sequence[int] = 0,
    seed: int = 5,
    ends: Iterable[int] = (),
    prompt: Sequence[int] = (1, 1, 1),
    **params: Any,
) -> EngineSequence:
    """A sequence that has generated these tokens, or so many tokens 1."""
    answer = [1] * generated if isinstance(generated, int) else generated
    return EngineSequence(
        request_id=0,
        tokens=[*prompt, *answer],
        num_prompt=len(prompt),
        max_len=1000,
        params=SamplingParams(**params),
        seed=seed,
        end_ids=frozenset(ends),
    )


def logits(rows: int = 1, vocab_size: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))


def logits_that_are_drawn_from(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """Grows by the logits of each call of `ops.sample`."""
    calls: list[torch.Tensor] = []
    draw = ops.sample

    def watched(rows: torch.Tensor, *options: torch.Tensor) -> torch.Tensor:
        calls.append(rows.clone())
        return draw(rows, *options)

    monkeypatch.setattr(ops, "sample", watched)
    return calls
