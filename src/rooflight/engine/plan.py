"""What a step runs, as plain data: it can be compared, written down and run again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Row(NamedTuple):
    """The part of one sequence that runs in a step: tokens at positions start, start + 1, …"""

    request_id: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    samples: bool  # whether its last token's logits give the next token
    every_logit: bool = False  # whether the logits of all its tokens are wanted, for prompt_logprobs

    @property
    def num_logits(self) -> int:
        return len(self.tokens) if self.every_logit else int(self.samples)


@dataclass(frozen=True)
class StepPlan:
    rows: tuple[Row, ...]

    @property
    def is_decode(self) -> bool:
        return all(row.start > 0 and len(row.tokens) == 1 for row in self.rows)

    @property
    def num_logits(self) -> int:
        return sum(row.num_logits for row in self.rows)
