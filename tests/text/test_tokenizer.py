from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, processors

from rooflight.text import Tokenizer

MakeFolder = Callable[..., Path]
ASK = [{"role": "user", "content": "dog"}]
TURNS = "{% for m in messages %}{{ bos_token + m.content }}{% endfor %}"


def copy_of(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(backend.to_str())


@pytest.fixture
def bos_backend(byte_level_backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """As Llama's files have it: the post-processor puts <s> in front."""
    backend = copy_of(byte_level_backend)
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return backend


def test_from_folder(make_folder: MakeFolder, byte_level_backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(bos_token="<s>", eos_token={"content": "<|im_end|>"}))
    text = "the dog 안녕하세요 🦙  x"
    ids = tokenizer.encode(text)
    assert ids == byte_level_backend.encode(text).ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.vocab_size == byte_level_backend.get_vocab_size()
    assert tokenizer.bos_id == 1
    assert tokenizer.special_ids == frozenset(range(5))
    assert tokenizer.encode("<|im_start|>dog<|im_end|>") == [3, *tokenizer.encode("dog"), 4]
    assert tokenizer.chat_template is None
    assert tokenizer.lead == ""


def test_from_folder_without_config(make_folder: MakeFolder) -> None:
    folder = make_folder()
    (folder / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_folder(folder)
    assert tokenizer.bos_id is None
    assert tokenizer.decode(tokenizer.encode("dog")) == "dog"


@given(st.text(max_size=40))
def test_any_text_survives(byte_level: Tokenizer, text: str) -> None:
    assert byte_level.decode(byte_level.encode(text), skip_special=False) == text


def test_decoding_leaves_out_special_and_unknown_ids(byte_level: Tokenizer) -> None:
    ids = byte_level.encode("<s>dog</s>")
    assert byte_level.decode([*ids, 10**6, -1]) == "dog"
    assert byte_level.decode(ids, skip_special=False) == "<s>dog</s>"
    assert byte_level.token_bytes(-1) == byte_level.token_bytes(byte_level.vocab_size) == b""


def test_br_051_plain_text_gets_one_bos(make_folder: MakeFolder, bos_backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(bos_backend, bos_token="<s>"))
    dog = tokenizer.encode("dog", add_special=False)
    assert 1 not in dog
    assert tokenizer.encode("dog") == [1, *dog]
    assert tokenizer.encode("<s>dog") == [1, *dog]
    assert tokenizer.encode("<s><s>dog") == [1, *dog]
    assert tokenizer.encode("<s>dog", add_special=False) == [1, *dog]
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("<s>" * 3) == [1]


def test_br_051_chat_gets_one_bos_at_the_start(make_folder: MakeFolder, bos_backend: tokenizers.Tokenizer) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(bos_backend, bos_token="<s>", chat_template=TURNS))
    dog = tokenizer.encode("dog", add_special=False)
    assert tokenizer.encode_chat(ASK) == [1, *dog]
    # A template that writes BOS before each turn means it; only the start is put right.
    assert tokenizer.encode_chat(ASK * 2) == [1, *dog, 1, *dog]
    silent = make_folder(bos_backend, bos_token="<s>", chat_template="{{ messages[0].content }}")
    assert Tokenizer.from_folder(silent).encode_chat(ASK) == [1, *dog]


@pytest.mark.parametrize(("processor", "stated"), [(True, False), (False, True), (True, True), (False, None)])
def test_add_bos_token_of_the_config_wins(
    make_folder: MakeFolder,
    bos_backend: tokenizers.Tokenizer,
    byte_level_backend: tokenizers.Tokenizer,
    processor: bool,
    stated: bool | None,
) -> None:
    backend = bos_backend if processor else byte_level_backend
    tokenizer = Tokenizer.from_folder(make_folder(backend, bos_token="<s>", add_bos_token=stated))
    assert tokenizer.encode("dog").count(1) == int(bool(stated))


def test_prefix_of_several_tokens_and_no_end_token(make_folder: MakeFolder, bos_backend: tokenizers.Tokenizer) -> None:
    bos_backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> <s> $A </s>", special_tokens=[("<|im_start|>", 3), ("<s>", 1), ("</s>", 2)]
    )
    tokenizer = Tokenizer.from_folder(make_folder(bos_backend))
    dog = tokenizer.encode("dog", add_special=False)
    assert tokenizer.encode("dog") == [3, 1, *dog]
    assert tokenizer.encode("<|im_start|><s>dog") == [3, 1, *dog]


def test_br_050_end_tokens(make_folder: MakeFolder) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(eos_token="</s>", eot_token="<|im_end|>"))
    assert tokenizer.eos_ids == (2, 4, 0)  # the last one is <|end|>, known by its name


