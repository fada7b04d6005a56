"""A vocabulary from the metadata of a GGUF file.

A GGUF file has no tokenizer.json: it lists tokens, scores, merges and special ids under
`tokenizer.ggml.*` and only names the rule by which a text is cut into words first. Of the kinds of
vocabulary in use, two are read: `gpt2` (byte-level BPE) and `llama` (sentencepiece BPE).
Source: the GGUF specification of the ggml project; the split patterns are those of the models' own
tokenizer.json files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from rooflight.text.vocabulary import END_TOKENS, Vocabulary, end_ids

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
_KEY = "tokenizer.ggml."
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2_split() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits_then_gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


@dataclass(frozen=True)
class _Cut:
    """How the tokenizer named by `tokenizer.ggml.pre` cuts a text before merging.

    ignore_merges: a word that is a token is taken whole, even if no merges lead to it.
    add_bos: used where the file does not say; nfc: composed characters first.
    """

    words: Callable[[], pre_tokenizers.PreTokenizer]
    ignore_merges: bool = False
    add_bos: bool = False
    nfc: bool = False


_LLAMA3 = _Cut(lambda: _split(_WORDS + r"\p{N}{1,3}" + _REST), ignore_merges=True, add_bos=True)
_GPT2 = _Cut(_gpt2_split)
_CUTS = {
    "default": _GPT2,
    "gpt-2": _GPT2,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Cut(lambda: _split(_WORDS + r"\p{N}" + _REST), nfc=True),
    "smollm": _Cut(_single_digits_then_gpt2),
}


def load_gguf(metadata: Mapping[str, Any]) -> Vocabulary:
    """Builds the vocabulary. Raises ValueError naming the key that is missing or wrong."""
    kinds = {"gpt2": _byte_level, "llama": _sentencepiece}
    model = _need(metadata, "model")
    if model not in kinds:
        raise ValueError(f"{_KEY}model must be one of {', '.join(kinds)}, but was {model!r}")
    tokens = _tokens(metadata)
    types = _per_token(metadata, "token_type", len(tokens)) or [_NORMAL] * len(tokens)
    ids = _special_token_ids(metadata, tokens, model)
    bos_id = ids.get("bos")
    backend, usually_bos = kinds[model](metadata, tokens, types)
    special = _mark_special(backend, tokens, types, ids)
    add_bos = metadata.get(_KEY + "add_bos_token", usually_bos and bos_id is not None)
    if add_bos and bos_id is None:
        raise ValueError(f"{_KEY}add_bos_token is true, but {_KEY}bos_token_id is missing")
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    return Vocabulary(
        backend=backend,
        prefix_ids=(bos_id,) if add_bos and bos_id is not None else (),
        bos_id=bos_id,
        eos_ids=end_ids(backend, special, (ids.get("eos"), ids.get("eot"), ids.get("eom"))),
        special_ids=special,
        named_tokens={name: tokens[ids[key]] if key in ids else "" for key, name in names.items()},
        templates=_templates(metadata),
        source="GGUF metadata",
    )


def _need(metadata: Mapping[str, Any], name: str) -> Any:
    try:
        return metadata[_KEY + name]
    except KeyError:
        raise ValueError(f"{_KEY}{name} is missing in the GGUF metadata") from None


def _per_token(metadata: Mapping[str, Any], name: str, count: int) -> list[Any] | None:
    values = metadata.get(_KEY + name)
    if values is not None and len(values) != count:
        raise ValueError(f"{_KEY}{name} must have {count} entries like {_KEY}tokens, but has {len(values)}")
    return None if values is None else list(values)


def _tokens(metadata: Mapping[str, Any]) -> list[str]:
    tokens = list(_need(metadata, "tokens"))
    first: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if first.setdefault(token, index) != index:
            raise ValueError(f"{_KEY}tokens holds {token!r} twice, at {first[token]} and {index}")
    return tokens


def _special_token_ids(metadata: Mapping[str, Any], tokens: list[str], model: str) -> dict[str, int]:
    ids: dict[str, int] = {}
    # Old sentencepiece files leave out the ids that every Llama has.
    usual = {"bos": "<s>", "eos": "</s>", "unknown": "<unk>"} if model == "llama" else {}
    for name in ("bos", "eos", "eot", "eom", "unknown", "padding"):
        index = metadata.get(f"{_KEY}{name}_token_id")
        if index is None and usual.get(name) in tokens:
            ids[name] = tokens.index(usual[name])
        elif index is not None and 0 <= index < len(tokens):
            ids[name] = index
        elif index is not None and name not in ("unknown", "padding"):
            # A padding token outside the table is common and harmless: nothing is padded here.
            raise ValueError(f"{_KEY}{name}_token_id must be below {len(tokens)}, but was {index}")
    return ids


def _mark_special(backend: Tokenizer, tokens: list[str], types: list[int], ids: Mapping[str, int]) -> frozenset[int]:
    """Has special and user-defined tokens taken whole from a text; returns the ids that are not text."""
    special = {
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
        # Sentencepiece models tuned for chat often have their end token as a user-defined one.
        if kind in (_CONTROL, _UNKNOWN) or (kind == _USER_DEFINED and token in END_TOKENS)
    }
    special |= {ids[name] for name in ("bos", "eos", "eot", "eom") if name in ids}
    defined = {index for index, kind in enumerate(types) if kind == _USER_DEFINED} - special
    backend.add_special_tokens([AddedToken(tokens[index], normalized=False) for index in sorted(special)])
    backend.add_tokens([AddedToken(tokens[index], normalized=False) for index in sorted(defined)])
    # Unused entries only fill the table up; should one be drawn, it is no text.
    return frozenset(special | {index for index, kind in enumerate(types) if kind == _UNUSED})


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """`tokenizer.chat_template` is the default one, `tokenizer.chat_template.NAME` are others."""
    key = "tokenizer.chat_template"
    named = {name.removeprefix(key + "."): text for name, text in metadata.items() if name.startswith(key + ".")}
    if metadata.get(key):
        named["default"] = metadata[key]
    return named


def _merges(metadata: Mapping[str, Any], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    merges = []
    for index, merge in enumerate(_need(metadata, "merges")):
        left, _, right = merge.partition(" ")
        if left not in vocab or right not in vocab or left + right not in vocab:
            raise ValueError(f"{_KEY}merges[{index}] {merge!r} uses or makes what is not a token")
        merges.append((left, right))
    return merges


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """BPE over bytes; the merges are in the file, the rule for cutting words is named."""
    name = metadata.get(_KEY + "pre", "default")
    cut = _CUTS.get(name)
    if cut is None:
        raise ValueError(f"{_KEY}pre must be one of {', '.join(_CUTS)}, but was {name!r}")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges(metadata, vocab)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=cut.ignore_merges))
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = cut.words()
    backend.decoder = decoders.ByteLevel()
    return backend, cut.add_bos


def _sentencepiece(metadata: Mapping[str, Any], tokens: list[str], types: list[int]) -> tuple[Tokenizer, bool]:
    """BPE over characters with "▁" for the space; what has no token is spelled in byte tokens."""
    vocab = {token: index for index, token in enumerate(tokens)}
    if _KEY + "merges" in metadata:
        merges = _merges(metadata, vocab)
    else:
        scores = _per_token(metadata, "scores", len(tokens))
        if scores is None:
            raise ValueError(f"{_KEY}scores is missing in the GGUF metadata")
        merges = _merges_from_scores(tokens, types, scores)
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == _UNKNOWN), None)
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    escape = normalizers.Replace(" ", "▁")
    unescape = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if metadata.get(_KEY + "add_space_prefix", True):
        # Each stretch of text between special tokens gets the space, as in Llama's own tokenizer.
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), escape])
        backend.decoder = decoders.Sequence([*unescape, decoders.Strip(" ", 1, 0)])
    else:
        backend.normalizer = escape
        backend.decoder = decoders.Sequence(unescape)
    return backend, True


def _merges_from_scores(tokens: list[str], types: list[int], scores: list[float]) -> list[tuple[str, str]]:
    """Sentencepiece joins the pair that makes the token of the highest score: all such pairs, best first."""
    rank = {
        token: (-score, index)
        for index, (token, kind, score) in enumerate(zip(tokens, types, scores, strict=True))
        if kind == _NORMAL
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(rank, key=rank.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in rank and token[cut:] in rank
    ]
