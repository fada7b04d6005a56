"""KEY=VALUE of `--template`, and what holds for every option."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import typer

from rooflight.cli.main import app
from rooflight.cli.options import template_arguments


def test_values_are_json_or_text() -> None:
    given = ["a=true", "b=False", "c=3", "d=null", 'e={"x": [1]}', "f=short", "g=", "h=x=y", 'i="3"', "j=NaNa"]
    assert template_arguments(given) == {
        "a": True,
        "b": False,
        "c": 3,
        "d": None,
        "e": {"x": [1]},
        "f": "short",
        "g": "",
        "h": "x=y",
        "i": "3",
        "j": "NaNa",
    }
    assert template_arguments(["a=1", "a=2"]) == {"a": 2}
    assert template_arguments(None) == {}


@pytest.mark.parametrize("pair", ["thinking", "=x", "a-b=1", " a=1", ""])
def test_refuses_what_is_no_pair(pair: str) -> None:
    with pytest.raises(ValueError) as caught:
        template_arguments([pair])
    assert str(caught.value) == f"--template must be KEY=VALUE with a name as key, was {pair!r}"


def _options(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, below in getattr(command, "commands", {}).items():
        yield from _options(below, f"{path} {name}")
    for parameter in command.params:
        yield path, parameter


def test_no_placeholder_is_an_options_own_name() -> None:
    """Typer 0.27 takes such a placeholder for the name and knows no --gpu, only --GPU."""
    for path, option in _options(typer.main.get_command(app), "rooflight"):
        assert (option.metavar or "").lower() != option.name, path
        assert all(name == name.lower() for name in option.opts), (path, option.opts)
