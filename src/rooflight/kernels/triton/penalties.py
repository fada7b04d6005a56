"""Penalties and bias in Triton: one pass over the logits of rows that have penalties, else none but those with a bias.

A row is cut into chunks, a program each. What a row asks for is known on the device only, so every launch is the same
and can be captured; a program of a row that asks for nothing reads its list of biases and returns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from rooflight.kernels.triton.rows import as_rows, check_last_dimension, check_vector

CHUNK, TILE = 4096, 1024  # logits of a program, and of one round of it
MOST_TOKENS = 1 << 27  # of a vocabulary: a grid has at most 65535 chunks
MOST_ENTRIES = 256  # of the list of biases that are looked at together


@triton.jit  # type: ignore[untyped-decorator]
def _penalize(
    logits_ptr, counts_ptr, prompt_ptr, repetition_ptr, frequency_ptr, presence_ptr, ids_ptr, values_ptr, places_ptr,
    logits_stride, counts_stride, prompt_stride, ids_stride, values_stride, vocab_size, width,
    PLACED: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)  # 64 bits: times a stride it passes 2^31, and so does a place
    begin = tl.program_id(1) * CHUNK
    end = tl.minimum(begin + CHUNK, vocab_size)
    logits_ptr += row * logits_stride
    repetition = tl.load(repetition_ptr + row)
    frequency, presence = tl.load(frequency_ptr + row), tl.load(presence_ptr + row)
    if (repetition != 1.0) | (frequency != 0.0) | (presence != 0.0):
        place = row
        if PLACED:
            place = tl.load(places_ptr + row)
        counts_ptr += place * counts_stride
        prompt_ptr += place * prompt_stride
        for start in range(begin, end, TILE):
            token = start + tl.arange(0, TILE)
            inside = token < end
            x = tl.load(logits_ptr + token, mask=inside, other=0.0)
            count = tl.load(counts_ptr + token, mask=inside, other=0)
            seen = (tl.load(prompt_ptr + token, mask=inside, other=0) != 0) | (count > 0)
            factor = tl.where(seen, repetition, 1.0)
            x = tl.where(x > 0.0, tl.div_rn(x, factor), x * factor)
            x -= frequency * count.to(tl.float32)
            x -= tl.where(count > 0, presence, 0.0)
            tl.store(logits_ptr + token, x, mask=inside)
    # Other threads' logits: those written above, then those with a bias.
    tl.debug_barrier()
    for first in range(0, width, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        token = tl.load(ids_ptr + row * ids_stride + entry, mask=entry < width, other=-1)
        mine = (token >= begin) & (token < end)
        value = tl.load(values_ptr + row * values_stride + entry, mask=mine, other=0.0)
        # Atomic, since a list may name a token twice.
        tl.atomic_add(logits_ptr + token, value, mask=mine & (value != float("-inf")), sem="relaxed")
    tl.debug_barrier()
    for first in range(0, width, ENTRIES):
        entry = first + tl.arange(0, ENTRIES)
        token = tl.load(ids_ptr + row * ids_stride + entry, mask=entry < width, other=-1)
        mine = (token >= begin) & (token < end)
        value = tl.load(values_ptr + row * values_stride + entry, mask=mine, other=0.0)
        tl.store(logits_ptr + token, value, mask=mine & (value == float("-inf")))


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
) -> None:
    vectors = {
        "repetition_penalty": repetition_penalty,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
    }
    for name, vector in vectors.items():
        check_vector(name, vector)
    if places is not None:
        check_vector("places", places)
    for name, table in (("bias_ids", bias_ids), ("bias_values", bias_values)):
        check_last_dimension(name, table)
    logits, counts = as_rows("logits", logits), as_rows("output_counts", output_counts)
    prompt = as_rows("prompt_mask", prompt_mask).view(torch.uint8)
    rows, vocab_size = logits.shape
    if vocab_size > MOST_TOKENS:
        raise ValueError(f"logits must have at most {MOST_TOKENS} columns, was {vocab_size}")
    if rows == 0:  # an empty grid is a launch error
        return
    width = bias_ids.shape[1]
    chunk = min(CHUNK, int(triton.next_power_of_2(vocab_size)))
    entries = min(MOST_ENTRIES, int(triton.next_power_of_2(max(width, 1))))
    with torch.cuda.device_of(logits):  # Triton launches on the current device, whatever the tensors say
        _penalize[rows, triton.cdiv(vocab_size, chunk)](
            logits, counts, prompt, *vectors.values(), bias_ids, bias_values, logits if places is None else places,
            logits.stride(0), counts.stride(0), prompt.stride(0), bias_ids.stride(0), bias_values.stride(0),
            vocab_size, width, PLACED=places is not None, CHUNK=chunk, TILE=min(TILE, chunk), ENTRIES=entries,
            num_warps=4,
        )  # fmt: skip
