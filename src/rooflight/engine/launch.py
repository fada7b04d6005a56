"""A step, or several, that a runner has begun: what it promises to whoever waits for the tokens."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Protocol

import torch

from rooflight.engine.outputs import TokenLogprobs

Landed = tuple[list[list[int]], list[TokenLogprobs | None]]


class Launch(Protocol):
    """What `Runner.launch` gives. It may be forgotten without having landed; it then runs all the same."""

    @property
    def prompt_logits(self) -> Many[torch.Tensor]:
        """For each row with `every_logit`, in their order: logits (its tokens, vocab_size) FP32."""

    def land(self) -> Landed:
        """Wait for the tokens: those of each row that samples, in their order, and what they report.

        A row gets `plan.gets(row)` tokens; what stands behind an end token or `ops.NO_TOKEN` does not matter. Reports
        are for plans that need the host: log-probabilities of the one token, where they are asked for. An error of the
        device may show only here.
        """


@dataclass(frozen=True)
class Done:
    """A launch that was over before it was given out."""

    tokens: list[list[int]]
    reports: list[TokenLogprobs | None]
    prompt_logits: Many[torch.Tensor] = ()

    def land(self) -> Landed:
        return self.tokens, self.reports
