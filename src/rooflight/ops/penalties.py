"""Penalties and bias on logits, in place, before the draw.

Repetition penalty: Keskar et al., "CTRL", 2019; frequency and presence: the OpenAI API's definitions.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define


def penalize_logits_(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    places: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Penalties and bias, written into logits (num_seqs, vocab_size) FP32.

    output_counts: (num_places, vocab_size) int32, how often each token was generated; prompt_mask: same shape, bool,
    whether it is in the prompt. places: (num_seqs,) int64, the row of these two that each row of logits goes by, one
    there is; None: its own number, and num_places is num_seqs.

    In this order: a token of prompt or output has a positive logit divided by repetition_penalty and a negative one
    multiplied, once, however often it was seen; frequency_penalty times its count is taken off; presence_penalty is
    taken off if it was generated at all; then bias_values (num_seqs, num_bias) FP32 are added at bias_ids (num_seqs,
    num_bias) int64, -1 for an unused entry. At last a token with a bias of -inf gets -inf, whatever it had, NaN and
    +inf too. Penalties: (num_seqs,) FP32; 1, 0 and 0 are off. Raises ValueError for shapes, dtypes and devices.
    """
    counts, penalties = (
        (output_counts, prompt_mask),
        (repetition_penalty, frequency_penalty, presence_penalty),
    )
    PENALIZE_LOGITS_.overload(logits, backend)(logits, *counts, *penalties, bias_ids, bias_values, places)


def _penalize_reference(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    places: torch.Tensor | None = None,
) -> None:
    if places is not None:
        output_counts, prompt_mask = output_counts[places], prompt_mask[places]
    generated = output_counts > 0
    repetition = repetition_penalty[:, None].where(generated | prompt_mask, 1)
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    logits.sub_(frequency_penalty[:, None] * output_counts)
    logits.sub_(presence_penalty[:, None] * generated)
    bans = (bias_values == float("-inf")) & (bias_ids >= 0)
    adds = (bias_ids >= 0) & ~bans
    logits.scatter_add_(1, bias_ids.where(adds, 0), bias_values.where(adds, 0))
    # Behind the vocabulary, what bans nothing: no entry of the same row may undo a ban.
    beyond = logits.shape[1]
    banned = torch.zeros(logits.shape[0], beyond + 1, dtype=torch.bool, device=logits.device)
    banned.scatter_(1, bias_ids.where(bans, beyond), True)
    logits.masked_fill_(banned[:, :beyond], float("-inf"))


def _check_penalize(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    places: torch.Tensor | None = None,
) -> None:
    checks.logit_rows(
        logits,
        repetition_penalty=(repetition_penalty, torch.float32),
        frequency_penalty=(frequency_penalty, torch.float32),
        presence_penalty=(presence_penalty, torch.float32),
    )
    checks.no_overlap("logits", logits)
    checks.has_dtype("output_counts", output_counts, torch.int32)
    checks.has_dtype("prompt_mask", prompt_mask, torch.bool)
    if places is None:
        checks.same_shape("output_counts", output_counts, logits)
        checks.same_shape("prompt_mask", prompt_mask, logits)
    else:
        checks.has_dtype("places", places, torch.int64)
        checks.has_shape("places", places, logits.shape[0])
        checks.same_device("places", places, logits)
        checks.has_shape("output_counts", output_counts, None, logits.shape[1])
        checks.same_shape("prompt_mask", prompt_mask, output_counts)
    checks.has_dtype("bias_ids", bias_ids, torch.int64)
    checks.has_shape("bias_ids", bias_ids, logits.shape[0], None)
    checks.has_dtype("bias_values", bias_values, torch.float32)
    checks.same_shape("bias_values", bias_values, bias_ids)
    for name, tensor in (
        ("output_counts", output_counts),
        ("prompt_mask", prompt_mask),
        ("bias_ids", bias_ids),
    ):
        checks.same_device(name, tensor, logits)
    checks.same_device("bias_values", bias_values, logits)


