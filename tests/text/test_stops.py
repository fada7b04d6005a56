from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflight.text import StopStrings


def stream(stops: list[str], pieces: list[str]) -> tuple[str, bool]:
    """All text given out for a stream of pieces, and whether a stop was reached."""
    watcher = StopStrings(stops)
    out = ""
    for piece in pieces:
        text, reached = watcher.add(piece)
        out += text
        if reached:
            return out, True
    return out + watcher.finish(), False


def whole(stops: list[str], text: str) -> tuple[str, bool]:
    """The same for a text that is there at once: the earliest end wins, then the earliest start."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    return (text[: min(ends)[1]], True) if ends else (text, False)


BETA = [["alpha", " beta", " gamma", " delta"], ["alpha be", "ta ga", "mma delta"], list("alpha beta gamma")]


@pytest.mark.parametrize("pieces", BETA)
def test_br_049_stop_across_tokens_leaks_nothing(pieces: list[str]) -> None:
    assert stream(["beta gamma"], pieces) == ("alpha ", True)


@pytest.mark.parametrize("pieces", BETA)
def test_br_049_stop_inside_a_token(pieces: list[str]) -> None:
    assert stream(["gamma"], pieces) == ("alpha beta ", True)


def test_br_049_false_start_is_delivered_in_full() -> None:
    watcher = StopStrings(["beta gamma"])
    assert watcher.add("alpha beta ga") == ("alpha ", False)
    assert watcher.add("la") == ("beta gala", False)
    assert watcher.add(" b") == (" ", False)
    assert watcher.finish() == "b"
    assert watcher.reached is None


@pytest.mark.parametrize("stops", [["beta gamma", "gamma"], ["gamma", "beta gamma"]])
@pytest.mark.parametrize("pieces", [*BETA, ["alpha beta gamma delta"]])
def test_br_049_two_stops_with_one_end_the_longest_wins(stops: list[str], pieces: list[str]) -> None:
    assert stream(stops, pieces) == ("alpha ", True)


@pytest.mark.parametrize("pieces", [["one two three"], list("one two three"), ["one t", "wo thr", "ee"]])
def test_br_049_the_earliest_end_wins_over_the_earliest_start(pieces: list[str]) -> None:
    assert stream(["one two three", "two"], pieces) == ("one ", True)


def test_text_is_given_out_as_soon_as_no_stop_can_begin_in_it() -> None:
    watcher = StopStrings(["aab"])
    assert watcher.add("a") == ("", False)
    assert watcher.add("a") == ("", False)
    assert watcher.add("a") == ("a", False)  # "aa" may still begin the stop
    assert watcher.add("c") == ("aac", False)


def test_stop_that_overlaps_itself() -> None:
    assert stream(["abab!"], list("ababab!x")) == ("ab", True)


def test_after_a_stop_everything_is_swallowed() -> None:
    watcher = StopStrings(["##", "\n\n"])
    assert watcher.add("text## and more") == ("text", True)
    assert watcher.reached == "##"
    assert watcher.add("more") == ("", True)
    assert watcher.finish() == ""


def test_without_stops_everything_passes_at_once() -> None:
    watcher = StopStrings([])
    assert watcher.add("anything") == ("anything", False)
    assert watcher.finish() == ""


def test_stops_beyond_ascii() -> None:
    assert stream(["끝🦙"], ["안녕 ", "끝", "🦙", "!"]) == ("안녕 ", True)


@pytest.mark.parametrize(
    ("stops", "words"),
    [(["a", ""], "empty"), ("stop", "sequence of strings"), ([3], "sequence of strings")],
)
def test_wrong_stops_are_refused(stops: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        StopStrings(stops)


few = st.text(alphabet="ab ", max_size=4)
two_letters = st.text(alphabet="ab", min_size=1, max_size=9)


@given(two_letters, st.text(alphabet="ab", max_size=40))
def test_stop_of_repeating_parts(stop: str, text: str) -> None:
    assert stream([stop], list(text + stop)) == whole([stop], text + stop)


def test_stop_that_begins_with_its_own_middle() -> None:
    assert stream(["aabaaaa"], list("aabaaabaaaa")) == ("aaba", True)


@given(st.lists(few.filter(bool), max_size=4), st.lists(few, max_size=12))
def test_stream_equals_whole_text(stops: list[str], pieces: list[str]) -> None:
    assert stream(stops, pieces) == whole(stops, "".join(pieces))


@given(st.lists(few.filter(bool), min_size=1, max_size=3), st.lists(few, max_size=12))
def test_no_more_is_held_back_than_a_stop_could_need(stops: list[str], pieces: list[str]) -> None:
    watcher = StopStrings(stops)
    seen = out = ""
    for piece in pieces:
        text, reached = watcher.add(piece)
        if reached:
            return
        seen, out = seen + piece, out + text
        starts = {stop[:length] for stop in stops for length in range(len(stop))}
        longest = max(len(start) for start in starts if seen.endswith(start))
        assert out == seen[: len(seen) - longest]
