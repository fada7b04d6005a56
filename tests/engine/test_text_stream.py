from __future__ import annotations

from typing import Any

import pytest

from rooflight import SamplingParams
from rooflight.engine.sequence import Sequence
from rooflight.engine.text_stream import TextStream
from rooflight.text import Tokenizer
from tests.engine.support import ids_of, write_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(write_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def feed(tokenizer: Tokenizer | None, ids: list[int], *stop: str, **params: Any) -> tuple[list[str], bool]:
    """Texts of each `add` and of `finish`, which comes unless a stop string was reached."""
    stream = TextStream(tokenizer, stop)
    sequence = Sequence(0, [1], 1, 100, SamplingParams(**params), 0, frozenset())
    shown: list[str] = []
    for token in ids:
        sequence.tokens.append(token)
        text, stopped = stream.add(sequence, token)
        shown.append(text)
        if stopped:
            return shown, True
    text, stopped = stream.finish()
    return [*shown, text], stopped


def test_text_comes_with_its_last_byte(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, ids_of("é!")) == (["", "é", "!", ""], False)


def test_text_is_held_back_while_it_may_be_a_stop_string(tokenizer: Tokenizer) -> None:
    ids = ids_of("alpha", " beta", " gala", " beta", " gamma")
    assert feed(tokenizer, ids, "beta gamma") == (["alpha", " ", "beta gala", " ", ""], True)


def test_held_back_text_comes_at_the_end(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, ids_of("alpha", " beta"), "beta gamma") == (["alpha", " ", "beta"], False)


def test_half_a_character_at_the_end_is_shown_as_replacement_and_may_complete_a_stop_string(
    tokenizer: Tokenizer,
) -> None:
    half = ids_of("ab🦙")[:4]
    assert feed(tokenizer, half) == (["a", "b", "", "", "\ufffd"], False)
    assert feed(tokenizer, half, "b\ufffd") == (["a", "", "", "", ""], True)


def test_special_tokens_are_no_text(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, ids_of("a", "<b>", "b"), "ab") == (["", "", ""], True)


def test_stop_strings_count_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    ids = ids_of("STOP", "STOP", "STOP", "STOP")
    assert feed(tokenizer, ids, "STOP", min_tokens=0) == ([""], True)
    assert feed(tokenizer, ids, "STOP", min_tokens=1) == ([""], True)
    assert feed(tokenizer, ids, "STOP", min_tokens=3) == (["STOP", "STOP", ""], True)
    assert feed(tokenizer, ids, "STOP", min_tokens=9, max_tokens=9) == (["STOP"] * 4 + [""], False)


def test_a_token_of_the_padded_vocabulary_has_no_text(tokenizer: Tokenizer) -> None:
    assert feed(tokenizer, [*ids_of("a"), 999, *ids_of("b")]) == (["a", "", "b", ""], False)


def test_without_a_tokenizer_there_is_no_text_and_no_stop_string() -> None:
    assert feed(None, [1, 2]) == (["", "", ""], False)
    with pytest.raises(ValueError, match=r"stop must be empty for a model without a tokenizer, was \('x',\)"):
        TextStream(None, ("x",))
