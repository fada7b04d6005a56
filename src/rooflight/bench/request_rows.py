"""Rows of `rooflight bench request`: from the timings of all rounds to medians, limits and ratios."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from rooflight.bench.measurement import OURS, Busy, RequestTiming, Spread
from rooflight.bench.roof import MILLISECONDS

NO_GPU = "there is no GPU in this run"


@dataclass(frozen=True)
class RequestRow:
    """One engine at one dtype and prompt: milliseconds as median, least and most over the rounds.

    Ratios are above 1 where ours is faster, and None on our own row.
    """

    engine: str
    version: str
    dtype: str
    prompt_tokens: int
    new_tokens: int
    first_token_ms: Spread
    per_token_ms: Spread
    limit_ms: float  # of a token: reading the weights once, on a GPU also the keys and values of the mean context
    first_token_ratio: float | None  # peer's median over ours
    per_token_ratio: float | None
    same_tokens: int | None  # leading tokens equal to ours; None on our own row and where weights differ
    request_tokens_per_s: Spread  # all tokens out over the whole request's time
    decode_tokens_per_s: Spread
    request_ratio: float | None  # our median over the peer's
    busy_first_token_ms: float | None = None  # in which the GPU worked, from a profiled request
    busy_per_token_ms: float | None = None
    busy_absent: str | None = NO_GPU  # why the two before are None

    @property
    def tokens_per_second(self) -> float:
        return MILLISECONDS / self.per_token_ms.median

    @property
    def of_limit(self) -> float:
        return self.limit_ms / self.per_token_ms.median


def mean_context(prompt_tokens: int, max_tokens: int) -> float:
    """Tokens that a decode step attends to, on average: the first sees the prompt and one, the last max_tokens - 1."""
    return prompt_tokens + max_tokens / 2


def rows_of(
    timings: Mapping[str, Sequence[RequestTiming]],
    versions: Mapping[str, str],
    dtype: str,
    prompt_tokens: int,
    limit_ms: float,
    *,
    same_weights: bool,
) -> list[RequestRow]:
    """A row for each engine of `versions`; those that ended on the way are left out."""
    ours = timings[OURS]
    our_first, our_token, our_request, _ = _spreads(ours)
    rows = []
    for engine, version in versions.items():
        runs = timings[engine]
        first, token, request, decode = _spreads(runs)
        is_peer = engine != OURS
        rows.append(
            RequestRow(
                engine=engine,
                version=version,
                dtype=dtype,
                prompt_tokens=prompt_tokens,
                new_tokens=len(runs[0].tokens),
                first_token_ms=first,
                per_token_ms=token,
                limit_ms=limit_ms,
                first_token_ratio=first.median / our_first.median if is_peer else None,
                per_token_ratio=token.median / our_token.median if is_peer else None,
                same_tokens=leading_equal(runs[0].tokens, ours[0].tokens) if is_peer and same_weights else None,
                request_tokens_per_s=request,
                decode_tokens_per_s=decode,
                request_ratio=our_request.median / request.median if is_peer else None,
            )
        )
    return rows


def with_busy(row: RequestRow, busy: Busy | str) -> RequestRow:
    """The row with the GPU's share, or with why there is none."""
    if isinstance(busy, str):
        return replace(row, busy_absent=busy)
    return replace(
        row,
        busy_first_token_ms=busy.first_token * MILLISECONDS,
        busy_per_token_ms=busy.per_token * MILLISECONDS,
        busy_absent=None,
    )


def _spreads(runs: Sequence[RequestTiming]) -> tuple[Spread, Spread, Spread, Spread]:
    """Milliseconds to the first token and per token; tokens a second of the request and of decoding."""
    return (
        Spread.of([run.first_token for run in runs], MILLISECONDS),
        Spread.of([run.per_token for run in runs], MILLISECONDS),
        Spread.of([run.request_rate for run in runs]),
        Spread.of([1 / run.per_token for run in runs]),
    )


def leading_equal(a: Sequence[int], b: Sequence[int]) -> int:
    for index, (left, right) in enumerate(zip(a, b, strict=True)):
        if left != right:
            return index
    return len(a)
