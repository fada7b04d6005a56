"""What Python's collector may look at while an engine runs, and that it gets everything back."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Iterator

import pytest

from rooflight import LLM, AsyncEngine, SamplingParams
from rooflight.engine import collector, llm
from rooflight.engine.collector import COLLECTOR, Collector
from tests.engine.support import prompt_ids

MANY = [prompt_ids(4, seed=seed) for seed in range(llm.MANY_PROMPTS)]
ONE = SamplingParams(max_tokens=1)


class Node:
    """Only the collector frees one that has itself."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Before and after. The collector of the process begins a period."""
    monkeypatch.setattr(COLLECTOR, "_collections", -1)
    monkeypatch.setattr(COLLECTOR, "_counts_from", 0.0)
    assert gc.get_freeze_count() == 0
    yield
    try:
        assert gc.get_freeze_count() == 0
    finally:
        gc.unfreeze()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [1000.0]
    monkeypatch.setattr(collector.time, "monotonic", lambda: now[0])
    return now


def frozen() -> bool:
    return gc.get_freeze_count() > 0


def test_what_was_there_is_set_aside_and_given_back() -> None:
    before, made = Node(), Collector()
    with made.aside():
        during = Node()
        looked_at = gc.get_objects()
        assert not any(found is before for found in looked_at)
        assert any(found is during for found in looked_at)
    assert any(found is before for found in gc.get_objects())


def test_the_outermost_one_gives_back() -> None:
    made = Collector()
    with made.aside():
        with made.aside():
            assert frozen()
        assert frozen()
    assert not frozen()
    with made.aside():
        assert frozen()


def test_the_last_of_several_threads_gives_back() -> None:
    made, entered, leave = Collector(), threading.Barrier(3), [threading.Event(), threading.Event()]

    def run(mine: threading.Event) -> None:
        with made.aside():
            entered.wait(10)
            mine.wait(10)

    threads = [threading.Thread(target=run, args=(event,)) for event in leave]
    for thread in threads:
        thread.start()
    entered.wait(10)
    for thread, event, left in zip(threads, leave, (True, False), strict=True):
        assert frozen()
        event.set()
        thread.join(10)
        assert frozen() is left


def test_threads_that_come_and_go_leave_nothing_frozen() -> None:
    made = Collector()

    def run() -> None:
        for _ in range(300):
            with made.aside():
                pass

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert (made._users, frozen()) == (0, False)


def test_an_exception_gives_back() -> None:
    with pytest.raises(KeyboardInterrupt), Collector().aside():
        raise KeyboardInterrupt
    assert not frozen()


def test_what_the_user_froze_stays_the_users(clock: list[float]) -> None:
    made, before = Collector(), Node()
    gc.freeze()
    count = gc.get_freeze_count()
    during = Node()
    with made.aside():
        assert any(found is during for found in gc.get_objects())
        assert gc.get_freeze_count() <= count
    assert frozen()
    assert not any(found is before for found in gc.get_objects())
    gc.unfreeze()
    with made.aside():  # counting is dear, and not done at every run
        assert not frozen()
    clock[0] += collector.PERIOD_S
    gc.collect()
    with made.aside():
        assert frozen()


@pytest.mark.parametrize("when", ["before", "during"])
def test_cycles_that_die_are_collected_afterwards(when: str) -> None:
    node = Node() if when == "before" else None
    with Collector().aside():
        node = node or Node()
        gone = weakref.ref(node)
        del node
        if when == "before":
            gc.collect()
            assert gone() is not None
    gc.collect()
    assert gone() is None


def test_cycles_of_a_long_run_are_collected_in_it() -> None:
    with Collector().aside():
        gone = weakref.ref(Node())
        gc.collect()
        assert gone() is None


def test_a_long_run_sets_aside_beside_a_short_one_that_did_not(clock: list[float]) -> None:
    made = Collector()
    with made.aside():
        pass
    clock[0] += collector.PERIOD_S
    with made.aside():
        assert not frozen()
        with made.aside(for_long=True):
            assert frozen()
    assert not frozen()


def test_what_is_dead_already_does_not_stay_for_a_long_run() -> None:
    gone = weakref.ref(Node())
    assert gone() is not None
    with Collector().aside(for_long=True):
        assert gone() is None


def test_a_loop_of_short_runs_does_not_keep_python_from_collecting(clock: list[float]) -> None:
    """Each of them begins with counters of zero, and none makes enough objects for a full collection."""
    made, nodes = Collector(), weakref.WeakSet[Node]()
    highest = 0
    for _ in range(3000):
        with made.aside():
            node = Node()
            node.more = [[] for _ in range(100)]  # type: ignore[attr-defined]
            nodes.add(node)
            del node
        clock[0] += 0.02  # 500 of a period
        highest = max(highest, len(nodes))
    assert highest < 2500
    assert len(nodes) < 1500


def test_a_new_period_begins_when_python_has_collected(clock: list[float]) -> None:
    made = Collector()
    with made.aside():
        gc.collect()  # of what came since: not the one that is waited for
    clock[0] += collector.PERIOD_S
    for _ in range(2):
        with made.aside():
            assert not frozen()
    with made.aside(for_long=True):
        assert frozen()
    with made.aside():
        assert not frozen()
    gc.collect()
    with made.aside():
        assert frozen()


@pytest.mark.parametrize(("prompts", "aside"), [(MANY, True), (MANY[:-1], False)])
def test_generate_sets_aside_for_many_prompts(llm: LLM, prompts: list[list[int]], aside: bool) -> None:
    seen = []
    llm.generate(prompts, ONE, progress=lambda done, total: seen.append(frozen()))
    assert seen == [aside] * len(prompts)
    assert not frozen()


@pytest.mark.parametrize("failing", ["prepare", "progress"])
def test_generate_that_fails_gives_back(llm: LLM, failing: str) -> None:
    def fail(done: int, total: int) -> None:
        raise KeyError("progress")

    prompts: list[list[int]] = [*MANY, []] if failing == "prepare" else MANY
    with pytest.raises(ValueError if failing == "prepare" else KeyError):
        llm.generate(prompts, ONE, progress=fail)
    assert not frozen()


def test_a_stream_sets_nothing_aside(llm: LLM) -> None:
    for _ in llm.stream(MANY[0], SamplingParams(max_tokens=3)):
        assert not frozen()


@pytest.mark.parametrize("dies", [False, True])
def test_an_async_engine_sets_aside_until_its_end(llm: LLM, monkeypatch: pytest.MonkeyPatch, dies: bool) -> None:
    def fail() -> None:
        raise KeyError("step")

    async def run(step: Callable[[], object]) -> list[bool]:
        async with AsyncEngine(llm) as engine:
            await (await engine.submit(MANY[0], ONE)).completions()
            seen = [frozen()]
            if dies:
                monkeypatch.setattr(llm.engine, "step", step)
                with pytest.raises(RuntimeError, match="loop died"):
                    await (await engine.submit(MANY[0], ONE)).completions()
                engine._thread.join(10)
                seen.append(frozen())
                monkeypatch.undo()
        return [*seen, frozen()]

    assert asyncio.run(run(fail)) == ([True, False, False] if dies else [True, False])
