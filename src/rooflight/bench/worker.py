"""One engine in its own process: `python -m rooflight.bench.worker ENGINE MODEL DTYPE DEVICE THREADS`.

A request {"prompt": [ids], "max_tokens": n} is answered with its timing (see `channel`).
"""

from __future__ import annotations

import sys
import time

import torch

from rooflight.bench.channel import Answer, Message, serve
from rooflight.bench.measurement import Contender


def load(engine: str, model: str | None, dtype: str, device: str) -> Contender:
    if engine == "rooflight":
        from rooflight.bench.ours import RooflightContender

        return RooflightContender(model, dtype, device)
    from rooflight.bench.peers.transformers import TransformersContender

    return TransformersContender(model, dtype, device)


def main(arguments: list[str]) -> None:
    engine, model, dtype, device, threads = arguments

    def start() -> tuple[Message, Answer]:
        torch.set_num_threads(int(threads))
        before = time.perf_counter()
        contender = load(engine, model or None, dtype, device)

        def answer(request: Message) -> Message:
            timing = contender.run(request["prompt"], request["max_tokens"])
            return {"first_token": timing.first_token, "total": timing.total, "tokens": timing.tokens}

        return {"ready": contender.versions(), "seconds": time.perf_counter() - before}, answer

    serve(start)


if __name__ == "__main__":
    main(sys.argv[1:])
