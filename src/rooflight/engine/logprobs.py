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

    None for a row that `ops.sample` gave no token. `raw` is changed in place.
    """
    return _describe(repaired_(raw), tokens, counts)


def repaired_(raw: torch.Tensor) -> torch.Tensor:
    """Logits as the model gave them, such that every row that has a token has a distribution too; in place.

    It may still have +inf, or NaN at an end token that was banned: NaN becomes -inf, and +inf the largest number.
    """
    return raw.nan_to_num_(nan=-INF, posinf=FLOAT32_MAX, neginf=-INF)


def best_logprobs(logits: torch.Tensor, ids: torch.Tensor, width: int) -> tuple[torch.Tensor, ...]:
    """`ops.top_logprobs` as it is reported: in range, and equals among the fetched by token id. All on the device.

    The greedy token, which is the first of equals, then comes first here too. How many are worked out should depend on
    no row's own wish, nor does the choice among equals then.
    """
    chosen, values, indices = ops.top_logprobs(logits, ids, width)
    indices, order = indices.sort(-1)
    values, order = values.gather(-1, order).sort(dim=-1, descending=True, stable=True)
    indices = indices.gather(-1, order)
    # Two finite logits may be further apart than FP32 goes, and a provider's rounding may end above 0.
    return chosen.clamp(-FLOAT32_MAX, 0), values.clamp(max=0), indices


def as_report(token: int, chosen: float, values: Many[float], indices: Many[int], k: int) -> TokenLogprobs | None:
    """What `best_logprobs` found for one row, with the k best that it asked for; None: it has no distribution."""
    if chosen != chosen:
        return None
    return TokenLogprobs(token, chosen, tuple((i, v) for i, v in zip(indices[:k], values[:k], strict=True) if v > -INF))


def width_for(vocab_size: int) -> int:
    """How many best ones are worked out, whoever asks for how many."""
    return min(MAX_LOGPROBS, vocab_size)


def _describe(logits: torch.Tensor, tokens: Many[int], counts: Many[int]) -> list[TokenLogprobs | None]:
    ids = torch.tensor(tokens, dtype=torch.int64, device=logits.device)
    found = best_logprobs(logits, ids, width_for(logits.shape[1]) if any(counts) else 0)
    chosen, values, indices = (tensor.tolist() for tensor in found)
    return [as_report(*row) for row in zip(tokens, chosen, values, indices, counts, strict=True)]
