"""Token ids to text, one id at a time."""

from __future__ import annotations

import codecs

from rooflight.text.tokenizer import Tokenizer


class Detokenizer:
    """Streams the text of a sequence of token ids.

    The texts returned by `add` and the last one by `finish`, joined, are exactly `tokenizer.decode`
    of all ids. A character whose bytes are spread over several tokens comes out whole, with its last
    token. Bytes that can no longer become a character come out as U+FFFD as soon as that is known, so
    at most three bytes are ever held back; each `add` costs the length of its token, nothing more.

    skip_special: leave special tokens out.
    continuing: the ids carry on a text that has already begun, so a sentencepiece vocabulary keeps
        the space of its first word.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True, continuing: bool = False) -> None:
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special else frozenset[int]()
        self._lead = "" if continuing else tokenizer.lead
        # Its error handling (one U+FFFD for each longest invalid start) is that of bytes.decode.
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._finished = False

    def add(self, token_id: int) -> str:
        """The text that this token completes; "" while a character is still open.

        Raises RuntimeError after `finish`.
        """
        if self._finished:
            raise RuntimeError("Detokenizer.add called after finish")
        if token_id in self._skipped:
            return ""
        return self._without_lead(self._utf8.decode(self._tokenizer.token_bytes(token_id)))

    def finish(self) -> str:
        """What is left: U+FFFD for a character that was never completed, else ""."""
        self._finished = True
        return self._without_lead(self._utf8.decode(b"", final=True))

    def _without_lead(self, text: str) -> str:
        if text and self._lead:
            text, self._lead = text.removeprefix(self._lead), ""
        return text
