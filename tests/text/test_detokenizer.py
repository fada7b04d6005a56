from __future__ import annotations

import random

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from rooflight.text import Detokenizer, Tokenizer

FAMILY = "👨‍👩‍👧‍👦"
TEXTS = [
    "A llama 🦙 says hi",
    f"family {FAMILY}{FAMILY} and 🏳️‍🌈",
    "안녕하세요, 각 갂 갃 뷁",
    "你好，世界。龘",
    "naïve café, ½ €",
    "  two  spaces\n\n\ttab ",
    "plain ascii",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 \u0301 ᄒ",
]


def deltas(tokenizer: Tokenizer, ids: list[int], *, skip_special: bool = True) -> list[str]:
    stream = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(stream.add(token_id) for token_id in ids), stream.finish()]


@pytest.fixture(params=["byte_level", "sentencepiece"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    found = request.getfixturevalue(request.param)
    assert isinstance(found, Tokenizer)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_br_047_streamed_text_is_whole(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text
    assert all("\ufffd" not in part for part in parts)
    assert parts[-1] == ""


def test_br_047_batch_of_eight_mixed(tokenizer: Tokenizer) -> None:
    rows = [tokenizer.encode(text) for text in TEXTS]
    streams = [Detokenizer(tokenizer) for _ in rows]
    outs = [""] * len(rows)
    for step in range(max(map(len, rows))):
        for row, ids in enumerate(rows):
            if step < len(ids):
                outs[row] += streams[row].add(ids[step])
    assert outs == TEXTS


def test_br_047_real_vocabulary(smollm: Tokenizer) -> None:
    for text in TEXTS:
        parts = deltas(smollm, smollm.encode(text))
        assert "".join(parts) == text
        assert all("\ufffd" not in part for part in parts)


def test_a_character_comes_out_with_its_last_token(byte_level: Tokenizer) -> None:
    alphabet = {byte: token_id for token_id in range(5, 261) for byte in byte_level.token_bytes(token_id)}
    ids = [alphabet[byte] for byte in "é🦙!".encode()]
    assert deltas(byte_level, ids) == ["", "é", "", "", "", "🦙", "!", ""]


def test_characters_of_byte_tokens_come_out_one_by_one(sentencepiece: Tokenizer) -> None:
    byte = [3 + value for value in "각🦙".encode()]
    assert deltas(sentencepiece, byte) == ["", "", "각", "", "", "", "🦙", ""]


def test_open_character_is_delivered_by_finish(tokenizer: Tokenizer) -> None:
    start = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xec")
    more = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\x95")
    assert deltas(tokenizer, [start, more]) == ["", "", "\ufffd"]
    assert tokenizer.decode([start, more]) == "\ufffd"
    assert deltas(tokenizer, [more]) == ["\ufffd", ""]


def test_invalid_bytes_do_not_hold_the_stream_up(byte_level: Tokenizer) -> None:
    ids = {byte_level.token_bytes(i): i for i in range(5, 261)}
    stray = [ids[b"\xff"], ids[b"a"], ids[b"\xec"], ids[b"b"], ids[b"\x95"], ids[b"c"]]
    assert deltas(byte_level, stray) == ["\ufffd", "a", "", "\ufffdb", "\ufffd", "c", ""]


def test_first_space_of_sentencepiece_is_dropped_once(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello world  hello")
    assert deltas(sentencepiece, ids) == ["", "hello", " world", " ", " hello", ""]
    two_spaces = sentencepiece.encode("  hello", add_special=False)
    assert "".join(deltas(sentencepiece, two_spaces)) == "  hello"
    carried_on = Detokenizer(sentencepiece, continuing=True)
    assert "".join(map(carried_on.add, sentencepiece.encode("hello"))) == " hello"


def test_special_tokens_are_left_out_or_shown(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<|im_start|>dog<|im_end|>")
    assert "".join(deltas(byte_level, ids)) == "dog"
    assert "".join(deltas(byte_level, ids, skip_special=False)) == "<|im_start|>dog<|im_end|>"


def test_ids_outside_the_vocabulary_have_no_text(byte_level: Tokenizer) -> None:
    assert deltas(byte_level, [byte_level.vocab_size, 10**6]) == ["", "", ""]


def test_add_after_finish_is_refused(byte_level: Tokenizer) -> None:
    stream = Detokenizer(byte_level)
    assert (stream.finish(), stream.finish()) == ("", "")
    with pytest.raises(RuntimeError, match="after finish"):
        stream.add(7)


def test_each_token_is_looked_at_once(byte_level: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[int] = []

    def look(token_id: int) -> bytes:
        looked.append(token_id)
        return b"\xe2"

    monkeypatch.setattr(byte_level, "token_bytes", look)
    monkeypatch.delattr(Tokenizer, "decode")
    stream = Detokenizer(byte_level)
    ids = list(range(5, 300))
    texts = [stream.add(token_id) for token_id in ids]
    assert looked == ids
    assert texts == ["", *["\ufffd"] * (len(ids) - 1)]


@given(st.lists(st.integers(0, 425), max_size=30), st.booleans())
def test_any_ids_byte_level(
    byte_level: Tokenizer, byte_level_backend: tokenizers.Tokenizer, ids: list[int], skip: bool
) -> None:
    joined = "".join(deltas(byte_level, ids, skip_special=skip))
    assert joined == byte_level.decode(ids, skip_special=skip)
    known = [token_id for token_id in ids if token_id < byte_level.vocab_size]
    assert joined == byte_level_backend.decode(known, skip_special_tokens=skip)


@given(st.lists(st.integers(0, 290), max_size=30), st.booleans())
def test_any_ids_sentencepiece(sentencepiece: Tokenizer, ids: list[int], skip: bool) -> None:
    joined = "".join(deltas(sentencepiece, ids, skip_special=skip))
    assert joined == sentencepiece.decode(ids, skip_special=skip)


# "▁" is how sentencepiece writes a space, so that character itself cannot survive; "<" begins specials.
@given(st.text(max_size=30).filter(lambda text: not {"▁", "<"} & set(text)))
def test_any_text(byte_level: Tokenizer, sentencepiece: Tokenizer, text: str) -> None:
    for tokenizer in (byte_level, sentencepiece):
        parts = deltas(tokenizer, tokenizer.encode(text), skip_special=False)
        lead = "" if tokenizer is byte_level else "<s> " if text else "<s>"
        assert "".join(parts) == lead + text


def test_real_vocabulary_any_ids(smollm: Tokenizer) -> None:
    draw = random.Random(47)
    for _ in range(300):
        ids = [draw.randrange(smollm.vocab_size) for _ in range(20)]
        assert "".join(deltas(smollm, ids)) == smollm.decode(ids)