def _composition(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
    places: torch.Tensor | None = None,
    *,
    compute: torch.dtype,
) -> torch.Tensor:
    """Row by row with masks and indices."""
    result = logits.to(compute, copy=True)
    for row in range(result.shape[0]):
        place = row if places is None else int(places[row])
        out, counts = result[row], output_counts[place].to(compute)
        seen = prompt_mask[place] | (counts > 0)
        penalty = repetition_penalty[row].to(compute)
        out[seen & (out > 0)] /= penalty
        out[seen & (out <= 0)] *= penalty
        out -= counts * frequency_penalty[row].to(compute) + (counts > 0) * presence_penalty[row].to(compute)
        entries = [
            pair for pair in zip(bias_ids[row].tolist(), bias_values[row].to(compute), strict=True) if pair[0] >= 0
        ]
        for token, value in entries:
            out[token] += value
        for token, value in entries:
            if value == float("-inf"):
                out[token] = value
    return result


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    logits, bias = args["logits"], args["bias_ids"].numel()
    row = 12 if args["places"] is None else 20
    return Cost(
        logits.numel() * (4 + 4 + 1) + row * logits.shape[0] + 12 * bias,
        4 * logits.numel(),
        5 * logits.numel(),
    )


def _inputs(make: Make, num_seqs: int, vocab_size: int, num_bias: int = 3, num_places: int | None = None) -> Args:
    """num_places: of the tables, in which the rows then have places; None: each row has its own."""
    generator, tables = make.generator(), num_seqs if num_places is None else num_places
    counts = torch.randint(-3, 4, (tables, vocab_size), generator=generator, dtype=torch.int32).clamp_(min=0)
    mask = torch.rand(tables, vocab_size, generator=generator) < 0.2
    order = torch.rand(num_seqs, vocab_size, generator=generator).argsort(1)  # no id twice in a row
    bias = order[:, :num_bias].contiguous()
    bias[:, :1] = -1  # an unused entry
    penalties = [torch.linspace(low, high, num_seqs).to(make.device) for low, high in ((1, 2), (-1, 1), (1, -1))]
    logits = make.randn(num_seqs, vocab_size, scale=3).float()
    values = make.randn(num_seqs, num_bias, salt=4).float()
    values[::3, 2:3] = float("-inf")  # a ban
    places = None if num_places is None else torch.randperm(tables, generator=generator)[:num_seqs].to(make.device)
    return logits, counts.to(make.device), mask.to(make.device), *penalties, bias.to(make.device), values, places


def _bans(make: Make) -> Args:
    """Bans of NaN, of infinities and of tokens that have another bias, before or behind; rows without penalties."""
    logits, counts, mask, *penalties, _, _, _ = _inputs(make, 4, 1003)
    inf = float("inf")
    logits[:, :4] = torch.tensor([float("nan"), inf, -inf, 1.0])
    ids = torch.tensor([0, 1, 2, 3, 3, -1, 700, 700, 1002]).repeat(4, 1)
    values = torch.tensor([-inf, -inf, -inf, 7.0, -inf, -inf, -inf, 7.0, 2.0]).repeat(4, 1)
    for column, off in zip(penalties, (1, 0, 0), strict=True):
        column[2:] = off
    ids[3] = -1
    return logits, counts, mask, *penalties, ids.to(make.device), values.to(make.device), None


PENALIZE_LOGITS_ = define(
    "penalize_logits_",
    "(Tensor(a!) logits, Tensor output_counts, Tensor prompt_mask, Tensor repetition_penalty, "
    "Tensor frequency_penalty, Tensor presence_penalty, Tensor bias_ids, Tensor bias_values, "
    "Tensor? places=None) -> ()",
    reference=_penalize_reference,
    fake=lambda *args: None,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check_penalize,
    dtypes=(torch.float32,),
    sweep=[{"num_seqs": n, "vocab_size": 1003, "num_places": n + 7} for n in (0, 1, 33)]
    + [{"num_seqs": 3, "vocab_size": size, "num_bias": bias} for size, bias in ((1, 0), (7, 1), (400, 300))]
    + [{"num_seqs": 4, "vocab_size": 5003}],
    workloads={f"qwen3-0.6b {n}": {"num_seqs": n, "vocab_size": 151936} for n in (1, 8, 64)},
    awkward={"bans": _bans},
)
