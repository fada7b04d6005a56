"""A workload through an engine, on a clock that moves by one second a step and by what is slept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rooflight import LLM, Chunk, Completion, SamplingParams, Timing
from rooflight.bench.drive import Round, Served, drive
from rooflight.bench.workload import Ask
from rooflight.engine.core import Engine


class Watched:
    """The time, and what the engine was asked for."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.slept: list[float] = []
        self.submitted: list[tuple[float, list[int], SamplingParams]] = []
        self.open: list[int] = []  # before each step
        self.engine, self.step, self.submit = engine, engine.step, engine.submit
        monkeypatch.setattr(engine, "step", self._step)
        monkeypatch.setattr(engine, "submit", self._submit)

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def _step(self) -> Iterator[tuple[int, Chunk]]:
        metrics = self.engine.metrics()
        self.open.append(metrics.waiting + metrics.running)
        self.now += 1.0
        return self.step()

    def _submit(self, prompt: list[int], params: SamplingParams) -> int:
        self.submitted.append((self.now - 100.0, prompt, params))
        return self.submit(prompt, params)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("random:tiny", device="cpu", num_pages=64, max_num_seqs=8, prefix_cache=False, skip_tokenizer=True)


def ask(arrival: float = 0.0, max_tokens: int = 2, length: int = 3) -> Ask:
    return Ask(list(range(7, 7 + length)), max_tokens, arrival)


def test_times_count_from_arrival_not_from_submission(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(llm.engine, monkeypatch)
    asks = [ask(), ask(arrival=0.5, max_tokens=3)]
    done = drive(llm.engine, asks, clock=watched.clock, sleep=watched.sleep)
    assert [at for at, _, _ in watched.submitted] == [0.0, 1.0]  # it came while a step was running
    first, second = done.served
    assert (first.first_token, first.latency, first.per_token) == (1.0, 2.0, 1.0)
    assert (second.first_token, second.latency, second.per_token) == (1.5, 3.5, 1.0)
    assert (done.wall, done.busy, done.steps, done.output_tokens) == (4.0, 4.0, 4, 5)
    assert done.mean_batch == 5 / 4
    assert watched.slept == []


def test_it_sleeps_until_the_next_arrival_when_there_is_nothing_to_do(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(llm.engine, monkeypatch)
    done = drive(llm.engine, [ask(), ask(arrival=10.0)], clock=watched.clock, sleep=watched.sleep)
    assert watched.slept == [8.0]
    assert [each.first_token for each in done.served] == [1.0, 1.0]
    assert (done.wall, done.busy, done.steps) == (12.0, 4.0, 4)


def test_a_sleep_that_is_too_short_is_continued(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(llm.engine, monkeypatch)
    done = drive(llm.engine, [ask(arrival=4.0)], clock=watched.clock, sleep=lambda s: watched.sleep(min(s, 3.0)))
    assert watched.slept == [3.0, 1.0]
    assert done.served[0].first_token == 1.0


def test_everything_asked_for_is_generated_and_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(llm.engine, monkeypatch)
    asks = [ask(max_tokens=2 + i, length=1 + 3 * i) for i in range(6)]
    ends = []
    done = drive(llm.engine, asks, ended=lambda: ends.append(watched.now), clock=watched.clock, sleep=watched.sleep)
    assert [each.tokens for each in done.served] == [2, 3, 4, 5, 6, 7]
    assert (done.output_tokens, done.steps, len(ends)) == (27, 7, 6)
    assert [prompt for _, prompt, _ in watched.submitted] == [each.prompt for each in asks]
    assert all(params.ignore_eos and params.temperature == 0 for _, _, params in watched.submitted)
    assert watched.open == [6, 6, 5, 4, 3, 2, 1]
    assert done.peak_pages == 6  # of 16 tokens: after the second step five requests are left, the longest in two pages
    assert not llm.engine.busy


def test_one_by_one_never_has_two_open(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(llm.engine, monkeypatch)
    asks = [ask(), ask(max_tokens=3), ask(arrival=1.0), ask(arrival=50.0)]
    done = drive(llm.engine, asks, 1, clock=watched.clock, sleep=watched.sleep)
    assert set(watched.open) == {1}
    assert [at for at, _, _ in watched.submitted] == [0.0, 2.0, 5.0, 50.0]
    assert [each.first_token for each in done.served] == [1.0, 3.0, 5.0, 1.0]  # waiting for its turn counts
    assert (done.steps, done.mean_batch) == (9, 1.0)


def test_a_pool_that_is_too_small_shows_as_preemptions() -> None:
    llm = LLM("random:tiny", device="cpu", num_pages=4, prefix_cache=False, skip_tokenizer=True)
    done = drive(llm.engine, [ask(length=14, max_tokens=30), ask(length=14, max_tokens=30)])
    assert done.output_tokens == 60
    assert done.preemptions > 0
    again = drive(llm.engine, [ask()])
    assert again.preemptions == 0  # those of this round, not of the engine


def test_a_request_that_fails_ends_the_run_with_its_error(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Completion("", (1,), (7,), "error", Timing(0.0, 0.0), error="no finite logits")
    monkeypatch.setattr(llm.engine, "submit", lambda prompt, params: 77)
    monkeypatch.setattr(llm.engine, "step", lambda: iter([(77, Chunk("", (1,), "error", lost))]))
    with pytest.raises(RuntimeError, match="a request for 2 tokens ended after 1: no finite logits"):
        drive(llm.engine, [ask()])


def test_percentiles_are_of_what_was_measured() -> None:
    """101 requests that came at 1 s; the i-th has its first token after i and its fifth after 9 i more seconds."""
    served = tuple(Served(ask(arrival=1.0, max_tokens=5), 1.0 + i, 1.0 + 10 * i, 5) for i in reversed(range(101)))
    done = Round(2000.0, 1.0, 1, 0, 1, served)
    for found, factor in ((done.first_token, 1.0), (done.per_token, 9 / 4), (done.latency, 10.0)):
        assert (found.p50, found.p90, found.p99) == (50 * factor, 90 * factor, 99 * factor)
        assert found.count == 101
