from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import LLM
from tests.engine.late import make_late
from tests.engine.runners import build
from tests.engine.support import assert_idle, checkpoint

Checkpoints = Callable[..., tuple[Path, Any]]


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices are slower on many threads, and the machine is shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """(folder, transformers model) of a family, written once for the same settings."""
    made: dict[tuple[Any, ...], tuple[Path, Any]] = {}

    def make(family: str = "qwen3", **overrides: Any) -> tuple[Path, Any]:
        key = (family, *sorted(overrides.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(family)
            made[key] = (folder, checkpoint(folder, family, **overrides))
        return made[key]

    return make


@pytest.fixture(scope="session")
def shared_llm(checkpoints: Checkpoints) -> LLM:
    folder, _ = checkpoints("qwen3", max_position_embeddings=1024)
    return LLM(str(folder), page_size=4, num_pages=512, max_model_len=600, max_num_batched_tokens=64)


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    """A Qwen3 whose heads the kernels take."""
    return checkpoints("qwen3", max_position_embeddings=1024, head_dim=64)[0]


@pytest.fixture(scope="module")
def plain(folder: Path) -> LLM:
    """With the runner of a CPU."""
    return LLM(str(folder), page_size=4, max_model_len=200, num_pages=400, max_num_batched_tokens=64, device="cpu")


@pytest.fixture(scope="module")
def ahead(folder: Path) -> LLM:
    """With that of a GPU."""
    return build(folder, device="cpu")


@pytest.fixture(autouse=True)
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """How runners launch; `late.in_every_mode` runs a test in others than that of the CPU."""
    chosen: tuple[int, int] = getattr(request, "param", (0, 1))
    if chosen != (0, 1):
        make_late(monkeypatch, *chosen)
    return chosen


@pytest.fixture
def llm(shared_llm: LLM, mode: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[LLM]:
    """A tiny Qwen3 with a tokenizer; at the end of each test it must be idle with all pages free."""
    monkeypatch.setattr(shared_llm.engine.scheduler, "most_steps", mode[1])
    pool = shared_llm.engine.scheduler.pool
    pool.withdraw(range(pool.num_pages))  # no test finds the prompts of another in the prefix cache
    yield shared_llm
    try:
        assert_idle(shared_llm)
    finally:  # a test that failed half-way must not fail the next ones
        for request_id in list(shared_llm.engine._requests):
            shared_llm.engine.abort(request_id)
