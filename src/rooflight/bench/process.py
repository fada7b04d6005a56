"""The parent's side of a contender's process."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rooflight.bench.measurement import RequestTiming

PEERS = ("transformers",)


def missing(peer: str) -> str | None:
    """Why a peer cannot run here, or None."""
    return None if importlib.util.find_spec(peer) else "not installed"


class ContenderProcess:
    """Starts the worker and waits until its model is loaded; ChildProcessError with its words if it cannot."""

    def __init__(self, engine: str, model: str | None, dtype: str, device: str, threads: int) -> None:
        self.engine = engine
        command = [sys.executable, "-m", "rooflight.bench.worker", engine, model or "", dtype, device, str(threads)]
        # A pipe would fill up, since libraries are talkative; closed in close().
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True
        )
        ready = self._read()
        self.versions: dict[str, str] = ready["ready"]
        self.load_seconds: float = ready["seconds"]

    def run(self, prompt: Sequence[int], max_tokens: int) -> RequestTiming:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has died: `_read` tells of what
            self._process.stdin.write(json.dumps({"prompt": list(prompt), "max_tokens": max_tokens}) + "\n")
            self._process.stdin.flush()
        reply = self._read()
        return RequestTiming(reply["first_token"], reply["total"], tuple(reply["tokens"]))

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            last = self._errors.read().strip().splitlines()[-1:] or ["no message"]
            raise ChildProcessError(f"{self.engine} ended with code {code}: {last[0]}")
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            self.close()
            raise ChildProcessError(f"{self.engine} could not load the model: {message['error']}")
        return message

    def close(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
        self._process.communicate()
        self._errors.close()

    def __enter__(self) -> ContenderProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
