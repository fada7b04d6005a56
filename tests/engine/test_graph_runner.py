"""The runner of a GPU: static buffers, several steps a launch, the sampler on the device.

Without a GPU the same steps run one by one, by the references; with one, in graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rooflight import LLM, SamplingParams, ops
from rooflight.bench.rungs import RUNGS, Rung
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import GraphRunner, compiled_prompts
from rooflight.engine.graph_sizes import buckets, prompt_sizes, suits
from rooflight.engine.scheduler import Scheduler
from rooflight.engine.static_batch import PromptBatch, PromptSize
from rooflight.engine.upload import TURNS, Upload
from rooflight.models.recipe import Recipe
from rooflight.ops import REGISTRY
from tests.engine.runners import build
from tests.engine.support import assert_idle, prompt_ids

Checkpoints = Callable[..., tuple[Path, Any]]
CPU = torch.device("cpu")


def mixed(count: int = 9) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [prompt_ids(length, seed=length) for length in (1, 3, 4, 5, 17, 40, 70, 90, 8)[:count]]
    options = [
        SamplingParams(12 + 3 * (i % 4), temperature=0.9 * (i % 2), top_k=20 * (i % 3), seed=i, ignore_eos=True)
        for i in range(count)
    ]
    return prompts, options


def test_tokens_equal_the_plain_runner(plain: LLM, ahead: LLM) -> None:
    prompts, options = mixed()
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    assert [c.token_ids for c in ahead.generate(prompts, options)] == expected
    assert_idle(ahead)


@pytest.mark.parametrize("most_steps", [1, 2])
def test_tokens_are_equal_at_any_number_of_steps(plain: LLM, folder: Path, most_steps: int) -> None:
    llm = build(folder, most_steps=most_steps, device="cpu")
    launches = []
    runner = llm.engine.runner
    launch = runner.launch
    runner.launch = lambda plan, sampling: launches.append(plan.steps) or launch(plan, sampling)  # type: ignore
    prompts, options = mixed(3)
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    assert [c.token_ids for c in llm.generate(prompts, options)] == expected
    assert max(launches) == most_steps
    assert_idle(llm)


def test_tokens_that_nobody_looks_at_one_by_one_are_counted(plain: LLM, folder: Path) -> None:
    """Without text a launch's tokens are delivered at once: the answers, ends and counts are the same."""
    llm = build(folder, device="cpu", skip_tokenizer=True)
    prompts, options = mixed(5)
    ends = tuple({c.token_ids[2] for c in plain.generate(prompts, options)})  # in the middle of a launch
    options = [*(replace(o, ignore_eos=False, stop_token_ids=ends) for o in options[:3]), *options[3:]]
    expected = plain.generate(prompts, options)
    found = llm.generate(prompts, options)
    assert [(c.token_ids, c.finish_reason) for c in found] == [(c.token_ids, c.finish_reason) for c in expected]
    assert [c.finish_reason for c in found] == ["stop"] * 3 + ["length"] * 2
    assert llm.engine.metrics().generated_tokens == sum(len(c.token_ids) for c in found)
    assert [c.text for c in found] == [""] * 5
    streamed = [chunk for chunk in llm.stream(prompts[4], options[4]) if chunk.token_ids]
    assert tuple(token for chunk in streamed for token in chunk.token_ids) == found[4].token_ids
    assert len(streamed) == len(found[4].token_ids)
    assert_idle(llm)


@pytest.mark.parametrize(("text", "logprobs"), [(False, None), (False, 2), (True, None)])
def test_only_tokens_that_nobody_looks_at_are_delivered_together(
    plain: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, text: bool, logprobs: int | None
) -> None:
    llm = build(folder, device="cpu", skip_tokenizer=not text)
    counts: list[int] = []
    advance = llm.engine._advance
    monkeypatch.setattr(llm.engine, "_advance", lambda *args: counts.append(args[-1]) or advance(*args))  # type: ignore
    prompts, options = mixed(4)
    options = [replace(o, logprobs=logprobs) for o in options]
    found, expected = llm.generate(prompts, options), plain.generate(prompts, options)
    assert [c.token_ids for c in found] == [c.token_ids for c in expected]
    assert sum(counts) == sum(len(c.token_ids) for c in found)
    assert (max(counts) > 1) == (not text and logprobs is None)
    for one, other in zip(found, expected, strict=True):
        assert [r.token_id for r in one.logprobs or ()] == [r.token_id for r in other.logprobs or ()]


