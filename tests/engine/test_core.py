"""The engine alone: admission, broken logits, cancelling, and histories of requests that share a small pool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from rooflight import LLM, Chunk, SamplingParams
from rooflight.engine.core import Engine
from rooflight.engine.plan import StepPlan
from tests.engine.late import in_every_mode
from tests.engine.support import Script, assert_conserved, assert_idle, ids_of, play, prompt_ids, tokens_alone

PARAMS = SamplingParams(max_tokens=12)


def collect(engine: Engine, requests: int) -> dict[int, list[Chunk]]:
    """Steps until all is done; chunks by request. Fails rather than hangs."""
    chunks: dict[int, list[Chunk]] = {}
    for _ in range(2000):
        if not engine.busy:
            break
        for request_id, chunk in engine.step():
            chunks.setdefault(request_id, []).append(chunk)
    assert not engine.busy
    assert len(chunks) == requests
    return chunks


def break_logits(monkeypatch: pytest.MonkeyPatch, llm: LLM, first_token: int, at: int, value: float) -> None:
    """Overwrites the logits for answer token `at` of the request whose prompt begins with `first_token`."""
    engine, run = llm.engine, llm.engine.runner.run

    def broken(plan: StepPlan) -> torch.Tensor:
        logits = run(plan)
        for index, row in enumerate(r for r in plan.rows if r.samples):
            sequence = engine._requests[row.request_id].sequence
            if sequence.tokens[0] == first_token and row.start + len(row.tokens) - sequence.num_prompt == at:
                logits[index] = value
        return logits

    monkeypatch.setattr(engine.runner, "run", broken)


@in_every_mode
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("at", [0, 1, 5])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_broken_logits_end_only_their_request(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, value: float, at: int, temperature: float
) -> None:
    params = SamplingParams(max_tokens=12, temperature=temperature, seed=3)
    prompts = [[11, *prompt_ids(9)], [12, *prompt_ids(70)], [13]]
    alone = [tokens_alone(llm, prompt, params) for prompt in prompts]
    break_logits(monkeypatch, llm, 12, at, value)
    good, bad, last = llm.generate(prompts, params)
    assert (good.token_ids, last.token_ids) == (alone[0], alone[2])
    assert (good.finish_reason, last.finish_reason, good.error) == ("length", "length", None)
    assert bad.token_ids == alone[1][:at]
    assert (bad.finish_reason, bad.error) == ("error", "the model gave no finite logits (NaN, or all -inf)")
    assert bad.text == llm.tokenizer.decode(alone[1][:at])  # type: ignore[union-attr]
    assert_idle(llm)


@in_every_mode
def test_one_nan_among_good_logits_is_an_error_too(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    run = llm.engine.runner.run

    def one_nan(plan: StepPlan) -> torch.Tensor:
        logits = run(plan)
        logits[:, 123] = torch.nan
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", one_nan)
    assert [r.finish_reason for r in llm.generate([[1], [2]], PARAMS)] == ["error", "error"]


@in_every_mode
def test_an_error_delivers_the_text_that_was_held_back(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    completion, shown = play(monkeypatch, llm, [*ids_of("alpha", " beta"), None], max_tokens=9, stop="beta gamma")
    assert (completion.text, shown) == ("alpha beta", ["alpha", " ", "beta"])
    assert (completion.finish_reason, len(completion.token_ids)) == ("error", 2)
    completion, _ = play(monkeypatch, llm, [*ids_of("m🦙")[:3], None], max_tokens=9)
    assert (completion.text, completion.finish_reason) == ("m\ufffd", "error")


@pytest.fixture
def poisoned(shared_llm: LLM) -> Iterator[int]:
    """A token whose embedding is NaN: its request computes NaN everywhere and leaves NaN in its pages."""
    row = shared_llm.decoder.embed[77].clone()
    shared_llm.decoder.embed[77] = torch.nan
    yield 77
    shared_llm.decoder.embed[77] = row


@in_every_mode
@pytest.mark.parametrize("length", [5, 63, 64, 65, 150])
def test_a_request_that_computes_nan_hurts_neither_neighbours_nor_successors(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, poisoned: int, length: int
) -> None:
    prompts = [prompt_ids(20, seed=2), prompt_ids(67, seed=3)]
    alone = [tokens_alone(llm, prompt, PARAMS) for prompt in prompts]
    assert not any(poisoned in [*prompt, *tokens] for prompt, tokens in zip(prompts, alone, strict=True))
    bad = [*prompt_ids(length - 1, seed=4), poisoned]
    run, cache, left_nan = llm.engine.runner.run, llm.engine.runner.cache, False

    def watched(plan: StepPlan) -> torch.Tensor:
        nonlocal left_nan
        logits = run(plan)
        left_nan = left_nan or bool(cache.data.isnan().any())
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", watched)
    first, broken, second = llm.generate([prompts[0], bad, prompts[1]], PARAMS)
    assert (broken.finish_reason, broken.token_ids) == ("error", ())
    assert [first.token_ids, second.token_ids] == alone
    assert left_nan
    assert [tokens_alone(llm, prompt, PARAMS) for prompt in prompts[::-1]] == alone[::-1]  # in those very pages


@in_every_mode
def test_chunks_come_one_a_token_and_the_last_one_has_the_completion(llm: LLM) -> None:
    request_id = llm.engine.submit(prompt_ids(5), PARAMS)
    chunks = collect(llm.engine, 1)[request_id]
    assert [len(chunk.token_ids) for chunk in chunks] == [1] * 12
    assert [chunk.finish_reason for chunk in chunks] == [None] * 11 + ["length"]
    completion = chunks[-1].completion
    assert completion is not None
    assert completion.token_ids == tokens_alone(llm, prompt_ids(5), PARAMS)


def test_steps_of_a_long_prompt_show_nothing(llm: LLM) -> None:
    llm.engine.submit(prompt_ids(150), SamplingParams(max_tokens=1))
    shown = [list(llm.engine.step()) for _ in range(3)]  # 64 + 64 + 22
    assert [len(chunks) for chunks in shown] == [0, 0, 1]
    assert list(llm.engine.step()) == []  # nothing left is no error


@in_every_mode
@pytest.mark.parametrize("steps", range(5))
def test_abort_at_any_time_frees_everything_and_keeps_the_neighbour(llm: LLM, steps: int) -> None:
    prompts = [prompt_ids(70, seed=5), prompt_ids(9, seed=6)]
    alone = tokens_alone(llm, prompts[1], PARAMS)
    first, second = (llm.engine.submit(prompt, PARAMS) for prompt in prompts)
    chunks: list[Chunk] = []
    for _ in range(steps):
        chunks += [chunk for owner, chunk in llm.engine.step() if owner == second]
    llm.engine.abort(first)
    llm.engine.abort(first)
    llm.engine.abort(10**9)
    chunks += collect(llm.engine, 1).get(second, []) if llm.engine.busy else []
    assert tuple(token for chunk in chunks for token in chunk.token_ids) == alone


def test_abort_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Python may collect an abandoned stream at any moment, also while the model runs."""
    prompts = [prompt_ids(9, seed=6), prompt_ids(9, seed=7)]
    alone = tokens_alone(llm, prompts[1], PARAMS)
    first, second = (llm.engine.submit(prompt, PARAMS) for prompt in prompts)
    run, steps = llm.engine.runner.run, 0

    def aborting(plan: StepPlan) -> torch.Tensor:
        nonlocal steps
        steps += 1
        logits = run(plan)
        if steps == 5:
            assert [row.request_id for row in plan.rows] == [first, second]
            llm.engine.abort(first)
        return logits

    monkeypatch.setattr(llm.engine.runner, "run", aborting)
    chunks = collect(llm.engine, 2)
    assert len(chunks[first]) == 4  # the prompts of both ran in the first step
    assert tuple(token for chunk in chunks[second] for token in chunk.token_ids) == alone


