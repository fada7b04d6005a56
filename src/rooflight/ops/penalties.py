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
    *,
    backend: str | None = None,
) -> None:
    """Penalties and bias, written into logits (num_seqs, vocab_size) FP32.

    output_counts: (num_seqs, vocab_size) int32, how often each token was generated; prompt_mask: same shape, bool,
    whether it is in the prompt. In this order: a token of prompt or output has a positive logit divided by
    repetition_penalty and a negative one multiplied, once, however often it was seen; frequency_penalty times its
    count is taken off; presence_penalty is taken off if it was generated at all; then bias_values are added at bias_ids
    (num_seqs, num_bias) int64, each at most once a row, -1 for an unused place. Penalties: (num_seqs,) FP32; 1, 0 and 0
    are off.
    """
    counts, penalties = (
        (output_counts, prompt_mask),
        (repetition_penalty, frequency_penalty, presence_penalty),
    )
    PENALIZE_LOGITS_.overload(logits, backend)(logits, *counts, *penalties, bias_ids, bias_values)


def _penalize_reference(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    generated = output_counts > 0
    repetition = repetition_penalty[:, None].where(generated | prompt_mask, 1)
    logits.copy_(torch.where(logits > 0, logits / repetition, logits * repetition))
    logits.sub_(frequency_penalty[:, None] * output_counts)
    logits.sub_(presence_penalty[:, None] * generated)
    used = bias_ids >= 0
    logits.scatter_add_(1, bias_ids.where(used, 0), bias_values.where(used, 0))


def _check_penalize(
    logits: torch.Tensor,
    output_counts: torch.Tensor,
    prompt_mask: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    bias_ids: torch.Tensor,
    bias_values: torch.Tensor,
) -> None:
    checks.logit_rows(
        logits,
        repetition_penalty=(repetition_penalty, torch.float32),
        frequency_penalty=(frequency_penalty, torch.float32),
        presence_penalty=(presence_penalty, torch.float32),
    )
    checks.no_overlap("logits", logits)
    checks.has_dtype("output_counts", output_counts, torch.int32)
    checks.same_shape("output_counts", output_counts, logits)
    checks.has_dtype("prompt_mask", prompt_mask, torch.bool)
    checks.same_shape("prompt_mask", prompt_mask, logits)
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
    *,
    compute: torch.dtype,
) -> torch.Tensor:
    """Row by row with masks and indices."""
    result = logits.to(compute, copy=True)
    for row in range(result.shape[0]):
        out, counts = result[row], output_counts[row].to(compute)
        seen = prompt_mask[row] | (counts > 0)
        penalty = repetition_penalty[row].to(compute)
        out[seen & (out > 0)] /= penalty
        out[seen & (out <= 0)] *= penalty
        out -= counts * frequency_penalty[row].to(compute) + (counts > 0) * presence_penalty[row].to(compute)
        for token, value in zip(bias_ids[row].tolist(), bias_values[row].to(compute), strict=True):
            if token >= 0:
                out[token] += value
    return result


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    logits, bias = args["logits"], args["bias_ids"].numel()
    return Cost(
        logits.numel() * (4 + 4 + 1) + 12 * logits.shape[0] + 12 * bias,
        4 * logits.numel(),
        5 * logits.numel(),
    )


def _inputs(make: Make, num_seqs: int, vocab_size: int, num_bias: int = 3) -> Args:
    generator = make.generator()
    counts = torch.randint(-3, 4, (num_seqs, vocab_size), generator=generator, dtype=torch.int32).clamp_(min=0)
    mask = torch.rand(num_seqs, vocab_size, generator=generator) < 0.2
    order = torch.rand(num_seqs, vocab_size, generator=generator).argsort(1)  # no id twice in a row
    bias = order[:, :num_bias].contiguous()
    bias[:, :1] = -1  # an unused place
    penalties = [torch.linspace(low, high, num_seqs).to(make.device) for low, high in ((1, 2), (-1, 1), (1, -1))]
    logits = make.randn(num_seqs, vocab_size, scale=3).float()
    values = make.randn(num_seqs, num_bias, salt=4).float()
    return logits, counts.to(make.device), mask.to(make.device), *penalties, bias.to(make.device), values


PENALIZE_LOGITS_ = define(
    "penalize_logits_",
    "(Tensor(a!) logits, Tensor output_counts, Tensor prompt_mask, Tensor repetition_penalty, "
    "Tensor frequency_penalty, Tensor presence_penalty, Tensor bias_ids, Tensor bias_values) -> ()",
    reference=_penalize_reference,
    fake=lambda *args: None,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check_penalize,
    dtypes=(torch.float32,),
    sweep=[{"num_seqs": n, "vocab_size": 1003} for n in (0, 1, 33)]
    + [{"num_seqs": 3, "vocab_size": size, "num_bias": bias} for size, bias in ((1, 0), (7, 1), (400, 300))],
    workloads={f"qwen3-0.6b {n}": {"num_seqs": n, "vocab_size": 151936} for n in (1, 8, 64)},
)
