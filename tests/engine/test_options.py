"""Penalties, biases, bans and log-probabilities on the device: what comes out is what the host says one by one.

Without a GPU the steps run one by one, by the references.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import LLM, Completion, SamplingParams, ops
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import GraphRunner
from rooflight.engine.logit_state import FEW, LogitState
from rooflight.engine.plan import Row, StepPlan
from rooflight.engine.scheduler import Scheduler
from tests.engine.runners import build
from tests.engine.sequences import sequence
from tests.engine.support import assert_idle, prompt_ids

Checkpoints = Callable[..., tuple[Path, Any]]
Kind = dict[str, Any]
ENDS = list(range(0, 1000, 3))
KINDS: list[Kind] = [
    {},
    {"repetition_penalty": 1.3},
    {"frequency_penalty": 1.5, "temperature": 0.8, "seed": 11},
    {"presence_penalty": 1.9, "repetition_penalty": 0.7},
    {"logit_bias": {5: 40.0, 6: 39.5, 7: 39.0}, "frequency_penalty": 0.5},
    {"temperature": 0.9, "seed": 8, "min_tokens": 9, "stop_token_ids": ENDS},
    {"logprobs": 2},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "seed": 5},
    {"logprobs": 20, "repetition_penalty": 1.5, "presence_penalty": 0.5, "n": 3, "temperature": 0.9, "seed": 3},
    {"logprobs": 0, "min_tokens": 4, "stop_token_ids": ENDS, "logit_bias": {ENDS[2]: 100.0}},
    {"prompt_logprobs": 1, "frequency_penalty": 1.0, "logprobs": 1},
]


def requests(kinds: Sequence[Kind] = KINDS, count: int = 22) -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts of few different tokens, so that penalties have something to work on."""
    lengths = (1, 3, 4, 17, 40, 70, 5, 8)
    prompts = [prompt_ids(lengths[i % len(lengths)], seed=i % 5) for i in range(count)]
    return prompts, [SamplingParams(**{"max_tokens": 9 + 5 * (i % 6)} | kinds[i % len(kinds)]) for i in range(count)]


def assert_same(got: Sequence[Completion], expected: Sequence[Completion]) -> None:
    for mine, theirs in zip(got, expected, strict=True):
        assert (mine.token_ids, mine.finish_reason) == (theirs.token_ids, theirs.finish_reason)
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        for one, other in zip(mine.logprobs or (), theirs.logprobs or (), strict=True):
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-4)
            assert {token for token, _ in one.top[:1]} <= {token for token, _ in other.top[:2]}
        if mine.logprobs is not None:
            assert [report.token_id for report in mine.logprobs if report] == list(mine.token_ids)


def watch(runner: Any, monkeypatch: pytest.MonkeyPatch) -> list[tuple[StepPlan, bool]]:
    """Plans from now on, and whether one of their sequences had tokens in flight."""
    plans: list[tuple[StepPlan, bool]] = []
    launch = runner.launch

    def note(plan: StepPlan, sampling: Any) -> Any:
        plans.append((plan, any(item.pending for item in sampling)))
        return launch(plan, sampling)

    monkeypatch.setattr(runner, "launch", note)
    return plans


@pytest.mark.parametrize("most_steps", [1, 8])
def test_all_kinds_together_give_what_the_host_says(
    plain: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, most_steps: int
) -> None:
    llm = build(folder, most_steps=most_steps, device="cpu")
    plans = watch(llm.engine.runner, monkeypatch)
    prompts, params = requests()
    assert_same(llm.generate(prompts, params), plain.generate(prompts, params))
    helped = [plan for plan, _ in plans if plan.needs_host]
    assert all(any(row.every_logit for row in plan.rows) for plan in helped)
    assert sum(in_flight for _, in_flight in plans) > len(plans) // 2
    assert max(plan.steps for plan, _ in plans) == most_steps
    assert_idle(llm)


