"""Ways to run a command: in this process, as a process of its own, on a terminal."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from rooflight.cli.main import app

COMMAND = [sys.executable, "-m", "rooflight.cli.main"]
PATIENCE = 60.0  # seconds; for machines that are busy with something else


def environment(**changes: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "ROOFLIGHT_DEBUG"}
    return kept | {"OMP_NUM_THREADS": "1", "TERM": "xterm-256color", "PYTHONUTF8": "1"} | changes


def invoke(*arguments: str | Path, stdin: str | bytes | None = None) -> Any:
    """The command in this process: `.exit_code`, `.stdout`, `.stderr`."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], input=stdin, prog_name="rooflight")
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


def refused(*arguments: str | Path, stdin: str | bytes | None = None, code: int = 2) -> str:
    """The one line on stderr of a command that fails with nothing on stdout, without its `rooflight: `."""
    result = invoke(*arguments, stdin=stdin)
    assert (result.exit_code, result.stdout) == (code, "")
    return only_line(result.stderr)


def only_line(stderr: str) -> str:
    assert stderr.startswith("rooflight: ")
    assert stderr.count("\n") == 1
    assert stderr.endswith("\n")
    return stderr.removeprefix("rooflight: ").rstrip("\n")


def run(arguments: Sequence[str | Path], **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """The command as a process of its own."""
    return subprocess.run(
        [*COMMAND, *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
        **kwargs,
    )


def _own_terminal() -> None:
    """In the child: the terminal is its own, and Ctrl-C ends it, also where the tests run in a script's background."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)


class Terminal:
    """The command on a terminal of its own, 80 columns wide. What it shows is read with `expect`."""

    def __init__(self, *arguments: str | Path) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        self._process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={name: value for name, value in environment().items() if name not in ("COLUMNS", "LINES")},
            start_new_session=True,
            # Makes it the controlling terminal, so that Ctrl-C becomes a signal.
            preexec_fn=_own_terminal,
        )
        os.close(slave)
        self._received = b""
        self._read_to = 0

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._master)

    @property
    def shown(self) -> str:
        """All of it, as text; codes and characters may arrive in parts, so it is decoded anew."""
        return plain(self._received.decode(errors="replace"))

    @property
    def echoes(self) -> bool:
        """Whether it shows what is typed, as a shell expects to find it."""
        return bool(termios.tcgetattr(self._master)[3] & termios.ECHO)

    def type(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def expect(self, pattern: str) -> re.Match[str]:
        """Read on until the pattern is shown; what is behind it stays unread."""
        deadline = time.monotonic() + PATIENCE
        while True:
            match = re.compile(pattern).search(self.shown, self._read_to)
            if match is not None:
                self._read_to = match.end()
                return match
            assert self._read(deadline), f"{pattern!r} was not shown; the end of what was: {self.shown[-2000:]!r}"

    def leave(self) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + PATIENCE
        while self._read(deadline):
            pass
        return self._process.wait(PATIENCE)

    def _read(self, deadline: float) -> bool:
        ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            return False
        try:
            data = os.read(self._master, 65536)
        except OSError:  # Linux says so when the other side is closed
            return False
        self._received += data
        return bool(data)


def plain(text: str) -> str:
    """Without colours and other codes, and with plain line breaks."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\001\002]", "", text).replace("\r\n", "\n")
