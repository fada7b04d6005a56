"""A bar for long work."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """On stderr, gone when done. Yields what takes (what, done, of).

    Where stderr is no terminal, a line now and then.
    """
    if not sys.stderr.isatty():
        yield _lines()
        return
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("starting")
        yield lambda what, done, of: progress.update(task, description=what, completed=done, total=of)


def _lines(every: float = 10.0) -> Callable[[str, int, int], None]:
    """A line on stderr, but not more often than every so many seconds, and none for what is done sooner."""
    last = time.monotonic()

    def progress(what: str, done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last >= every:
            last = time.monotonic()
            print(f"{what}: {done} of {of}", file=sys.stderr, flush=True)

    return progress
