"""A runner like that of a GPU: launches run one after the other, and nobody sees their tokens before they land."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import pytest
import torch

from rooflight.engine.launch import Landed, Launch
from rooflight.engine.plan import StepPlan
from rooflight.engine.runner import Runner
from rooflight.engine.sequence import Sequence

MODES = [(0, 1), (1, 1), (1, 4), (1, 8)]  # launches in flight while the next is planned, most steps of a launch
in_every_mode = pytest.mark.parametrize("mode", MODES, indirect=True, ids=lambda mode: f"ahead{mode[0]}steps{mode[1]}")


@dataclass
class Late:
    """A launch over a runner that is done at once. Launches land in their order, but some may be forgotten."""

    plan: StepPlan
    done: Launch
    number: int
    landed: list[int]  # numbers

    @property
    def prompt_logits(self) -> Many[torch.Tensor]:
        return self.done.prompt_logits

    def land(self) -> Landed:
        assert self.number > self.landed[-1]
        self.landed.append(self.number)
        tokens, reports = self.done.land()
        assert [len(got) for got in tokens] == [self.plan.gets(row) for row in self.plan.rows if row.samples]
        assert [len(told) for told in reports] == [len(got) for got in tokens]
        return tokens, reports


def make_late(patch: pytest.MonkeyPatch, ahead: int, most_steps: int) -> None:
    """Every runner from now on; a scheduler that exists already must be told its `most_steps`."""
    launch, launched, landed = Runner.launch, [0], [0]

    def late(runner: Runner, plan: StepPlan, sampling: Many[Sequence]) -> Late:
        assert 1 <= plan.steps <= most_steps
        assert ahead or not any(-1 in row.tokens for row in plan.rows)
        for sequence, row in zip(sampling, [row for row in plan.rows if row.samples], strict=True):
            assert (sequence.request_id, sequence.place) == (row.request_id, row.place)
            assert not plan.needs_host or sequence.pending == 0
        done = launch(runner, plan, sampling)
        launched[0] += 1
        return Late(plan, done, launched[0], landed)

    patch.setattr(Runner, "ahead", ahead)
    patch.setattr(Runner, "most_steps", most_steps)
    patch.setattr(Runner, "launch", late)
