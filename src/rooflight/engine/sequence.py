"""A request on its way through the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field

from rooflight.engine.outputs import FinishReason
from rooflight.engine.page_pool import ROOT
from rooflight.engine.params import SamplingParams

MOST_ENTRIES = 1024  # of the list of biases and banned tokens that a device keeps for every place


@dataclass(slots=True, eq=False)
class Sequence:
    """One request: its tokens so far, how many are in the cache, and its pages.

    While launches are in flight, `num_computed` is what will be in the cache when they have landed, and `pending` how
    many tokens they give it. `tokens` are those that the host knows.
    """

    request_id: int
    tokens: list[int]
    num_prompt: int
    max_len: int  # tokens at which it must end: prompt + max_tokens, or the context
    params: SamplingParams
    seed: int
    end_ids: frozenset[int]
    pages: list[int] = field(default_factory=list)
    num_computed: int = 0
    pending: int = 0
    place: int = -1  # while it runs: a number that no other running one has
    num_cached: int = 0  # prompt tokens that the prefix cache had when it first began
    preemptions: int = 0
    finish_reason: FinishReason | None = None
    num_published: int = 0  # pages
    link: int = ROOT  # of the last of them

    @property
    def num_tokens(self) -> int:
        """With those in flight."""
        return len(self.tokens) + self.pending

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def max_cached(self) -> int:
        """Most tokens it may have in the cache: the last one generated is delivered and never run."""
        return max(self.max_len - 1, self.num_prompt)

    @property
    def reads_prompt(self) -> bool:
        """Whether it needs the logits of its whole prompt, and so no part of it from the cache."""
        return self.params.prompt_logprobs is not None and self.num_tokens == self.num_prompt

    @property
    def ends_in_flight(self) -> bool:
        """Whether the launches in flight give it the last token that it may have."""
        return self.pending > 0 and self.num_tokens >= self.max_len

    def has_options(self, num_tokens: int) -> bool:
        """Whether the token behind so many is more than a draw: its logits are changed or reported."""
        return self.params.has_options or num_tokens - self.num_prompt < self.params.min_tokens

    @property
    def fills_tables(self) -> bool:
        """Whether it has more biases and bans than a device keeps for a sequence."""
        bans = len(self.end_ids) if self.params.min_tokens else 0
        return len(self.params.logit_bias) + bans > MOST_ENTRIES

    @property
    def needs_host(self) -> bool:
        """Whether a host that draws has to know the tokens before its next one, or to look at the logits."""
        return self.has_options(self.num_tokens) or self.reads_prompt
