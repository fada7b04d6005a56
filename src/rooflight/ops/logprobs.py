"""Log-probabilities to report with a token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.sample import NO_TOKEN


def top_logprobs(
    logits: torch.Tensor, ids: torch.Tensor, k: int, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities (natural) of the chosen ids and of the k best tokens of each row.

    logits: (num_seqs, vocab_size) FP32; ids: (num_seqs,) int64; 0 <= k <= vocab_size. Returns (chosen (num_seqs,) FP32,
    values (num_seqs, k) FP32 in falling order, indices (num_seqs, k) int64).

    What `sample` gives for a row without a distribution, the id NO_TOKEN, has chosen NaN. A row with NaN, with +inf or
    with nothing above -inf has NaN everywhere. Any other id outside the vocabulary raises on the CPU (RuntimeError) and
    is undefined on a GPU. Raises ValueError for shapes, dtypes, devices and k.
    """
    return TOP_LOGPROBS.overload(logits, backend)(logits, ids, k)  # type: ignore[no-any-return]


def _top_reference(logits: torch.Tensor, ids: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logprobs = torch.log_softmax(logits, -1)
    values, indices = logprobs.topk(k, -1)
    missing = ids == NO_TOKEN
    chosen = logprobs.gather(1, ids.masked_fill(missing, 0)[:, None]).squeeze(1)
    return chosen.masked_fill(missing, float("nan")), values, indices


def _check_top(logits: torch.Tensor, ids: torch.Tensor, k: int) -> None:
    checks.logit_rows(logits, ids=(ids, torch.int64))
    if not 0 <= k <= logits.shape[1]:
        checks.fail("k", f"be from 0 to vocab_size = {logits.shape[1]}", k)


def _composition(
    logits: torch.Tensor, ids: torch.Tensor, k: int, *, compute: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide_logits = logits.to(compute)
    logprobs = wide_logits - torch.logsumexp(wide_logits, -1, keepdim=True)
    order = torch.sort(logits, -1, descending=True).indices[:, :k]
    chosen = [logprobs[row, token] if token >= 0 else logprobs.new_tensor(torch.nan) for row, token in enumerate(ids)]
    return torch.stack(chosen) if chosen else logprobs.new_empty(0), logprobs.gather(1, order), order


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    logits, rows = args["logits"], args["logits"].shape[0]
    return Cost(logits.numel() * 4 + rows * 8, rows * (4 + 12 * args["k"]), 3 * logits.numel())


def _inputs(make: Make, num_seqs: int, vocab_size: int, k: int) -> Args:
    # A permutation for each row: no two logits are equal, so the order of the best is one.
    rows = [torch.randperm(vocab_size, generator=torch.Generator().manual_seed(make.seed + i)) for i in range(num_seqs)]
    logits = torch.stack(rows).float() / 50 if rows else torch.empty(0, vocab_size)
    ids = torch.randint(vocab_size, (num_seqs,), generator=make.generator())
    return logits.to(make.device), ids.to(make.device), k


def _no_token(make: Make) -> Args:
    """Rows that `sample` gave no token, between good ones."""
    logits, ids, k = _inputs(make, 6, 1003, 5)
    ids[::2] = NO_TOKEN
    return logits, ids, k


TOP_LOGPROBS = define(
    "top_logprobs",
    "(Tensor logits, Tensor ids, int k) -> (Tensor, Tensor, Tensor)",
    reference=_top_reference,
    fake=lambda logits, ids, k: (
        logits.new_empty(logits.shape[:1]),
        logits.new_empty(logits.shape[0], k),
        ids.new_empty(logits.shape[0], k),
    ),
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check_top,
    dtypes=(torch.float32,),
    sweep=[{"num_seqs": n, "vocab_size": 1003, "k": 5} for n in (0, 1, 33)]
    + [{"num_seqs": 3, "vocab_size": size, "k": k} for size, k in ((1, 1), (7, 0), (255, 255))],
    workloads={f"qwen3-0.6b {n}": {"num_seqs": n, "vocab_size": 151936, "k": 5} for n in (1, 8, 64)},
    awkward={"no_token": _no_token},
)
