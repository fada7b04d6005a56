"""Steps on buffers that stay where they are: what a CUDA graph can capture and run again.

Model, head, sampler and the way from one token to the next are all on the device. A decode batch runs several steps
for one launch; a prompt batch runs the new tokens of several sequences. Rows and tokens that are there only to fill a
graph's size write nothing: slot -1, no keys, no place.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import torch

from rooflight import ops
from rooflight.engine.kv_cache import KVCache
from rooflight.engine.plan import Row
from rooflight.engine.sequence import Sequence
from rooflight.engine.upload import Columns, Download, Upload
from rooflight.models.decoder import Decoder

NOWHERE = -1  # the place of a row that is none: the last, spare one of all last tokens
INTS, SHORTS, FLOATS = torch.int64, torch.int32, torch.float32
SAMPLING = {"temperature": FLOATS, "top_p": FLOATS, "min_p": FLOATS, "top_k": SHORTS, "seeds": INTS, "num_tokens": INTS}


class Model:
    """What every batch runs on. last_tokens: by place, the token that a sequence got last, and a spare one."""

    def __init__(self, decoder: Decoder, cache: KVCache, max_model_len: int, places: int) -> None:
        self.decoder, self.cache, self.max_model_len = decoder, cache, max_model_len
        self.device = cache.data.device
        self.table_width = -(-max_model_len // cache.page_size)
        self.last_tokens = torch.zeros(places + 1, dtype=torch.int64, device=self.device)

    def known(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Ids with those that the host did not know. A row that got no token goes on with any: nobody looks."""
        return torch.where(ids < 0, self.last_tokens[places].clamp(min=0), ids)

    def draw(self, logits: torch.Tensor, given: dict[str, torch.Tensor]) -> torch.Tensor:
        rows = logits.shape[0]
        options = [given[name][:rows] for name in ("temperature", "top_k", "top_p", "min_p", "seeds", "num_tokens")]
        return ops.sample(logits, *options)


def _sampling_columns(rows: int) -> Columns:
    return {name: ((rows,), dtype) for name, dtype in SAMPLING.items()}


def _write_sampling(host: dict[str, np.ndarray], sequences: Many[Sequence], num_tokens: Many[int]) -> None:
    """Parameters of the rows that sample; those behind them stay as they were, and nobody looks at what they draw."""
    count = len(sequences)
    filters = [sequence.params.filters for sequence in sequences]
    for column, name in enumerate(("temperature", "top_p", "min_p", "top_k")):
        host[name][:count] = [values[column] for values in filters]
        host[name][count:] = 0
    host["seeds"][:count] = [sequence.seed for sequence in sequences]
    host["num_tokens"][:count] = num_tokens


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
        self.down = Download(most_steps, rows, model.device)

    def write(self, rows: Many[Row], sequences: Many[Sequence]) -> None:
        """Write down a launch of these rows, none of which is longer than one token, and send it."""
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
        self.upload.send()

    def begin(self) -> None:
        """Before the first step of a launch."""
        given = self.upload.device
        given["ids"].copy_(self.model.known(given["ids"], given["places"]))

    def step(self, index: int) -> None:
        """One step; its tokens go to row `index` of the history."""
        model, given = self.model, self.upload.device
        meta = ops.AttentionMeta(given["table"], given["seq_lens"], given["seq_lens"], 1, model.max_model_len)
        hidden = model.decoder(given["ids"], given["positions"], model.cache.layers, given["slots"], meta, True)
        tokens = model.draw(model.decoder.logits(hidden), given)
        ids, positions, num_tokens = given["ids"], given["positions"], given["num_tokens"]
        moved = ids, positions, num_tokens, given["seq_lens"], given["slots"], model.last_tokens, self.history
        rest = given["table"], given["limits"], given["places"], model.cache.page_size
        ops.advance_decode_(tokens, *moved, *rest, index)


class PromptBatch:
    """Up to `tokens` new tokens of up to `rows` sequences."""

    def __init__(self, model: Model, tokens: int, rows: int) -> None:
        self.model, self.tokens, self.rows = model, tokens, rows
        columns: Columns = {
            **dict.fromkeys(("ids", "positions", "slots", "owners"), ((tokens,), INTS)),
            "query_starts": ((rows + 1,), SHORTS),
            "seq_lens": ((rows,), SHORTS),
            **dict.fromkeys(("wanted", "places"), ((rows,), INTS)),
            **_sampling_columns(rows),
            "table": ((rows, model.table_width), SHORTS),
        }
        self.upload = Upload(columns, model.device)
        self.drawn = torch.zeros(1, rows, dtype=torch.int64, device=model.device)
        self.down = Download(1, rows, model.device)

    def write(self, rows: Many[Row], sequences: Many[Sequence]) -> tuple[int, int, int]:
        """Write down a step of these rows and send it; returns its numbers of tokens, rows and rows that sample."""
        host, size = self.upload.begin(), self.model.cache.page_size
        count, sampling = len(rows), [index for index, row in enumerate(rows) if row.samples]
        lengths = np.array([len(row.tokens) for row in rows])
        starts = np.array([row.start for row in rows])
        ends = np.cumsum(lengths)
        total = int(ends[-1])
        for index, row in enumerate(rows):
            host["table"][index, : len(row.pages)] = row.pages
            host["ids"][ends[index] - lengths[index] : ends[index]] = row.tokens
        owner = np.repeat(np.arange(count), lengths)
        positions = np.arange(total) + (starts - ends + lengths)[owner]
        slots = host["table"][owner, positions // size].astype(np.int64) * size + positions % size
        places = np.array([row.place for row in rows])
        host["ids"][total:] = 0
        host["query_starts"][0], host["query_starts"][1 : count + 1], host["query_starts"][count + 1 :] = 0, ends, total
        columns = {
            "positions": (positions, 0),
            "slots": (slots, -1),
            "owners": (places[owner], NOWHERE),
            "seq_lens": (starts + lengths, 0),
            "wanted": (ends[sampling] - 1, 0),
            "places": (places[sampling], NOWHERE),
        }
        for name, (values, padding) in columns.items():
            host[name][: len(values)], host[name][len(values) :] = values, padding
        _write_sampling(host, sequences, (starts + lengths)[sampling].tolist())
        self.upload.send()
        return total, count, len(sampling)

    def step(self, tokens: int, rows: int, sampling: int, whole_prompt: bool = False, decodes: int = 0) -> None:
        """Run so many tokens of so many rows: all that there is room for in a graph, those that are there outside.

        decodes: how many of the rows, the last ones, have one token each that goes through decode attention.
        """
        model, given = self.model, self.upload.device
        ids = model.known(given["ids"][:tokens], given["owners"][:tokens])
        starts, lengths, table = given["query_starts"][: rows + 1], given["seq_lens"][:rows], given["table"][:rows]
        prompts, longest, other = rows - decodes, model.max_model_len, None
        if decodes:
            other = ops.AttentionMeta(table[prompts:], lengths[prompts:], lengths[prompts:], 1, longest)
        own = table[:prompts], lengths[:prompts], starts[: prompts + 1]
        meta = ops.AttentionMeta(*own, tokens, longest, whole_prompt, other)
        positions, slots = given["positions"][:tokens], given["slots"][:tokens]
        hidden = model.decoder(ids, positions, model.cache.layers, slots, meta, False)
        if sampling:
            drawn = model.draw(model.decoder.logits(hidden[given["wanted"][:sampling]]), given)
            model.last_tokens[given["places"][:sampling]] = drawn
            self.drawn[0, :sampling] = drawn
