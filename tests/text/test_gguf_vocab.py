from __future__ import annotations

import itertools
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import pre_tokenizers

from rooflight.text import Tokenizer
from rooflight.text.token_bytes import BYTE_ALPHABET

# Ids given by llama.cpp for the same file (build of October 2026).
SMOLLM_IDS = {
    "def f(x):\n    return x**2  # 12.5%\n": [
        *(1604, 275, 24, 104, 727, 472, 1003, 1792, 828, 34, 216, 907, 216, 33, 34, 30, 37, 21, 198)
    ],
    "a  12 345\r\n6": [81, 256, 33, 34, 216, 35, 36, 37, 2738, 38],
    "🦙 llama 👨‍👩‍👧": [
        *(10813, 116, 243, 303, 4130, 81, 15107, 235, 118, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117)
    ],
    "안녕하세요 세계": [
        *(183, 239, 226, 182, 223, 239, 33085, 242, 183, 222, 133, 183, 244, 238, 18601, 222, 133, 181, 128, 222)
    ],
    "你好，世界": [18645, 250, 48392, 138, 12831, 7906, 240, 178, 239, 230],
    "   two   spaces\n\n\tand a tab ": [256, 827, 256, 5600, 1116, 197, 397, 253, 10147, 216],
    "don't I'LL we've": [12420, 982, 339, 23, 16421, 392, 3543],
    "<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n": [1, 4093, 198, 26843, 17, 2, 198, 1, 520, 9531, 198],
    "<|endoftext|><file_sep>x": [0, 5, 104],
    "": [],
}
LACKING = "\x04\x06\x13\x14\x16\x1d"
SENTENCEPIECE_IDS = {
    # text: (with the space prefix, without), likewise
    "hello world": ([274, 277], [273, 277]),
    "  hello": ([278, 274], [259, 274]),
    "hello</s>hello world.": ([274, 2, 274, 277, 284], [273, 2, 273, 277, 284]),
    "안녕 각": ([280, 281, 259, 237, 179, 132], [282, 259, 237, 179, 132]),
    "<0x41>": ([259, 63, 51, 123, 55, 52, 65], [63, 51, 123, 55, 52, 65]),
    "ll ld": ([259, 260, 260, 259, 272], [260, 260, 259, 272]),
    " ": ([278], [259]),
    "helo\n": ([259, 268, 267, 13], [268, 267, 13]),
    "": ([], []),
}


@pytest.mark.parametrize("text", SMOLLM_IDS)
def test_smollm_ids_are_those_of_llama_cpp(smollm: Tokenizer, text: str) -> None:
    assert smollm.encode(text) == SMOLLM_IDS[text]
    assert smollm.decode(SMOLLM_IDS[text], skip_special=False) == text


def test_smollm_special_tokens_and_template(smollm: Tokenizer) -> None:
    assert smollm.vocab_size == 49152
    assert (smollm.bos_id, smollm.eos_ids) == (1, (2, 0))
    assert smollm.special_ids == frozenset(range(17))
    ids = smollm.encode_chat([{"role": "user", "content": "Hi!"}])
    assert ids[-11:] == SMOLLM_IDS["<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"]
    assert ids[:2] == [1, 9690]
    assert smollm.decode(ids).startswith("system\nYou are a helpful AI assistant")


# This vocabulary lacks the tokens of a few bytes: six control characters, and 0xF1 and 0xF2, which
# begin characters of empty planes. Its own library drops them from a text, and so do we.
@given(st.text(st.characters(exclude_categories=["Cs"], exclude_characters=LACKING, max_codepoint=0x3FFFF)))
def test_smollm_any_text_survives(smollm: Tokenizer, text: str) -> None:
    assert smollm.decode(smollm.encode(text), skip_special=False) == text


def test_smollm_drops_what_it_has_no_token_for(smollm: Tokenizer) -> None:
    assert smollm.decode(smollm.encode(f"a{LACKING}b")) == "ab"