@in_every_mode
def test_abort_of_the_only_request_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    request_id = llm.engine.submit([1, 2], PARAMS)
    run = llm.engine.runner.run

    def aborting(plan: StepPlan) -> torch.Tensor:
        llm.engine.abort(request_id)
        return run(plan)

    monkeypatch.setattr(llm.engine.runner, "run", aborting)
    assert list(llm.engine.step()) == []


def test_a_failing_runner_leaves_the_requests_as_they_were(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    """Out of memory, say: the same step can be tried again."""
    alone = tokens_alone(llm, prompt_ids(70), PARAMS)
    request_id = llm.engine.submit(prompt_ids(70), PARAMS)
    run, calls = llm.engine.runner.run, 0

    def every_other(plan: StepPlan) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls % 2:
            raise RuntimeError("out of memory")
        return run(plan)

    monkeypatch.setattr(llm.engine.runner, "run", every_other)
    tokens: list[int] = []
    while llm.engine.busy:
        with pytest.raises(RuntimeError, match="out of memory"):
            llm.engine.step()
        tokens += [token for _, chunk in llm.engine.step() for token in chunk.token_ids]
    assert tuple(tokens) == alone
    assert request_id not in llm.engine._requests


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt must have at least one token, was empty"),
        ([1, 1000], {}, "prompt must have token ids below 1000, was one with 1 to 1000"),
        ([-1, 5], {}, "prompt must have token ids below 1000, was one with -1 to 5"),
        ([2**70], {}, "prompt must have token ids below 1000"),
        ([1] * 600, {}, "leave room for an answer in the context of 600 tokens, was 600 tokens"),
        ([1] * 601, {}, "leave room for an answer in the context of 600 tokens, was 601 tokens"),
    ],
)
def test_a_prompt_that_cannot_run_is_refused(llm: LLM, prompt: list[int], params: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        llm.engine.submit(prompt, SamplingParams(**params))


@in_every_mode
def test_br_063_a_request_too_large_for_the_pool_is_refused_and_the_small_one_finishes() -> None:
    llm = LLM("random:tiny", num_pages=2)
    exact = llm.engine.submit([5] * 25, SamplingParams(max_tokens=8))  # 32 tokens in the cache: the whole pool
    for length in (26, 32, 33, 2000):
        with pytest.raises(ValueError, match=rf"may need {length + 7} tokens of KV cache .*, the pool has 2 pages"):
            llm.engine.submit([5] * length, SamplingParams(max_tokens=8))
    small = llm.engine.submit([5, 6], SamplingParams(max_tokens=3))
    chunks = collect(llm.engine, 2)
    for request_id, count in ((exact, 8), (small, 3)):
        completion = chunks[request_id][-1].completion
        assert completion is not None
        assert (len(completion.token_ids), completion.finish_reason) == (count, "length")
    assert_idle(llm)


LINES = {100 + i: ids_of("abcdefghijklmnopqrstuvwxyz"[i:]) for i in range(26)}


class Histories(RuleBasedStateMachine):
    """Requests of one scripted engine come, run and go; each must say its whole line whatever the others do."""

    requests = Bundle("requests")
    llm: LLM

    @initialize(pages=st.integers(3, 6), max_seqs=st.integers(1, 3))
    def start(self, pages: int, max_seqs: int) -> None:
        self.llm = LLM("random:tiny", num_pages=pages, page_size=4, max_num_seqs=max_seqs, max_num_batched_tokens=3)
        self.llm.engine.runner.run = Script(self.llm, LINES)  # type: ignore[method-assign]
        self.open: dict[int, tuple[int, int]] = {}
        self.heard: dict[int, list[int]] = {}

    @rule(target=requests, key=st.integers(100, 125), length=st.integers(1, 6), max_tokens=st.integers(0, 6))
    def submit(self, key: int, length: int, max_tokens: int) -> int:
        request_id = self.llm.engine.submit([key] * length, SamplingParams(max_tokens=max_tokens))
        self.open[request_id] = (key, max_tokens)
        self.heard[request_id] = []
        return request_id

    @rule()
    def step(self) -> None:
        for request_id, chunk in self.llm.engine.step():
            key, max_tokens = self.open[request_id]
            self.heard[request_id] += chunk.token_ids
            if chunk.completion is not None:
                assert list(chunk.completion.token_ids) == self.heard[request_id]
                line = LINES[key] + ids_of("xxxxxx")
                assert self.heard[request_id] == line[:max_tokens]
                del self.open[request_id]

    @rule(request_id=consumes(requests))
    def abort(self, request_id: int) -> None:
        self.llm.engine.abort(request_id)
        self.open.pop(request_id, None)

    @invariant()
    def pages_are_conserved(self) -> None:
        if hasattr(self, "open"):
            assert_conserved(self.llm.engine.scheduler)
            assert sorted(self.llm.engine._groups) == sorted(self.open)

    def teardown(self) -> None:
        if hasattr(self, "open"):
            for _ in range(100 * (1 + len(self.open))):
                if self.open:
                    self.step()
            assert not self.open
            assert_idle(self.llm)


@in_every_mode
def test_histories(mode: tuple[int, int]) -> None:
    options = settings(max_examples=25, stateful_step_count=30, deadline=None, derandomize=True)
    run_state_machine_as_test(Histories, settings=options)
