"""Launches that are planned while others are in flight: what comes out is what the engine of today says."""

from __future__ import annotations

from typing import Any

import pytest

from rooflight import LLM, Chunk, Completion, SamplingParams, ops
from rooflight.engine.launch import Launch
from rooflight.engine.plan import UNKNOWN, StepPlan
from tests.engine.conftest import Checkpoints
from tests.engine.late import MODES, in_every_mode, make_late
from tests.engine.support import Script, assert_conserved, assert_idle, ids_of, prompt_ids

KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 11},
    {"repetition_penalty": 1.3},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 5},
    {"stop_token_ids": list(range(0, 1000, 7))},
    {"temperature": 0.9, "seed": 8, "min_tokens": 4, "stop_token_ids": list(range(0, 1000, 3))},
    {"temperature": 0.7, "seed": 3, "n": 3},
    {"logprobs": 2},
    {"prompt_logprobs": 1, "n": 2},
    {"max_tokens": 0, "prompt_logprobs": 0},
    {"temperature": 1.0, "seed": 4, "stop": ["a", "e", "\ufffd"]},
]
OTHERS = [(1, 1), (1, 4), (1, 8), (2, 8), (0, 4)]
# Whoever needs the host, among others or not: without them nearly every launch is ahead.
CROWDS = {"all kinds": KINDS, "of the device": [KINDS[i] for i in (0, 1, 3, 4, 6, 10)]}


def requests(kinds: list[dict[str, Any]]) -> list[tuple[list[int], SamplingParams]]:
    found = []
    for i in range(24):
        length = [1, 2, 15, 16, 17, 31, 64, 33, 5][i % 9]
        options = {"max_tokens": 1 + 7 * i % 25} | kinds[i % len(kinds)]
        options["min_tokens"] = min(options.get("min_tokens", 0), options["max_tokens"])
        found.append((prompt_ids(length, seed=i % 3), SamplingParams(**options)))
    return found


def served(llm: LLM, kinds: list[dict[str, Any]], abort: bool = False) -> dict[tuple[int, int], list[Chunk]]:
    """Chunks by number of the request and of its answer; requests come in while others run."""
    engine, owners = llm.engine, {}
    chunks: dict[tuple[int, int], list[Chunk]] = {}
    wanted = requests(kinds)
    for _ in range(2000):
        if len(owners) < len(wanted):
            owners[engine.submit(*wanted[len(owners)])] = len(owners)
        elif not engine.busy:
            break
        for owner, chunk in engine.step():
            number = owners[owner]
            chunks.setdefault((number, chunk.index), []).append(chunk)
            if abort and number % 4 == 3 and sum(len(got) for (n, _), got in chunks.items() if n == number) == 3:
                engine.abort(owner)
        assert_conserved(engine.scheduler)
    assert_idle(llm)
    return chunks


def checked(chunks: list[Chunk]) -> Completion:
    """The completion, which says what the chunks said one after the other."""
    last = chunks[-1].completion
    assert last is not None
    assert [token for chunk in chunks for token in chunk.token_ids] == list(last.token_ids)
    assert "".join(chunk.text for chunk in chunks) == last.text
    assert all(len(chunk.token_ids) == 1 for chunk in chunks[:-1])
    return last


def small(checkpoints: Checkpoints, prefix_cache: bool = True) -> LLM:
    """A pool in which some have to stop."""
    folder, _ = checkpoints("qwen3", max_position_embeddings=1024)
    return LLM(
        str(folder), page_size=4, num_pages=23, max_model_len=100, max_num_batched_tokens=64, prefix_cache=prefix_cache
    )


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("crowd", CROWDS)
@pytest.mark.parametrize("other", OTHERS)
def test_mixed_requests_say_what_they_say_in_a_synchronous_engine(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints, other: tuple[int, int], crowd: str, prefix_cache: bool
) -> None:
    expected = served(small(checkpoints, prefix_cache), CROWDS[crowd])
    make_late(monkeypatch, *other)
    llm = small(checkpoints, prefix_cache)
    found = served(llm, CROWDS[crowd])
    assert found.keys() == expected.keys()
    for key, chunks in found.items():
        mine, other_one = checked(chunks), checked(expected[key])
        assert (mine.token_ids, mine.text, mine.finish_reason) == (
            other_one.token_ids,
            other_one.text,
            other_one.finish_reason,
        )
        assert (mine.logprobs is None) == (other_one.logprobs is None)
        for ours, theirs in zip(mine.logprobs or (), other_one.logprobs or (), strict=True):
            assert ours.token_id == theirs.token_id
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert len(mine.prompt_logprobs or ()) == len(other_one.prompt_logprobs or ())
    metrics = llm.engine.metrics()
    assert metrics.preemptions > 0
    assert metrics.generated_tokens == sum(len(checked(chunks).token_ids) for chunks in found.values())
    assert {checked(chunks).finish_reason for chunks in found.values()} == {"stop", "length"}


