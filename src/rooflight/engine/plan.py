"""What a launch runs, as plain data: it can be compared, written down and run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

UNKNOWN = -1  # a row's token that the host has not seen yet: the last one that the launches before gave its place


class Row(NamedTuple):
    """The part of one sequence that runs in a step: tokens at positions start, start + 1, …

    place: which of the sequences that run this is; no other has it while this one runs, then the next one may.
    limit: tokens that it may have in the cache. A launch of several steps takes none beyond, whose page is another's.
    """

    request_id: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]  # for all that the launch writes
    samples: bool  # whether its last token's logits give the next token
    every_logit: bool = False  # whether the logits of all its tokens are wanted, for prompt_logprobs
    place: int = 0
    limit: int = 0

    @property
    def num_logits(self) -> int:
        return len(self.tokens) if self.every_logit else int(self.samples)


@dataclass(frozen=True)
class StepPlan:
    """steps: decode steps of the launch, each with the tokens that the one before gave; all rows sample if it has more.

    needs_host: a row's next token is made with the host's help (see `Scheduler`), or it gives prompt_logprobs. Such a
    launch is alone: nothing is in flight beside it.
    """

    rows: tuple[Row, ...]
    steps: int = 1
    needs_host: bool = False

    @property
    def is_decode(self) -> bool:
        return all(row.start > 0 and len(row.tokens) == 1 for row in self.rows)

    @property
    def num_logits(self) -> int:
        """Of its first step."""
        return sum(row.num_logits for row in self.rows)

    def gets(self, row: Row) -> int:
        """Tokens that the launch gives one of its rows."""
        if self.steps == 1:
            return int(row.samples)
        return min(self.steps, max(row.limit - row.start, 1))
