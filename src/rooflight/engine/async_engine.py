"""The engine on a thread of its own, for many callers at once: servers, event loops, other threads."""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from threading import Condition, Thread, current_thread
from typing import Any

from rooflight.engine.collector import COLLECTOR
from rooflight.engine.llm import LLM, Messages, Prompt
from rooflight.engine.metrics import Metrics
from rooflight.engine.outputs import Chunk, Completion
from rooflight.engine.params import SamplingParams
from rooflight.engine.request import Request


class EngineStopped(RuntimeError):
    """The engine was closed, or its loop died; `__cause__` is what it died of."""


Item = Chunk | EngineStopped


@dataclass(eq=False)
class _Mailbox:
    """Where the chunks of a request go: to the event loop of whoever reads them."""

    loop: asyncio.AbstractEventLoop
    items: asyncio.Queue[Item]
    open: int  # completions that have not ended


def _post(mail: Sequence[tuple[_Mailbox, Item]]) -> list[_Mailbox]:
    """Put items into mailboxes, with one call for each event loop; returns those whose loop is closed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Mailbox, Item]]] = {}
    for mailbox, item in mail:
        by_loop.setdefault(mailbox.loop, []).append((mailbox, item))
    lost: list[_Mailbox] = []
    for loop, letters in by_loop.items():
        try:
            loop.call_soon_threadsafe(_put, letters)
        except RuntimeError:  # closed: nobody reads any more
            lost += [mailbox for mailbox, _ in letters]
    return lost


def _put(mail: Sequence[tuple[_Mailbox, Item]]) -> None:
    for mailbox, item in mail:
        mailbox.items.put_nowait(item)


class Stream(AsyncIterator[Chunk]):
    """Chunks of one request, for one reader. Closing it, leaving its `async with` or dropping it aborts the request."""

    def __init__(self, engine: AsyncEngine, request_id: int, items: asyncio.Queue[Item], many: int) -> None:
        self.request_id = request_id
        self._engine, self._items = engine, items
        self._left = many  # completions that have not been read to their end

    async def __anext__(self) -> Chunk:
        """The next chunk. EngineStopped if there will be none."""
        if self._left > 0:
            item = await self._items.get()
        if self._left <= 0:  # it may have been aborted meanwhile
            raise StopAsyncIteration
        if isinstance(item, EngineStopped):
            self._left = 0
            raise item
        self._left -= item.finish_reason is not None
        return item

    async def completions(self) -> list[Completion]:
        """Read to the end: the request's n completions, in their order."""
        found = [chunk.completion async for chunk in self if chunk.completion is not None]
        return sorted(found, key=lambda completion: completion.index)

    def abort(self) -> None:
        """End the request and free its memory; what was not read is lost. One that has ended is no error."""
        if self._left > 0:
            self._left = 0
            self._engine.abort(self.request_id)

    async def aclose(self) -> None:
        self.abort()

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.abort()

    def __del__(self) -> None:
        self.abort()


