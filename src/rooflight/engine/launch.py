"""A step, or several, that a runner has begun: what it promises to whoever waits for the tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import torch

from rooflight.engine.options import ReportArrival
from rooflight.engine.outputs import TokenLogprobs
from rooflight.engine.upload import Arrival

Landed = tuple[list[list[int]], list[list[TokenLogprobs | None]]]


class Launch(Protocol):
    """What `Runner.launch` gives. It may be forgotten without having landed; it then runs all the same."""

    @property
    def prompt_logits(self) -> Many[torch.Tensor]:
        """For each row with `every_logit`, in their order: logits (its tokens, vocab_size) FP32."""

    def land(self) -> Landed:
        """Wait for the tokens: those of each row that samples, in their order, and what they report.

        A row gets `plan.gets(row)` tokens and as many reports; what stands behind an end token or `ops.NO_TOKEN` does
        not matter. A report is what is asked for of a token's log-probabilities, or None. An error of the device may
        show only here.
        """


@dataclass(frozen=True)
class Done:
    """A launch that was over before it was given out."""

    tokens: list[list[int]]
    reports: list[list[TokenLogprobs | None]]
    prompt_logits: Many[torch.Tensor] = ()

    def land(self) -> Landed:
        return self.tokens, self.reports


@dataclass(frozen=True)
class InFlight:
    """A launch whose tokens arrive. gets: for each row that samples, how many; columns: where they are."""

    arrival: Arrival
    gets: Many[int]
    columns: Many[int]
    reports: ReportArrival | None = None
    prompt_logits: Many[torch.Tensor] = ()

    def land(self) -> Landed:
        tokens = self.arrival.wait()
        given = [tokens[:many, column].tolist() for many, column in zip(self.gets, self.columns, strict=True)]
        if self.reports is None:
            return given, [[None] * many for many in self.gets]
        return given, self.reports.reports(given, self.columns)
