"""The worker's side of a measuring process: JSON lines in on standard input, one answer a line out.

The first line out says that the worker is ready, or gives the error that kept it from starting.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any, TextIO

Message = dict[str, Any]
Answer = Callable[[Message], Message]


def serve(start: Callable[[], tuple[Message, Answer]]) -> None:
    """Start, say ready with the given message, then answer every line until standard input ends."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with the replies
    try:
        ready, answer = start()
    except Exception as error:
        say(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    say(replies, ready)
    for line in sys.stdin:
        say(replies, answer(json.loads(line)))


def say(replies: TextIO, message: Message) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()
