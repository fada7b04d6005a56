"""One contender in its own process: `python -m rooflight.bench.worker ENGINE MODEL DTYPE DEVICE THREADS`.

Speaks JSON lines: a request {"prompt": [ids], "max_tokens": n} on standard input is answered on standard output.
The first line out says that the model is loaded, or gives the error.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any, TextIO

import torch

from rooflight.bench.measurement import Contender


def load(engine: str, model: str | None, dtype: str, device: str) -> Contender:
    if engine == "rooflight":
        from rooflight.bench.ours import RooflightContender

        return RooflightContender(model, dtype, device)
    from rooflight.bench.peers.transformers import TransformersContender

    return TransformersContender(model, dtype, device)


def main(arguments: list[str]) -> None:
    engine, model, dtype, device, threads = arguments
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever libraries print must not mix with the replies
    torch.set_num_threads(int(threads))
    start = time.perf_counter()
    try:
        contender = load(engine, model or None, dtype, device)
    except Exception as error:
        say(replies, {"error": f"{type(error).__name__}: {error}"})
        return
    say(replies, {"ready": contender.versions(), "seconds": time.perf_counter() - start})
    for line in sys.stdin:
        request = json.loads(line)
        timing = contender.run(request["prompt"], request["max_tokens"])
        say(replies, {"first_token": timing.first_token, "total": timing.total, "tokens": timing.tokens})


def say(replies: TextIO, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
