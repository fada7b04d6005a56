"""Text of an answer to stdout as it comes, and its figures."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from rooflight.cli.wrap import WordWrap

if TYPE_CHECKING:
    from rooflight.engine import Chunk, Completion

# A model may write any control character, and a terminal would obey.
_OBEYED = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}


class Writer:
    """Writes pieces of text to stdout at once; knows what was written and whether the line is finished.

    A pipe or a file gets the text as it is, a terminal gets it wrapped and without control characters.
    """

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        moves = self._terminal and os.environ.get("TERM", "dumb") != "dumb"  # knows how to move the cursor back
        self._wrap = WordWrap(shutil.get_terminal_size().columns) if moves else None
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def write(self, text: str) -> None:
        if text:
            self._pieces.append(text)
            text = text.translate(_OBEYED) if self._terminal else text
            sys.stdout.write(self._wrap.add(text) if self._wrap else text)
            sys.stdout.flush()

    def end_line(self) -> None:
        """A line break unless there is one already, or nothing was written."""
        if self._pieces and not self._pieces[-1].endswith("\n"):
            print(flush=True)


def stream(chunks: Generator[Chunk, None, None], writer: Writer) -> Completion:
    """Print a streamed answer. Its line is finished and its memory freed also when Ctrl-C stops it."""
    completion = None
    try:
        for chunk in chunks:
            writer.write(chunk.text)
            completion = chunk.completion
    except KeyboardInterrupt:
        writer.end_line()
        raise
    finally:
        chunks.close()
    writer.end_line()
    assert completion is not None  # the last chunk has it
    return completion


def figures(completion: Completion) -> dict[str, Any]:
    """Counts and times of one answer; None where nothing was measured (no token, no second token)."""
    tokens, timing = len(completion.token_ids), completion.timing
    per_token = timing.seconds_per_token(tokens) if tokens > 1 else None
    return {
        "prompt_tokens": len(completion.prompt_token_ids),
        "completion_tokens": tokens,
        "finish_reason": completion.finish_reason,
        "seconds_to_first_token": timing.first_token if tokens else None,
        "seconds_per_token": per_token,
        "tokens_per_second": 1 / per_token if per_token else None,
        "seconds": timing.total,
    }


def show_figures(completion: Completion, wanted: bool | None) -> None:
    """The statistics line on stderr; by default only where a person is looking."""
    if not (sys.stderr.isatty() if wanted is None else wanted):
        return
    from rich.console import Console

    Console(stderr=True, highlight=False).print(figures_line(completion), style="dim", markup=False, soft_wrap=True)


def figures_line(completion: Completion) -> str:
    """`41 tokens in, 64 out (length) · first 0.52 s · 31.2 ms a token · 32.1 tokens/s`."""
    values = figures(completion)
    parts = [f"{values['prompt_tokens']} tokens in, {values['completion_tokens']} out ({values['finish_reason']})"]
    if values["seconds_to_first_token"] is not None:
        parts.append(f"first {values['seconds_to_first_token']:.2f} s")
    if values["seconds_per_token"]:
        parts.append(f"{values['seconds_per_token'] * 1e3:.1f} ms a token")
        parts.append(f"{values['tokens_per_second']:.1f} tokens/s")
    return " · ".join(parts)
