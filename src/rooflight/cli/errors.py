"""What a command says when it fails: one line on stderr and an exit code.

Exit codes: 2 for what a user can put right (options, names, files, prompts), 1 for a command that ran and failed,
130 for Ctrl-C, 1 without a word when the reader of a pipe has gone. `ROOFLIGHT_DEBUG=1` shows the traceback instead.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import typer
from typer.core import TyperGroup

FAILED, MISUSED, INTERRUPTED = 1, 2, 130


class Failure(Exception):
    """The command ran and did not succeed; the message is what the user sees."""


class OneLineErrors(TyperGroup):
    """The top command group. Whatever is below it raises freely; nothing leaves it but an exit code."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> Any:
        def run() -> Any:
            return super(OneLineErrors, self).main(
                args, prog_name, complete_var, False, windows_expand_args=windows_expand_args, **extra
            )

        return sys.exit(exit_code(run)) if standalone_mode else run()


def exit_code(run: Callable[[], Any]) -> int:
    """Run a command; say in one line what went wrong, if anything did."""
    try:
        result = run()
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except (KeyboardInterrupt, typer.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _mute()
        return FAILED
    except Exception as error:
        if os.environ.get("ROOFLIGHT_DEBUG") == "1":
            raise
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is a whole help page, perhaps shown already
            typer.echo(str(error), err=True, nl=False)
            return MISUSED
        code, message = describe(error)
        print(f"rooflight: {message}", file=sys.stderr)
        return code


def describe(error: Exception) -> tuple[int, str]:
    """Exit code and message, in one line of printable characters."""
    usage = getattr(error, "format_message", None)  # the errors of typer, whose classes move between its versions
    if usage is not None:
        context = getattr(error, "ctx", None)
        hint = f" (see `{context.command_path} --help`)" if context is not None else ""
        return MISUSED, _one_line(usage().rstrip(". ")) + hint
    if isinstance(error, OSError) and error.filename is not None:
        return MISUSED, _one_line(f"{error.filename}: {error.strerror}")
    if isinstance(error, (ValueError, OSError)):
        return MISUSED, _one_line(str(error) or type(error).__name__)
    if isinstance(error, Failure):
        return FAILED, _one_line(str(error))
    message = _one_line(f"{type(error).__name__}: {error}")
    return FAILED, f"unexpected {message} (ROOFLIGHT_DEBUG=1 shows where)"


def _one_line(text: str) -> str:
    """Names of files and tensors come from outside: no line breaks, no terminal codes."""
    line = " ".join(text.split())
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)


def _mute() -> None:
    """Send what is still buffered nowhere: the interpreter flushes at its end and would complain once more."""
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, ValueError):  # stdout is no file
        return