def test_byte_alphabet_is_that_of_the_library() -> None:
    assert sorted(BYTE_ALPHABET.values()) == list(range(256))
    assert set(BYTE_ALPHABET) == set(pre_tokenizers.ByteLevel.alphabet())


def with_merges(pre: str | None, merges: list[str], more: dict[int, tuple[str, int]] | None = None) -> Tokenizer:
    """All 256 byte tokens (id = byte), one token for each merge, further tokens as id: (text, type)."""
    tokens = sorted(BYTE_ALPHABET, key=BYTE_ALPHABET.__getitem__)
    tokens += [merge.replace(" ", "") for merge in merges]
    types = [1] * len(tokens)
    for token, kind in (more or {}).values():
        tokens.append(token)
        types.append(kind)
    metadata: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": merges,
    }
    if pre is not None:
        metadata["tokenizer.ggml.pre"] = pre
    return Tokenizer.from_gguf(metadata)


def pieces(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.token_bytes(token_id).decode() for token_id in tokenizer.encode(text)]


DIGITS = ["1 2", "12 3", "123 4", "Ġ 1"]
NUMBERS = {
    "llama-bpe": ["123", "4"],
    "qwen2": ["1", "2", "3", "4"],
    "smollm": ["1", "2", "3", "4"],
    "gpt-2": ["1234"],
    "default": ["1234"],
    None: ["1234"],
}


@pytest.mark.parametrize("pre", NUMBERS)
def test_digits_are_grouped_as_the_model_learned_them(pre: str | None) -> None:
    tokenizer = with_merges(pre, DIGITS)
    assert pieces(tokenizer, "1234") == NUMBERS[pre]
    # Only GPT-2 lets a number take the space before it along.
    assert pieces(tokenizer, " 1")[0] == (" 1" if pre in ("gpt-2", "default", None) else " ")


@pytest.mark.parametrize(
    ("pre", "newline", "shout"),
    [
        ("llama-bpe", ["!\n"], ["I", "'LL"]),
        ("qwen2", ["!\n"], ["I", "'LL"]),
        ("smollm", ["!", "\n"], ["I", "'", "LL"]),
        ("gpt-2", ["!", "\n"], ["I", "'", "LL"]),
    ],
)
def test_newlines_and_contractions(pre: str, newline: list[str], shout: list[str]) -> None:
    tokenizer = with_merges(pre, ["! Ċ", "L L", "' LL", "I '"])
    assert pieces(tokenizer, "!\n") == newline
    assert pieces(tokenizer, "I'LL") == shout


def test_smollm_keeps_spaces_before_a_digit_together() -> None:
    assert pieces(with_merges("smollm", ["Ġ Ġ"]), "a  1") == ["a", "  ", "1"]
    assert pieces(with_merges("qwen2", ["Ġ Ġ"]), "a  1") == ["a", " ", " ", "1"]


def test_llama_takes_a_word_that_is_a_token_whole() -> None:
    # No merges lead to "xyz", as for a good many words of the Llama 3 vocabulary.
    assert pieces(with_merges("llama-bpe", ["x y"], {257: ("xyz", 1)}), "xyz") == ["xyz"]
    assert pieces(with_merges("qwen2", ["x y"], {257: ("xyz", 1)}), "xyz") == ["xy", "z"]


def test_qwen_composes_characters_first() -> None:
    assert with_merges("qwen2", []).encode("e\u0301") == list("é".encode())
    assert with_merges("llama-bpe", []).encode("e\u0301") == list("e\u0301".encode())


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "smollm", "gpt-2"])
@given(text=st.text(max_size=30))
def test_any_text_survives(byte_level_metadata: dict[str, Any], pre: str, text: str) -> None:
    tokenizer = Tokenizer.from_gguf({**byte_level_metadata, "tokenizer.ggml.pre": pre})
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(tokenizer.encode(text), skip_special=False) == expected


