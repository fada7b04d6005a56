"""Many callers of one engine: streams, what happens when they leave, when the loop dies, and when it is closed."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from rooflight import LLM, AsyncEngine, Chunk, SamplingParams
from rooflight.engine import EngineStopped
from rooflight.engine.plan import StepPlan
from tests.engine.late import in_every_mode
from tests.engine.support import assert_idle, prompt_ids, tokens_alone

PARAMS = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=500)


@pytest.fixture
def engine(llm: LLM) -> Iterator[AsyncEngine]:
    made = AsyncEngine(llm)
    yield made
    made.close()


def idle(engine: AsyncEngine, seconds: float = 2.0) -> bool:
    """Whether everything is free again within so many seconds."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        metrics = engine.metrics()
        if metrics.running == metrics.waiting == 0 and metrics.free_pages == metrics.pages:
            return True
        time.sleep(0.005)
    return False


@in_every_mode
def test_streams_of_many_callers_give_the_tokens_of_solo_runs(llm: LLM) -> None:
    prompts = [prompt_ids(length, seed=length) for length in (1, 5, 30, 64, 65, 150)]
    alone = [tokens_alone(llm, prompt, PARAMS) for prompt in prompts]

    async def one(engine: AsyncEngine, prompt: list[int]) -> tuple[int, ...]:
        stream = await engine.submit(prompt, PARAMS)
        return tuple([token async for chunk in stream for token in chunk.token_ids])

    async def all_of_them() -> list[tuple[int, ...]]:
        async with AsyncEngine(llm) as engine:
            return list(await asyncio.gather(*(one(engine, prompt) for prompt in prompts)))

    assert asyncio.run(all_of_them()) == alone
    assert_idle(llm)


def test_generate_takes_many_prompts_and_gives_n_completions_of_each(engine: AsyncEngine) -> None:
    params = SamplingParams(max_tokens=5, temperature=0.9, seed=8, n=3)
    first, second = asyncio.run(engine.generate([[1, 2], [3, 4]], params))
    assert [completion.index for completion in first] == [completion.index for completion in second] == [0, 1, 2]
    assert len({completion.token_ids for completion in first}) == 3
    assert [c.token_ids for c in asyncio.run(engine.generate([[1, 2]], params))[0]] == [c.token_ids for c in first]
    with pytest.raises(ValueError, match="params must be one or as many as prompts = 2, was 1"):
        asyncio.run(engine.generate([[1], [2]], [PARAMS]))


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], PARAMS, "prompt must have at least one token"),
        ([10**6], PARAMS, "prompt must have token ids below 1000"),
        ([1], SamplingParams(logit_bias={1000: 1.0}), "logit_bias must have token ids below 1000, was one with 1000"),
        ([1], {"max_tokens": 3}, "params must be SamplingParams"),
    ],
)
def test_a_bad_request_is_refused_where_it_was_made(
    engine: AsyncEngine, prompt: Any, params: Any, message: str
) -> None:
    async def submit() -> None:
        await engine.submit(prompt, params)

    with pytest.raises(ValueError, match=message):
        asyncio.run(submit())
    assert len(asyncio.run(engine.generate([[1, 2]], PARAMS))[0][0].token_ids) == 12


@in_every_mode
@pytest.mark.parametrize("leave", ["abort", "aclose", "context", "drop", "cancel", "engine"])
def test_br_070_a_reader_that_leaves_frees_its_memory(engine: AsyncEngine, leave: str) -> None:
    async def read_and_leave() -> None:
        stream = await engine.submit(prompt_ids(5), LONG)
        await anext(stream)
        if leave == "abort":
            stream.abort()
            stream.abort()
        elif leave == "aclose":
            await stream.aclose()
        elif leave == "context":
            async with stream:
                pass
        elif leave == "engine":
            engine.abort(stream.request_id)
            *_, last = [chunk async for chunk in stream]
            assert last.finish_reason == "abort"
            assert last.completion is not None
            assert 1 <= len(last.completion.token_ids) < 500
        elif leave == "cancel":

            async def forever() -> None:
                async for _ in stream:
                    pass

            task = asyncio.create_task(forever())
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    asyncio.run(read_and_leave())
    gc.collect()
    assert idle(engine)
    assert engine._mailboxes == {}


