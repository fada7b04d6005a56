"""Engines side by side, each in its own process and all loaded, so that they can take turns."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from contextlib import ExitStack
from typing import Protocol, TypeVar

from rooflight.bench.measurement import OURS, Room
from rooflight.bench.process import ContenderProcess

T = TypeVar("T")


class Start(Protocol):
    """Starts an engine: `ContenderProcess`, or what tests put in its place."""

    def __call__(
        self, engine: str, model: str | None, dtype: str, device: str, threads: int, room: Room
    ) -> ContenderProcess: ...


class Contest:
    """Ours must run; a peer that cannot be loaded or dies is left out from then on, and named in `absent`.

    `absent` gets "<engine> <label>" with the engine's last words. launch: loads one engine.
    """

    def __init__(
        self,
        engines: Sequence[str],
        launch: Callable[[str], ContenderProcess],
        absent: MutableMapping[str, str],
        label: str,
    ) -> None:
        self._absent, self._label = absent, label
        self._stack = ExitStack()
        self.running: list[ContenderProcess] = []
        try:
            for engine in engines:
                self._load(engine, launch)
        except BaseException:
            self._stack.close()
            raise

    def _load(self, engine: str, launch: Callable[[str], ContenderProcess]) -> None:
        try:
            process = launch(engine)
        except ChildProcessError as error:
            self._lose(engine, error)
        else:
            self.running.append(self._stack.enter_context(process))

    def turn(self, number: int) -> list[ContenderProcess]:
        """Who runs, in order: every other turn begins at the other end."""
        return list(self.running if number % 2 else reversed(self.running))

    def ask(self, process: ContenderProcess, question: Callable[[ContenderProcess], T]) -> T | None:
        """The answer, or None where a peer has died over it."""
        try:
            return question(process)
        except ChildProcessError as error:
            self._lose(process.engine, error)
            self.running.remove(process)
            return None

    def _lose(self, engine: str, error: ChildProcessError) -> None:
        if engine == OURS:
            raise error
        self._absent[f"{engine} {self._label}"] = str(error)

    def __enter__(self) -> Contest:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
