"""Every way to fail: the line, the exit code."""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import NoReturn

import pytest
import typer

import rooflight
from rooflight.cli.errors import Failure, exit_code
from tests.cli.running import invoke, only_line, refused


def fails(error: BaseException) -> Callable[[], NoReturn]:
    def run() -> NoReturn:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ValueError("x must be 1,\n  was 2"), 2, "x must be 1, was 2"),
        (ValueError(), 2, "ValueError"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "a.gguf"),
            2,
            "a.gguf: No such file or directory",
        ),
        (OSError("the disk is gone"), 2, "the disk is gone"),
        (ValueError("file \x1b[31m\udcff"), 2, "file \\x1b[31m\\udcff"),
        (Failure("no finite logits"), 1, "no finite logits"),
        (RuntimeError("out of\nmemory"), 1, "unexpected RuntimeError: out of memory (ROOFLIGHT_DEBUG=1 shows where)"),
    ],
)
def test_one_line_and_a_code(
    error: Exception, code: int, line: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROOFLIGHT_DEBUG", raising=False)
    assert exit_code(fails(error)) == code
    captured = capsys.readouterr()
    assert (only_line(captured.err), captured.out) == (line, "")


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (typer.Abort(), 130), (BrokenPipeError(), 1)])
def test_without_a_word(
    error: BaseException, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rooflight.cli.errors._mute", lambda: None)  # it would mute this process
    assert exit_code(fails(error)) == code
    assert capsys.readouterr() == ("", "")


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFLIGHT_DEBUG", "1")
    with pytest.raises(ValueError, match="as it was"):
        exit_code(fails(ValueError("as it was")))


def test_success_and_exit_codes() -> None:
    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 3) == 3


@pytest.mark.parametrize(
    ("arguments", "start", "command"),
    [
        (["generate", "hi", "--bogus"], "No such option: --bogus", "rooflight generate"),
        (["generate", "hi", "there"], "Got unexpected extra argument", "rooflight generate"),
        (["generate", "hi", "--max-tokens", "x"], "Invalid value for '--max-tokens': ", "rooflight generate"),
        (["info", "a", "b"], "Got unexpected extra argument", "rooflight info"),
        (["sing"], "No such command 'sing'", "rooflight"),
        (["--bogus"], "No such option: --bogus", "rooflight"),
    ],
)
def test_usage_errors_point_to_the_help(arguments: list[str], start: str, command: str) -> None:
    line = refused(*arguments)
    assert line.startswith(start)
    assert line.endswith(f" (see `{command} --help`)")


def test_version_and_help() -> None:
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"rooflight {rooflight.__version__}\n")
    bare, asked = invoke(), invoke("--help")
    assert bare.exit_code == asked.exit_code == 0
    assert bare.stdout.split() == asked.stdout.split()
    for command in ("generate", "chat", "info"):
        assert command in bare.stdout
        shown = invoke(command, "-h").stdout
        assert "Examples" in shown
        assert f"rooflight {command}" in shown
