"""Tokens of one request -> text to show: whole characters, stop strings, end tokens left out."""

from __future__ import annotations

from rooflight.engine.sequence import Sequence
from rooflight.text.detokenizer import Detokenizer
from rooflight.text.stops import StopStrings
from rooflight.text.tokenizer import Tokenizer


class TextStream:
    """Feed each token with `add`; what comes back may be shown at once. `finish` gives what was held back."""

    def __init__(self, tokenizer: Tokenizer | None, stop: tuple[str, ...]) -> None:
        if tokenizer is None and stop:
            raise ValueError(f"stop must be empty for a model without a tokenizer, was {stop!r}")
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self._stops = StopStrings(stop) if stop else None

    @property
    def has_text(self) -> bool:
        return self._detokenizer is not None

    def add(self, sequence: Sequence, token: int) -> tuple[str, bool]:
        """Text that is safe to show, and whether a stop string was reached."""
        if self._detokenizer is None:
            return "", False
        text = self._detokenizer.add(token)
        if self._stops is None or sequence.num_generated < sequence.params.min_tokens:
            return text, False
        return self._stops.add(text)

    def finish(self) -> tuple[str, bool]:
        """Held-back text when the tokens end without a stop string; a half character may still complete one."""
        if self._detokenizer is None:
            return "", False
        text = self._detokenizer.finish()
        if self._stops is None:
            return text, False
        shown, stopped = self._stops.add(text)
        return (shown, True) if stopped else (shown + self._stops.finish(), False)
