"""Logits -> the log-probabilities that a request asked to see."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from rooflight import ops
from rooflight.engine.outputs import TokenLogprobs
from rooflight.engine.params import FLOAT32_MAX, MAX_LOGPROBS

INF = float("inf")


def prompt_logprobs(logits: torch.Tensor, next_tokens: Many[int], k: int) -> list[TokenLogprobs | None]:
    """Logits (positions, vocab_size) FP32 of consecutive prompt positions and the token that follows each.

    None for a position whose logits have NaN or +inf, or nothing above -inf. `logits` is left as it is.
    """
    return _describe(logits, next_tokens, [k] * len(next_tokens))


def token_logprobs(raw: torch.Tensor, tokens: Many[int], counts: Many[int]) -> list[TokenLogprobs | None]:
    """raw (len(tokens), vocab_size) FP32 as the model gave it, the token drawn and the number of best ones of each row.

    None for a row that `ops.sample` gave no token. `raw` is changed in place: a row that has a token may still have
    +inf, or NaN at an end token that was banned, so NaN becomes -inf and +inf the largest number.
    """
    return _describe(raw.nan_to_num_(nan=-INF, posinf=FLOAT32_MAX, neginf=-INF), tokens, counts)


def _describe(logits: torch.Tensor, tokens: Many[int], counts: Many[int]) -> list[TokenLogprobs | None]:
    # The number of best ones that is worked out depends on no row's own, nor does the choice among equals then.
    width = min(MAX_LOGPROBS, logits.shape[1]) if any(counts) else 0
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    chosen, values, indices = ops.top_logprobs(logits, ids, width)
    # Equals among the fetched by token id: the greedy token, which is the first of equals, then comes first here too.
    indices, order = indices.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    indices = indices.gather(-1, order)
    # Two finite logits may be further apart than FP32 goes, and a provider's rounding may end above 0.
    chosen, values = chosen.clamp(-FLOAT32_MAX, 0), values.clamp(max=0)
    rows = zip(tokens, chosen.tolist(), indices.tolist(), values.tolist(), counts, strict=True)
    return [
        TokenLogprobs(token, logprob, tuple((i, v) for i, v in zip(best[:k], tops[:k], strict=True) if v > -INF))
        if logprob == logprob  # NaN: the row has no distribution
        else None
        for token, logprob, best, tops, k in rows
    ]
