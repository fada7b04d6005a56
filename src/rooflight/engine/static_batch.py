"""Steps on buffers that stay where they are: what a CUDA graph can capture and run again.

Model, head, sampler and the way from one token to the next are all on the device. A decode batch runs several steps
for one launch; a prompt batch runs the new tokens of several sequences. Rows and tokens that are there only to fill a
graph's size write nothing: slot -1, no keys, no place.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from collections.abc import Set
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from rooflight import ops
from rooflight.engine.kv_cache import KVCache
from rooflight.engine.options import SAMPLING, Options, Reports, draw
from rooflight.engine.plan import Row
from rooflight.engine.sequence import Sequence
from rooflight.engine.upload import Columns, Download, Upload
from rooflight.models.decoder import Decoder

NOWHERE = -1  # the place of a row that is none: the last, spare one of all last tokens
INTS, SHORTS = torch.int64, torch.int32
PLAIN: frozenset[int] = frozenset()


class Model:
    """What every batch runs on. last_tokens: by place, the token that a sequence got last, and a spare one."""

    def __init__(self, decoder: Decoder, cache: KVCache, max_model_len: int, places: int) -> None:
        self.decoder, self.cache, self.max_model_len = decoder, cache, max_model_len
        self.device = cache.data.device
        self.table_width = -(-max_model_len // cache.page_size)
        self.spare = places
        self.last_tokens = torch.zeros(places + 1, dtype=torch.int64, device=self.device)

    def known(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Ids with those that the host did not know. A row that got no token goes on with any: nobody looks."""
        return torch.where(ids < 0, self.last_tokens[places].clamp(min=0), ids)

    def next_tokens(
        self, hidden: torch.Tensor, given: dict[str, torch.Tensor], options: Options | None, step: int = 0
    ) -> torch.Tensor:
        if options is None:
            return draw(self.decoder.raw_logits(hidden), given)
        return options.draw(self.decoder.logits(hidden), given, step)

    def reports(self, steps: int, rows: int) -> Reports:
        return Reports(steps, rows, self.decoder.config.vocab_size, self.device)


def _sampling_columns(rows: int) -> Columns:
    return {name: ((rows,), dtype) for name, dtype in {**SAMPLING, "tables": INTS}.items()}


def _write_sampling(host: dict[str, np.ndarray], sequences: Many[Sequence], num_tokens: Many[int]) -> None:
    """Parameters of the rows that sample. Those behind them are greedy, which is least work; nobody looks at them."""
    count = len(sequences)
    filters = [sequence.params.filters for sequence in sequences]
    for column, name in enumerate(("temperature", "top_p", "min_p", "top_k")):
        host[name][:count] = [values[column] for values in filters]
        host[name][count:] = 0
    host["seeds"][:count] = [sequence.seed for sequence in sequences]
    host["num_tokens"][:count] = num_tokens


def _write_tables(host: dict[str, np.ndarray], places: Many[int], optional: Set[int], spare: int) -> None:
    """Where the state of the rows that sample is; optional: places of those that have one."""
    if optional:
        host["tables"][: len(places)] = [place if place in optional else spare for place in places]
        host["tables"][len(places) :] = spare


class DecodeBatch:
    """Up to `rows` sequences, a token each a step."""

    def __init__(self, model: Model, rows: int, most_steps: int) -> None:
        self.model, self.rows = model, rows
        ints = ("ids", "positions", "slots", "limits", "places")
        columns: Columns = {
            **dict.fromkeys(ints, ((rows,), INTS)),
            "seq_lens": ((rows,), SHORTS),
            **_sampling_columns(rows),
            "table": ((rows, model.table_width), SHORTS),
        }
        self.upload = Upload(columns, model.device)
        self.history = torch.zeros(most_steps, rows, dtype=torch.int64, device=model.device)
        self.down = Download((most_steps, rows), model.device)

    @cached_property
    def reports(self) -> Reports:
        return self.model.reports(*self.history.shape)

    def write(self, rows: Many[Row], sequences: Many[Sequence], optional: Set[int] = PLAIN) -> None:
        """Write down a launch of these rows, none of which is longer than one token, and send it.

        optional: places of rows that draw with options.
        """
        host, count, size = self.upload.begin(), len(rows), self.model.cache.page_size
        starts = np.array([row.start for row in rows])
        table = host["table"]
        for index, row in enumerate(rows):
            table[index, : len(row.pages)] = row.pages
        columns = {
            "ids": ([row.tokens[0] for row in rows], 0),
            "positions": (starts, 0),
            "slots": (table[np.arange(count), starts // size].astype(np.int64) * size + starts % size, -1),
            "limits": ([row.limit for row in rows], 0),
            "places": ([row.place for row in rows], NOWHERE),
            "seq_lens": (starts + 1, 0),
        }
        for name, (values, padding) in columns.items():
            host[name][:count], host[name][count:] = values, padding
        _write_sampling(host, sequences, (starts + 1).tolist())
        _write_tables(host, [row.place for row in rows], optional, self.model.spare)
        self.upload.send()

    def begin(self) -> None:
        """Before the first step of a launch."""
        given = self.upload.device
        given["ids"].copy_(self.model.known(given["ids"], given["places"]))

    def step(self, index: int, options: Options | None = None) -> None:
        """One step; its tokens go to row `index` of the history."""
        model, given = self.model, self.upload.device
        meta = ops.AttentionMeta(given["table"], given["seq_lens"], given["seq_lens"], 1, model.max_model_len)
        hidden = model.decoder(given["ids"], given["positions"], model.cache.layers, given["slots"], meta, True)
        tokens = model.next_tokens(hidden, given, options, index)
        ids, positions, num_tokens = given["ids"], given["positions"], given["num_tokens"]
        moved = ids, positions, num_tokens, given["seq_lens"], given["slots"], model.last_tokens, self.history
        rest = given["table"], given["limits"], given["places"], model.cache.page_size
        ops.advance_decode_(tokens, *moved, *rest, index)


class PromptSize(NamedTuple):
    """Of a step, or of what there is room for: prompts' new tokens, prompts, and sequences that decode beside them."""

    tokens: int
    prompts: int
    decodes: int = 0

    @property
    def rows(self) -> int:
        return self.prompts + self.decodes

    def holds(self, other: PromptSize) -> bool:
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))


