"""Reads the tokenizer files of a Hugging Face model folder.

Format: tokenizer.json is the `tokenizers` library's own; tokenizer_config.json holds the names of
special tokens, whether BOS is added and often the chat template; chat_template.jinja,
chat_template.json and additional_chat_templates/*.jinja hold templates and win over it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from rooflight.text.vocabulary import END_TOKENS, Vocabulary, end_ids

_NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def load_folder(folder: Path) -> Vocabulary:
    """Reads a folder. Raises FileNotFoundError or ValueError naming the file."""
    backend = _read_backend(folder / "tokenizer.json")
    config_file = folder / "tokenizer_config.json"
    config = _read_json(config_file) if config_file.is_file() else {}
    try:
        _add_listed_tokens(backend, config.get("added_tokens_decoder") or {})
        named = {name: _token_text(config, name) for name in (*_NAMED, "eot_token")}
        _mark_special(backend, named)
        ids = {name: backend.token_to_id(text) if text else None for name, text in named.items()}
        if named["eos_token"] and ids["eos_token"] is None:
            raise ValueError(f"eos_token {named['eos_token']!r} is not in the vocabulary")
        prefix = _prefix_ids(backend, config.get("add_bos_token"), ids["bos_token"])
        templates = _named_templates(config)
    except ValueError as error:
        raise ValueError(f"{config_file}: {error}") from error
    templates.update(_template_files(folder))
    added = backend.get_added_tokens_decoder()
    special = frozenset(token_id for token_id, token in added.items() if token.special)
    return Vocabulary(
        backend=backend,
        prefix_ids=prefix,
        bos_id=ids["bos_token"],
        eos_ids=end_ids(backend, special, (ids["eos_token"], ids["eot_token"])),
        special_ids=special,
        named_tokens={name: named[name] or "" for name in _NAMED},
        templates={name: text for name, text in templates.items() if text},
        source=str(folder),
    )


def _read_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise FileNotFoundError(f"{file}: no such file; the folder of a model must hold one") from None
    except UnicodeDecodeError as error:
        raise ValueError(f"{file}: not UTF-8 text ({error})") from error


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(_read_text(file))
    except json.JSONDecodeError as error:
        raise ValueError(f"{file}: not valid JSON ({error})") from error
    if not isinstance(content, dict):
        raise ValueError(f"{file}: must hold a JSON object, not {type(content).__name__}")
    return content


def _read_backend(file: Path) -> tokenizers.Tokenizer:
    text = _read_text(file)
    try:
        backend = tokenizers.Tokenizer.from_str(text)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the library raises bare Exception and, for bad merges, a Rust panic
        raise ValueError(f"{file}: not a tokenizer ({' '.join(str(error).split())})") from error
    # A training set-up left in the file would cut or pad prompts without a word.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _token_text(config: Mapping[str, Any], name: str) -> str | None:
    """A token is given as a text, as an object with `content`, or as null."""
    token = config.get(name)
    if isinstance(token, Mapping):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise ValueError(f"{name} must be a text, but was {token!r}")
    return token


def _add_listed_tokens(backend: tokenizers.Tokenizer, listed: object) -> None:
    """Adds the tokens that only the configuration lists, and checks that they get their ids."""
    if not isinstance(listed, Mapping):
        raise ValueError(f"added_tokens_decoder must be an object, but was {listed!r}")
    for key in sorted(listed, key=int):
        entry = listed[key]
        if not isinstance(entry, Mapping) or not isinstance(entry.get("content"), str):
            raise ValueError(f"added_tokens_decoder[{key}] must be an object with content, but was {entry!r}")
        if backend.id_to_token(int(key)) == entry["content"]:
            continue
        flags = ("single_word", "lstrip", "rstrip", "normalized", "special")
        token = tokenizers.AddedToken(entry["content"], **{flag: bool(entry.get(flag)) for flag in flags})
        backend.add_tokens([token])
        got = backend.token_to_id(token.content)
        if got != int(key):
            raise ValueError(f"added token {token.content!r} must have id {key}, but gets {got}")


def _mark_special(backend: tokenizers.Tokenizer, named: Mapping[str, str | None]) -> None:
    """Some files name BOS or an end token, or have a usual end token, without marking it as special.

    unk_token and pad_token stay as they are: some files make an ordinary word the padding.
    """
    stated = {named["bos_token"], named["eos_token"], named["eot_token"]}
    added = {token.content: token.special for token in backend.get_added_tokens_decoder().values()}
    unmarked = [text for text, special in added.items() if not special and text in {*stated, *END_TOKENS}]
    unmarked += [text for text in stated - {*added} if text and backend.token_to_id(text) is not None]
    backend.add_special_tokens(unmarked)


def _prefix_ids(backend: tokenizers.Tokenizer, add_bos: bool | None, bos_id: int | None) -> tuple[int, ...]:
    """What stands before every text: the post-processor's tokens, corrected by add_bos_token."""
    encoding = backend.encode("a")
    after = encoding.special_tokens_mask.index(0) if 0 in encoding.special_tokens_mask else 0
    prefix = tuple(encoding.ids[:after])
    if add_bos is None:
        return prefix
    if not add_bos:
        return tuple(token_id for token_id in prefix if token_id != bos_id)
    if bos_id is None:
        raise ValueError("add_bos_token is true, but bos_token is not in the vocabulary")
    return prefix if bos_id in prefix else (bos_id, *prefix)


def _named_templates(config: Mapping[str, Any]) -> dict[str, str]:
    """chat_template: one text, or a list of {name, template}, or an object from name to text."""
    given = config.get("chat_template")
    if given is None:
        return {}
    if isinstance(given, str):
        return {"default": given}
    if isinstance(given, list) and all(isinstance(entry, Mapping) for entry in given):
        given = {entry.get("name"): entry.get("template") for entry in given}
    if not isinstance(given, Mapping) or not all(isinstance(text, str) for text in (*given, *given.values())):
        raise ValueError("chat_template must be a text or a list of objects with name and template")
    return dict(given)


def _template_files(folder: Path) -> dict[str, str]:
    templates: dict[str, str] = {}
    as_json = folder / "chat_template.json"
    if as_json.is_file():
        content = _read_json(as_json)
        try:
            templates.update(_named_templates(content))
        except ValueError as error:
            raise ValueError(f"{as_json}: {error}") from error
    for file in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[file.stem] = _read_text(file)
    plain = folder / "chat_template.jinja"
    if plain.is_file():
        templates["default"] = _read_text(plain)
    return templates
