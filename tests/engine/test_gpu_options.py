"""Draws with options in graphs: nobody waits, and the tokens are those of single steps and of the host."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import LLM, SamplingParams
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import LATE, GraphRunner
from rooflight.engine.logit_state import FEW
from rooflight.engine.scheduler import Scheduler
from tests.engine.support import assert_idle, prompt_ids
from tests.engine.test_options import KINDS, assert_same, requests

Checkpoints = Callable[..., tuple[Path, Any]]
pytestmark = pytest.mark.gpu
EVERYTHING: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "logit_bias": {5: 3.0, 9: -4.0},
    "logprobs": 5,
    "ignore_eos": True,
}


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3", max_position_embeddings=1024, head_dim=64)[0]


def build(folder: Path, **options: Any) -> LLM:
    sizes = {"page_size": 4, "max_model_len": 200, "num_pages": 400, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    return LLM(str(folder), **{"device": "cuda", "dtype": "fp32"} | sizes | options)


def late_graphs(llm: LLM) -> set[tuple[str | int, ...]]:
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    return {key for key in runner._graphs if key[0] in LATE}


@pytest.fixture
def no_waiting() -> Iterator[Callable[[], None]]:
    yield lambda: torch.cuda.set_sync_debug_mode("error")
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("prompts_too", [False, True])
def test_nobody_waits_while_decoding_with_options(
    folder: Path, no_waiting: Callable[[], None], prompts_too: bool
) -> None:
    """Some 600 steps of four requests; with prompts, places are written anew as well."""
    llm = build(folder, max_num_seqs=4)
    params = SamplingParams(max_tokens=150, temperature=0.7, seed=1, **EVERYTHING)
    prompts = [prompt_ids(5, seed=seed) for seed in range(4)]
    expected = [done.token_ids for done in llm.generate(prompts, params)]
    for _ in range(4 if not prompts_too else 2):
        for prompt in prompts:
            llm.engine.submit(prompt, params)
        if prompts_too:
            no_waiting()
        for _ in range(4):
            llm.engine.step()
        no_waiting()
        found = []
        while llm.engine.busy:
            found += [chunk.completion for _, chunk in llm.engine.step() if chunk.completion is not None]
        torch.cuda.set_sync_debug_mode("default")
        assert sorted(done.token_ids for done in found) == sorted(expected)
    assert {key[0] for key in late_graphs(llm)} == {"reports"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_graphs_with_options_equal_single_steps(folder: Path, dtype: str) -> None:
    """The same kernels, captured and not: the same tokens, whatever is padded, and the same log-probabilities."""
    captured, single = build(folder, dtype=dtype), build(folder, dtype=dtype, graphs=False)
    seen = set()
    for count in (1, 3, 9, 22):
        prompts, params = requests(count=count)
        assert_same(captured.generate(prompts, params), single.generate(prompts, params))
        seen |= {key[0] for key in late_graphs(captured)}
    assert seen == set(LATE)
    assert late_graphs(single) == set()
    assert_idle(captured)


def test_greedy_tokens_are_those_of_the_host(folder: Path) -> None:
    """The same runner, told that the host takes part: one step at a time, its counts made from the tokens."""
    llm = build(folder, prefix_cache=False)
    old = llm.engine
    kinds = [{key: value for key, value in kind.items() if key not in ("temperature", "n")} for kind in KINDS]
    prompts, params = requests(kinds)
    found = llm.generate(prompts, params)
    llm.engine = Engine(old.runner, Scheduler(400, 4, 16, 64, False, 8, False), old.tokenizer, old.end_ids)
    assert_same(found, llm.generate(prompts, params))


def test_graphs_are_made_again_when_lists_of_biases_grow(folder: Path) -> None:
    """Those made before know tables that have gone."""
    captured, single = build(folder), build(folder, graphs=False)
    prompts = [prompt_ids(7), prompt_ids(9)]
    for many, width in ((2, FEW), (FEW + 1, 2 * FEW), (3, 2 * FEW), (300, 512)):
        bias = {token: 5.0 + token % 3 for token in range(many)}
        params = SamplingParams(max_tokens=40, logit_bias=bias, frequency_penalty=0.3, ignore_eos=True)
        assert_same(captured.generate(prompts, params), single.generate(prompts, params))
        assert {(key[0], key[3]) for key in late_graphs(captured)} == {("options", width)}


def test_a_graph_that_is_made_while_others_decode_changes_nothing_for_them(folder: Path) -> None:
    """Its draws are rehearsed, and its steps are captured, between two launches of theirs."""
    expected = []
    params = SamplingParams(max_tokens=100, temperature=0.8, seed=3, frequency_penalty=1.0, ignore_eos=True)
    late = SamplingParams(max_tokens=60, logprobs=3, presence_penalty=1.0, ignore_eos=True)
    for graphs in (False, True):
        llm, found = build(folder, graphs=graphs), {}
        owners = [llm.engine.submit(prompt_ids(6), params)]
        for step in range(200):
            if step in (4, 6):
                owners.append(llm.engine.submit(prompt_ids(step), late))
            for owner, chunk in llm.engine.step() if llm.engine.busy else ():
                if chunk.completion is not None:
                    found[owner] = chunk.completion
        expected.append([found[owner] for owner in owners])
    assert_same(expected[1], expected[0])
