"""One model with a KV pool, and on it an engine for every rung of the ladder: they run one after the other."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rooflight.bench.measurement import PAGE_SIZE
from rooflight.bench.rungs import Rung
from rooflight.engine import LLM, SamplingParams
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import GraphRunner
from rooflight.engine.launch import Landed, Launch
from rooflight.engine.outputs import Completion
from rooflight.engine.plan import StepPlan
from rooflight.engine.scheduler import Scheduler
from rooflight.engine.sequence import Sequence as Running


@dataclass(frozen=True)
class Climb:
    """One request on a rung: seconds of a token after the first, those of them that the host waited, the tokens."""

    per_token: float
    waited: float
    tokens: tuple[int, ...]


class Climber:
    """Greedy requests, end tokens ignored. Graphs are captured here, where the device has them."""

    def __init__(self, model: str | None, dtype: str, device: str, rungs: Sequence[Rung], longest: int) -> None:
        pages = -(-longest // PAGE_SIZE) + 1
        self.llm = LLM(
            model, dtype=dtype, device=device, max_model_len=longest, num_pages=pages, page_size=PAGE_SIZE,
            max_num_seqs=1, prefix_cache=False, graphs=False, most_steps=1, skip_tokenizer=True,
        )  # fmt: skip
        self._device = torch.device(device)
        self._engines = {rung.name: self._engine(rung) for rung in rungs}

    def _engine(self, rung: Rung) -> Engine:
        llm, old = self.llm, self.llm.engine
        tokens, graphs = old.scheduler.max_num_batched_tokens, rung.graphs and self._device.type == "cuda"
        cache, longest = old.runner.cache, llm.max_model_len
        runner = WatchedRunner(llm.decoder, cache, longest, 1, tokens, graphs, rung.steps, rung.recipe)
        pool = old.scheduler.pool
        # Every rung counts its own pages of the one memory: no two of them run at the same time, and none keeps any.
        scheduler = Scheduler(pool.num_pages, PAGE_SIZE, 1, tokens, False, rung.steps)
        return Engine(runner, scheduler, None, frozenset())

    def facts(self) -> dict[str, object]:
        pool = self.llm.engine.scheduler.pool
        return {"max_model_len": self.llm.max_model_len, "num_pages": pool.num_pages, "page_size": PAGE_SIZE}

    def run(self, rung: Rung, prompt: Sequence[int], max_tokens: int) -> Climb:
        engine = self._engines[rung.name]
        runner = engine.runner
        assert isinstance(runner, WatchedRunner)
        self.llm.decoder.recipe = rung.recipe
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # the rung before may have left a launch behind
        runner.waited = 0.0
        completion = _complete(engine, prompt, max_tokens)
        tokens, timing = completion.token_ids, completion.timing
        if completion.error is not None or len(tokens) != max_tokens:
            raise RuntimeError(f"{rung.name}: ended after {len(tokens)} of {max_tokens} tokens: {completion.error}")
        rest = max_tokens - 1
        return Climb(timing.seconds_per_token(max_tokens), runner.waited / rest, tokens)


def _complete(engine: Engine, prompt: Sequence[int], max_tokens: int) -> Completion:
    engine.submit(list(prompt), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    while True:
        for _, chunk in engine.step():
            if chunk.completion is not None:
                return chunk.completion


class WatchedRunner(GraphRunner):
    """Counts the seconds that the host waits for tokens of decode launches, in `waited`."""

    waited = 0.0

    def launch(self, plan: StepPlan, sampling: Sequence[Running]) -> Launch:
        launch = super().launch(plan, sampling)
        return Watched(launch, self) if plan.is_decode else launch


class Watched:
    prompt_logits: Sequence[torch.Tensor] = ()

    def __init__(self, launch: Launch, runner: WatchedRunner) -> None:
        self._launch, self._runner = launch, runner

    def land(self) -> Landed:
        begin = time.perf_counter()
        landed = self._launch.land()
        self._runner.waited += time.perf_counter() - begin
        return landed
