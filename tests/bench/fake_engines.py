"""Engines of `bench request` and of cases without processes: times as told, and who was asked what, in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rooflight.bench.measurement import Busy, RequestTiming, Room

FIRST, TOKEN = 0.010, 0.002  # seconds, of an engine with speed 1


class FakeEngines:
    """A `start`. speed: by engine a factor on its times. dies: by engine on which question, counted from 0, it dies.

    unloadable, unprofiled: by engine the reason. Every question adds to the log: (engine, what, tokens of the prompt).
    """

    def __init__(self, **parts: Any) -> None:
        self.speed: Mapping[str, float] = parts.get("speed", {})
        self.dies: Mapping[str, int] = parts.get("dies", {})
        self.unloadable: Mapping[str, str] = parts.get("unloadable", {})
        self.unprofiled: Mapping[str, str] = parts.get("unprofiled", {})
        self.started: list[tuple[str, str | None, str, str, int, Room]] = []
        self.log: list[tuple[str, str, int]] = []
        self.profiled: list[int] = []
        self.open: list[str] = []

    def __call__(self, engine: str, model: str | None, dtype: str, device: str, threads: int, room: Room) -> FakeEngine:
        self.started.append((engine, model, dtype, device, threads, room))
        if engine in self.unloadable:
            raise ChildProcessError(f"{engine} could not load the model: {self.unloadable[engine]}")
        return FakeEngine(self, engine, room)


class FakeEngine:
    def __init__(self, all_: FakeEngines, engine: str, room: Room) -> None:
        self.all, self.engine = all_, engine
        self.versions = {engine: "9.9"}
        self.facts = {"max_model_len": room.max_model_len, "num_pages": room.num_pages, "page_size": 16}
        self.asked = 0
        all_.open.append(engine)

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming:
        self._ask("run", len(prompt))
        speed = self.all.speed.get(self.engine, 1.0)
        slower = 1 + 0.01 * (self.asked % 3)  # a spread
        first = FIRST * speed * slower
        tokens = (*range(max_tokens - 1), 0 if self.engine == "rooflight" else 1)
        return RequestTiming(first, first + TOKEN * speed * slower * (max_tokens - 1), tokens)

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        self._ask("serve", sum(map(len, prompts)))
        return self.all.speed.get(self.engine, 1.0) * (TOKEN * max_tokens) * (1 + 0.01 * (self.asked % 3))

    def busy(self, prompt: Sequence[int], tokens: int) -> Busy | str:
        self.all.profiled.append(tokens)
        self._ask("busy", len(prompt))
        return self.all.unprofiled.get(self.engine) or Busy(FIRST / 2, TOKEN / 4)

    def _ask(self, what: str, tokens: int) -> None:
        self.all.log.append((self.engine, what, tokens))
        self.asked += 1
        if self.asked > self.all.dies.get(self.engine, 10**6):
            raise ChildProcessError(f"{self.engine} ended with code -9: out of memory")

    def __enter__(self) -> FakeEngine:
        return self

    def __exit__(self, *error: object) -> None:
        self.all.open.remove(self.engine)
