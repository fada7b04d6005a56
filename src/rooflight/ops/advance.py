"""From one decode step to the next without the host: tokens, positions, lengths and slots of every sequence move on.

What a captured step needs to be followed by itself. A sequence stands still once it may not grow any more, and where
it got no token: it then writes nothing, and what it gives from there on is nobody's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define


def advance_decode_(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    num_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    history: torch.Tensor,
    block_table: torch.Tensor,
    limits: torch.Tensor,
    places: torch.Tensor,
    page_size: int,
    step: int,
    *,
    backend: str | None = None,
) -> None:
    """tokens: (num_seqs,) int64, what `sample` gave. Written in place:

    history (steps, num_seqs) int64: row `step` becomes tokens; last_tokens (num_places,) int64: tokens at `places`
    (num_seqs,) int64, -1 for none. A sequence moves on if it got a token (0 or more) and positions + 1 < limits
    (num_seqs,) int64: then ids (num_seqs,) int64 becomes the token, positions (num_seqs,) int64 grows by one, seq_lens
    (num_seqs,) int32 is positions + 1 and num_tokens (num_seqs,) int64 the number of the next token to draw (positions
    + 1), slots (num_seqs,) int64 the place of the new position by block_table (num_seqs, max_pages) int32. One that
    does not gets slot -1; the rest of it stays. Raises ValueError for shapes, dtypes and devices. No gradient.
    """
    operator = ADVANCE_DECODE_.overload(tokens, backend)
    state = ids, positions, num_tokens, seq_lens, slots, last_tokens, history
    operator(tokens, *state, block_table, limits, places, page_size, step)


def _check(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    num_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    history: torch.Tensor,
    block_table: torch.Tensor,
    limits: torch.Tensor,
    places: torch.Tensor,
    page_size: int,
    step: int,
) -> None:
    checks.has_dtype("tokens", tokens, torch.int64)
    checks.has_shape("tokens", tokens, None)
    rows = tokens.shape[0]
    columns = {"ids": ids, "positions": positions, "num_tokens": num_tokens, "slots": slots}
    for name, tensor in (columns | {"limits": limits, "places": places}).items():
        checks.has_dtype(name, tensor, torch.int64)
        checks.has_shape(name, tensor, rows)
    checks.has_dtype("seq_lens", seq_lens, torch.int32)
    checks.has_shape("seq_lens", seq_lens, rows)
    checks.has_dtype("last_tokens", last_tokens, torch.int64)
    checks.has_shape("last_tokens", last_tokens, None)
    checks.has_dtype("history", history, torch.int64)
    checks.has_shape("history", history, None, rows)
    checks.has_dtype("block_table", block_table, torch.int32)
    checks.has_shape("block_table", block_table, rows, None)
    written = columns | {"seq_lens": seq_lens, "last_tokens": last_tokens, "history": history}
    for name, tensor in (written | {"block_table": block_table, "limits": limits, "places": places}).items():
        checks.same_device(name, tensor, tokens)
    for name, tensor in written.items():
        checks.no_overlap(name, tensor)
    if page_size < 1:
        checks.fail("page_size", "be 1 or more", page_size)
    if not 0 <= step < history.shape[0]:
        checks.fail("step", f"be a row of history, 0 to {history.shape[0] - 1}", step)


def _reference(
    tokens: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    num_tokens: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    last_tokens: torch.Tensor,
    history: torch.Tensor,
    block_table: torch.Tensor,
    limits: torch.Tensor,
    places: torch.Tensor,
    page_size: int,
    step: int,
) -> None:
    history[step] = tokens
    # A row without a place writes what is there already, behind all others: the last of equal indices may not matter.
    spare = torch.cat((last_tokens, tokens.new_zeros(1)))
    spare.scatter_(0, places.where(places >= 0, last_tokens.shape[0]), tokens)
    last_tokens.copy_(spare[:-1])
    moves = (tokens >= 0) & (positions + 1 < limits)
    position = (positions + 1).where(moves, 0)
    page = block_table.gather(1, (position // page_size)[:, None])[:, 0] if block_table.shape[1] else position
    slots.copy_((page * page_size + position % page_size).where(moves, -1))
    ids.copy_(tokens.where(moves, ids))
    positions.copy_(position.where(moves, positions))
    num_tokens.copy_((position + 1).where(moves, num_tokens))
    seq_lens.copy_((position + 1).where(moves, seq_lens))


def _composition(*args: Any, compute: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Row by row on the host."""
    tokens, *rest = (a.clone() if isinstance(a, torch.Tensor) else a for a in args)
    ids, positions, num_tokens, seq_lens, slots, last_tokens, history, table, limits, places, page_size, step = rest
    for row, token in enumerate(tokens.tolist()):
        history[step, row] = token
        if places[row] >= 0:
            last_tokens[places[row]] = token
        position = int(positions[row]) + 1
        if token < 0 or position >= limits[row]:
            slots[row] = -1
            continue
        ids[row], positions[row], num_tokens[row], seq_lens[row] = token, position, position + 1, position + 1
        slots[row] = int(table[row, position // page_size]) * page_size + position % page_size
    return ids, positions, num_tokens, seq_lens, slots, last_tokens, history


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    rows = args["tokens"].shape[0]
    return Cost(rows * (8 * 6 + 4), rows * (8 * 6 + 4), 0)


def _inputs(make: Make, num_seqs: int, num_places: int = 40, steps: int = 3, page_size: int = 16) -> Args:
    """Sequences: some that got no token, some at their limit, some without a place."""
    rows, generator = num_seqs, make.generator()
    positions = torch.randint(50, (rows,), generator=generator)
    tokens = torch.randint(1000, (rows,), generator=generator)
    tokens[2::7] = -1
    limits = positions + 2
    limits[1::4] -= 1  # at its limit
    places = torch.randperm(max(rows, num_places), generator=generator)[:rows]
    places[3::5] = -1
    table = torch.randint(99, (rows, 52 // page_size + 1), generator=generator, dtype=torch.int32)
    columns = (positions + 1000, positions, positions + 1, (positions + 1).int(), positions * 3)
    state = *columns, torch.arange(max(rows, num_places)) - 5, torch.full((steps, rows), 77)
    moved = [t.clone().to(make.device) for t in (tokens, *state, table, limits, places)]
    return *moved, page_size, min(1, steps - 1)


ADVANCE_DECODE_ = define(
    "advance_decode_",
    "(Tensor tokens, Tensor(a!) ids, Tensor(b!) positions, Tensor(c!) num_tokens, Tensor(d!) seq_lens, "
    "Tensor(e!) slots, Tensor(f!) last_tokens, Tensor(g!) history, Tensor block_table, Tensor limits, Tensor places, "
    "int page_size, int step) -> ()",
    reference=_reference,
    plumbing=True,
    fake=lambda *args: None,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    dtypes=(torch.float32,),
    sweep=[{"num_seqs": n} for n in (0, 1, 33)] + [{"num_seqs": 7, "steps": 1, "page_size": p} for p in (1, 32)],
    workloads={f"{n} sequences": {"num_seqs": n} for n in (1, 64, 1024)},
)
