"""Word wrap of a stream, on a model of the terminal that obeys the codes."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from rooflight.cli.wrap import WordWrap


def shown(pieces: list[str], columns: int) -> list[str]:
    """The lines on the screen. Fails if a line reaches the last column."""
    wrap = WordWrap(columns)
    lines = [""]
    for token in re.findall(r"\x1b\[\d+D\x1b\[K|\n|[^\n\x1b]", "".join(wrap.add(piece) for piece in pieces)):
        if token == "\n":
            lines.append("")
        elif token.startswith("\x1b"):
            back = int(re.findall(r"\d+", token)[0])
            while back > 0:
                back -= cell_len(lines[-1][-1])
                lines[-1] = lines[-1][:-1]
            assert back == 0
        else:
            lines[-1] += token
        assert cell_len(lines[-1].expandtabs()) < columns
    return lines


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("the quick brown", ["the quick", "brown"]),
        ("the quick b", ["the quick", "b"]),
        ("123456789 x", ["123456789", "x"]),
        ("123456789abc", ["123456789", "abc"]),
        ("a 123456789abc", ["a", "123456789", "abc"]),
        ("one\n\n  two", ["one", "", "  two"]),
        ("one\ttwo", ["one", "two"]),
        ("안녕하세요 x", ["안녕하세", "요 x"]),
        ("", [""]),
    ],
)
def test_lines_of_ten_columns(text: str, lines: list[str]) -> None:
    assert [line.rstrip() for line in shown([text], 10)] == lines
    assert [line.rstrip() for line in shown(list(text), 10)] == lines


@settings(max_examples=200, deadline=None)
@given(st.lists(st.text("ab é안🦙\n", max_size=12), max_size=12), st.integers(3, 30))
def test_nothing_is_lost_and_words_that_fit_stay_whole(pieces: list[str], columns: int) -> None:
    text = "".join(pieces)
    lines = shown(pieces, columns)
    assert re.sub(r"\s", "", "".join(lines)) == re.sub(r"\s", "", text)
    whole = {word for word in re.split(r"\s", text) if word.isascii() and len(word) < columns}
    assert whole <= {word for line in lines for word in re.split(r"[\s안🦙é]", line)} | {""}