class AsyncEngine:
    """Runs an `LLM`, which nobody else may use meanwhile, until `close`. All methods may be called from any thread.

    Requests of all callers run together. A bad one is refused by `submit`, with ValueError, and never reaches the
    others. If the loop itself dies, every reader gets `EngineStopped` at once, and so does whoever submits later.
    Python's collector leaves alone what was there before, until `close` (collector.py).
    """

    def __init__(self, llm: LLM) -> None:
        if llm.claimed:
            raise ValueError("llm must not be run by another AsyncEngine")
        if llm.engine.busy:
            raise ValueError(
                "llm must not have requests that are open, such as streams that were not read to their end"
            )
        self.llm = llm
        llm.claimed = True
        self._wake = Condition()
        self._added: list[tuple[list[Request], _Mailbox]] = []
        self._aborted: list[int] = []
        self._mailboxes: dict[int, _Mailbox] = {}  # of requests that the engine has; only its thread touches them
        self._closing = False
        self._failure: BaseException | None = None
        self._thread = Thread(target=self._loop, name="rooflight-engine", daemon=True)
        self._thread.start()
        # A thread that is in the middle of a step when Python ends would take the process down with it.
        atexit.register(self.close)

    async def submit(
        self, prompt: Prompt | Messages, /, params: SamplingParams | None = None, **template: Any
    ) -> Stream:
        """Queue a prompt, or the messages of a chat with its template's keywords; returns a stream of its chunks.

        Raises ValueError as `LLM.stream` does, EngineStopped after the end.
        """
        options = SamplingParams() if params is None else params
        # A long text takes its time, which other readers of this event loop should not have to wait for.
        ids = await asyncio.to_thread(self.llm.encode_any, prompt, **template)
        requests = self.llm.prepare(ids, options)
        mailbox = _Mailbox(asyncio.get_running_loop(), asyncio.Queue(), options.n)
        with self._wake:
            self._check()
            self._added.append((requests, mailbox))
            self._wake.notify()
        return Stream(self, requests[0].group.id, mailbox.items, options.n)

    async def generate(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[list[Completion]]:
        """All completions of many prompts, n of each."""
        options = list(params) if isinstance(params, Sequence) else [params] * len(prompts)
        if len(options) != len(prompts):
            raise ValueError(f"params must be one or as many as prompts = {len(prompts)}, was {len(options)}")
        streams: list[Stream] = []
        try:
            for prompt, option in zip(prompts, options, strict=True):
                streams.append(await self.submit(prompt, option))
            return [await stream.completions() for stream in streams]
        finally:  # if this is cancelled, nobody reads them
            for stream in streams:
                stream.abort()

    def abort(self, request_id: int) -> None:
        """End a request: its reader gets what there is, with "abort" as reason. One that has ended is no error."""
        with self._wake:
            if not self._closing:
                self._aborted.append(request_id)
                self._wake.notify()

    def metrics(self) -> Metrics:
        """How the engine is doing now."""
        return self.llm.engine.metrics()

    def close(self) -> None:
        """Stop after the step that runs now: what has not ended is aborted, and its readers get EngineStopped."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        if self._thread is not current_thread():
            self._thread.join()
            atexit.unregister(self.close)

    async def aclose(self) -> None:
        """`close` without keeping the event loop waiting."""
        await asyncio.to_thread(self.close)

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    def _check(self) -> None:
        if self._closing or self._failure is not None:
            raise self._stopped()

    def _stopped(self) -> EngineStopped:
        if self._failure is None:
            return EngineStopped("the engine was closed")
        error = EngineStopped(f"the engine's loop died: {type(self._failure).__name__}: {self._failure}")
        error.__cause__ = self._failure
        return error

    def _loop(self) -> None:
        try:
            with COLLECTOR.aside(for_long=True):
                while self._take_orders():
                    self._deliver(self.llm.engine.step())
        except BaseException as error:  # whatever it is, nobody may wait for ever
            self._failure = error
        self._end()

    def _take_orders(self) -> bool:
        """Wait until there is something to do, and take in what callers want; False at the end."""
        engine = self.llm.engine
        with self._wake:
            while not (self._added or self._aborted or self._closing or engine.busy):
                self._wake.wait()
            added, self._added = self._added, []
            aborted, self._aborted = self._aborted, []
            closing = self._closing
        for requests, mailbox in added:
            self._mailboxes[requests[0].group.id] = mailbox
        for requests, _ in added:
            engine.add(requests)
        self._deliver((request_id, chunk) for request_id in aborted for chunk in engine.abort(request_id))
        return not closing

    def _deliver(self, chunks: Iterable[tuple[int, Chunk]]) -> None:
        mail: list[tuple[_Mailbox, Item]] = []
        owners: dict[_Mailbox, int] = {}
        for owner, chunk in chunks:
            mailbox = self._mailboxes.get(owner)
            if mailbox is None:
                continue
            mail.append((mailbox, chunk))
            owners[mailbox] = owner
            mailbox.open -= chunk.finish_reason is not None
            if mailbox.open == 0:
                del self._mailboxes[owner]
        for mailbox in _post(mail):
            self._mailboxes.pop(owners[mailbox], None)
            self.llm.engine.abort(owners[mailbox])

    def _end(self) -> None:
        """Tell every reader, and leave the engine empty."""
        with self._wake:
            self._closing = True
            added, self._added = self._added, []
        owners = list(self._mailboxes)
        readers = [*self._mailboxes.values(), *(mailbox for _, mailbox in added)]
        self._mailboxes.clear()
        _post([(mailbox, self._stopped()) for mailbox in readers])  # first of all: the rest may fail, if the loop did
        for owner in owners:
            with suppress(Exception):
                self.llm.engine.abort(owner)
        self.llm.claimed = False
