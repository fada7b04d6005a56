"""The parent's side of a measuring process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, TypeVar

from rooflight.bench.measurement import ANY_ROOM, Busy, Facts, RequestTiming, Room

PEERS = ("transformers", "vllm")
NEED_A_GPU = ("vllm",)
Worker = TypeVar("Worker", bound="WorkerProcess")


def missing(peer: str, device: str = "cuda") -> str | None:
    """Why a peer cannot run here, or None."""
    if not importlib.util.find_spec(peer):
        return "not installed"
    return "runs on a GPU only" if peer in NEED_A_GPU and device == "cpu" else None


class WorkerProcess:
    """A process that runs `module` and answers JSON lines with JSON lines (`channel`). Its errors are kept.

    `name` is what error messages call it. Starting returns at once; the first `receive` waits until it is ready.
    patience: seconds that it may take for an answer; None waits for ever.
    """

    def __init__(
        self,
        name: str,
        module: str,
        arguments: Sequence[str],
        changes: Mapping[str, str] | None = None,
        patience: float | None = None,
    ) -> None:
        self.name, self._patience = name, patience
        # A pipe would fill up, since libraries are talkative; closed in close().
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**os.environ, **(changes or {})},
        )

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Send a message and wait for the answer; ChildProcessError with its last words if it has died."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `receive` tells of what
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        # An answer is one line, so nothing is left in Python's buffer that select would not see.
        if not select.select([self._process.stdout], [], [], self._patience)[0]:
            self._process.kill()
            raise ChildProcessError(f"{self.name} did not answer for {self._patience:g} s")
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["no message"]
            raise ChildProcessError(f"{self.name} ended with code {code}: {last[0]}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self: Worker) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ContenderProcess(WorkerProcess):
    """Starts an engine and waits until its model is loaded; ChildProcessError with its words if it cannot."""

    def __init__(
        self, engine: str, model: str | None, dtype: str, device: str, threads: int, room: Room = ANY_ROOM
    ) -> None:
        self.engine = engine
        arguments = [engine, model or "", dtype, device, str(threads), json.dumps(asdict(room))]
        super().__init__(engine, "rooflight.bench.worker", arguments)
        ready = self.receive()
        if "error" in ready:
            self.close()
            raise ChildProcessError(f"{engine} could not load the model: {ready['error']}")
        self.versions: dict[str, str] = ready["ready"]
        self.facts: Facts = ready["facts"] | {"load_seconds": ready["seconds"]}

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming:
        reply = self.ask({"prompt": list(prompt), "max_tokens": max_tokens})
        return RequestTiming(reply["first_token"], reply["total"], tuple(reply["tokens"]))

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
        """Seconds of all of them together."""
        reply = self.ask({"do": "serve", "prompts": [list(prompt) for prompt in prompts], "max_tokens": max_tokens})
        return float(reply["seconds"])

    def busy(self, prompt: Sequence[int], tokens: int) -> Busy | str:
        """GPU-busy time of a request with so many tokens after the first, or why there is none.

        Nothing may be timed in this process afterwards.
        """
        reply = self.ask({"do": "busy", "prompt": list(prompt), "tokens": tokens})
        return reply["absent"] if "absent" in reply else Busy(**reply)
