"""One engine in its own process: `python -m rooflight.bench.worker ENGINE MODEL DTYPE DEVICE THREADS [ROOM]`.

ROOM is a `Room` as JSON. Messages, each answered by a line (see `channel`):
{"prompt": [ids], "max_tokens": n}                        times of one request
{"do": "serve", "prompts": [[ids]], "max_tokens": n}      seconds of all of them together
{"do": "busy", "prompt": [ids], "tokens": n}              GPU-busy seconds of a request, or why there are none
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict

import torch

from rooflight.bench.channel import Answer, Message, serve
from rooflight.bench.measurement import OURS, Contender, Room


def load(engine: str, model: str | None, dtype: str, device: str, room: Room) -> Contender:
    """Each import alone: a peer is a package that need not be there."""
    if engine == OURS:
        from rooflight.bench.ours import RooflightContender

        return RooflightContender(model, dtype, device, room)
    if engine == "vllm":
        from rooflight.bench.peers.vllm import VllmContender

        return VllmContender(model, dtype, device, room)
    from rooflight.bench.peers.transformers import TransformersContender

    return TransformersContender(model, dtype, device)


def reply(contender: Contender, message: Message, device: str) -> Message:
    """The answer to one message."""
    match message.get("do", "run"):
        case "serve":
            return {"seconds": contender.serve(message["prompts"], message["max_tokens"])}  # type: ignore[attr-defined]
        case "busy":
            return busy(contender, message["prompt"], message["tokens"], device)
        case _:
            timing = contender.run(message["prompt"], message["max_tokens"])
            return {"first_token": timing.first_token, "total": timing.total, "tokens": timing.tokens}


def busy(contender: Contender, prompt: list[int], tokens: int, device: str) -> Message:
    if device == "cpu":
        return {"absent": "there is no GPU in this run"}
    from rooflight.bench.busy import measure_busy

    try:
        return asdict(measure_busy(lambda count: contender.complete(prompt, count), tokens))
    except Exception as error:  # the request was timed already; that a profiler fails must not lose it
        return {"absent": (str(error).splitlines() or [type(error).__name__])[0]}


def main(arguments: list[str]) -> None:
    engine, model, dtype, device, threads, *rest = arguments

    def start() -> tuple[Message, Answer]:
        torch.set_num_threads(int(threads))
        before = time.perf_counter()
        room = Room(**json.loads(rest[0])) if rest else Room()
        contender = load(engine, model or None, dtype, device, room)
        ready = {"ready": contender.versions(), "facts": dict(contender.facts())}
        return {**ready, "seconds": time.perf_counter() - before}, lambda message: reply(contender, message, device)

    serve(start)


if __name__ == "__main__":
    main(sys.argv[1:])
