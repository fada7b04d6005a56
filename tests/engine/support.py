"""Tiny checkpoints with tokenizers, scripted models and checks that several tests share."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers

from rooflight import LLM, Completion, SamplingParams
from rooflight.engine.page_pool import ROOT
from rooflight.engine.plan import Row, StepPlan
from rooflight.engine.scheduler import Scheduler
from tests.models import tiny

# Ids 0 to 5 are special tokens, then come the 256 bytes, then whole pieces that only a script can say.
SPECIALS = ["<s>", "<a>", "<b>", "<c>", "<d>", "<pad>"]
PIECES = ["alpha", " beta", " gamma", " delta", " gala", "alpha be", "ta ga", "mma", " rays", "STOP", "안녕", "🦙"]
BYTE_BASE = len(SPECIALS)
PIECE_BASE = BYTE_BASE + 256
TOKENIZER_VOCAB = PIECE_BASE + len(PIECES)


def byte_level_backend() -> tokenizers.Tokenizer:
    """Byte-level BPE without merges: a text is encoded byte by byte, pieces have ids all the same."""
    alphabet = _byte_alphabet()
    vocab = {token: index for index, token in enumerate(SPECIALS)}
    vocab |= {character: BYTE_BASE + byte for byte, character in enumerate(alphabet)}
    vocab |= {"".join(alphabet[byte] for byte in piece.encode()): PIECE_BASE + i for i, piece in enumerate(PIECES)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in SPECIALS])
    return backend


def _byte_alphabet() -> list[str]:
    """GPT-2's character for each byte, read off the library: the one it writes for that byte alone."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(256, 512))
    alphabet = [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
    assert sorted(alphabet) == sorted(pre_tokenizers.ByteLevel.alphabet())
    return alphabet


def ids_of(*parts: str) -> list[int]:
    """Token ids of a script: a special token, a piece, or any text byte by byte."""
    ids: list[int] = []
    for part in parts:
        if part in SPECIALS:
            ids.append(SPECIALS.index(part))
        elif part in PIECES:
            ids.append(PIECE_BASE + PIECES.index(part))
        else:
            ids.extend(BYTE_BASE + byte for byte in part.encode())
    return ids


def write_tokenizer(folder: Path, **config: Any) -> Path:
    """tokenizer.json and tokenizer_config.json beside a checkpoint."""
    (folder / "tokenizer.json").write_text(byte_level_backend().to_str(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def checkpoint(folder: Path, family: str = "qwen3", **overrides: Any) -> Any:
    """Writes a tiny FP32 checkpoint with a tokenizer into `folder` and returns the transformers model.

    Biases are made smaller: with large ones the greedy answer is the same token over and over and proves nothing.
    """
    model = tiny.reference_model(family, **overrides)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.mul_(0.2)
    tiny.save(model, folder)
    write_tokenizer(folder)
    return model


@torch.inference_mode()
def reference_tokens(model: Any, prompt: Sequence[int], max_tokens: int, **options: Any) -> tuple[int, ...]:
    """Greedy tokens by transformers' own `generate`, the end token included."""
    ids = torch.tensor([list(prompt)])
    options = {"max_new_tokens": max_tokens, "do_sample": False, "pad_token_id": 0} | options
    out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return tuple(out[0, len(prompt) :].tolist())


def prompt_ids(length: int, seed: int = 1, vocab_size: int = 1000) -> list[int]:
    return [int(token) for token in tiny.prompt(length, vocab_size=vocab_size, seed=seed)]


def tokens_alone(llm: LLM, prompt: Sequence[int], params: SamplingParams) -> tuple[int, ...]:
    return llm.generate([list(prompt)], params)[0].token_ids


def assert_idle(llm: LLM) -> None:
    """Nothing runs, waits or is remembered, and every page is free exactly once."""
    engine = llm.engine
    assert not engine.busy
    assert (engine.scheduler.waiting, engine.scheduler.running) == ([], [])
    assert (engine._requests, engine._empty, llm._inboxes) == ({}, [], {})
    assert (list(engine._launches), list(engine.scheduler.in_flight)) == ([], [])
    assert_conserved(engine.scheduler)
    assert engine.scheduler.pool.free == engine.scheduler.pool.num_pages


def assert_conserved(scheduler: Scheduler) -> None:
    """Every page is free, held as often as running sequences say, or idle in the prefix cache: exactly one of these."""
    pool = scheduler.pool
    held = Counter(page for sequence in scheduler.running for page in sequence.pages)
    assert [pool._holders[page] for page in range(pool.num_pages)] == [held[page] for page in range(pool.num_pages)]
    assert sorted([*held, *pool._free, *pool._idle]) == list(range(pool.num_pages))
    assert pool._keys == {page: key for key, page in pool._published.items()}
    assert set(pool._idle) <= set(pool._keys)
    assert set(pool._links.values()) | {ROOT} == pool._alive
    places = [sequence.place for sequence in scheduler.running]
    assert len(set(places)) == len(places)
    assert set(places) <= set(range(scheduler.max_num_seqs))


SECOND = ids_of("x")[0]  # what a scripted model says where its line is not allowed or has ended
Line = Sequence["int | None"]  # None: logits that are all NaN


class Script:
    """Stands in for `Runner.run`: every request says its line, chosen by the first token of its prompt."""

    def __init__(self, llm: LLM, lines: Mapping[int, Line] | Line) -> None:
        self.engine = llm.engine
        self.vocab_size = llm.config.vocab_size
        self.lines = lines
        self.steps = 0

    def __call__(self, plan: StepPlan) -> torch.Tensor:
        self.steps += 1
        rows = [self._row(row) for row in plan.rows if row.samples]
        return torch.stack(rows) if rows else torch.empty(0, self.vocab_size)

    def _row(self, row: Row) -> torch.Tensor:
        sequence = self.engine._requests[row.request_id].sequence
        line = self.lines[sequence.tokens[0]] if isinstance(self.lines, Mapping) else self.lines
        number = row.start + len(row.tokens) - sequence.num_prompt
        wanted = line[number] if number < len(line) else SECOND
        if wanted is None:
            return torch.full((self.vocab_size,), torch.nan)
        logits = torch.zeros(self.vocab_size)
        logits[SECOND] = 500.0
        logits[wanted] = 1000.0
        return logits


def play(monkeypatch: pytest.MonkeyPatch, llm: LLM, line: Line, **params: Any) -> tuple[Completion, list[str]]:
    """The completion of a scripted request and the texts of its chunks; stream and generate must agree."""
    monkeypatch.setattr(llm.engine.runner, "run", Script(llm, line))
    options = SamplingParams(**params)
    whole = llm.generate([[7]], options)[0]
    chunks = list(llm.stream([7], options))
    streamed = chunks[-1].completion
    assert streamed is not None
    assert [chunk.finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert [chunk.completion for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert "".join(chunk.text for chunk in chunks) == streamed.text == whole.text
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == streamed.token_ids == whole.token_ids
    assert chunks[-1].finish_reason == streamed.finish_reason == whole.finish_reason
    assert streamed.error == whole.error
    assert_idle(llm)
    return whole, [chunk.text for chunk in chunks]