def test_end_of_one_message_is_not_the_end_where_return_is(
    make_folder: MakeFolder, byte_level_backend: tokenizers.Tokenizer
) -> None:
    backend = copy_of(byte_level_backend)
    backend.add_special_tokens(["<|return|>"])
    tokenizer = Tokenizer.from_folder(make_folder(backend, eos_token="<|return|>"))
    assert 0 not in tokenizer.eos_ids
    assert tokenizer.eos_ids[0] == backend.token_to_id("<|return|>")


def test_named_tokens_become_special(make_folder: MakeFolder, byte_level_backend: tokenizers.Tokenizer) -> None:
    backend = copy_of(byte_level_backend)
    backend.add_tokens(["<think>", "<|endoftext|>"])
    vocab = backend.get_vocab()
    think, end, fox, dog = (vocab[text] for text in ("<think>", "<|endoftext|>", "Ġfox", "Ġdog"))
    tokenizer = Tokenizer.from_folder(make_folder(backend, eos_token="Ġfox", pad_token="Ġdog"))
    assert tokenizer.special_ids - set(range(5)) == {end, fox}
    assert tokenizer.eos_ids[0] == fox
    assert tokenizer.decode([think, end, fox, dog]) == "<think> dog"


def test_tokens_that_only_the_config_lists(make_folder: MakeFolder, byte_level_backend: tokenizers.Tokenizer) -> None:
    next_id = byte_level_backend.get_vocab_size()
    listed = {
        "1": {"content": "<s>", "special": True},
        str(next_id): {"content": "<|x|>", "special": True},
        str(next_id + 1): {"content": "<y>"},
    }
    tokenizer = Tokenizer.from_folder(make_folder(added_tokens_decoder=listed))
    assert tokenizer.encode("<|x|><y>") == [next_id, next_id + 1]
    assert tokenizer.decode([next_id, next_id + 1]) == "<y>"


def test_truncation_and_padding_of_the_file_are_off(
    make_folder: MakeFolder, byte_level_backend: tokenizers.Tokenizer
) -> None:
    backend = copy_of(byte_level_backend)
    backend.enable_truncation(max_length=4)
    backend.enable_padding(length=4)
    tokenizer = Tokenizer.from_folder(make_folder(backend))
    assert (
        tokenizer.decode(tokenizer.encode("a long text with many words in it")) == "a long text with many words in it"
    )
    assert len(tokenizer.encode("x")) == 1


NAMED = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]


@pytest.mark.parametrize(
    ("given", "files", "plain", "tools"),
    [
        ("one", {}, "one", "one"),
        (NAMED, {}, "one", "two"),
        ({"default": "one", "tool_use": "two"}, {}, "one", "two"),
        ("old", {"chat_template.jinja": "new"}, "new", "new"),
        (NAMED, {"chat_template.jinja": "new"}, "new", "two"),
        ("old", {"chat_template.json": json.dumps({"chat_template": "new"})}, "new", "new"),
        (None, {"chat_template.json": "{}", "chat_template.jinja": "new"}, "new", "new"),
        ("one", {"additional_chat_templates/tool_use.jinja": "two"}, "one", "two"),
    ],
)
def test_where_templates_come_from(
    make_folder: MakeFolder, given: Any, files: dict[str, str], plain: str, tools: str
) -> None:
    tokenizer = Tokenizer.from_folder(make_folder(files=files, chat_template=given))
    assert tokenizer.chat_template == plain
    assert tokenizer.render_chat(ASK) == plain
    assert tokenizer.render_chat(ASK, tools=[{}]) == tools


