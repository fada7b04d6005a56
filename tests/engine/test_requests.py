"""What a request may ask of the engine beyond tokens: several answers, log-probabilities, a callback; and faults."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflight import LLM, Chunk, Completion, SamplingParams
from rooflight.engine.metrics import Percentiles
from rooflight.engine.plan import StepPlan
from tests.engine.late import in_every_mode
from tests.engine.support import Script, assert_idle, ids_of, prompt_ids, tokens_alone

PARAMS = SamplingParams(max_tokens=12)


def last_of(chunks: list[Chunk]) -> Completion:
    assert chunks[-1].completion is not None
    return chunks[-1].completion


def run(llm: LLM, *requests: int) -> dict[int, list[Chunk]]:
    chunks: dict[int, list[Chunk]] = {request: [] for request in requests}
    for _ in range(2000):
        if not llm.engine.busy:
            return chunks
        for owner, chunk in llm.engine.step():
            chunks[owner].append(chunk)
    raise AssertionError("the engine does not come to an end")


@in_every_mode
def test_n_answers_share_the_pages_of_their_prompt(llm: LLM) -> None:
    params = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=4)
    results = llm.generate([prompt_ids(41, seed=1), [7]], params)
    assert [c.index for c in results] == [0, 1, 2, 3] * 2
    assert len({c.token_ids for c in results[:4]}) == 4
    assert [c.cached_tokens for c in results[:4]] == [0, 40, 40, 40]  # pages of 4
    assert [c.cached_tokens for c in results[4:]] == [0, 0, 0, 0]
    assert llm.generate([prompt_ids(41, seed=1)], params)[1].token_ids == results[1].token_ids
    assert tokens_alone(llm, prompt_ids(41, seed=1), SamplingParams(max_tokens=8, temperature=1.0, seed=5)) == (
        results[0].token_ids
    )


@in_every_mode
def test_n_answers_come_as_one_stream(llm: LLM) -> None:
    chunks = list(llm.stream([1, 2, 3], SamplingParams(max_tokens=3, temperature=1.0, seed=5, n=3)))
    assert sorted(chunk.index for chunk in chunks) == [0] * 3 + [1] * 3 + [2] * 3
    ends = [chunk.completion for chunk in chunks if chunk.completion is not None]
    assert sorted(end.index for end in ends) == [0, 1, 2]
    for end in ends:
        tokens = [token for chunk in chunks if chunk.index == end.index for token in chunk.token_ids]
        assert tuple(tokens) == end.token_ids


@in_every_mode
def test_greedy_answers_are_all_the_same_and_end_alone(llm: LLM) -> None:
    alone = tokens_alone(llm, [3, 4], PARAMS)
    assert [c.token_ids for c in llm.generate([[3, 4]], SamplingParams(max_tokens=12, n=3))] == [alone] * 3


@in_every_mode
@pytest.mark.parametrize("steps", range(6))
def test_abort_drops_all_answers_of_a_prompt_also_those_that_have_not_begun(llm: LLM, steps: int) -> None:
    request = llm.engine.submit(prompt_ids(100), SamplingParams(max_tokens=50, n=3))
    for _ in range(steps):
        llm.engine.step()
    assert [chunk.finish_reason for chunk in llm.engine.abort(request)] == ["abort"] * 3
    assert llm.engine.abort(request) == []
    assert_idle(llm)


def test_an_aborted_request_says_what_it_had(llm: LLM) -> None:
    alone = tokens_alone(llm, [3, 4], PARAMS)
    request = llm.engine.submit([3, 4], PARAMS)
    for _ in range(5):
        llm.engine.step()
    (chunk,) = llm.engine.abort(request)
    assert chunk.completion is not None
    assert (chunk.completion.token_ids, chunk.completion.finish_reason) == (alone[:5], "abort")


@torch.inference_mode()
def reference_logprobs(model: Any, tokens: list[int]) -> torch.Tensor:
    return torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1)


@in_every_mode
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_log_probabilities_of_prompt_and_answer_are_the_models(llm: LLM, checkpoints: Any, length: int) -> None:
    _, model = checkpoints("qwen3", max_position_embeddings=1024)
    prompt = prompt_ids(length, seed=9)
    params = SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=2)
    (completion,) = llm.generate([prompt], params)
    assert completion.logprobs is not None
    assert completion.prompt_logprobs is not None
    assert completion.prompt_logprobs[0] is None
    expected = reference_logprobs(model, [*prompt, *completion.token_ids])
    reports = [*completion.prompt_logprobs[1:], *completion.logprobs]
    for position, report in enumerate(reports):
        assert report is not None
        assert report.token_id == [*prompt, *completion.token_ids][position + 1]
        assert report.logprob == pytest.approx(expected[position, report.token_id].item(), abs=1e-4)
        count = 2 if position + 1 < length else 3
        best = expected[position].topk(count)
        assert [token for token, _ in report.top] == best.indices.tolist()
        assert [value for _, value in report.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert completion.token_ids == tokens_alone(llm, prompt, SamplingParams(max_tokens=4))


def test_log_probabilities_of_a_prompt_need_no_answer_and_take_nothing_from_the_cache(llm: LLM) -> None:
    prompt = prompt_ids(150, seed=9)
    llm.generate([prompt], PARAMS)
    (completion,) = llm.generate([prompt], SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert completion.prompt_logprobs is not None
    assert (len(completion.prompt_logprobs), completion.token_ids, completion.text) == (150, (), "")
    assert (completion.finish_reason, completion.cached_tokens) == ("length", 0)
    assert all(report is not None and report.top == () for report in completion.prompt_logprobs[1:])


@in_every_mode
def test_neighbours_of_one_that_reads_its_prompt_are_not_disturbed(llm: LLM) -> None:
    prompts = [prompt_ids(20, seed=1), prompt_ids(170, seed=2), prompt_ids(33, seed=3)]
    alone = [tokens_alone(llm, prompt, PARAMS) for prompt in prompts]
    reading = SamplingParams(max_tokens=12, prompt_logprobs=5)
    assert [c.token_ids for c in llm.generate(prompts, [PARAMS, reading, PARAMS])] == alone


@in_every_mode
def test_chunks_carry_the_log_probabilities_of_their_tokens(llm: LLM) -> None:
    chunks = list(llm.stream([5, 6], SamplingParams(max_tokens=4, logprobs=1)))
    for chunk in chunks:
        assert chunk.logprobs is not None
        assert tuple(report.token_id for report in chunk.logprobs) == chunk.token_ids
    assert last_of(chunks).logprobs == tuple(report for chunk in chunks for report in chunk.logprobs or ())
    assert all(chunk.logprobs is None for chunk in llm.stream([5, 6], PARAMS))


@in_every_mode
@pytest.mark.parametrize("at", [1, 3, 12])
def test_a_callback_that_raises_ends_its_request_and_no_other(llm: LLM, at: int) -> None:
    prompts = [prompt_ids(9, seed=6), prompt_ids(9, seed=7)]
    alone = [tokens_alone(llm, prompt, PARAMS) for prompt in prompts]
    heard: list[Chunk] = []

    def callback(chunk: Chunk) -> None:
        heard.append(chunk)
        if len(heard) == at:
            raise KeyError("gone")

    bad = llm.engine.submit(prompts[0], PARAMS, callback)
    good = llm.engine.submit(prompts[1], PARAMS)
    chunks = run(llm, bad, good)
    completion = last_of(chunks[bad])
    assert (completion.finish_reason, completion.error) == ("error", "its callback raised KeyError: 'gone'")
    assert completion.token_ids == alone[0][:at]
    assert tuple(token for chunk in chunks[bad] for token in chunk.token_ids) == alone[0][:at]
    assert len(heard) == at
    assert last_of(chunks[good]).token_ids == alone[1]
    assert_idle(llm)


def test_a_callback_may_abort_its_own_request_and_others(llm: LLM) -> None:
    requests: list[int] = []

    def callback(chunk: Chunk) -> None:
        if len(heard) == 3:
            for request in requests:
                llm.engine.abort(request)
            raise RuntimeError("and raise")
        heard.append(chunk)

    heard: list[Chunk] = []
    requests += [llm.engine.submit([1, 2], PARAMS, callback), llm.engine.submit([3, 4], PARAMS)]
    chunks = run(llm, *requests)
    assert [len(chunks[request]) for request in requests] == [4, 3]
    assert chunks[requests[0]][-1].finish_reason == "error"
    assert_idle(llm)


@in_every_mode
def test_a_tokenizer_that_raises_ends_only_its_request(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    alone = tokens_alone(llm, [8], PARAMS)
    bad, good = llm.engine.submit([7], PARAMS), llm.engine.submit([8], PARAMS)
    stream = llm.engine._requests[bad].stream

    def broken(*args: Any) -> Any:
        raise UnicodeError("no such character")

    monkeypatch.setattr(stream, "add", broken)
    chunks = run(llm, bad, good)
    assert (last_of(chunks[bad]).finish_reason, last_of(chunks[bad]).error) == (
        "error",
        "UnicodeError: no such character",
    )
    assert last_of(chunks[good]).token_ids == alone


def test_a_bias_beyond_the_vocabulary_is_refused_and_reaches_nobody(llm: LLM) -> None:
    with pytest.raises(ValueError, match="logit_bias must have token ids below 1000, was one with 1000"):
        llm.generate([[1]], SamplingParams(logit_bias={1000: 1.0}))
    (completion,) = llm.generate([[1]], SamplingParams(max_tokens=3, logit_bias={999: 100.0}))
    assert completion.token_ids == (999, 999, 999)


@in_every_mode
def test_br_059_seeds_survive_preemption(llm: LLM, checkpoints: Any) -> None:
    folder, _ = checkpoints("qwen3", max_position_embeddings=1024)
    prompts = [prompt_ids(length, seed=length) for length in (15, 16, 17, 30)]
    params = [SamplingParams(max_tokens=30, temperature=0.9, seed=seed) for seed in range(4)]
    alone = [tokens_alone(llm, prompt, option) for prompt, option in zip(prompts, params, strict=True)]
    for prefix_cache in (True, False):
        small = LLM(str(folder), page_size=16, num_pages=7, max_model_len=64, prefix_cache=prefix_cache)
        found = small.generate(prompts, params)
        assert small.engine.metrics().preemptions > 0
        assert [completion.token_ids for completion in found] == alone
        assert_idle(small)


def test_progress_counts_completions(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    llm.generate([[1], [2, 3]], SamplingParams(max_tokens=2, n=2), progress=lambda *counts: seen.append(counts))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_a_progress_that_raises_frees_everything(llm: LLM) -> None:
    def stop(done: int, of: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        llm.generate([[1], prompt_ids(80)], [SamplingParams(max_tokens=1), PARAMS], progress=stop)


@in_every_mode
def test_metrics_count_what_happened(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM("random:tiny", num_pages=8, page_size=4)
    line = ids_of("abcdefgh")
    monkeypatch.setattr(llm.engine.runner, "run", Script(llm, line))
    llm.generate([[7] * 9, [7] * 9, [8]], [SamplingParams(max_tokens=4), SamplingParams(max_tokens=4), PARAMS])
    waiting = llm.engine.submit([9], PARAMS)
    llm.engine.abort(waiting)
    metrics = llm.engine.metrics()
    assert (metrics.waiting, metrics.running, metrics.pages, metrics.free_pages) == (0, 0, 8, 8)
    assert (metrics.submitted, metrics.finished) == (4, {"length": 3, "abort": 1})
    assert (metrics.prompt_tokens, metrics.generated_tokens) == (19, 20)
    assert metrics.first_token.count == 3
    assert metrics.per_token.count == 20 - 3
    assert 0 < metrics.per_token.p50 <= metrics.per_token.p90 <= metrics.per_token.p99
    assert metrics.tokens_per_second > 0


def test_percentiles_are_values_that_were_measured() -> None:
    assert Percentiles.of([]) == Percentiles(0.0, 0.0, 0.0, 0)
    assert Percentiles.of([3.0]) == Percentiles(3.0, 3.0, 3.0, 1)
    assert Percentiles.of([float(i) for i in range(101)][::-1]) == Percentiles(50.0, 90.0, 99.0, 101)


@in_every_mode
@pytest.mark.parametrize("many", [3, 5])
def test_br_068_one_of_the_requests_owns_the_very_last_slot(llm: LLM, checkpoints: Any, many: int) -> None:
    """A pool full of NaN, whose last slot is written and read like any other."""
    folder, _ = checkpoints("qwen3", max_position_embeddings=1024)
    prompts = [prompt_ids(12, seed=seed) for seed in range(many)]
    alone = [tokens_alone(llm, prompt, SamplingParams(max_tokens=5)) for prompt in prompts]
    full = LLM(str(folder), page_size=4, num_pages=4 * many, max_model_len=17, prefix_cache=False)
    cache = full.engine.runner.cache.data
    cache.fill_(float("nan"))
    found = full.generate(prompts, SamplingParams(max_tokens=5))  # 16 tokens each in the cache
    assert [completion.token_ids for completion in found] == alone
    assert cache.isfinite().all()


@in_every_mode
@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33])
@pytest.mark.parametrize("at_once", [True, False])
def test_br_065_a_prompt_that_is_cached_as_a_whole(llm: LLM, checkpoints: Any, length: int, at_once: bool) -> None:
    folder, _ = checkpoints("qwen3", max_position_embeddings=1024)
    prompt = prompt_ids(length, seed=length)
    alone = tokens_alone(llm, prompt, PARAMS)
    fresh = LLM(str(folder), page_size=16, num_pages=32)
    if at_once:
        first, second = fresh.generate([prompt, prompt], PARAMS)
    else:
        first, second = fresh.generate([prompt], PARAMS)[0], fresh.generate([prompt], PARAMS)[0]
    assert first.token_ids == second.token_ids == alone
    assert first.cached_tokens == 0
    assert second.cached_tokens == (0 if at_once else (length - 1) // 16 * 16)


@in_every_mode
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [15, 16, 17])
def test_br_064_four_that_outgrow_the_pool_lose_no_token(
    llm: LLM, checkpoints: Any, length: int, prefix_cache: bool
) -> None:
    folder, _ = checkpoints("qwen3", max_position_embeddings=1024)
    prompts = [prompt_ids(length, seed=seed) for seed in range(4)]
    params = SamplingParams(max_tokens=40)  # four pages in the end
    alone = [tokens_alone(llm, prompt, params) for prompt in prompts]
    small = LLM(str(folder), page_size=16, num_pages=9, max_model_len=128, prefix_cache=prefix_cache)
    assert [completion.token_ids for completion in small.generate(prompts, params)] == alone
    assert small.engine.metrics().preemptions > 0
    assert_idle(small)


@in_every_mode
@pytest.mark.parametrize("max_tokens", [0, 1, 5])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_every_answer_gets_the_log_probabilities_of_the_whole_prompt(prefix_cache: bool, max_tokens: int) -> None:
    llm = LLM("random:tiny", num_pages=128, prefix_cache=prefix_cache, skip_tokenizer=True)
    params = SamplingParams(max_tokens=max_tokens, prompt_logprobs=0, n=2)
    found = llm.generate([prompt_ids(400, vocab_size=200)], params)
    assert [completion.index for completion in found] == [0, 1]
    for completion in found:
        assert completion.prompt_logprobs is not None
        assert [report is None for report in completion.prompt_logprobs] == [True] + [False] * 399
        assert len(completion.token_ids) == max_tokens
    assert llm.engine.metrics().generated_tokens == 2 * max_tokens


def test_many_that_read_their_prompts_share_the_logits_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A vocabulary of numbers for each token: 64 prompts at once must not take gigabytes."""
    llm = LLM("random:tiny", num_pages=512, max_num_batched_tokens=4096, skip_tokenizer=True)
    run, most = llm.engine.runner.run, 0

    def counting(plan: StepPlan) -> torch.Tensor:
        nonlocal most
        most = max(most, plan.num_logits)
        return run(plan)

    monkeypatch.setattr(llm.engine.runner, "run", counting)
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    found = llm.generate([prompt_ids(100, seed=i, vocab_size=200) for i in range(20)], params)
    assert all(None not in (completion.prompt_logprobs or (None,))[1:] for completion in found)
    assert 100 < most <= 256 + 20