@pytest.mark.parametrize("text", SENTENCEPIECE_IDS)
@pytest.mark.parametrize("space_prefix", [True, False])
def test_sentencepiece_ids_are_those_of_llama_cpp(
    sentencepiece_metadata: dict[str, Any], text: str, space_prefix: bool
) -> None:
    metadata = {**sentencepiece_metadata, "tokenizer.ggml.add_space_prefix": space_prefix}
    tokenizer = Tokenizer.from_gguf(metadata)
    expected = SENTENCEPIECE_IDS[text][0 if space_prefix else 1]
    assert tokenizer.encode(text, add_special=False) == expected
    assert tokenizer.encode(text) == [1, *expected]
    if "</s>" not in text:
        assert tokenizer.decode([1, *expected]) == text


def best_pair_first(metadata: dict[str, Any], text: str) -> list[int]:
    """Sentencepiece's rule word for word: again and again join the pair with the best-scored result."""
    tokens, scores = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.scores"]
    score = {token: scores[index] for index, token in enumerate(tokens) if index >= 259}
    parts = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joins = [(score[a + b], -i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in score]
        if not joins:
            break
        index = -max(joins)[1]
        parts[index : index + 2] = [parts[index] + parts[index + 1]]
    ids: list[int] = []
    for part in parts:
        ids += [tokens.index(part)] if part in score else [3 + byte for byte in part.encode()]
    return ids


@given(st.text(alphabet="helowrd 안녕.x", max_size=20))
def test_sentencepiece_joins_the_best_scored_pair_first(
    sentencepiece: Tokenizer, sentencepiece_metadata: dict[str, Any], text: str
) -> None:
    assert sentencepiece.encode(text, add_special=False) == best_pair_first(sentencepiece_metadata, text)


def test_sentencepiece_text_is_never_joined_to_a_byte_token(sentencepiece_metadata: dict[str, Any]) -> None:
    metadata = dict(sentencepiece_metadata)
    pieces = ["<", "0", "x", "4", "1", ">", "<0", "<0x", "41", "41>"]
    for name, values in (("tokens", pieces), ("token_type", [1] * 10), ("scores", [-50.0] * 10)):
        metadata["tokenizer.ggml." + name] = [*metadata["tokenizer.ggml." + name], *values]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert [tokenizer.token_bytes(i) for i in tokenizer.encode("<0x41>")[2:]] == [b"<0x", b"41>"]


def test_sentencepiece_decodes_partly_and_with_specials(sentencepiece: Tokenizer) -> None:
    ids = sentencepiece.encode("hello world")
    assert sentencepiece.decode(ids[1:]) == "hello world"
    assert sentencepiece.decode(ids, skip_special=False) == "<s> hello world"
    assert sentencepiece.decode([277]) == "world"
    assert sentencepiece.token_bytes(277) == b" world"


def test_sentencepiece_without_ids_uses_the_usual_names(sentencepiece_metadata: dict[str, Any]) -> None:
    metadata = {name: value for name, value in sentencepiece_metadata.items() if not name.endswith("_id")}
    tokenizer = Tokenizer.from_gguf(metadata)
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
    assert tokenizer.encode("hello") == [1, 274]


@pytest.mark.parametrize(
    ("pre", "stated", "starts"),
    [("llama-bpe", None, [1]), ("llama-bpe", False, []), ("qwen2", None, []), ("gpt-2", True, [1])],
)
def test_whether_bos_is_added(
    byte_level_metadata: dict[str, Any], pre: str, stated: bool | None, starts: list[int]
) -> None:
    metadata = {**byte_level_metadata, "tokenizer.ggml.pre": pre, "tokenizer.ggml.bos_token_id": 1}
    if stated is not None:
        metadata["tokenizer.ggml.add_bos_token"] = stated
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.bos_id == 1
    assert tokenizer.encode("dog") == [*starts, *tokenizer.encode("dog", add_special=False)]


def test_br_050_all_end_tokens_of_the_file(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(
        {**byte_level_metadata, "tokenizer.ggml.eos_token_id": 7, "tokenizer.ggml.eot_token_id": 9}
    )
    # Stated ones first, then <|im_end|>, <|end|> and </s>, which the vocabulary marks as special.
    assert tokenizer.eos_ids == (7, 9, 4, 0, 2)
    assert tokenizer.special_ids == frozenset({0, 1, 2, 3, 4, 7, 9})


def test_br_050_end_token_that_is_user_defined(sentencepiece_metadata: dict[str, Any]) -> None:
    metadata = dict(sentencepiece_metadata)
    for name, value in (("tokens", "<|im_end|>"), ("token_type", 4), ("scores", 0.0)):
        metadata["tokenizer.ggml." + name] = [*metadata["tokenizer.ggml." + name], value]
    tokenizer = Tokenizer.from_gguf(metadata)
    assert tokenizer.eos_ids == (2, 285)
    assert tokenizer.encode("hello<|im_end|>") == [1, 274, 285]
    assert tokenizer.decode([274, 285]) == "hello"


def test_kinds_of_tokens() -> None:
    more = {256: ("<think>", 4), 257: ("<é>", 4), 258: ("<ctrl x>", 3), 259: ("[PAD259]", 5)}
    tokenizer = with_merges("qwen2", [], more)
    assert tokenizer.encode("x<think>y<é><ctrl x>") == [ord("x"), 256, ord("y"), 257, 258]
    assert tokenizer.decode([256, 257, 258, 259]) == "<think><é>"
    assert tokenizer.decode([256, 258], skip_special=False) == "<think><ctrl x>"
    assert tokenizer.special_ids == frozenset({258, 259})
    assert len(tokenizer.encode("[PAD259]")) == 8
    assert tokenizer.vocab_size == 260


def test_templates_of_the_file(byte_level_metadata: dict[str, Any]) -> None:
    assert Tokenizer.from_gguf(byte_level_metadata).chat_template is None
    tokenizer = Tokenizer.from_gguf(
        {
            **byte_level_metadata,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.chat_template": "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ messages[0].content }}",
            "tokenizer.chat_template.tool_use": "tools: {{ tools | length }}",
        }
    )
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<s><|im_end|>hi"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}], tools=[{}, {}]) == "tools: 2"