def test_br_070_two_hundred_that_leave_leave_nothing(engine: AsyncEngine) -> None:
    """While queued, in the prompt and later; threads and tables must not grow."""
    threads = threading.active_count()

    async def crowd() -> None:
        streams = [await engine.submit(prompt_ids(1 + i % 100), LONG) for i in range(200)]
        for i, stream in enumerate(streams):
            if i % 3 == 0:
                await anext(stream)
            stream.abort()

    asyncio.run(crowd())
    assert idle(engine)
    core = engine.llm.engine
    assert (core._requests, core._groups, engine._mailboxes, core._empty) == ({}, {}, {}, [])
    assert threading.active_count() == threads
    assert engine.metrics().finished["abort"] >= 190


def test_a_reader_whose_event_loop_is_gone_is_dropped(engine: AsyncEngine) -> None:
    kept = []

    async def submit() -> None:
        kept.append(await engine.submit([1, 2], LONG))

    asyncio.run(submit())
    assert idle(engine)


@in_every_mode
def test_if_the_loop_dies_every_reader_hears_at_once(monkeypatch: pytest.MonkeyPatch, engine: AsyncEngine) -> None:
    run = engine.llm.engine.runner.run

    def dying(plan: StepPlan) -> torch.Tensor:
        if len(engine.llm.engine._groups) == 12:  # all are there
            raise MemoryError("no more memory")
        return run(plan)

    monkeypatch.setattr(engine.llm.engine.runner, "run", dying)

    async def read(number: int) -> str:
        stream = await engine.submit(prompt_ids(3 + number), LONG)
        with pytest.raises(EngineStopped) as caught:
            async for _ in stream:
                pass
        assert isinstance(caught.value.__cause__, MemoryError)
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        return str(caught.value)

    async def everybody() -> list[str]:
        return list(await asyncio.wait_for(asyncio.gather(*map(read, range(12))), 10))

    assert asyncio.run(everybody()) == ["the engine's loop died: MemoryError: no more memory"] * 12
    with pytest.raises(EngineStopped, match="MemoryError: no more memory"):
        asyncio.run(engine.generate([[1]], PARAMS))
    engine.close()  # readers hear first: its thread may still be leaving
    assert_idle(engine.llm)


@in_every_mode
def test_closing_tells_readers_and_leaves_the_model_usable(llm: LLM) -> None:
    alone = tokens_alone(llm, [5, 6], PARAMS)

    async def close_early() -> None:
        async with AsyncEngine(llm) as engine:
            stream = await engine.submit([5, 6], LONG)
            await anext(stream)
        with pytest.raises(EngineStopped, match="the engine was closed"):
            async for _ in stream:
                pass
        with pytest.raises(EngineStopped, match="the engine was closed"):
            await engine.submit([5, 6])
        engine.close()
        await engine.aclose()

    asyncio.run(close_early())
    assert_idle(llm)
    assert tokens_alone(llm, [5, 6], PARAMS) == alone


def test_a_text_and_messages_are_encoded_as_the_llm_does(engine: AsyncEngine) -> None:
    async def both() -> None:
        stream = await engine.submit("héllo", SamplingParams(max_tokens=1))
        (completion,) = await stream.completions()
        assert completion.prompt_token_ids == tuple(engine.llm.encode("héllo"))
        with pytest.raises(ValueError, match="template"):
            await engine.submit([{"role": "user", "content": "hi"}])
        with pytest.raises(ValueError, match="prompt must be a list of messages for template keywords"):
            await engine.submit("hi", enable_thinking=True)

    asyncio.run(both())


def test_metrics_can_be_read_from_any_thread_while_it_runs(engine: AsyncEngine) -> None:
    seen = []
    done = threading.Event()

    def watch() -> None:
        while not done.is_set():
            seen.append(engine.metrics())

    watcher = threading.Thread(target=watch)
    watcher.start()
    asyncio.run(engine.generate([prompt_ids(20, seed=i) for i in range(20)], PARAMS))
    done.set()
    watcher.join()
    last = engine.metrics()
    assert last.generated_tokens - seen[0].generated_tokens == 20 * 12
    assert max(metrics.running for metrics in seen) > 1
    assert [m.steps for m in seen] == sorted(m.steps for m in seen)


