"""The processes of a run of operators: which contenders each holds, and what happens when one fails."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Protocol

from rooflight.bench.contenders import AGAIN, NAMES
from rooflight.bench.peers.ops import PEERS
from rooflight.bench.process import WorkerProcess

COMPILED = "compiled"
MOST_COMPILERS = 6
CORES_PER_COMPILER = 2
CASES_PER_COMPILER = 3
RESTARTS = 2
PATIENCE = 180.0  # seconds for an answer; some peers compile with nvcc at their first call
# In one process. Ours once more has its own, so that a tie band holds what differs between processes.
TOGETHER = tuple(name for name in NAMES if name != AGAIN and (name not in PEERS or name == "eager"))


class Process(Protocol):
    """What `WorkerProcess` is to this module."""

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]: ...

    def receive(self) -> dict[str, Any]: ...

    def close(self) -> None: ...


Start = Callable[[Sequence[str]], Process]


def start_process(names: Sequence[str]) -> Process:
    # Inductor would start a pool of compiling processes in each of ours; compiling in place shares the cores better.
    changes = {"TORCHINDUCTOR_COMPILE_THREADS": "1"} if COMPILED in names else {}
    return WorkerProcess(names[0], "rooflight.bench.ops_worker", names, changes, PATIENCE)


class Crew:
    """One process with its contenders. Shares cases with `of` processes of the same contenders."""

    def __init__(self, names: Sequence[str], start: Start, share: int = 0, of: int = 1) -> None:
        self.wanted, self.names = tuple(names), tuple(names)
        self.absent: dict[str, str] = {}
        self._start, self._share, self._of = start, share, of
        self._process: Process | None = start(self.wanted)
        self._restarts, self._last = RESTARTS, ""

    @property
    def alive(self) -> bool:
        return self._process is not None

    def serves(self, index: int) -> bool:
        """Whether the case of this number is measured here."""
        return index % self._of == self._share

    def wait(self) -> None:
        """Until it is ready: then `names` are those that can run here, `absent` the others with their reasons."""
        assert self._process is not None
        try:
            ready = self._process.receive()
        except ChildProcessError as error:
            ready = {"error": str(error)}
        if "error" in ready:
            self._lose()
            self.names, self.absent = (), dict.fromkeys(self.wanted, ready["error"])
        else:
            self.names, self.absent = tuple(ready["ready"]), ready["absent"]

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """An answer that is no error; ChildProcessError otherwise."""
        reply = self.try_ask(message)
        if "error" in reply:
            raise ChildProcessError(f"{self.wanted[0]}: {reply['error']}")
        return reply

    def try_ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer; {"error": why, "broken": bool} where there is none. What is broken starts anew, twice at most."""
        if self._process is None and not self._restart():
            return {"error": f"its process failed too often, at last: {self._last}", "broken": True}
        assert self._process is not None
        try:
            reply = self._process.ask(message)
        except ChildProcessError as error:
            reply = {"error": str(error), "broken": True}
        if reply.get("broken"):
            self._last = reply.get("error", "a kernel failed")
            self._lose()
        return reply

    def _restart(self) -> bool:
        if self._restarts == 0:
            return False
        self._restarts -= 1
        self._process = self._start(self.wanted)
        names, absent = self.names, self.absent
        self.wait()
        if not self.alive:
            self.names, self.absent = names, absent
        return self.alive

    def _lose(self) -> None:
        if self._process is not None:
            self._process.close()
        self._process = None

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lose()


def crews(names: Sequence[str], cases: int, start: Start) -> list[Crew]:
    """Processes for these contenders, started: ours and eager in one, each peer in one, compiled in several."""
    together = [name for name in names if name in TOGETHER]
    found = [Crew(together, start)] if together else []
    found += [Crew([name], start) for name in names if name not in TOGETHER and name != COMPILED]
    if COMPILED in names:
        cores = (os.cpu_count() or 1) // CORES_PER_COMPILER
        count = max(1, min(MOST_COMPILERS, cores, -(-cases // CASES_PER_COMPILER)))
        found += [Crew([COMPILED], start, share, count) for share in range(count)]
    return found