def test_padding_id_outside_the_table_is_harmless(byte_level_metadata: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf({**byte_level_metadata, "tokenizer.ggml.padding_token_id": 2**32 - 1})
    assert tokenizer.encode("dog") == tokenizer.encode("dog")


K = "tokenizer.ggml."


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({K + "pre": "tekken"}, r"pre must be one of default, .*llama-bpe.*smollm, but was 'tekken'"),
        ({K + "model": "t5"}, r"model must be one of gpt2, llama, but was 't5'"),
        ({K + "model": None}, r"ggml\.model is missing"),
        ({K + "tokens": None}, r"ggml\.tokens is missing"),
        ({K + "merges": None}, r"ggml\.merges is missing"),
        ({K + "merges": ["a b", "a ☃"]}, r"merges\[\d\] '.*' uses or makes what is not a token"),
        ({K + "token_type": [1, 1]}, r"token_type must have \d+ entries"),
        ({K + "eos_token_id": 10**6}, r"eos_token_id must be below \d+, but was 1000000"),
        ({K + "bos_token_id": -1}, r"bos_token_id must be below \d+, but was -1"),
        ({K + "add_bos_token": True}, r"add_bos_token is true, but tokenizer\.ggml\.bos_token_id is missing"),
        ({K + "tokens": ["a", "b", "a"], K + "token_type": None}, r"tokens holds 'a' twice, at 0 and 2"),
        ({K + "merges": ["a b c"]}, r"merges\[0\] 'a b c' uses or makes"),
        ({K + "model": "llama"}, r"merges\[0\]|scores is missing"),
    ],
)
def test_wrong_metadata_names_the_key(byte_level_metadata: dict[str, Any], change: dict[str, Any], words: str) -> None:
    metadata = {**byte_level_metadata, **change}
    if change.get(K + "model") == "llama":
        del metadata[K + "merges"]
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_gguf({name: value for name, value in metadata.items() if value is not None})
