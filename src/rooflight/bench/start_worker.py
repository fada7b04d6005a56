"""One start of the engine, in the process that `start` began for it.

Answers with one line (`channel`): seconds from the parent's clock just before the process to an `LLM` that is ready,
by part, and to the first token. The clock is the system's, the same in both processes.
"""

from __future__ import annotations

import sys
from time import monotonic as now

import torch

from rooflight.bench.channel import Answer, Message, serve
from rooflight.engine import LLM, SamplingParams

PROMPT_TOKENS = 32


def main(begun: float, torch_there: float) -> None:
    """begun, torch_there: when the first line of Python ran, and when torch was imported. The rest is in `sys.argv`."""
    imported = now()
    started, model, device, skip_tokenizer = sys.argv[1:]
    parts = {
        "interpreter": begun - float(started),
        "import torch": torch_there - begun,
        "import rooflight": imported - torch_there,
    }

    def start() -> tuple[Message, Answer]:
        return measure(float(started), parts, model, device, skip_tokenizer == "1"), lambda message: message

    serve(start)


def measure(started: float, parts: dict[str, float], model: str, device: str, skip_tokenizer: bool) -> Message:
    """Goes on where `parts` end. What none of them holds, such as static buffers of graphs, is the rest."""
    parts = dict(parts)
    if device == "cuda":
        begin = now()
        torch.empty(1, device=device)
        torch.cuda.synchronize()
        parts["CUDA"] = now() - begin
    llm = LLM(model, device=device, skip_tokenizer=skip_tokenizer)
    if device == "cuda":
        torch.cuda.synchronize()
    ready = now() - started
    parts |= grouped(llm.start_seconds)
    parts["rest"] = ready - sum(parts.values())
    prompt = [token % llm.config.vocab_size for token in range(1, PROMPT_TOKENS + 1)]
    llm.generate([prompt], SamplingParams(max_tokens=1, ignore_eos=True))
    return {"ready": ready, "first_token": now() - started, "parts": parts}


def grouped(seconds: dict[str, float]) -> dict[str, float]:
    """What an LLM tells of its start, with kernels' first steps and graphs of prompts and of decoding together."""
    parts: dict[str, float] = {}
    for name, value in seconds.items():
        part = "first steps" if name.startswith("first ") else "graphs" if name.endswith(" graphs") else name
        parts[part] = parts.get(part, 0.0) + value
    return parts
