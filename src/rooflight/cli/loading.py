"""A model for a command: the checks that need no model, then the load with its bar."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rooflight.engine import LLM
    from rooflight.text import Tokenizer

MAX_THREADS = 1024  # far beyond what helps; more makes OpenMP end the process


@dataclass(frozen=True)
class OpenModel:
    """A loaded model that takes text; `name` is where it came from, resolved."""

    llm: LLM
    tokenizer: Tokenizer
    name: str

    @property
    def dtype(self) -> str:
        from rooflight.cli.model_facts import dtype_name

        return dtype_name(self.llm.decoder.embed.dtype)

    @property
    def device(self) -> str:
        return str(self.llm.decoder.embed.device)


def open_model(
    model: str | None, *, dtype: str, device: str, max_model_len: int | None, threads: int | None
) -> OpenModel:
    """Load a model; ValueError for one that takes no text, if possible before it is loaded."""
    from rooflight.engine import LLM
    from rooflight.models.sources import Kind, resolve

    set_threads(threads)
    source = resolve(model)
    if source.kind is Kind.RANDOM:
        raise ValueError(f"{source.name} has random weights and no tokenizer, so it takes no text; `info` shows it")
    with _bar(Path(source.name).name) as progress:
        llm = LLM(model, dtype=dtype, device=device, max_model_len=max_model_len, progress=progress)
    if llm.tokenizer is None:
        raise ValueError(f"{source.name} has no tokenizer, so it takes no text")
    return OpenModel(llm, llm.tokenizer, source.name)


def set_threads(threads: int | None) -> None:
    """Let PyTorch compute with `threads` CPU threads; None leaves its own choice."""
    if threads is None:
        return
    check_threads(threads)
    import torch

    torch.set_num_threads(threads)


def check_threads(threads: int) -> None:
    if not 1 <= threads <= MAX_THREADS:
        raise ValueError(f"threads must be from 1 to {MAX_THREADS}, was {threads}")


@contextmanager
def _bar(name: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar of bytes on stderr that goes away when done; none where stderr is no terminal.

    It appears with the first bytes: before them the hub may show bars of its own.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("[dim]loading {task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as bar:
        task = bar.add_task(name, total=None, visible=False)

        def update(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, visible=True, refresh=True)

        yield update
