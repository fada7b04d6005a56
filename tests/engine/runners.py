"""The runner of a GPU on any device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rooflight import LLM
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import GraphRunner
from rooflight.engine.scheduler import Scheduler


def build(folder: Path, captured: bool = False, most_steps: int = 8, num_pages: int = 400, **options: Any) -> LLM:
    """An LLM whose runner is the GPU's, on whatever device the options say."""
    llm = LLM(str(folder), page_size=4, max_model_len=200, num_pages=num_pages, **options)
    if isinstance(llm.engine.runner, GraphRunner):
        return llm
    old = llm.engine
    runner = GraphRunner(llm.decoder, old.runner.cache, llm.max_model_len, 16, 64, captured, most_steps)
    scheduler = Scheduler(num_pages, 4, 16, 64, old.scheduler.prefix_cache, runner.most_steps, runner.options_on_device)
    llm.engine = Engine(runner, scheduler, old.tokenizer, old.end_ids)
    return llm