def test_what_is_aborted_between_its_launch_and_its_tokens_gets_none(folder: Path) -> None:
    llm = build(folder, device="cpu", skip_tokenizer=True)
    engine = llm.engine
    params = SamplingParams(20, ignore_eos=True)
    first, second = (engine.submit(prompt_ids(5, seed=seed), params) for seed in (1, 2))
    for group in (first, second):
        engine._groups[group][0].group.streams = False
    land = engine._land
    engine._land = lambda: (land(), engine.abort(second))[0]  # type: ignore[method-assign, func-returns-value]
    chunks = [item for _ in range(40) if engine.busy for item in engine.step()]
    assert [owner for owner, chunk in chunks if chunk.completion] == [first]
    assert engine.metrics().generated_tokens == 20
    assert_idle(llm)


@pytest.mark.parametrize("early", [1, 20, 1000])
def test_a_large_step_begins_early(plain: LLM, ahead: LLM, monkeypatch: pytest.MonkeyPatch, early: int) -> None:
    """With so many tokens, or with a full step of 64."""
    prompts, options = mixed()
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    events = []
    prepare, launch = ahead.prepare, ahead.engine.runner.launch
    monkeypatch.setattr("rooflight.engine.llm.EARLY_STEP", early)
    monkeypatch.setattr(ahead, "prepare", lambda *args: events.append("prompt") or prepare(*args))
    monkeypatch.setattr(ahead.engine.runner, "launch", lambda *args: events.append("launch") or launch(*args))
    assert [c.token_ids for c in ahead.generate(prompts, options)] == expected
    enough = 1 + next(i for i in range(len(prompts)) if sum(map(len, prompts[: i + 1])) >= min(early, 64))
    assert events.index("launch") == enough
    assert events.count("prompt") == len(prompts)
    assert_idle(ahead)


