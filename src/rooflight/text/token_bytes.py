"""Which bytes each token stands for.

A token need not hold whole characters, so text can be put together (and streamed) only from bytes.
The rules are read from the decoder of the tokenizer, of which language models use two kinds:

- byte-level: each character of the token is one byte, written with GPT-2's printable alphabet;
- sentencepiece-style: "▁" is a space, `<0xE2>` is one byte, and the text loses its first space.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, every other byte for 256, 257, ..."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(256 + rank): byte for rank, byte in enumerate(others)})
    return alphabet


BYTE_ALPHABET = _byte_alphabet()


class TokenBytes:
    """Bytes of each token id, worked out on first use.

    lead: what is taken away once from the start of a decoded text (" " or "").
    Raises ValueError for a decoder that cannot be told token by token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, source: str) -> None:
        self._backend = backend
        self._source = source
        self._added = frozenset(backend.get_added_tokens_decoder())
        self._known: dict[int, bytes] = {}
        self._byte_level = False
        self._byte_fallback = False
        self._replacements: list[tuple[str, str]] = []
        self._separator = ""
        self.lead = ""
        if backend.decoder is None:
            # Without a decoder the library joins tokens with spaces (word-level vocabularies).
            self._separator = self.lead = " "
        else:
            self._read(json.loads(backend.decoder.__getstate__()))
        if self._byte_level and (self._replacements or self._byte_fallback or self.lead):
            raise ValueError(f"{source}: a ByteLevel decoder together with other steps is not supported")

    def __getitem__(self, token_id: int) -> bytes:
        """Bytes of one token; none for an id outside the vocabulary (padded logits can draw one)."""
        known = self._known.get(token_id)
        if known is None:
            known = self._known[token_id] = self._work_out(token_id)
        return known

    def _read(self, decoder: Mapping[str, Any]) -> None:
        """Takes over one decoder step; a sequence is read step by step."""
        kind = decoder["type"]
        if kind == "Sequence":
            for step in decoder["decoders"]:
                self._read(step)
        elif kind == "ByteLevel":
            self._byte_level = True
        elif kind == "ByteFallback":
            self._byte_fallback = True
        elif kind == "Replace" and "String" in decoder["pattern"]:
            self._replacements.append((decoder["pattern"]["String"], decoder["content"]))
        elif kind == "Metaspace":
            self._replacements.append((decoder["replacement"], " "))
            self.lead = "" if decoder["prepend_scheme"] == "never" else " "
        elif kind == "Strip" and decoder["start"] <= 1 and decoder["stop"] == 0:
            self.lead = decoder["content"] * decoder["start"]
        elif kind != "Fuse":
            raise ValueError(
                f"{self._source}: decoder step {json.dumps(decoder)} is not supported; known are ByteLevel, "
                "ByteFallback, Replace of a string, Metaspace, Fuse, and Strip of one leading character"
            )

    def _work_out(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if token_id >= 0 else None
        if token is None:
            return b""
        if self._byte_level:
            # Added tokens are kept as plain text; only learned ones are written in the alphabet.
            if token_id in self._added or not BYTE_ALPHABET.keys() >= set(token):
                return token.encode()
            return bytes(BYTE_ALPHABET[character] for character in token)
        for old, new in self._replacements:
            token = token.replace(old, new)
        byte = _BYTE_TOKEN.fullmatch(token) if self._byte_fallback else None
        if byte is not None:
            return bytes([int(byte[1], 16)])
        return (self._separator + token).encode()