@pytest.mark.parametrize("other", OTHERS)
def test_those_that_leave_disturb_nobody(
    monkeypatch: pytest.MonkeyPatch, checkpoints: Checkpoints, other: tuple[int, int]
) -> None:
    expected = served(small(checkpoints), KINDS)
    make_late(monkeypatch, *other)
    llm = small(checkpoints)
    found = served(llm, KINDS, abort=True)
    assert llm.engine.metrics().finished["abort"] > 3
    for key, chunks in found.items():
        tokens = [token for chunk in chunks for token in chunk.token_ids]
        if key[0] % 4 == 3:
            assert tokens == [token for chunk in expected[key] for token in chunk.token_ids][: len(tokens)]
        else:
            assert checked(chunks).token_ids == checked(expected[key]).token_ids


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch, llm: LLM) -> list[tuple[StepPlan, int]]:
    """What is launched, and how many launches are in flight then."""
    seen: list[tuple[StepPlan, int]] = []
    launch = llm.engine.runner.launch

    def noting(plan: StepPlan, sampling: Any) -> Launch:
        seen.append((plan, len(llm.engine._launches)))
        return launch(plan, sampling)

    monkeypatch.setattr(llm.engine.runner, "launch", noting)
    return seen


AHEAD = pytest.mark.parametrize("mode", [(1, 4)], indirect=True)


@AHEAD
def test_the_next_launch_is_queued_before_the_one_before_has_landed(llm: LLM, plans: list[Any]) -> None:
    (done,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=11))
    assert len(done.token_ids) == 11
    assert [(plan.steps, flight) for plan, flight in plans] == [(1, 0), (4, 1), (4, 1), (2, 1)]
    assert [plan.rows[0].tokens for plan, _ in plans] == [(5, 6, 7), (UNKNOWN,), (UNKNOWN,), (UNKNOWN,)]
    assert [plan.rows[0].start for plan, _ in plans] == [0, 3, 7, 11]
    assert {plan.rows[0].limit for plan, _ in plans} == {13}


@AHEAD
@pytest.mark.parametrize(
    "params",
    [{"logprobs": 0}, {"frequency_penalty": 0.5}, {"logit_bias": {3: 1.0}}, {"min_tokens": 6}, {"prompt_logprobs": 0}],
    ids=str,
)
def test_what_needs_the_host_is_launched_alone(llm: LLM, plans: list[Any], params: dict[str, Any]) -> None:
    options = SamplingParams(max_tokens=6, **params)
    llm.generate([[5], [6, 7]], [options, SamplingParams(max_tokens=6)])
    alone = [(plan, flight) for plan, flight in plans if plan.needs_host]
    assert len(alone) == (1 if "prompt_logprobs" in params else 6)
    assert {(plan.steps, flight) for plan, flight in alone} == {(1, 0)}
    assert not any(UNKNOWN in row.tokens for plan, _ in alone for row in plan.rows)


@AHEAD
def test_tokens_of_one_launch_come_in_one_step_one_chunk_each(llm: LLM) -> None:
    llm.engine.submit([5, 6], SamplingParams(max_tokens=7))
    steps = [[chunk.token_ids for _, chunk in llm.engine.step()] for _ in range(4)]
    assert [len(tokens) for tokens in steps] == [1, 4, 2, 0]
    assert all(len(token) == 1 for tokens in steps for token in tokens)


