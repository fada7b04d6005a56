"""What a throughput run asks an engine for: prompts, lengths and arrival times, made from a seed alone."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

import torch

CHOICES = "N, fixed:N, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA"
_FORMS = {
    "fixed": re.compile(r"(\d{1,9})", re.ASCII),
    "uniform": re.compile(r"(\d{1,9})-(\d{1,9})", re.ASCII),
    "lognormal": re.compile(r"(\d{1,9}),(\d{1,3}(?:\.\d{1,9})?)", re.ASCII),
}


@dataclass(frozen=True)
class Lengths:
    """Counts of tokens: all alike, uniform with both ends, or lognormal, rounded and clipped to what there is room for.

    least: below it nothing is drawn. most: above it neither; None where only the room says.
    """

    text: str
    kind: str
    least: int
    most: int | None
    median: float = 0.0
    sigma: float = 0.0

    @staticmethod
    def parse(name: str, text: str, least: int = 1) -> Lengths:
        """One of `CHOICES`, none below `least`; ValueError naming the field."""
        kind, _, values = (text if ":" in text else f"fixed:{text}").partition(":")
        form = _FORMS.get(kind)
        match = form.fullmatch(values) if form else None
        if match is None:
            raise ValueError(f"{name} must be {CHOICES}, was {text!r}")
        low, high = float(match[1]), float(match[match.lastindex or 1])
        if low < least or (kind == "uniform" and high < low):
            upward = ", LOW not above HIGH" if kind == "uniform" else ""
            raise ValueError(f"{name} must be {least} or more tokens{upward}, was {text!r}")
        if kind == "lognormal":
            return Lengths(text, kind, least, None, median=low, sigma=high)
        return Lengths(text, kind, int(low), int(high))

    def draw(self, room: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
        """A length for each entry of `room`, and not above it: int64."""
        if self.most is not None:
            drawn = torch.randint(self.least, self.most + 1, room.shape, generator=generator)
        else:
            normal = torch.randn(room.shape, generator=generator, dtype=torch.float64)
            spread = (math.log(self.median) + self.sigma * normal).clamp(max=math.log(2.0**62))  # int64 takes it
            drawn = spread.exp().round().to(torch.int64).clamp(min=self.least)
        return drawn.minimum(room)


@dataclass(frozen=True)
class Ask:
    """One request. arrival: seconds from the beginning of the run."""

    prompt: list[int]
    max_tokens: int
    arrival: float

    @property
    def most_cached(self) -> int:
        """Tokens that it has in the KV cache at its end: the last one is delivered and never run."""
        return len(self.prompt) + self.max_tokens - 1


def make(
    prompts: Lengths,
    answers: Lengths,
    *,
    requests: int,
    vocab_size: int,
    context: int,
    rate: float | None = None,
    seed: int = 0,
) -> list[Ask]:
    """Requests in the order of their arrival, with random token ids; the same arguments make the same ones.

    rate: requests a second, on average, of Poisson arrivals that begin with the first request; None: all at once. It
    changes nothing but the times, and twice the rate is the same times halved. ValueError for lengths that may not fit
    the context.
    """
    shortest_answer = answers.most or answers.least
    if (prompts.most or prompts.least) + shortest_answer > context:
        raise ValueError(
            f"prompt_tokens and max_tokens must fit the context of {context} tokens together, "
            f"were {prompts.text} and {answers.text}"
        )
    generator = torch.Generator().manual_seed(seed)
    prompt_lengths = prompts.draw(torch.full((requests,), context - shortest_answer), generator)
    answer_lengths = answers.draw(context - prompt_lengths, generator).tolist()
    ids = torch.randint(vocab_size, (int(prompt_lengths.sum()),), generator=generator)
    gaps = torch.empty(requests, dtype=torch.float64).exponential_(generator=generator)
    gaps[0] = 0.0
    arrivals = (gaps.cumsum(0) / rate).tolist() if rate is not None else [0.0] * requests
    split = ids.split(prompt_lengths.tolist())
    return [Ask(p.tolist(), n, at) for p, n, at in zip(split, answer_lengths, arrivals, strict=True)]