def test_missing_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_folder(tmp_path)


BAD_MERGES = {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": [["a", "b"]]}


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("tokenizer.json", "{", r"tokenizer\.json: not a tokenizer \("),
        ("tokenizer.json", "[]", r"tokenizer\.json: not a tokenizer \("),
        ("tokenizer.json", json.dumps({"model": BAD_MERGES}), r"tokenizer\.json: not a tokenizer \("),
        ("tokenizer_config.json", "{,}", r"tokenizer_config\.json: not valid JSON"),
        ("tokenizer_config.json", "[]", r"tokenizer_config\.json: must hold a JSON object, not list"),
        ("tokenizer_config.json", '{"eos_token": "<no>"}', r"_config\.json: eos_token '<no>' is not in the vocab"),
        ("tokenizer_config.json", '{"eos_token": 3}', r"_config\.json: eos_token must be a text, but was 3"),
        ("tokenizer_config.json", '{"add_bos_token": true}', r"_config\.json: add_bos_token is true, but"),
        ("tokenizer_config.json", '{"chat_template": 3}', r"_config\.json: chat_template must be a text or"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}', r"_config\.json: chat_template must be"),
        ("tokenizer_config.json", '{"added_tokens_decoder": 3}', r"_config\.json: added_tokens_decoder must be an"),
        ("tokenizer_config.json", '{"added_tokens_decoder": {"7": 1}}', r"added_tokens_decoder\[7\] must be an obj"),
        (
            "tokenizer_config.json",
            '{"added_tokens_decoder": {"9999": {"content": "<x>"}}}',
            r"_config\.json: added token '<x>' must have id 9999, but gets \d+",
        ),
        ("chat_template.json", "3", r"chat_template\.json: must hold a JSON object, not int"),
        ("chat_template.json", '{"chat_template": [1]}', r"chat_template\.json: chat_template must be a text"),
        ("chat_template.jinja", b"\xff", r"chat_template\.jinja: not UTF-8 text"),
    ],
)
def test_broken_files_are_named(make_folder: MakeFolder, file: str, content: str | bytes, words: str) -> None:
    folder = make_folder()
    (folder / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words) as caught:
        Tokenizer.from_folder(folder)
    assert str(caught.value).count("_config.json:") <= 1


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(ValueError, match=r"^text holds half a surrogate pair at index 2$"):
        byte_level.encode("ab\ud83e")
    with pytest.raises(ValueError, match=r"^text must be a string, not bytes$"):
        byte_level.encode(b"ab")  # type: ignore[arg-type]


def test_decoder_that_cannot_be_streamed_is_refused(
    make_folder: MakeFolder, byte_level_backend: tokenizers.Tokenizer
) -> None:
    backend = copy_of(byte_level_backend)
    backend.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match=r"decoder step .*WordPiece.* is not supported; known are ByteLevel"):
        Tokenizer.from_folder(make_folder(backend))
    backend.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)])
    with pytest.raises(ValueError, match="ByteLevel decoder together with other steps"):
        Tokenizer.from_folder(make_folder(backend))


@pytest.mark.parametrize(
    ("decoder", "expected"),
    [
        (decoders.Metaspace(), "hi there"),
        (decoders.Metaspace(prepend_scheme="never"), " hi there"),
        (decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]), " hi there"),
        (None, "▁hi ▁there"),
    ],
)
def test_other_decoders_agree_with_the_library(make_folder: MakeFolder, decoder: Any, expected: str) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"▁hi": 0, "▁there": 1, "?": 2}, unk_token="?"))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer.from_folder(make_folder(backend))
    assert tokenizer.decode([0, 1]) == backend.decode([0, 1]) == expected


def test_valid_byte_tokens_decode_as_in_the_library(sentencepiece: Tokenizer) -> None:
    text = "hello 각 🦙, world"
    ids = sentencepiece.encode(text)
    assert sentencepiece.decode(ids) == sentencepiece._backend.decode(ids) == text
