"""Read the events of a Chrome trace one by one, so that a file of any length takes the memory of its longest event."""

from __future__ import annotations

import codecs
import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

Progress = Callable[[int, int], None]  # bytes of the file read so far, bytes in all

CHUNK = 1 << 20
LONGEST = 16 << 20  # characters of one value; events have some hundreds, so a longer one means something else
_GZIP = b"\x1f\x8b"
_LONGEST_WORD = 12  # no literal or escape of JSON is longer: a fault this close to the end may be due to the end
_SPACE = re.compile(r"[ \t\r\n]*")
_decode = json.JSONDecoder(strict=False).raw_decode  # names of kernels and files may hold control characters


def stream_events(
    path: Path, progress: Progress | None = None, other: Callable[[str, Any], None] | None = None
) -> Iterator[Any]:
    """The values in the list `traceEvents` of a JSON file, or of a gzip of one; also of a file that is such a list.

    progress: called as progress(bytes read, bytes in all). other: called with the file's other keys and their values.
    Raises OSError for a file that cannot be opened; ValueError in one line, naming the file, for one that is empty,
    no JSON, cut, damaged or without `traceEvents`. The faults of a file's end come after the events before it.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        raise ValueError(f"{path} is no regular file")  # a pipe or a device may never end
    with path.open("rb") as file:
        text = _Text(path, file, progress)
        first = text.peek()
        if not first:
            raise ValueError(f"{path} is empty")
        if first == "{":
            yield from _events_of_object(text, other)
        elif first == "[":
            yield from text.items()
        else:
            raise ValueError(f"{path} is not JSON: it begins with {first!r}")
        if text.peek():
            raise text.fault("something stands behind its end")


def _events_of_object(text: _Text, other: Callable[[str, Any], None] | None) -> Iterator[Any]:
    found = False
    text.take("{")
    while text.peek() != "}":
        key = text.value()
        if not isinstance(key, str):
            raise text.fault("a key must be a string")
        text.take(":")
        if key != "traceEvents":
            value = text.value()
            if other is not None:
                other(key, value)
        elif text.peek() not in ("[", ""):
            raise ValueError(f"{text.path} is no trace: traceEvents must be a list")
        else:
            found = True
            yield from text.items()
        if text.peek() != ",":
            break
        text.take(",")
    text.take("}")
    if not found:
        raise ValueError(f"{text.path} is no trace: it has no traceEvents")


class _Text:
    """The text of a file from where the reader stands, more of it whenever it is needed."""

    def __init__(self, path: Path, file: IO[bytes], progress: Progress | None) -> None:
        self.path = path
        self._file, self._progress = file, progress
        self._size = file.seek(0, 2)
        file.seek(0)
        packed = file.read(len(_GZIP)) == _GZIP
        file.seek(0)
        self._data: IO[bytes] = gzip.GzipFile(fileobj=file) if packed else file  # type: ignore[assignment]
        self._utf8 = codecs.getincrementaldecoder("utf-8-sig")(errors="replace")
        self._buffer = ""
        self._at = 0  # the reader's place in the buffer
        self._passed = 0  # characters before the buffer
        self._ended = False

    def peek(self) -> str:
        """The next character that is not white space, not taken yet; "" at the end of the file."""
        while True:
            match = _SPACE.match(self._buffer, self._at)
            assert match is not None  # it matches nothing at all too
            self._at = match.end()
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._more():
                return ""

    def take(self, character: str) -> None:
        found = self.peek()
        if not found:
            raise self._cut()
        if found != character:
            raise self.fault(f"{character} expected, {found!r} found")
        self._at += 1

    def value(self) -> Any:
        """The next value, whole."""
        while self.peek():
            try:
                value, end = _decode(self._buffer, self._at)
            except RecursionError:
                raise self.fault("too deeply nested") from None
            except ValueError as error:  # also of an integer with too many digits
                if not self._unfinished(error):
                    raise self.fault(getattr(error, "msg", str(error))) from None
            else:
                if self._ended or not self._goes_on(value, end):
                    self._at = end
                    return value
            if len(self._buffer) - self._at > LONGEST:
                raise self.fault(f"one value has more than {LONGEST:,} characters")
            if not self._more():
                continue
        raise self._cut()

    def items(self) -> Iterator[Any]:
        """The values of a list, which must be next."""
        self.take("[")
        while self.peek() != "]":
            yield self.value()
            if self.peek() != ",":
                break
            self._at += 1
        self.take("]")

    def fault(self, what: str) -> ValueError:
        return ValueError(f"{self.path} is not JSON: {what}, near character {self._passed + self._at:,}")

    def _cut(self) -> ValueError:
        return ValueError(f"{self.path} is cut: it ends in the middle, after {self._passed + self._at:,} characters")

    def _goes_on(self, value: Any, end: int) -> bool:
        """Whether the end of the buffer may have cut the value: a number shows no sign of it, as 1 of 1.5e3."""
        rest = len(self._buffer) - end
        return type(value) in (int, float) and rest < _LONGEST_WORD and (not rest or self._buffer[end] in ".eE")

    def _unfinished(self, error: ValueError) -> bool:
        """Whether more text could mend it. At the end of the file it could not, and the file is cut."""
        if not isinstance(error, json.JSONDecodeError):
            return False
        at_end = error.pos >= len(self._buffer) - _LONGEST_WORD or error.msg.startswith("Unterminated string")
        if at_end and self._ended:
            raise self._cut() from None
        return at_end

    def _more(self) -> bool:
        """Append to the buffer, which forgets what was read; False at the end of the file."""
        if self._ended:
            return False
        rest = self._buffer[self._at :]
        data = self._read(max(CHUNK, len(rest)))  # doubling, so that a long value is not tried again and again
        self._ended = not data
        self._passed += self._at
        self._buffer, self._at = rest + self._utf8.decode(data, final=self._ended), 0
        if self._progress is not None:
            self._progress(min(self._file.tell(), self._size), self._size)
        return not self._ended or len(self._buffer) > len(rest)

    def _read(self, size: int) -> bytes:
        try:
            return self._data.read(size)
        except EOFError:
            raise ValueError(f"{self.path} is cut: its gzip stream has no end") from None
        except (zlib.error, gzip.BadGzipFile) as error:
            raise ValueError(f"{self.path} is a damaged gzip file: {error}") from None