def test_a_reader_that_waits_hears_when_another_task_aborts_its_stream(engine: AsyncEngine) -> None:
    """A server that watches the connection aborts what its handler is reading."""

    async def both() -> list[Chunk]:
        stream = await engine.submit(prompt_ids(500), LONG)

        async def read() -> list[Chunk]:
            return [chunk async for chunk in stream]

        reader = asyncio.create_task(read())
        await asyncio.sleep(0.01)
        stream.abort()
        return await asyncio.wait_for(reader, 5)

    assert all(chunk.finish_reason is None for chunk in asyncio.run(both()))
    assert idle(engine)


@pytest.mark.parametrize("where", ["add", "abort"])
def test_if_even_the_end_fails_every_reader_hears(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """The loop may have died of tables that are wrong, and then it cannot tidy up either."""
    llm = LLM("random:tiny", num_pages=64, skip_tokenizer=True)

    def broken(*args: Any) -> Any:
        raise AssertionError("the tables are wrong")

    async def read(engine: AsyncEngine) -> None:
        stream = await engine.submit([1, 2, 3], LONG)
        if where == "abort":
            await anext(stream)
            monkeypatch.setattr(llm.engine.runner, "run", broken)
            monkeypatch.setattr(llm.engine.scheduler, "cancel", broken)
        async for _ in stream:
            pass

    async def hears(engine: AsyncEngine) -> None:
        with pytest.raises(EngineStopped, match="the tables are wrong"):  # from submit already, if it comes late
            await read(engine)

    async def everybody() -> None:
        engine = AsyncEngine(llm)
        if where == "add":
            monkeypatch.setattr(llm.engine.scheduler, "add", broken)
        await asyncio.wait_for(asyncio.gather(*(hears(engine) for _ in range(3))), 5)

    asyncio.run(everybody())


@in_every_mode
def test_a_cancelled_generate_leaves_nothing_running(engine: AsyncEngine) -> None:
    async def cancel() -> None:
        task = asyncio.create_task(engine.generate([[1], [2], [3]], LONG))
        await asyncio.sleep(0.05)
        task.cancel()
        kept = await asyncio.gather(task, return_exceptions=True)
        assert isinstance(kept[0], asyncio.CancelledError)
        assert await asyncio.to_thread(idle, engine)

    asyncio.run(cancel())


def test_an_llm_with_open_streams_is_refused(llm: LLM) -> None:
    stream = llm.stream([1, 2], PARAMS)
    with pytest.raises(ValueError, match="llm must not have requests that are open"):
        AsyncEngine(llm)
    stream.close()


def test_a_program_that_ends_without_closing_ends_well() -> None:
    program = """
import asyncio
from rooflight import LLM, AsyncEngine, SamplingParams
async def main():
    engine = AsyncEngine(LLM("random:tiny", skip_tokenizer=True, num_pages=256))
    stream = await engine.submit([1, 2, 3], SamplingParams(max_tokens=3000))
    await anext(stream)
    globals()["kept"] = stream, engine
asyncio.run(main())
print("end")
"""
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def test_nobody_else_runs_an_llm_meanwhile(llm: LLM) -> None:
    """An intruder is told so, leaves nothing behind, and the engine lives on."""
    engine = AsyncEngine(llm)
    with pytest.raises(ValueError, match="llm must not be run by another AsyncEngine"):
        AsyncEngine(llm)
    for intrude in (lambda: llm.generate([[1]], PARAMS), lambda: llm.stream([1], PARAMS)):
        with pytest.raises(RuntimeError, match="an AsyncEngine runs this LLM: use its submit"):
            intrude()
    assert engine.metrics().waiting == engine.metrics().running == 0
    assert len(asyncio.run(engine.generate([[1]], PARAMS))[0][0].token_ids) == 12
    engine.close()
    assert len(llm.generate([[1]], PARAMS)[0].token_ids) == 12