class PromptBatch:
    """New tokens of prompts, and behind them those of sequences that decode, a token each."""

    def __init__(self, model: Model, room: PromptSize) -> None:
        self.model, self.room = model, room
        columns: Columns = {
            **dict.fromkeys(("ids", "positions", "slots", "owners"), ((room.tokens + room.decodes,), INTS)),
            "query_starts": ((room.prompts + 1,), SHORTS),
            "seq_lens": ((room.rows,), SHORTS),
            **dict.fromkeys(("wanted", "places"), ((room.rows,), INTS)),
            **_sampling_columns(room.rows),
            "table": ((room.rows, model.table_width), SHORTS),
        }
        self.upload = Upload(columns, model.device)
        self.drawn = torch.zeros(1, room.rows, dtype=torch.int64, device=model.device)
        self.down = Download((1, room.rows), model.device)

    @cached_property
    def reports(self) -> Reports:
        return self.model.reports(*self.drawn.shape)

    def write(
        self,
        prompts: Many[Row],
        decodes: Many[Row],
        sequences: Many[Sequence],
        size: PromptSize,
        optional: Set[int] = PLAIN,
    ) -> None:
        """Write down a step and send it, for `step(size)`. sequences: of the rows that sample, in the rows' order.

        optional: places of rows that draw with options.
        """
        host, page_size = self.upload.begin(), self.model.cache.page_size
        lengths = np.array([len(row.tokens) for row in prompts], dtype=np.int64)
        ends = np.cumsum(lengths)
        # Where the rows' tokens begin, and which place in the table each row has.
        begins = np.concatenate((ends - lengths, size.tokens + np.arange(len(decodes))))
        places_in_table = [*range(len(prompts)), *range(size.prompts, size.prompts + len(decodes))]
        rows = [*prompts, *decodes]
        counts = np.concatenate((lengths, np.ones(len(decodes), np.int64)))
        starts = np.array([row.start for row in rows])
        for name, nothing in (("ids", 0), ("positions", 0), ("slots", -1), ("owners", NOWHERE), ("seq_lens", 0)):
            host[name][:] = nothing
        for place, begin, row in zip(places_in_table, begins.tolist(), rows, strict=True):
            host["table"][place, : len(row.pages)] = row.pages
            host["ids"][begin : begin + len(row.tokens)] = row.tokens
        owner = np.repeat(np.arange(len(rows)), counts)
        within = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)  # of the row's new tokens
        where, positions = begins[owner] + within, starts[owner] + within
        pages = host["table"][np.array(places_in_table)[owner], positions // page_size].astype(np.int64)
        places = np.array([row.place for row in rows])
        host["positions"][where], host["owners"][where] = positions, places[owner]
        host["slots"][where] = pages * page_size + positions % page_size
        host["seq_lens"][places_in_table] = starts + counts
        host["query_starts"][0] = 0
        host["query_starts"][1 : len(prompts) + 1] = ends
        host["query_starts"][len(prompts) + 1 :] = ends[-1] if len(prompts) else 0
        sampling = [index for index, row in enumerate(rows) if row.samples]
        for name, values, nothing in (
            ("wanted", (begins + counts - 1)[sampling], 0),
            ("places", places[sampling], NOWHERE),
        ):
            host[name][: len(sampling)], host[name][len(sampling) :] = values, nothing
        _write_sampling(host, sequences, (starts + counts)[sampling].tolist())
        _write_tables(host, places[sampling].tolist(), optional, self.model.spare)
        self.upload.send()

    def step(self, size: PromptSize, sampling: int, whole_prompt: bool = False, options: Options | None = None) -> None:
        """Run what was written. sampling: rows that sample; in a graph all that there is room for."""
        model, given, total = self.model, self.upload.device, size.tokens + size.decodes
        ids = model.known(given["ids"][:total], given["owners"][:total])
        lengths, table, longest, other = given["seq_lens"], given["table"], model.max_model_len, None
        if size.decodes:
            own = slice(size.prompts, size.rows)
            other = ops.AttentionMeta(table[own], lengths[own], lengths[own], 1, longest)
        prompts = table[: size.prompts], lengths[: size.prompts], given["query_starts"][: size.prompts + 1]
        meta = ops.AttentionMeta(*prompts, size.tokens, longest, whole_prompt, other)
        positions, slots = given["positions"][:total], given["slots"][:total]
        wanted = given["wanted"][:sampling]
        hidden = model.decoder(ids, positions, model.cache.layers, slots, meta, False, wanted)
        if sampling:
            drawn = model.next_tokens(hidden, given, options)
            model.last_tokens[given["places"][:sampling]] = drawn
            self.drawn[0, :sampling] = drawn