@AHEAD
def test_an_abort_says_what_has_been_delivered_and_forgets_what_is_in_flight(llm: LLM) -> None:
    alone = llm.generate([[3, 4]], SamplingParams(max_tokens=12))[0].token_ids
    request = llm.engine.submit([3, 4], SamplingParams(max_tokens=12))
    for _ in range(2):
        llm.engine.step()
    assert len(llm.engine._launches) == 1
    (chunk,) = llm.engine.abort(request)
    assert chunk.completion is not None
    assert (chunk.completion.token_ids, chunk.completion.finish_reason) == (alone[:5], "abort")
    assert_idle(llm)


@AHEAD
@pytest.mark.parametrize("at", [1, 2, 3, 5, 6])
def test_a_callback_that_aborts_amid_the_tokens_of_a_launch(llm: LLM, at: int) -> None:
    """Its own chunk is the last one; the rest of the launch is nobody's."""
    heard: list[Chunk] = []

    def callback(chunk: Chunk) -> None:
        heard.append(chunk)
        if len(heard) == at:
            llm.engine.abort(request)

    request = llm.engine.submit([3, 4], SamplingParams(max_tokens=12), callback)
    shown = []
    while llm.engine.busy:
        shown += [chunk for _, chunk in llm.engine.step()]
    assert [chunk.token_ids for chunk in shown] == [chunk.token_ids for chunk in heard]
    assert len(heard) == at
    assert_idle(llm)


@in_every_mode
@pytest.mark.parametrize("text", [True, False])
def test_no_token_of_a_launch_counts_behind_one_that_has_none(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, text: bool
) -> None:
    if not text:
        monkeypatch.setattr(llm.engine._intake, "_tokenizer", None)
    llm.engine.scheduler.pool.withdraw(range(512))
    monkeypatch.setattr(llm.engine.runner, "run", Script(llm, [*ids_of("abc"), None, *ids_of("efghijkl")]))
    (done,) = llm.generate([[7]], SamplingParams(max_tokens=12))
    assert (done.token_ids, done.finish_reason) == (tuple(ids_of("abc")), "error")
    assert llm.engine.scheduler.pool.shareable == 0
    assert ops.NO_TOKEN not in done.token_ids


@pytest.mark.parametrize("mode", MODES[1:], indirect=True)
@pytest.mark.parametrize(("kind", "every"), [(RuntimeError, 2), (RuntimeError, 3), (KeyboardInterrupt, 3)])
@pytest.mark.parametrize("where", ["launch", "land"])
def test_what_fails_now_and_then_loses_nothing(
    monkeypatch: pytest.MonkeyPatch, llm: LLM, kind: type[BaseException], where: str, every: int
) -> None:
    """Before or after what it was about: tokens of launches in flight are delivered, or made again."""
    params = SamplingParams(max_tokens=20, temperature=0.9, seed=3)
    prompts = [prompt_ids(70), [5], [6, 7]]
    alone = [completion.token_ids for completion in llm.generate(prompts, params)]
    owners = [llm.engine.submit(prompt, params) for prompt in prompts]
    launch, calls, raised = llm.engine.runner.launch, 0, 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise kind("now and then")

    def failing(plan: StepPlan, sampling: Any) -> Any:
        if where == "launch":
            fail()
            return launch(plan, sampling)
        late = launch(plan, sampling)
        land = late.land
        late.land = lambda: fail() or land()
        return late

    monkeypatch.setattr(llm.engine.runner, "launch", failing)
    chunks: dict[int, list[Chunk]] = {owner: [] for owner in owners}
    for _ in range(500):
        if not llm.engine.busy:
            break
        try:
            for owner, chunk in llm.engine.step():
                chunks[owner].append(chunk)
        except kind:
            raised += 1
            assert not llm.engine._launches
            assert not any(item.pending for item in llm.engine.scheduler.running)
    assert raised >= 2
    assert [checked(chunks[owner]).token_ids for owner in owners] == alone
    assert_idle(llm)
