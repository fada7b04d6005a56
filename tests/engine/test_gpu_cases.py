"""Cases from the field (BR-…) that a runtime on a GPU must pass: its pool, its graphs and its memory."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import LLM, Completion, SamplingParams
from rooflight.engine import llm as llm_module
from rooflight.engine.graph_runner import GraphRunner
from rooflight.engine.launch import Launch
from rooflight.engine.memory import SHARE, working_bytes
from rooflight.engine.plan import StepPlan
from tests.engine.support import assert_idle, prompt_ids
from tests.engine.test_core import collect

Checkpoints = Callable[..., tuple[Path, Any]]
pytestmark = pytest.mark.gpu
DEVICE = "cuda"
LEAST_ERROR = 1e-4  # of a log-probability in FP32, as a batch changes how products are summed up
SMALL = {"device": DEVICE, "page_size": 16, "max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def folder(checkpoints: Checkpoints) -> Path:
    return checkpoints("qwen3", max_position_embeddings=1024, head_dim=64)[0]


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """What a test held is free for the next one."""
    yield
    gc.collect()
    torch.cuda.empty_cache()


def small(folder: Path, **options: Any) -> LLM:
    return LLM(str(folder), **SMALL | {"dtype": "fp32", "num_pages": 64} | options)


def greedy(max_tokens: int, logprobs: int | None = None) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, ignore_eos=True)


def first_difference(tokens: Sequence[int], others: Sequence[int]) -> int | None:
    assert len(tokens) == len(others)
    pairs = zip(tokens, others, strict=True)
    return next((index for index, (one, other) in enumerate(pairs) if one != other), None)


def error_between(truth: Completion, other: Completion) -> float:
    """Of log-probabilities of the same tokens, behind the same tokens."""
    end = first_difference(truth.token_ids, other.token_ids)
    found = [0.0]
    for one, two in zip((truth.logprobs or ())[:end], (other.logprobs or ())[:end], strict=True):
        found.append(abs(one.logprob - two.logprob))
    if end is not None:
        assert truth.logprobs is not None
        assert other.logprobs is not None
        theirs = dict(other.logprobs[end].top)
        found += [abs(value - theirs[token]) for token, value in truth.logprobs[end].top if token in theirs]
    return max(found)


def assert_equal_up_to_ties(tokens: Sequence[int], truth: Completion, error: float = LEAST_ERROR) -> None:
    """Another token only where the two best were closer than four times the error; what follows it is another text."""
    index = first_difference(truth.token_ids, tokens)
    if index is not None:
        assert truth.logprobs is not None
        (_, best), (_, second) = truth.logprobs[index].top[:2]
        assert best - second < 4 * error, (index, best - second, error)


# Batches ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_br_013_an_answer_alone_and_in_a_batch(folder: Path, dtype: str) -> None:
    """The same every time; in a batch, where products are summed up in another order, other tokens only at ties."""
    sizes = {"max_model_len": 600, "num_pages": 200, "max_num_batched_tokens": 256, "prefix_cache": False}
    llm = small(folder, dtype=dtype, **sizes)
    prompt = prompt_ids(20)
    crowd = [prompt, *(prompt_ids(length, seed=length) for length in (1, 15, 64, 129, 250, 333, 500))]
    alone = [llm.generate([prompt], greedy(64))[0].token_ids for _ in range(3)]
    together = [[found.token_ids for found in llm.generate(crowd, greedy(64))] for _ in range(3)]
    assert alone == alone[:1] * 3
    assert together == together[:1] * 3
    assert len(set(alone[0])) > 8  # an answer that says one thing over and over proves nothing

    truth, seen = llm.generate([prompt], greedy(64, 2))[0], llm.generate(crowd, greedy(64, 2))[0]
    assert truth.logprobs is not None
    largest = max(abs(value) for report in truth.logprobs for _, value in report.top)
    rounding = torch.finfo(torch.float32 if dtype == "fp32" else torch.bfloat16).eps * largest
    error = max(error_between(truth, seen), rounding)
    assert error < (0.01 if dtype == "fp32" else 0.5)
    for tokens in (alone[0], together[0][0], seen.token_ids):
        assert_equal_up_to_ties(tokens, truth, error)
    assert_idle(llm)


# The pool ---------------------------------------------------------------------------------------------------------


def test_br_063_a_request_too_large_for_the_pool_is_refused_and_the_small_one_finishes(folder: Path) -> None:
    llm = small(folder, num_pages=2)
    begin = time.perf_counter()
    exact = llm.engine.submit(prompt_ids(25), greedy(8))  # 32 tokens in the cache: the whole pool
    for length in (26, 32, 33, 100):
        with pytest.raises(ValueError, match=rf"may need {length + 7} tokens of KV cache .*, the pool has 2 pages"):
            llm.engine.submit(prompt_ids(length), greedy(8))
    little = llm.engine.submit(prompt_ids(2), greedy(3))
    chunks = collect(llm.engine, 2)
    assert time.perf_counter() - begin < 10
    for request_id, count in ((exact, 8), (little, 3)):
        completion = chunks[request_id][-1].completion
        assert completion is not None
        assert (len(completion.token_ids), completion.finish_reason) == (count, "length")
    assert_idle(llm)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_br_064_four_that_outgrow_the_pool_lose_no_token(folder: Path, prefix_cache: bool) -> None:
    roomy = small(folder, prefix_cache=False)
    tight = small(folder, num_pages=11, prefix_cache=prefix_cache)  # for four that have four pages in the end
    for length in (15, 16, 17, 31, 32, 33):
        prompts = [prompt_ids(length, seed=10 * length + seed) for seed in range(4)]
        params = greedy(57 - length)
        before = tight.engine.metrics().preemptions
        found = tight.generate(prompts, params)
        assert tight.engine.metrics().preemptions > before
        for prompt, completion in zip(prompts, found, strict=True):
            truth = roomy.generate([prompt], greedy(57 - length, 2))[0]
            assert_equal_up_to_ties(completion.token_ids, truth)
        assert_idle(tight)
        assert tight.engine.scheduler.pool.free == 11


@pytest.mark.parametrize("at_once", [True, False])
def test_br_065_a_prompt_that_is_cached_as_a_whole(folder: Path, at_once: bool) -> None:
    plain, llm = small(folder, prefix_cache=False), small(folder)
    for length in (31, 32, 33):
        prompt = prompt_ids(length, seed=length)
        truth = plain.generate([prompt], greedy(12, 2))[0]
        if at_once:
            first, second = llm.generate([prompt, prompt], greedy(12))
        else:
            first, second = llm.generate([prompt], greedy(12))[0], llm.generate([prompt], greedy(12))[0]
        assert first.cached_tokens == 0
        assert second.cached_tokens == (0 if at_once else (length - 1) // 16 * 16)
        for completion in (first, second):
            assert_equal_up_to_ties(completion.token_ids, truth)
    assert_idle(llm)


# Graphs -----------------------------------------------------------------------------------------------------------


def watch(runner: GraphRunner, monkeypatch: pytest.MonkeyPatch, owned: torch.Tensor) -> set[int]:
    """How many rows decode steps have from now on; owned (pages, slots): made true where a request has a token."""
    sizes: set[int] = set()
    launch, replay, page_size = runner.launch, runner._replay, owned.shape[1]

    def note_launch(plan: StepPlan, sampling: Sequence[Any]) -> Launch:
        for row in plan.rows:
            for position in range(row.start, row.start + len(row.tokens) + max(plan.gets(row) - 1, 0)):
                owned[row.pages[position // page_size], position % page_size] = True
        return launch(plan, sampling)

    def note_replay(key: tuple[str | int, ...], step: Callable[[], None]) -> None:
        if key[0] == "decode":
            sizes.add(int(key[1]))
        replay(key, step)

    monkeypatch.setattr(runner, "launch", note_launch)
    monkeypatch.setattr(runner, "_replay", note_replay)
    return sizes


def written_from_the_last_page(llm: LLM, many: int) -> tuple[list[tuple[int, ...]], torch.Tensor, set[int]]:
    """Tokens, the bytes of a cache that was full of NaN, and how many rows the decode steps had."""
    runner, pool = llm.engine.runner, llm.engine.scheduler.pool
    assert isinstance(runner, GraphRunner)
    runner.cache.data.fill_(float("nan"))
    pool._free = list(range(pool.num_pages))  # the very last page is the first one taken
    owned = torch.zeros(pool.num_pages, runner.cache.page_size, dtype=torch.bool)
    prompts = [prompt_ids(length, seed=length) for length in (16, 5, 17, 1, 22)[:many]]
    params = [
        SamplingParams(12 + 9 * i, temperature=0.9 * (i % 2), top_k=20, seed=i, ignore_eos=True) for i in range(many)
    ]
    with pytest.MonkeyPatch.context() as patch:
        rows = watch(runner, patch, owned)
        tokens = [completion.token_ids for completion in llm.generate(prompts, params)]
    unwritten = runner.cache.data.isnan().permute(2, 4, 0, 1, 3, 5).flatten(2).cpu()  # (pages, slots, all of a slot)
    assert torch.equal(unwritten.all(-1), ~owned)
    assert torch.equal(unwritten.any(-1), ~owned)
    assert owned[-1].all()  # the first request has more than a page
    assert 64 < int(owned.sum()) < owned.numel() / 2
    return tokens, runner.cache.data.clone().view(torch.uint8), rows


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_br_068_padded_rows_of_a_graph_write_nowhere(folder: Path, dtype: str) -> None:
    """Three and five requests in graphs of 1, 2, 4 and 8 rows: tokens and the bytes of the cache are as without."""
    captured, single = (small(folder, dtype=dtype, graphs=graphs, prefix_cache=False) for graphs in (True, False))
    assert captured.graph_buckets == (1, 2, 4, 8)
    assert single.graph_buckets == ()
    for many, sizes in ((3, {1, 2, 4}), (5, {1, 2, 4, 8})):
        tokens, data, rows = written_from_the_last_page(captured, many)
        expected, same, _ = written_from_the_last_page(single, many)
        assert rows == sizes
        assert tokens == expected
        assert torch.equal(data, same)
    assert_idle(captured)


# Memory -----------------------------------------------------------------------------------------------------------


def test_br_071_a_pool_that_cannot_fit_is_refused_before_anything_is_captured(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any) -> None:
        raise AssertionError("steps were made")

    monkeypatch.setattr(llm_module, "GraphRunner", never)
    page = 16 * 3 * 2 * 2 * 64 * 4  # bytes: slots, layers, keys and values, KV heads, head_dim, FP32
    free = torch.cuda.mem_get_info()[0]
    for num_pages in (10**9, int(0.98 * free) // page):
        message = (
            rf"^max_model_len or num_pages must be smaller: a KV cache of {num_pages} pages of 16 tokens takes "
            rf"{num_pages * page / 1e9:.2f} GB, \d+\.\d\d GB are free on cuda, of which 3\.\d\d GB are for the steps"
        )
        with pytest.raises(ValueError, match=message):
            small(folder, num_pages=num_pages)


def allow_no_more(spare: int = 0) -> None:
    """From now on PyTorch gets no more memory from this GPU than it has, and so many bytes."""
    gc.collect()
    torch.cuda.empty_cache()  # what it only keeps would be given back, and taken again
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + spare) / total))


@pytest.fixture
def limited() -> Iterator[None]:
    yield
    torch.cuda.set_per_process_memory_fraction(1.0)


SHORT = r"\(CUDA out of memory\. Tried to allocate [0-9.]+ (bytes|[KMG]iB)\)$"


@pytest.mark.usefixtures("limited")
def test_br_071_a_model_that_does_not_fit_is_one_message() -> None:
    allow_no_more(100 << 20)
    message = (
        r"^model must be smaller, or its dtype: 1\.\d\d GB of weights do not fit on cuda, where \d+\.\d\d GB were "
    )
    with pytest.raises(ValueError, match=message + "free " + SHORT):
        LLM("random:qwen3-0.6b", device=DEVICE, dtype="bf16", skip_tokenizer=True)


@pytest.mark.usefixtures("limited")
@pytest.mark.parametrize("when", ["before the steps are made", "while they are captured"])
def test_br_071_memory_that_ends_during_the_start_is_one_message(
    folder: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """And the process can go on: the next model, with enough memory, says what it said before."""
    tokens = small(folder).generate([prompt_ids(5)], greedy(20))[0].token_ids

    def limit(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            allow_no_more()
            return make(*args, **kwargs)

        return made

    with monkeypatch.context() as patch:
        if when == "before the steps are made":
            patch.setattr(llm_module, "GraphRunner", limit(GraphRunner))
        else:
            patch.setattr(torch.cuda, "CUDAGraph", limit(torch.cuda.CUDAGraph))
        message = (
            r"^num_pages, max_num_seqs or max_num_batched_tokens must be smaller: of \d+\.\d\d GB that were free on "
            r"cuda the KV cache takes 0\.00 GB, and the rest is too little for the steps "
        )
        with pytest.raises(ValueError, match=message + SHORT):
            small(folder)
    torch.cuda.set_per_process_memory_fraction(1.0)
    assert small(folder).generate([prompt_ids(5)], greedy(20))[0].token_ids == tokens


NEIGHBOUR = """
import sys, torch
held = torch.ones(int(0.3 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device="cuda")
torch.cuda.synchronize()
print(len(held), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def neighbour() -> Iterator[tuple[int, int]]:
    """Another process with three tenths of the memory: what was free before, and what it holds."""
    gc.collect()
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info()[0]
    command = [sys.executable, "-c", NEIGHBOUR]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the other process ended"
        yield free, int(line)
        process.communicate()  # closes its stdin, and it ends


def test_br_071_beside_another_process_the_pool_is_smaller_and_the_largest_batch_runs(
    neighbour: tuple[int, int], checkpoints: Checkpoints
) -> None:
    context = 262_144  # 256 of these would need more than there is
    shape = {"vocab_size": 151_936, "num_hidden_layers": 4, "head_dim": 64, "max_position_embeddings": context}
    llm = LLM(str(checkpoints("qwen3", **shape)[0]), device=DEVICE, dtype="bf16")
    free, held = neighbour
    cache, dtype = llm.engine.runner.cache, torch.bfloat16
    room = SHARE * (free - held) - working_bytes(llm.config, dtype, 256, 8192)
    wanted = 256 * context * llm.config.kv_bytes_per_token(dtype)
    assert cache.bytes <= min(wanted, room)
    assert cache.bytes >= min(wanted, room - (2 << 30))  # contexts of two processes, and the weights
    if free < 180e9:
        assert cache.bytes < wanted

    penalties = {"repetition_penalty": 1.2, "frequency_penalty": 0.5, "presence_penalty": 0.5}
    prompts = [*(prompt_ids(32, seed=seed) for seed in range(255)), prompt_ids(9000)]
    for options in ({"logprobs": 20, **penalties}, {}):  # with all that is kept of each, and by the largest graphs
        params = [
            SamplingParams(16, temperature=0.8, top_p=0.9, seed=seed, ignore_eos=True, **options)  # type: ignore[arg-type]
            for seed in range(256)
        ]
        found = llm.generate(prompts, params)
        assert [(len(one.token_ids), one.finish_reason, one.error) for one in found] == [(16, "length", None)] * 256
    whole = llm.generate([prompt_ids(9000, seed=2)], SamplingParams(1, prompt_logprobs=20))[0]
    assert len(whole.prompt_logprobs or ()) == 9000
    assert llm.engine.scheduler.pool.free == cache.num_pages
