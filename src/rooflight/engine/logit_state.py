"""What changes the logits of sequences, kept on the device by place: so nobody waits for the host between two tokens.

A place has the counts of the tokens that its sequence generated, those of its prompt, its penalties, biases and banned
end tokens. Steps count their tokens themselves. The host notes how many tokens a place has counted; where that is not
what a launch starts from, since the sequence is new there, was stopped, or launches were forgotten, it writes the place
anew from the tokens, all of which it then knows. One more, spare place is of those that ask for nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Many
from functools import cached_property
from itertools import chain

import numpy as np
import torch

from rooflight import ops
from rooflight.engine.plan import Row
from rooflight.engine.sequence import Sequence
from rooflight.engine.upload import send

OFF = (1.0, 0.0, 0.0)  # repetition, frequency and presence penalty
FEW = 16  # entries of biases and bans that there is room for at first
BAN = float("-inf")


class Tables:
    """The device's side: counts of generated tokens, tokens of the prompt and so on, of each place."""

    def __init__(self, rows: int, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(rows, vocab_size, dtype=torch.int32, device=device)
        self.prompt = torch.zeros(rows, vocab_size, dtype=torch.bool, device=device)
        self.penalties = torch.zeros(3, rows, device=device)
        self.penalties[0] = 1
        self.min_lens = torch.zeros(rows, dtype=torch.int64, device=device)
        self.bias_ids = torch.full((rows, FEW), -1, dtype=torch.int64, device=device)
        self.bias_values = torch.zeros(rows, FEW, device=device)

    def widen(self, need: int) -> None:
        """Room for so many biases and bans; twice as much at least as there was."""
        more = (1 << max(need - 1, 0).bit_length()) - self.bias_ids.shape[1]
        if more > 0:  # both or none: there may be memory for the first one only
            ids = torch.nn.functional.pad(self.bias_ids, (0, more), value=-1)
            self.bias_ids, self.bias_values = ids, torch.nn.functional.pad(self.bias_values, (0, more))


class LogitState:
    """State of `places` sequences. What it needs of the device's memory it takes when the first one comes."""

    def __init__(self, places: int, vocab_size: int, device: torch.device) -> None:
        self.spare, self.vocab_size, self.device = places, vocab_size, device
        self._notes: dict[int, tuple[Sequence, int, int]] = {}  # by place: what `_note` says of it

    @cached_property
    def _tables(self) -> Tables:
        return Tables(self.spare + 1, self.vocab_size, self.device)

    @property
    def width(self) -> int:
        """Of the lists of biases and bans. When it grows the tables move, and graphs that know them are of no use."""
        return self._tables.bias_ids.shape[1]

    def write(self, rows: Many[Row], sequences: Many[Sequence]) -> None:
        """Before a launch: what places do not have yet of the sequences of these rows. Nobody waits for it.

        Until `launched`, the places count as not written: a launch that fails may have counted some of its tokens.
        """
        missing = [
            (row, sequence)
            for row, sequence in zip(rows, sequences, strict=True)
            if self._notes.pop(row.place, None) != _note(sequence, _drawn_at(row))
        ]
        if missing:
            self._write(missing)

    def launched(self, rows: Many[Row], sequences: Many[Sequence], gets: Many[int]) -> None:
        """The launch is on its way, and gives these rows so many tokens."""
        for row, sequence, many in zip(rows, sequences, gets, strict=True):
            self._notes[row.place] = _note(sequence, _drawn_at(row) + many)

    def forget(self, rows: Many[Row]) -> None:
        """These get tokens in another way."""
        for row in rows:
            self._notes.pop(row.place, None)

    def penalize_(self, logits: torch.Tensor, places: torch.Tensor, num_tokens: torch.Tensor) -> None:
        """Change logits (rows, vocab_size) FP32 of the tokens behind so many, by the state at each row's place."""
        tables = self._tables
        repetition, frequency, presence = tables.penalties[:, places]
        ids, values = tables.bias_ids[places], tables.bias_values[places]
        lifted = (values == BAN) & (num_tokens >= tables.min_lens[places])[:, None]
        penalties = repetition, frequency, presence, ids.masked_fill(lifted, -1), values
        ops.penalize_logits_(logits, tables.counts, tables.prompt, *penalties, places)

    def count_(self, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Count a token of each row, but for those that got none."""
        cells = places * self.vocab_size + tokens.clamp(min=0)
        self._tables.counts.view(-1).scatter_add_(0, cells, (tokens >= 0).int())

    def _write(self, missing: Many[tuple[Row, Sequence]]) -> None:
        tables, lists = self._tables, [_entries(sequence) for _, sequence in missing]
        tables.widen(max(map(len, lists)))
        ids = np.full((len(missing), self.width), -1)
        values = np.zeros((len(missing), self.width), np.float32)
        for index, entries in enumerate(lists):
            ids[index, : len(entries)] = [token for token, _ in entries]
            values[index, : len(entries)] = [value for _, value in entries]
        counted = [(row.place, _known(row, s), s) for row, s in missing if s.params.penalties != OFF]
        repeated = [part for part in counted if part[2].params.penalties[0] != 1]
        given = send(
            {
                "places": np.array([row.place for row, _ in missing]),
                "min_lens": np.array([s.num_prompt + s.params.min_tokens for _, s in missing]),
                "penalties": np.array([s.params.penalties for _, s in missing], np.float32).T,
                "ids": ids,
                "values": values,
                "counted": np.array([place for place, _, _ in counted], np.int64),
                "prompt": self._cells([(place, tokens[: s.num_prompt]) for place, tokens, s in repeated]),
                "answer": self._cells([(place, tokens[s.num_prompt :]) for place, tokens, s in counted]),
            },
            self.device,
        )
        places, answer = given["places"], given["answer"]
        tables.min_lens[places], tables.penalties[:, places] = given["min_lens"], given["penalties"]
        tables.bias_ids[places], tables.bias_values[places] = given["ids"], given["values"]
        if counted:  # without a penalty nobody looks at counts and prompt
            tables.counts.index_fill_(0, given["counted"], 0)
            tables.prompt.index_fill_(0, given["counted"], False)
            tables.prompt.view(-1).index_fill_(0, given["prompt"], True)
            tables.counts.view(-1).scatter_add_(0, answer, torch.ones_like(answer, dtype=torch.int32))

    def _cells(self, tokens: Many[tuple[int, Collection[int]]]) -> np.ndarray:
        """Where tokens stand in the tables, of each place."""
        lengths = [len(of_place) for _, of_place in tokens]
        ids = np.fromiter(chain.from_iterable(of_place for _, of_place in tokens), np.int64, sum(lengths))
        return np.repeat(np.array([place for place, _ in tokens], np.int64) * self.vocab_size, lengths) + ids


def _entries(sequence: Sequence) -> list[tuple[int, float]]:
    """Biases, and bans of end tokens: these count until there are `min_tokens`, and win over a bias."""
    ends = sequence.end_ids if sequence.params.min_tokens else ()
    return [*sequence.params.logit_bias.items(), *((token, BAN) for token in ends)]


def _drawn_at(row: Row) -> int:
    """Tokens before the first one that a launch draws for a row."""
    return row.start + len(row.tokens)


def _note(sequence: Sequence, num_tokens: int) -> tuple[Sequence, int, int]:
    """Whose tokens a place has counted, how often it was stopped, since it then had other places, and how many."""
    return sequence, sequence.preemptions, num_tokens


def _known(row: Row, sequence: Sequence) -> list[int]:
    """The tokens before the first one that is drawn."""
    if len(sequence.tokens) < _drawn_at(row):
        raise RuntimeError(f"request {sequence.request_id} has tokens in flight that nobody counted")
    return sequence.tokens[: _drawn_at(row)]
