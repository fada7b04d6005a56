"""Rooflight as a contender."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch

import rooflight
from rooflight.bench.measurement import ANY_ROOM, OURS, PAGE_SIZE, Facts, RequestTiming, Room
from rooflight.engine import LLM, SamplingParams
from rooflight.engine.memory import free_bytes, working_bytes
from rooflight.models.load import DTYPES, load_config

SHARE = 0.5  # of a GPU's free memory that our KV pool may take: the peers' stand beside it
STEP_SHARE = 0.25  # and what a large step works with
SMALL_STEP = 16_384  # tokens: no smaller for that


class RooflightContender:
    def __init__(self, model: str | None, dtype: str, device: str, room: Room = ANY_ROOM) -> None:
        given: dict[str, Any] = {name: value for name, value in vars(room).items() if value is not None}
        given["page_size"] = PAGE_SIZE
        if room.num_pages is not None:
            given["num_pages"] = _fitting(room, model, DTYPES[dtype], device)
            if device != "cpu" and room.max_num_batched_tokens is not None:
                given["max_num_batched_tokens"] = _step(room, model, DTYPES[dtype], device)
        # Every round has the same prompts: a cache of prefixes would leave nothing of them to run.
        self.llm = LLM(model, dtype=dtype, device=device, skip_tokenizer=True, prefix_cache=False, **given)

    def versions(self) -> dict[str, str]:
        return {OURS: rooflight.__version__}

    def facts(self) -> Facts:
        scheduler = self.llm.engine.scheduler
        return {
            "max_model_len": self.llm.max_model_len,
            "num_pages": scheduler.pool.num_pages,
            "page_size": scheduler.page_size,
            "max_num_seqs": scheduler.max_num_seqs,
            "max_num_batched_tokens": scheduler.max_num_batched_tokens,
            "graph_buckets": list(getattr(self.llm, "graph_buckets", ())),
            "prefix_cache": scheduler.prefix_cache,
        }

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        completion = self.llm.generate([list(prompt)], params)[0]
        return RequestTiming(completion.timing.first_token, completion.timing.total, completion.token_ids)

    def complete(self, prompt: Sequence[int], max_tokens: int) -> object:
        return self.run(prompt, max_tokens)

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        asked = [list(prompt) for prompt in prompts]
        start = time.perf_counter()
        completions = self.llm.generate(asked, params)
        seconds = time.perf_counter() - start
        for completion in completions:
            if completion.error is not None or len(completion.token_ids) != max_tokens:
                got = len(completion.token_ids)
                raise RuntimeError(f"a request for {max_tokens} tokens ended after {got}: {completion.error}")
        return seconds


def _step(room: Room, model: str | None, dtype: torch.dtype, device: str) -> int:
    """Tokens of a step as asked for, or half as many, and so on, as long as they take more than their share."""
    config, tokens = load_config(model), room.max_num_batched_tokens or SMALL_STEP
    share = STEP_SHARE * (free_bytes(torch.device(device)) - config.num_parameters() * dtype.itemsize)
    while tokens > SMALL_STEP and working_bytes(config, dtype, room.max_num_seqs or 1, tokens) > share:
        tokens = max(tokens // 2, SMALL_STEP)
    return tokens


def _fitting(room: Room, model: str | None, dtype: torch.dtype, device: str) -> int:
    """Pages as asked for, or as many as our share of a GPU's memory holds, but enough for one request.

    The engine refuses what it cannot hold at all.
    """
    assert room.num_pages is not None
    if device == "cpu":
        return room.num_pages
    config = load_config(model)
    free = SHARE * (free_bytes(torch.device(device)) - config.num_parameters() * dtype.itemsize)
    fitting = int(free) // (PAGE_SIZE * config.kv_bytes_per_token(dtype))
    one = -(-(room.max_model_len or config.max_position_embeddings) // PAGE_SIZE)
    return max(one, min(room.num_pages, fitting))