def test_a_full_step_begins_before_all_prompts_are_looked_at(
    plain: LLM, ahead: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, options = mixed()
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    events = []
    prepare, launch = ahead.prepare, ahead.engine.runner.launch
    monkeypatch.setattr(ahead, "prepare", lambda *args: events.append("prompt") or prepare(*args))
    monkeypatch.setattr(ahead.engine.runner, "launch", lambda *args: events.append("launch") or launch(*args))
    assert [c.token_ids for c in ahead.generate(prompts, options)] == expected
    full = 1 + next(i for i in range(len(prompts)) if sum(map(len, prompts[: i + 1])) >= 64)
    expected_events = ["prompt"] * full + ["launch"] + ["prompt"] * (len(prompts) - full) + ["launch"]
    assert events[: len(expected_events)] == expected_events
    assert_idle(ahead)


def test_what_has_begun_is_given_up_for_a_later_prompt_that_does_not_fit(plain: LLM, ahead: LLM) -> None:
    prompts, options = mixed()
    with pytest.raises(ValueError, match="prompt must have token ids below"):
        ahead.generate([*prompts, [10**6]], options[0])
    assert_idle(ahead)
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    assert [c.token_ids for c in ahead.generate(prompts, options)] == expected
    assert_idle(ahead)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_step_that_fails_to_begin_leaves_nothing_behind(
    plain: LLM, ahead: LLM, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """Nor anything of a stream that is dropped at that moment."""
    prompts, options = mixed()
    stream = ahead.stream(prompts[0], options[0])
    launch = ahead.engine.runner.launch

    def fail(*_: Any) -> Any:
        stream.close()
        raise error

    monkeypatch.setattr(ahead.engine.runner, "launch", fail)
    with pytest.raises(error):
        ahead.generate(prompts, options)
    monkeypatch.setattr(ahead.engine.runner, "launch", launch)
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    assert [c.token_ids for c in ahead.generate(prompts, options)] == expected
    assert_idle(ahead)


def test_a_stream_dropped_while_a_step_begins_is_gone_at_once(ahead: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, options = mixed()
    stream = ahead.stream(prompts[0], options[0])
    launch = ahead.engine.runner.launch
    monkeypatch.setattr(ahead.engine.runner, "launch", lambda *args: (stream.close(), launch(*args))[1])
    with pytest.raises(ValueError, match="prompt must have token ids below"):
        ahead.generate([*prompts, [10**6]], options[0])
    assert_idle(ahead)


@pytest.mark.parametrize("rung", RUNGS, ids=lambda rung: rung.name)
def test_tokens_are_equal_on_every_rung_of_the_ladder(plain: LLM, folder: Path, rung: Rung) -> None:
    """Prompts of several sequences, batches that are padded up, and rows that end in the middle of a launch."""
    llm = build(folder, device="cpu")
    old = llm.engine
    runner = GraphRunner(llm.decoder, old.runner.cache, 200, 16, 64, False, rung.steps, rung.recipe)
    assert llm.decoder.recipe == rung.recipe
    llm.engine = Engine(runner, Scheduler(400, 4, 16, 64, False, rung.steps), old.tokenizer, old.end_ids)
    prompts, options = mixed()
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    assert [c.token_ids for c in llm.generate(prompts, options)] == expected
    runner._prompts = []  # then sequences that decode beside prompts have attention of their own
    assert [c.token_ids for c in llm.generate(prompts, options)] == expected
    assert_idle(llm)


@pytest.mark.parametrize("most_steps", [0, 3, 2.0, True])
def test_steps_of_a_launch_are_a_power_of_two(folder: Path, most_steps: Any) -> None:
    with pytest.raises(ValueError, match=r"^most_steps must be a "):
        LLM(str(folder), device="cpu", most_steps=most_steps)


@pytest.mark.parametrize("captured", [[PromptSize(64, 16, 16)], []])
def test_decoding_rows_beside_prompts(
    captured: list[PromptSize], plain: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sequences that decode are put behind the prompts, in a padded step or an exact one."""
    llm = build(folder, device="cpu")
    runner = llm.engine.runner
    assert isinstance(runner, GraphRunner)
    monkeypatch.setattr(runner, "_prompts", [PromptBatch(runner.model, room) for room in captured])
    seen: list[int] = []
    ask = PromptBatch.write

    def write(self: PromptBatch, prompts: Any, decodes: Any, *rest: Any) -> None:
        seen.append(len(decodes))
        ask(self, prompts, decodes, *rest)

    monkeypatch.setattr(PromptBatch, "write", write)
    prompts, options = mixed()
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    assert [c.token_ids for c in llm.generate(prompts, options)] == expected
    assert max(seen) > 1


def test_the_smallest_step_that_holds_the_rows() -> None:
    sizes = prompt_sizes(256, 8192)
    assert sizes[0] == (32, 8, 0)
    assert sizes[-1] == (8192, 128, 256)
    assert sizes == sorted(sizes, key=lambda size: size.tokens + size.decodes)
    assert prompt_sizes(4, 64) == [(32, 4, 0), (64, 4, 0)]
    assert PromptSize(64, 4, 2).holds(PromptSize(64, 4, 2))
    assert not PromptSize(64, 4, 2).holds(PromptSize(1, 1, 3))


@pytest.mark.parametrize(
    ("provider", "major", "head_dim", "heads", "page_size", "expected"),
    [
        ("cuda", 9, 128, 2, 16, True),
        ("cuda", 9, 64, 64, 64, True),
        ("triton", 9, 128, 2, 16, False),
        ("cuda", 10, 128, 2, 16, False),
        ("cuda", 9, 80, 2, 16, False),
        ("cuda", 9, 128, 65, 16, False),
        ("cuda", 9, 128, 2, 8, False),
        ("cuda", 9, 128, 2, 48, False),
    ],
)
def test_long_prompts_stay_with_the_compiled_kernel_where_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    major: int,
    head_dim: int,
    heads: int,
    page_size: int,
    expected: bool,
) -> None:
    monkeypatch.setitem(REGISTRY["prefill_attention"].active, "cuda", provider)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, 0))
    assert compiled_prompts(torch.device("cuda"), head_dim, heads, page_size) is expected
    assert not compiled_prompts(CPU, head_dim, heads, page_size)


def test_a_large_step_is_not_padded_far() -> None:
    """Its padding would take longer than the launches that a graph saves."""
    assert prompt_sizes(256, 16384)[-1] == (16384, 128, 256)
    assert suits(PromptSize(64, 4, 2), PromptSize(1, 1, 0))
    for tokens in (8192, 16384):
        room = PromptSize(tokens, 128, 256)
        assert suits(room, PromptSize(3 * tokens // 4, 1, 0))
        assert not suits(room, PromptSize(3 * tokens // 4 - 1, 1, 0))
    assert not suits(PromptSize(64, 4, 2), PromptSize(65, 1, 0))


def test_host_features_between_launches(plain: LLM, ahead: LLM) -> None:
    """A request that needs the host beside others that do not, some of which have options."""
    prompts, options = mixed(5)
    options[1] = SamplingParams(max_tokens=10, repetition_penalty=1.3, logprobs=2, ignore_eos=True)
    options[3] = SamplingParams(max_tokens=10, min_tokens=4, prompt_logprobs=1)
    expected, got = plain.generate(prompts, options), ahead.generate(prompts, options)
    assert [c.token_ids for c in got] == [c.token_ids for c in expected]
    for one, other in zip(got[1].logprobs or (), expected[1].logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)


def test_end_tokens_in_the_middle_of_a_launch(plain: LLM, ahead: LLM) -> None:
    prompt = prompt_ids(6)
    answer = plain.generate([prompt], SamplingParams(max_tokens=20, ignore_eos=True))[0].token_ids
    stop = SamplingParams(max_tokens=20, stop_token_ids=[answer[5]], ignore_eos=True)
    expected = plain.generate([prompt], stop)[0]
    got = ahead.generate([prompt], stop)[0]
    assert (got.token_ids, got.finish_reason) == (expected.token_ids, "stop")
    assert_idle(ahead)


def test_a_page_is_never_written_by_who_does_not_own_it(plain: LLM, folder: Path) -> None:
    """BR-068: three and five requests in batches of four and eight; every other byte of the cache is as before."""
    llm = build(folder, device="cpu", prefix_cache=False)
    runner = llm.engine.runner
    for count in (3, 5):
        runner.cache.data.fill_(float("nan"))
        prompts, options = mixed(count)
        expected = [c.token_ids for c in plain.generate(prompts, options)]
        assert [c.token_ids for c in llm.generate(prompts, options)] == expected
        taken = sum(-(-(len(p) + o.max_tokens - 1) // 4) for p, o in zip(prompts, options, strict=True))
        written = ~runner.cache.data.isnan().all(-1).all(-1).all(-1)  # (layers, 2, pages)
        assert int(written.any(0).any(0).sum()) <= taken
        slots = (~runner.cache.data[0, 0, :, 0, :, 0].isnan()).sum()
        assert int(slots) == sum(len(p) + o.max_tokens - 1 for p, o in zip(prompts, options, strict=True))


def test_buckets_are_powers_of_two_and_the_most() -> None:
    assert buckets(1) == [1]
    assert buckets(8) == [1, 2, 4, 8]
    assert buckets(100) == [1, 2, 4, 8, 16, 32, 64, 100]


def test_an_upload_keeps_its_columns_apart() -> None:
    upload = Upload({"a": ((3,), torch.int64), "b": ((2, 2), torch.int32), "c": ((1,), torch.float32)}, CPU)
    for turn in range(TURNS + 1):
        host = upload.begin()
        host["a"][:], host["b"][:], host["c"][:] = turn, [[1, 2], [3, turn]], turn / 2
        upload.send()
        assert upload.device["a"].tolist() == [turn] * 3
        assert upload.device["b"].tolist() == [[1, 2], [3, turn]]
        assert upload.device["c"].tolist() == [turn / 2]
    assert all(tensor.data_ptr() % 16 == upload.device["a"].data_ptr() % 16 for tensor in upload.device.values())


def test_the_host_writes_elsewhere_while_a_copy_waits() -> None:
    upload = Upload({"a": ((1,), torch.int64)}, CPU)
    places = {upload.begin()["a"].ctypes.data for _ in range(2 * TURNS)}
    assert len(places) == TURNS
    assert isinstance(upload.begin()["a"], np.ndarray)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_graphs_equal_single_steps(folder: Path, dtype: str) -> None:
    """The same kernels, captured and not: the same tokens, whatever is padded."""
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "max_num_seqs": 16, "max_num_batched_tokens": 64}
    captured = build(folder, **options)
    single = build(folder, **options)
    runner = GraphRunner(single.decoder, single.engine.runner.cache, 200, 16, 64, graphs=False)
    single.engine.runner = runner
    for count in (1, 3, 5, 9):
        prompts, params = mixed(count)
        expected = [c.token_ids for c in single.generate(prompts, params)]
        assert [c.token_ids for c in captured.generate(prompts, params)] == expected
    assert_idle(captured)


@pytest.mark.gpu
@pytest.mark.parametrize("rung", RUNGS[:5], ids=lambda rung: rung.name)
def test_operators_taken_apart_can_be_captured(folder: Path, rung: Rung) -> None:
    llm = build(folder, device="cuda", dtype="bf16", max_num_seqs=16, max_num_batched_tokens=64, graphs=False)
    cache, engine, found = llm.engine.runner.cache, llm.engine, []
    for graphs in (False, True):
        runner = GraphRunner(llm.decoder, cache, 200, 16, 64, graphs, 8, rung.recipe)
        llm.engine = Engine(runner, Scheduler(400, 4, 16, 64, False, 8), engine.tokenizer, engine.end_ids)
        found.append([c.token_ids for c in llm.generate(*mixed(5))])
    assert found[0] == found[1]


@pytest.mark.gpu
def test_nothing_is_allocated_and_nobody_waits_while_decoding(folder: Path) -> None:
    llm = build(folder, device="cuda", max_num_seqs=4)
    prompt, params = [prompt_ids(5)], SamplingParams(max_tokens=150, ignore_eos=True)
    llm.generate(prompt, params)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(7):
            llm.generate(prompt, params)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize(("room", "lengths"), [(1, (5,)), (4, (3, 3, 3, 9)), (16, (2,) * 15 + (7,))])
def test_chunks_of_one_token(plain: LLM, folder: Path, room: int, lengths: tuple[int, ...]) -> None:
    """Steps with room for one more token: a prompt's chunk beside sequences that decode draws nothing."""
    llm = LLM(str(folder), page_size=4, max_model_len=200, num_pages=400, device="cpu", max_num_batched_tokens=room)
    old = llm.engine
    runner = GraphRunner(llm.decoder, old.runner.cache, 200, min(16, room), room, graphs=False)
    scheduler = Scheduler(400, 4, min(16, room), room, False, runner.most_steps)
    llm.engine = Engine(runner, scheduler, old.tokenizer, old.end_ids)
    prompts = [prompt_ids(length, seed=place) for place, length in enumerate(lengths)]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    expected = [c.token_ids for c in plain.generate(prompts, params)]
    assert [c.token_ids for c in llm.generate(prompts, params)] == expected
    assert_idle(llm)


@pytest.mark.parametrize("recipe", [None, Recipe()], ids=["projections", "plain"])
def test_rows_that_sample_go_on_behind_the_last_attention(
    plain: LLM, folder: Path, monkeypatch: pytest.MonkeyPatch, recipe: Recipe | None
) -> None:
    """Of a prompt in chunks none, then one; its keys and values are those that the next tokens need."""
    llm = build(folder, device="cpu", prefix_cache=False)
    old, down = llm.engine, llm.decoder.layers[-1].down
    runner = GraphRunner(llm.decoder, old.runner.cache, 200, 16, 64, graphs=False, recipe=recipe)
    llm.engine = Engine(runner, Scheduler(400, 4, 16, 64, False, 8), old.tokenizer, old.end_ids)
    name = "linear" if recipe else "linear_add_"
    product, rows = getattr(ops, name), list[int]()

    def noted(x: torch.Tensor, *rest: torch.Tensor) -> object:
        if any(tensor is down.weight for tensor in rest):
            rows.append(len(x))
        return product(x, *rest)

    monkeypatch.setattr(ops, name, noted)
    prompt, params = [prompt_ids(150)], SamplingParams(max_tokens=20, ignore_eos=True)
    expected = plain.generate(prompt, params)[0].token_ids
    room = runner._prompts[0].room.rows
    assert llm.generate(prompt, params)[0].token_ids == expected
    assert rows[:3] == [room] * 3  # padded as in a graph, where all rows that there is room for draw
    runner._prompts = []
    rows.clear()
    assert llm.generate(prompt, params)[0].token_ids == expected
    assert rows[:3] == [0, 0, 1]
    assert_idle(llm)


@pytest.mark.gpu(count=2)
def test_a_model_on_the_second_gpu(plain: LLM, folder: Path) -> None:
    """Everything is on cuda:1 while cuda:0 is current, and has graphs of a model of its own."""
    build(folder, device="cuda:0", dtype="fp32")
    llm = build(folder, device="cuda:1", dtype="fp32", max_num_seqs=16, max_num_batched_tokens=64)
    prompts, options = mixed(5)
    torch.cuda.set_device(0)
    first = [c.token_ids for c in llm.generate(prompts, options)]
    assert first == [c.token_ids for c in llm.generate(prompts, options)]
    assert torch.cuda.current_device() == 0
    assert all(len(tokens) == option.max_tokens for tokens, option in zip(first, options, strict=True))
    greedy = [place for place, option in enumerate(options) if option.temperature == 0]
    expected = [c.token_ids for c in plain.generate(prompts, options)]
    assert [first[place] for place in greedy] == [expected[place] for place in greedy]