@pytest.mark.parametrize("kind", KINDS[1:10], ids=str)
def test_each_kind_alone_is_launched_ahead_and_several_steps_at_once(
    plain: LLM, ahead: LLM, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    plans = watch(ahead.engine.runner, monkeypatch)
    params = SamplingParams(**{"max_tokens": 40, "ignore_eos": True} | kind)
    expected = plain.generate([prompt_ids(9)], params)
    assert_same(ahead.generate([prompt_ids(9)], params), expected)
    if params.n == 1 and len(expected[0].token_ids) > 20:
        assert [plan.steps for plan, _ in plans[:4]] == [1, 8, 8, 8]
        assert [in_flight for _, in_flight in plans[1:4]] == [True] * 3
    assert not any(plan.needs_host for plan, _ in plans)


def test_an_answer_that_a_penalty_changes_is_another_than_that_of_none(ahead: LLM) -> None:
    """Or else the tests above would prove little."""
    prompt = prompt_ids(17, seed=2)
    found = {
        ahead.generate([prompt], SamplingParams(**{"max_tokens": 30, "ignore_eos": True} | kind))[0].token_ids
        for kind in (KINDS[0], KINDS[1], KINDS[3], KINDS[4], {"frequency_penalty": 1.5}, {"repetition_penalty": 1.6})
    }
    assert len(found) == 6


def test_no_token_is_repeated_under_a_penalty_that_forbids_it(ahead: LLM) -> None:
    """In one launch of several steps a token counts for the next step already; those of the prompt count too."""
    prompt = prompt_ids(30)
    never = SamplingParams(max_tokens=60, repetition_penalty=1e30, ignore_eos=True)
    tokens = ahead.generate([prompt], never)[0].token_ids
    assert len({*tokens, *prompt}) == len(tokens) + len(set(prompt))
    for kind in ({"frequency_penalty": 2.0}, {"presence_penalty": 2.0}):
        bias = dict.fromkeys(range(40), 50.0)
        params = SamplingParams(max_tokens=20, logit_bias=bias, ignore_eos=True, **kind)  # type: ignore[arg-type]
        assert len(set(ahead.generate([prompt], params)[0].token_ids)) > 4


def test_an_end_token_waits_for_min_tokens_whatever_its_bias(plain: LLM, ahead: LLM) -> None:
    """+100 on it: it is the very first token that may be one, in the middle of a launch and at its ends."""
    for least in (1, 2, 5, 9, 10, 17):
        params = SamplingParams(max_tokens=30, min_tokens=least, stop_token_ids=[7], logit_bias={7: 100.0})
        (got,) = ahead.generate([prompt_ids(6)], params)
        assert_same([got], plain.generate([prompt_ids(6)], params))
        assert len(got.token_ids) == least + 1
        assert (got.token_ids.index(7), got.finish_reason) == (least, "stop")


def test_places_are_written_anew_for_who_comes_next(plain: LLM, folder: Path) -> None:
    """Two places for many requests, each of which leaves its counts, biases and bans there."""
    llm = build(folder, device="cpu", prefix_cache=False)
    old = llm.engine
    scheduler = Scheduler(400, 4, 2, 64, False, 8, True)
    llm.engine = Engine(old.runner, scheduler, old.tokenizer, old.end_ids)
    prompts, params = requests([KINDS[i] for i in (1, 0, 4, 2, 6, 3, 9, 8)], 30)
    assert_same(llm.generate(prompts, params), plain.generate(prompts, params))


def test_another_engine_may_go_on_with_the_runner(plain: LLM, folder: Path) -> None:
    """Its requests have the same ids, places and lengths, and other tokens."""
    llm = build(folder, device="cpu")
    params = SamplingParams(max_tokens=8, repetition_penalty=1.6, frequency_penalty=1.0, ignore_eos=True)
    first = llm.generate([prompt_ids(9, seed=1)], params)
    old = llm.engine
    llm.engine = Engine(old.runner, Scheduler(400, 4, 16, 64, True, 8, True), old.tokenizer, old.end_ids)
    for prompt in (prompt_ids(9, seed=2), prompt_ids(17, seed=3), prompt_ids(16, seed=4)):
        assert_same(llm.generate([prompt], params), plain.generate([prompt], params))
    assert first[0].token_ids != llm.generate([prompt_ids(9, seed=2)], params)[0].token_ids


def test_who_is_preempted_goes_on_as_if_nothing_had_been(plain: LLM, folder: Path) -> None:
    """Too few pages for all: places change, and counts are made from the tokens again."""
    llm = build(folder, device="cpu", num_pages=50)
    kinds = [KINDS[i] for i in (1, 2, 3, 4, 6, 9)]
    prompts, params = (
        [prompt_ids(12, seed=i) for i in range(6)],
        [SamplingParams(**{"max_tokens": 60, "ignore_eos": True} | kind) for kind in kinds],
    )
    assert_same(llm.generate(prompts, params), plain.generate(prompts, params))
    assert llm.engine.scheduler.preemptions > 2
    assert_idle(llm)


@pytest.mark.parametrize(("where", "every"), [("launch", 2), ("launch", 3), ("land", 2), ("land", 3)])
def test_launches_that_are_forgotten_have_not_counted(
    plain: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, where: str, every: int
) -> None:
    """They ran, and their tokens were counted; they are made again from what the host knows."""
    llm = build(folder, device="cpu")
    prompts, params = requests(count=11)
    expected = plain.generate(prompts, params)
    launch, calls, raised = llm.engine.runner.launch, 0, 0

    def fail() -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0:
            raise RuntimeError("now and then")

    class Failing:
        def __init__(self, launch: Any) -> None:
            self.launch, self.prompt_logits = launch, launch.prompt_logits

        def land(self) -> Any:
            fail()
            return self.launch.land()

    def failing(plan: StepPlan, sampling: Any) -> Any:
        done = launch(plan, sampling)  # what fails behind it has run all the same
        if where == "launch":
            fail()
            return done
        return Failing(done)

    monkeypatch.setattr(llm.engine.runner, "launch", failing)
    done: dict[tuple[int, int], Completion] = {}
    owners = [llm.engine.submit(prompt, option) for prompt, option in zip(prompts, params, strict=True)]
    for _ in range(1000):
        if not llm.engine.busy:
            break
        try:
            for owner, chunk in llm.engine.step():
                if chunk.completion is not None:
                    done[owners.index(owner), chunk.index] = chunk.completion
        except RuntimeError:
            raised += 1
    assert raised >= 2
    assert_same([done[key] for key in sorted(done)], expected)
    assert_idle(llm)


def test_the_same_tokens_counted_by_the_host_in_between(plain: LLM, folder: Path) -> None:
    """Somebody's prompt_logprobs take some steps of everybody to the host, whose tokens the device has not counted."""
    llm = build(folder, device="cpu")
    params = [SamplingParams(max_tokens=50, frequency_penalty=1.0, repetition_penalty=1.2, ignore_eos=True)] * 3
    prompts = [prompt_ids(20, seed=i) for i in range(3)]
    expected = plain.generate(prompts, params)
    owners = [llm.engine.submit(prompt, option) for prompt, option in zip(prompts, params, strict=True)]
    found: dict[int, Completion] = {}
    runner, last = llm.engine.runner, dict[int, int]()
    assert isinstance(runner, GraphRunner)
    state = runner._state
    for step in range(200):
        if step in (3, 6):
            llm.engine.submit(prompt_ids(40 + step), SamplingParams(max_tokens=2, prompt_logprobs=0))
        for owner, chunk in llm.engine.step() if llm.engine.busy else ():
            if owner in owners and chunk.completion is not None:
                found[owner] = chunk.completion
        if runner._last != last:  # a launch of the host
            assert state._notes.keys().isdisjoint(runner._last)
            last = runner._last
    assert_same([found[owner] for owner in owners], expected)
    assert set(last) == {0, 1, 2, 3}


def test_lists_of_biases_grow_while_others_are_in_flight(plain: LLM, folder: Path) -> None:
    llm = build(folder, device="cpu")
    bias = [{token: 30.0 + token % 7 for token in range(3, 3 + many)} for many in (2, FEW, FEW + 1, 300)]
    options = [
        SamplingParams(max_tokens=30, logit_bias=entries, frequency_penalty=0.5, ignore_eos=True) for entries in bias
    ]
    prompts = [prompt_ids(8, seed=i) for i in range(4)]
    expected = plain.generate(prompts, options)
    owners, found = [], {}
    for step in range(100):
        if step % 2 == 0 and step < 8:
            owners.append(llm.engine.submit(prompts[step // 2], options[step // 2]))
        for owner, chunk in llm.engine.step() if llm.engine.busy else ():
            if chunk.completion is not None:
                found[owner] = chunk.completion
    assert_same([found[owner] for owner in owners], expected)


def test_plain_requests_have_no_more_to_do(ahead: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has a batch when its min_tokens are behind it."""
    calls: list[int] = []
    penalise = ops.penalize_logits_

    def watched(*args: Any) -> None:
        calls.append(len(args[0]))
        penalise(*args)

    monkeypatch.setattr(ops, "penalize_logits_", watched)
    ahead.generate([prompt_ids(5)] * 3, SamplingParams(max_tokens=20, temperature=0.5, seed=1, ignore_eos=True))
    assert calls == []
    fresh = build(folder, device="cpu")
    fresh.generate([prompt_ids(5)] * 3, SamplingParams(max_tokens=20, seed=1, ignore_eos=True))
    assert "_tables" not in vars(fresh.engine.runner._state)  # type: ignore[attr-defined]
    ahead.generate([prompt_ids(5)], SamplingParams(max_tokens=40, min_tokens=9, stop_token_ids=ENDS, ignore_eos=True))
    assert len(calls) <= 16


def test_a_row_without_a_distribution_reports_nothing(ahead: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """NaN logits in the middle of a launch: what came before has its reports."""
    runner = ahead.engine.runner
    assert isinstance(runner, GraphRunner)
    logits, calls = runner.decoder.logits, 0

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return logits(hidden) * (torch.nan if calls == 5 else 1.0)

    monkeypatch.setattr(runner.decoder, "logits", failing)
    params = SamplingParams(max_tokens=20, logprobs=1, frequency_penalty=1.0, ignore_eos=True)
    (done,) = ahead.generate([prompt_ids(5, seed=9)], params)
    assert (len(done.token_ids), done.finish_reason) == (4, "error")
    assert [report.token_id for report in done.logprobs or () if report] == list(done.token_ids)
    assert_idle(ahead)


# The state by itself


def row(place: int, num_tokens: int) -> Row:
    return Row(0, num_tokens - 1, (1,), (), True, place=place)


def changed(state: LogitState, place: int, num_tokens: int = 9, size: int = 8) -> list[float]:
    """Logits of 8 for every token, behind so many."""
    logits = torch.full((1, size), 8.0)
    state.penalize_(logits, torch.tensor([place]), torch.tensor([num_tokens]))
    return logits[0].tolist()


def test_a_place_is_written_when_it_is_not_what_a_launch_starts_from() -> None:
    state = LogitState(2, 8, torch.device("cpu"))
    item = sequence([5, 5], prompt=[1, 2], repetition_penalty=2.0, frequency_penalty=1.0, logit_bias={7: 3.0})
    state.write([row(1, 4)], [item])
    start = [8.0, 4.0, 4.0, 8.0, 8.0, 2.0, 8.0, 11.0]
    assert changed(state, 1) == start
    assert changed(state, 0) == changed(state, state.spare) == [8.0] * 8
    state.count_(torch.tensor([1, state.spare]), torch.tensor([3, 6]))
    state.launched([row(1, 4)], [item], [1])
    counted = [*start[:3], 3.0, *start[4:]]
    state.write([row(1, 5)], [item])  # goes on, with a token that the host does not know
    assert changed(state, 1) == counted
    assert changed(state, state.spare) == [8.0] * 8
    state.write([row(1, 4)], [item])  # what was launched is forgotten
    assert changed(state, 1) == start
    state.count_(torch.tensor([1]), torch.tensor([ops.NO_TOKEN]))
    assert changed(state, 1) == start


@pytest.mark.parametrize("how", ["forget", "fails", "preempted", "another"])
def test_what_may_not_be_relied_on(how: str) -> None:
    """The number of tokens is right, and yet they may be others."""
    state = LogitState(2, 8, torch.device("cpu"))
    item = sequence([5], prompt=[1, 2], presence_penalty=1.0)
    state.write([row(0, 3)], [item])
    state.count_(torch.tensor([0]), torch.tensor([3]))
    state.launched([row(0, 3)], [item], [1])
    if how == "another":
        item = sequence([4, 4], prompt=[1, 2], presence_penalty=1.0)
    else:
        item.tokens.append(4)
    if how == "forget":
        state.forget([row(0, 3)])
    elif how == "preempted":
        item.preemptions += 1
    elif how == "fails":
        state.write([row(0, 4)], [item])
        assert changed(state, 0)[3] == 7.0  # it was right so far
    state.write([row(0, 4)], [item])
    assert [token for token, value in enumerate(changed(state, 0)) if value == 7.0] == (
        [4] if how == "another" else [4, 5]
    )


def test_tokens_that_nobody_counted_are_an_error() -> None:
    state = LogitState(2, 8, torch.device("cpu"))
    item = sequence([5], prompt=[1, 2], presence_penalty=1.0)
    with pytest.raises(RuntimeError, match="request 0 has tokens in flight"):
        state.write([row(0, 4)], [item])


def test_a_ban_is_lifted_and_leaves_the_bias() -> None:
    state = LogitState(2, 200, torch.device("cpu"))
    item = sequence(prompt=[1, 2], ends={3, 7}, min_tokens=2, max_tokens=9, logit_bias={3: 5.0})
    state.write([row(0, 2)], [item])
    minus = float("-inf")
    assert changed(state, 0, 3, 200)[:8] == [8.0, 8.0, 8.0, minus, 8.0, 8.0, 8.0, minus]
    assert changed(state, 0, 4, 200)[:8] == [8.0, 8.0, 8.0, 13.0, 8.0, 8.0, 8.0, 8.0]
    assert state.width == FEW
    wide = sequence(prompt=[1, 2], logit_bias=dict.fromkeys([5, *range(100, 100 + FEW)], 1.0))
    state.write([row(1, 2)], [wide])
    assert state.width == 2 * FEW
    assert changed(state, 0, 3, 200)[:8] == [8.0, 8.0, 8.0, minus, 8.0, 8.0, 8.0, minus]
    assert changed(state, 1, 3, 200) == [8.0 + (token == 5 or 100 <= token < 100 + FEW) for token in range(200)]


def test_a_list_that_is_too_long_for_the_device_goes_by_the_host(
    plain: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Biases and bans together; its neighbours meanwhile do so too, and are ahead again when it has ended."""
    monkeypatch.setattr("rooflight.engine.sequence.MOST_ENTRIES", 8)
    llm = build(folder, device="cpu")
    plans = watch(llm.engine.runner, monkeypatch)
    bias = {token: float(token % 5) for token in range(6)}
    options: list[Kind] = [
        {"logit_bias": bias, "min_tokens": 3, "stop_token_ids": [7, 8, 9]},
        {"logit_bias": bias, "min_tokens": 3, "stop_token_ids": [7, 8]},
        {"frequency_penalty": 1.0, "max_tokens": 30},
    ]
    prompts = [prompt_ids(5, seed=seed) for seed in range(3)]
    params = [SamplingParams(**{"max_tokens": 6, "ignore_eos": True} | kind) for kind in options]
    assert_same(llm.generate(prompts, params), plain.generate(prompts, params))
    helped = [plan.needs_host for plan, _ in plans]
    assert helped[:6] == [True] * 6
    assert not any(helped[6:])
    assert llm.engine.runner._state.width <= FEW  # type: ignore[attr-defined]


def test_memory_that_ends_while_lists_grow_leaves_them_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    state = LogitState(2, 500, torch.device("cpu"))
    wide = sequence(prompt=[1, 2], logit_bias=dict.fromkeys(range(FEW + 1), 1.0))
    row = Row(0, 0, (1, 2), (0,), True, place=0, limit=9)
    pad, calls = torch.nn.functional.pad, 0

    def once(*args: Any, **kwargs: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("no more")
        return pad(*args, **kwargs)

    monkeypatch.setattr(torch.nn.functional, "pad", once)
    with pytest.raises(torch.OutOfMemoryError):
        state.write([row], [wide])
    assert state.width == FEW == state._tables.bias_values.shape[1]
    state.write([row], [wide])
    assert state.width == 2 * FEW == state._tables.bias_values.shape[1]
