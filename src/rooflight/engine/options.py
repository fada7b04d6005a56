"""Draws with options: logits that are changed before, log-probabilities that are reported after, all on the device."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rooflight import ops
from rooflight.engine.logit_state import LogitState
from rooflight.engine.logprobs import as_report, best_logprobs, repaired_, width_for
from rooflight.engine.outputs import TokenLogprobs
from rooflight.engine.plan import Row, StepPlan
from rooflight.engine.sequence import Sequence
from rooflight.engine.upload import Arrival, Download

Given = dict[str, torch.Tensor]
# What `ops.sample` asks of each row, in its order.
SAMPLING = {
    "temperature": torch.float32,
    "top_k": torch.int32,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "seeds": torch.int64,
    "num_tokens": torch.int64,
}


class Wish(NamedTuple):
    """rows, sequences: of a launch, those whose draws have options; places: theirs. tops: of each row that samples, how
    many best log-probabilities it reports, None for none at all."""

    rows: tuple[Row, ...] = ()
    sequences: tuple[Sequence, ...] = ()
    tops: tuple[int | None, ...] = ()
    places: frozenset[int] = frozenset()

    @property
    def reports(self) -> bool:
        return any(top is not None for top in self.tops)


def wish_of(plan: StepPlan, sampling: Many[Sequence]) -> Wish:
    """What the rows of a plan that sample, and these sequences of theirs, ask for."""
    if not any(sequence.params.may_have_options for sequence in sampling):
        return Wish()
    pairs = zip((row for row in plan.rows if row.samples), sampling, strict=True)
    chosen = [(row, sequence) for row, sequence in pairs if sequence.has_options(row.start + len(row.tokens))]
    rows, sequences = tuple(row for row, _ in chosen), tuple(sequence for _, sequence in chosen)
    tops = tuple(sequence.params.logprobs for sequence in sampling)
    return Wish(rows, sequences, tops, frozenset(row.place for row in rows))


class Reports:
    """Log-probabilities of a batch's tokens (steps, rows), on the device and on their way back."""

    def __init__(self, steps: int, rows: int, vocab_size: int, device: torch.device) -> None:
        self._width = width_for(vocab_size)
        best = steps, rows, self._width
        self._found = (
            torch.zeros(steps, rows, device=device),
            torch.zeros(best, device=device),
            torch.zeros(best, dtype=torch.int64, device=device),
        )
        self._down = [Download(tuple(found.shape), device, found.dtype) for found in self._found]
        self._out: list[torch.Tensor] = []

    def note(self, raw: torch.Tensor, tokens: torch.Tensor, step: int) -> None:
        """In a step: raw (rows, vocab_size) FP32, as the model gave it, is changed."""
        for found, new in zip(self._found, best_logprobs(repaired_(raw), tokens, self._width), strict=True):
            found[step, : len(tokens)] = new

    def copy(self, first: int, many: int) -> None:
        """Ask for what `many` steps found, to stand behind that of the `first` ones of a launch."""
        if first == 0:
            self._out = [down.begin() for down in self._down]
        for out, found in zip(self._out, self._found, strict=True):
            out[first : first + many].copy_(found[:many], non_blocking=True)

    def end(self, tops: Many[int | None]) -> ReportArrival:
        return ReportArrival([down.end() for down in self._down], tops)


@dataclass(frozen=True)
class ReportArrival:
    """Log-probabilities that will be there once the device has got so far."""

    arrivals: Many[Arrival]
    tops: Many[int | None]

    def reports(self, given: Many[Many[int]], columns: Many[int]) -> list[list[TokenLogprobs | None]]:
        """Of the tokens that are given to the rows at these columns."""
        chosen, values, ids = (arrival.wait() for arrival in self.arrivals)
        reports: list[list[TokenLogprobs | None]] = []
        for tokens, column, top in zip(given, columns, self.tops, strict=True):
            if top is None:
                reports.append([None] * len(tokens))
            else:
                found = (part[: len(tokens), column].tolist() for part in (chosen, values, ids))
                reports.append([as_report(t, c, v, i, top) for t, c, v, i in zip(tokens, *found, strict=True)])
        return reports


class Options(NamedTuple):
    """How the rows of a batch draw. `given` of a batch says where each row's state is: `tables`."""

    state: LogitState
    reports: Reports | None

    def draw(self, logits: torch.Tensor, given: Given, step: int) -> torch.Tensor:
        """Tokens (rows,) for logits (rows, vocab_size) FP32, which change. The first rows of `given` are theirs."""
        rows = logits.shape[0]
        places, num_tokens = given["tables"][:rows], given["num_tokens"][:rows]
        raw = None if self.reports is None else logits.clone()
        self.state.penalize_(logits, places, num_tokens)
        tokens = draw(logits, given)
        self.state.count_(places, tokens)
        if self.reports is not None and raw is not None:
            self.reports.note(raw, tokens, step)
        return tokens

    def rehearse(self, rows: int, dtype: torch.dtype) -> None:
        """A draw of the spare place, for nothing: loads the kernels of one of so many rows."""
        device, vocab_size = self.state.device, self.state.vocab_size
        given = {name: torch.zeros(rows, dtype=kind, device=device) for name, kind in SAMPLING.items()}
        given["tables"] = torch.full((rows,), self.state.spare, device=device)
        self.draw(torch.zeros(rows, vocab_size, dtype=dtype, device=device).float(), given, 0)


def draw(logits: torch.Tensor, given: Given) -> torch.Tensor:
    """Tokens (rows,); the first rows of `given` are theirs."""
    rows = logits.shape[0]
    return ops.sample(logits, *(given[name][:rows] for name in SAMPLING))
