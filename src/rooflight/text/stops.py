"""Stop strings in streamed text."""

from __future__ import annotations

from collections.abc import Sequence


class _Matcher:
    """Follows one stop string through a text: how much of its start the text now ends with.

    Knuth, Morris and Pratt's method: after a mismatch fall back to the longest start that is still
    matched, so that each character of the text is looked at once.
    """

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.matched = 0
        self._fallback = [0]
        matched = 0
        for character in stop[1:]:
            while matched and stop[matched] != character:
                matched = self._fallback[matched - 1]
            matched += stop[matched] == character
            self._fallback.append(matched)

    def step(self, character: str) -> bool:
        """Takes one character (never after a full match); True when the stop string is complete."""
        while self.matched and self.stop[self.matched] != character:
            self.matched = self._fallback[self.matched - 1]
        self.matched += self.stop[self.matched] == character
        return self.matched == len(self.stop)


class StopStrings:
    """Watches streamed text for stop strings and gives out what surely comes before one.

    The stop string that is complete first ends the text, wherever the pieces of the stream begin and
    end; of several that are complete with the same character, the longest. The stop string itself and
    all after it are never given out. Text that may be the start of one is held back until it is clear.

    stops: the strings, none of them empty; with no strings at all every text passes.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise ValueError(f"stops must be a sequence of strings, not {stops!r}")
        if "" in stops:
            raise ValueError(f"stops must not hold an empty string, but was {list(stops)!r}")
        self._matchers = [_Matcher(stop) for stop in dict.fromkeys(stops)]
        self._held = ""
        self.reached: str | None = None
        """The stop string that ended the text, None so far."""

    def add(self, text: str) -> tuple[str, bool]:
        """Takes the next piece of text.

        Returns the text that is now safe to emit, and whether a stop string has been reached. After
        that every further call returns ("", True).
        """
        if self.reached is not None:
            return "", True
        seen = self._held + text
        for end, character in enumerate(text, start=len(self._held) + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.step(character)]
            if complete:
                self.reached = max(complete, key=len)
                self._held = ""
                return seen[: end - len(self.reached)], True
        safe = len(seen) - max((matcher.matched for matcher in self._matchers), default=0)
        self._held = seen[safe:]
        return seen[:safe], False

    def finish(self) -> str:
        """The text still held back, when the stream ends without a stop string; else ""."""
        held, self._held = self._held, ""
        return held