@in_every_mode
def test_an_empty_request_is_not_lost_when_the_model_raises(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    empty, other = llm.stream([1], SamplingParams(max_tokens=0)), llm.stream([2], PARAMS)
    run, calls = llm.engine.runner.run, 0

    def once(plan: StepPlan) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 1:
            raise MemoryError
        return run(plan)

    monkeypatch.setattr(llm.engine.runner, "run", once)
    with pytest.raises(MemoryError):
        next(other)
    assert [chunk.finish_reason for chunk in empty] == ["length"]


@in_every_mode
@pytest.mark.parametrize("before_the_end", [0, 1, 3])
def test_an_interrupt_in_a_callback_loses_nothing_of_the_neighbours(llm: LLM, before_the_end: int) -> None:
    alone = [tokens_alone(llm, [token], PARAMS) for token in (5, 6, 7)]
    at, calls = len(alone[1]) - before_the_end, 0

    def callback(chunk: Chunk) -> None:
        nonlocal calls
        calls += 1
        if calls == at:
            raise KeyboardInterrupt

    requests = [
        llm.engine.submit([5], PARAMS),
        llm.engine.submit([6], PARAMS, callback),
        llm.engine.submit([7], PARAMS),
    ]
    chunks: dict[int, list[Chunk]] = {request: [] for request in requests}
    interrupts = 0
    while llm.engine.busy:
        try:
            for owner, chunk in llm.engine.step():
                chunks[owner].append(chunk)
        except KeyboardInterrupt:
            interrupts += 1
    assert interrupts == 1
    for place in (0, 2):
        tokens = tuple(token for chunk in chunks[requests[place]] for token in chunk.token_ids)
        assert tokens == last_of(chunks[requests[place]]).token_ids == alone[place]
    if before_the_end == 0:  # it was its very last chunk: the request has ended, but nobody can be told
        assert len(chunks[requests[1]]) == at - 1
    else:
        assert last_of(chunks[requests[1]]).token_ids == alone[1]


@in_every_mode
def test_a_callback_must_not_run_the_engine(llm: LLM) -> None:
    alone = [tokens_alone(llm, [token], PARAMS) for token in (5, 6)]
    bad = llm.engine.submit([5], PARAMS, lambda chunk: llm.generate([[9]], PARAMS))
    good = llm.engine.submit([6], PARAMS)
    chunks: dict[int, list[Chunk]] = {bad: [], good: []}
    while llm.engine.busy:
        for owner, chunk in llm.engine.step():
            chunks[owner].append(chunk)
    assert last_of(chunks[bad]).error == "its callback raised RuntimeError: a callback must not run the engine"
    assert last_of(chunks[bad]).token_ids == alone[0][:1]
    assert last_of(chunks[good]).token_ids == alone[1]


@in_every_mode
def test_a_callback_may_abort_all_answers_to_its_prompt_also_for_no_tokens(llm: LLM) -> None:
    for max_tokens in (0, 3):
        requests: list[int] = []
        params = SamplingParams(max_tokens=max_tokens, n=3)
        requests.append(llm.engine.submit([4], params, lambda chunk, its=requests: llm.engine.abort(its[0])))
        chunks = run(llm, *requests)
        assert len(chunks[requests[0]]) == 1
        assert_idle(llm)


@in_every_mode
def test_the_collector_may_drop_a_stream_in_the_middle_of_a_step(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> None:
    alone = tokens_alone(llm, [6], PARAMS)
    forever = llm.stream([5], SamplingParams(max_tokens=500))
    next(forever)
    good = llm.stream([6], PARAMS)
    recorder, step = llm.engine._recorder, llm.engine._recorder.step

    def collecting(*args: Any) -> None:
        with recorder._lock:
            forever.close()
        step(*args)

    monkeypatch.setattr(recorder, "step", collecting)
    assert last_of(list(good)).token_ids == alone
    assert_idle(llm)


@in_every_mode
def test_a_callback_that_raises_leaves_shared_prefixes_alone(llm: LLM) -> None:
    prompt = prompt_ids(41, seed=4)
    llm.generate([prompt], PARAMS)

    def gone(chunk: Chunk) -> None:
        raise ConnectionError

    run(llm, llm.engine.submit(prompt, PARAMS, gone))
    assert llm.generate([prompt], PARAMS)[0].cached_tokens == 40


def test_nothing_runs_if_one_of_many_is_refused(llm: LLM) -> None:
    before = llm.engine.metrics()
    with pytest.raises(ValueError, match="prompt must have at least one token"):
        llm.generate([[1], [2], []], PARAMS)
    after = llm.engine.metrics()
    assert (after.submitted, after.steps, after.finished) == (before.submitted, before.steps, before.finished)
