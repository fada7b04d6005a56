"""Logits -> one token a sequence, by each sequence's own parameters, with the host; `options.py` does it without.

In this order: log-probabilities are taken from the model's logits; penalties and bias; the ban of end tokens before
min_tokens, which no bias can lift; the draw. Everything is made from the sequence's parameters, seed and tokens, and
nothing is carried from step to step, so preemption changes no draw.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from itertools import chain

import numpy as np
import torch

from rooflight import ops
from rooflight.engine.logprobs import token_logprobs
from rooflight.engine.outputs import TokenLogprobs
from rooflight.engine.sequence import Sequence


def sample(
    logits: torch.Tensor, sequences: Many[Sequence], positions: Many[int] | None = None
) -> tuple[list[int], list[TokenLogprobs | None]]:
    """logits (len(sequences), vocab_size) FP32 -> what `sample_tokens` gives, and log-probabilities where asked for.

    None for a sequence that did not ask, or got no token. `logits` may be changed in place.
    """
    reports: list[TokenLogprobs | None] = [None] * len(sequences)
    asking = [(row, k) for row, s in enumerate(sequences) if (k := s.params.logprobs) is not None]
    if not asking:
        return sample_tokens(logits, sequences, positions), reports
    rows, counts = zip(*asking, strict=True)
    raw = logits[_tensor(rows, logits)]
    tokens = sample_tokens(logits, sequences, positions)
    for row, report in zip(rows, token_logprobs(raw, [tokens[row] for row in rows], counts), strict=True):
        reports[row] = report
    return tokens, reports


def sample_tokens(logits: torch.Tensor, sequences: Many[Sequence], positions: Many[int] | None = None) -> list[int]:
    """logits (len(sequences), vocab_size) FP32 -> token ids; `ops.NO_TOKEN` for a row without a distribution.

    The draw of a sequence depends on its logits, its seed and its tokens, and on nothing else. `logits` may be changed
    in place. The ids of a logit_bias must be in the vocabulary (`SamplingParams.check_vocabulary`).
    positions: of the tokens to draw; None: each behind those that its sequence has. Without penalties and bans only the
    position counts, and the sequence's tokens may be those of some steps ago.
    """
    penalised = [row for row, s in enumerate(sequences) if s.params.changes_logits]
    if penalised:
        _penalize(logits, penalised, [sequences[row] for row in penalised])
    _ban_ends(logits, sequences)
    if all(s.params.temperature == 0 for s in sequences):  # nothing but the temperature counts
        size = len(sequences)
        floats, ints = logits.new_zeros(size), logits.new_zeros(size, dtype=torch.int64)
        return ops.sample(logits, floats, ints.int(), floats, floats, ints, ints).tolist()
    heats, top_ps, min_ps, top_ks = zip(*[s.params.filters for s in sequences], strict=True)
    floats = _tensor((heats, top_ps, min_ps), logits, np.float32)
    ints = _tensor((top_ks, [s.seed for s in sequences], positions or [len(s.tokens) for s in sequences]), logits)
    picks = ops.sample(logits, floats[0], ints[0].int(), floats[1], floats[2], ints[1], ints[2])
    return picks.tolist()


def _penalize(logits: torch.Tensor, rows: list[int], sequences: list[Sequence]) -> None:
    """Penalties and bias of the rows that have one; the others pay nothing."""
    index = None if len(rows) == len(logits) else _tensor(rows, logits)
    part = logits if index is None else logits[index]
    # Only what a penalty looks at is counted: long prompts cost nothing without a repetition penalty.
    answers = [s.tokens[s.num_prompt :] if s.params.penalties != (1, 0, 0) else () for s in sequences]
    prompts = [s.tokens[: s.num_prompt] if s.params.penalties[0] != 1 else () for s in sequences]
    counts = torch.zeros(part.shape, dtype=torch.int32, device=part.device)
    where, tokens = _cells(answers, part)
    counts.view(-1).index_add_(0, where * part.shape[1] + tokens, torch.ones_like(tokens, dtype=torch.int32))
    seen = torch.zeros(part.shape, dtype=torch.bool, device=part.device)
    seen[_cells(prompts, part)] = True
    biases = [s.params.logit_bias for s in sequences]
    widest = max(map(len, biases))
    ids = [[*bias, *[-1] * (widest - len(bias))] for bias in biases]
    values = [[*bias.values(), *[0.0] * (widest - len(bias))] for bias in biases]
    columns = tuple(zip(*[s.params.penalties for s in sequences], strict=True))
    repetition, frequency, presence = _tensor(columns, logits, np.float32)
    bias = _tensor(ids, logits), _tensor(values, logits, np.float32)
    ops.penalize_logits_(part, counts, seen, repetition, frequency, presence, *bias)
    if index is not None:
        logits[index] = part


def _ban_ends(logits: torch.Tensor, sequences: Many[Sequence]) -> None:
    """No end token before min_tokens."""
    banned = [
        s.end_ids if s.params.min_tokens and s.num_generated < s.params.min_tokens else frozenset() for s in sequences
    ]
    if any(banned):
        logits[_cells(banned, logits)] = float("-inf")


def _cells(tokens: Many[Collection[int]], logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows and columns of the tokens that are given for each row."""
    lengths = [len(row) for row in tokens]
    rows = np.repeat(np.arange(len(tokens)), lengths)
    columns = np.fromiter(chain.from_iterable(tokens), dtype=np.int64, count=sum(lengths))
    return _tensor(rows, logits), _tensor(columns, logits)


def _tensor(values: object, logits: torch.Tensor, dtype: type = np.int64) -> torch.Tensor:
    """Through NumPy, which reads a list several times faster than torch.tensor; one copy to the device."""
    return torch.from_numpy(np.asarray(values, dtype=dtype)).to(logits.device)
