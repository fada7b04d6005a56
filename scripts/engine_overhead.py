"""What a decode step costs beside the model: microseconds of the host, part by part.

    python scripts/engine_overhead.py [SEQUENCES] [PROMPT_TOKENS]    default 64 and 512

The model is replaced by logits that are there already, so that only scheduling, tensors, sampling and delivery remain.
"""

from __future__ import annotations

import cProfile
import pstats
import sys
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch

from rooflight import LLM, SamplingParams
from rooflight.engine import runner as runner_module
from rooflight.engine.plan import StepPlan

STEPS = 300


def timed(times: list[float], function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        start = time.perf_counter()
        result = function(*args)
        times.append((time.perf_counter() - start) * 1e6)
        return result

    return call


def main(sequences: int = 64, prompt: int = 512) -> None:
    torch.set_num_threads(1)
    pages = sequences * (-(-(prompt + 2 * STEPS) // 16) + 1)
    llm = LLM("random:tiny", num_pages=pages, max_num_seqs=sequences, max_num_batched_tokens=4096, skip_tokenizer=True)
    engine = llm.engine
    runner, scheduler = engine.runner, engine.scheduler
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(sequences, llm.config.vocab_size, generator=generator)
    parts: dict[str, list[float]] = {name: [] for name in ("plan", "tensors", "sample", "landed", "deliver", "step")}

    def run(plan: StepPlan) -> torch.Tensor:
        runner._tensors(plan)
        return logits[: plan.num_logits]  # greedy sampling leaves them as they are

    runner._tensors = timed(parts["tensors"], runner._tensors)  # type: ignore[method-assign]
    runner.run = run  # type: ignore[method-assign]
    scheduler.plan = timed(parts["plan"], scheduler.plan)  # type: ignore[method-assign]
    scheduler.landed = timed(parts["landed"], scheduler.landed)  # type: ignore[method-assign]
    runner_module.sample = timed(parts["sample"], runner_module.sample)  # type: ignore[assignment]
    for number in range(sequences):
        tokens = [(number + place) % 997 for place in range(prompt)]
        engine.submit(tokens, SamplingParams(max_tokens=2 * STEPS, ignore_eos=True))
    while len(scheduler.running) < sequences or any(s.num_generated == 0 for s in scheduler.running):
        list(engine.step())
    for times in parts.values():
        times.clear()
    for _ in range(STEPS):
        start = time.perf_counter()
        list(engine.step())
        parts["step"].append((time.perf_counter() - start) * 1e6)
    inner = sum(median(parts[name]) for name in ("plan", "tensors", "sample", "landed"))
    parts["deliver"] = [median(parts["step"]) - inner]
    print(f"{sequences} sequences of {prompt} tokens and more, median of {STEPS} decode steps")
    for name, times in parts.items():
        print(f"{name:10} {median(times):8.1f} us")
    print(f"{'schedule':10} {median(parts['plan']) + median(parts['landed']):8.1f} us (plan and landed)")
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(50):
        list(engine.step())
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(14)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
