"""The traced step is the step that runs: the same operators, in the same order, and what is added appears."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from rooflight import LLM, SamplingParams, ops
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import GraphRunner
from rooflight.engine.scheduler import Scheduler
from rooflight.limits.trace import PLAIN, Call, Recorder, Step, trace
from rooflight.models.checkpoint.base import CheckpointError
from rooflight.models.decoder import DecoderLayer
from rooflight.models.load import load_config
from rooflight.models.recipe import Recipe, on_gpu

TINY = load_config("random:tiny")
ON_GPU = on_gpu(TINY.dtype, True)


def ours(calls: list[Call]) -> list[tuple[str, str, int | None]]:
    return [(call.operator, call.label, call.layer) for call in calls if call.operator in ops.REGISTRY]


def sizes(calls: list[Call]) -> list[tuple[str, str, tuple[int, ...]]]:
    """Of our operators and of the rows that are picked of what they computed."""
    picks = [call for call in calls if call.operator in ops.REGISTRY or call.operator == "index"]
    return [(call.operator, call.label, call.shape) for call in picks if call.dtype.is_floating_point]


def recorded(model: str | None, prompts: list[list[int]]) -> list[list[Call]]:
    """The calls of each engine step that answers the prompts with three tokens each."""
    llm = LLM(model, max_model_len=256)
    for prompt in prompts:
        llm.engine.submit(prompt, SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True))
    steps = []
    while llm.engine.busy:
        with Recorder(llm.engine.runner.decoder) as recorder:
            list(llm.engine.step())
        steps.append(recorder.calls)
    return steps


@pytest.mark.parametrize("model", ["random:tiny", None], ids=["tiny", "embedded"])
def test_traced_operators_are_those_of_a_real_step(model: str | None) -> None:
    try:
        config = load_config(model)
    except CheckpointError as error:
        pytest.skip(str(error))
    prefill, *decodes = recorded(model, [[1, 2, 3, 4, 5]])
    expected = trace(config, Step("prefill", 1, 5))
    assert ours(prefill) == ours(expected)
    assert sizes(prefill) == sizes(expected)
    assert sum(c.cost.flops for c in prefill) == sum(c.cost.flops for c in expected)
    assert len(decodes) == 2
    for number, step in enumerate(decodes):
        expected = trace(config, Step("decode", 1, 5 + number))
        assert ours(step) == ours(expected)
        real, traced = ([c.cost for c in calls if c.operator in ops.REGISTRY] for calls in (step, expected))
        # The recorder was given no lengths: the real tensors hold them.
        assert real == traced


def test_the_traced_decoder_of_a_gpu_is_that_of_its_runner() -> None:
    """Which runs here without graphs; one launch has several steps."""
    llm = LLM("random:tiny", max_model_len=256)
    runner = GraphRunner(llm.decoder, llm.engine.runner.cache, 256, 4, 64, graphs=False)
    scheduler = Scheduler(llm.engine.scheduler.pool.num_pages, 16, 4, 64, False, runner.most_steps)
    engine = Engine(runner, scheduler, None, frozenset())
    engine.submit([1, 2, 3, 4, 5], SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True))
    with Recorder(llm.decoder) as recorder:
        while engine.busy:
            list(engine.step())
    found = ours(recorder.calls)
    prompt, step = (ours(trace(TINY, s, ON_GPU)) for s in (Step("prefill", 1, 5), Step("decode", 1, 5)))
    assert found == prompt + 8 * step
    assert Counter(name for name, _, _ in step) == Counter(
        embedding=1, rms_norm_linear=3, qk_norm_rope_attention_=2, linear_add_=4, rms_norm_swiglu=2, sample=1,
    )  # fmt: skip
    assert {(name, label) for name, label, _ in step if label in ("qkv", "o", "gate_up", "down", "head")} == {
        ("rms_norm_linear", "qkv"), ("linear_add_", "o"), ("rms_norm_swiglu", "gate_up"), ("linear_add_", "down"),
        ("rms_norm_linear", "head"),
    }  # fmt: skip


def test_a_traced_prompt_is_that_of_the_gpus_runner_row_by_row() -> None:
    """Kernel by kernel, as a prompt runs that no graph is padded to."""
    llm = LLM("random:tiny", max_model_len=256)
    runner = GraphRunner(llm.decoder, llm.engine.runner.cache, 256, 4, 64, graphs=False)
    runner._prompts = []
    scheduler = Scheduler(llm.engine.scheduler.pool.num_pages, 16, 4, 64, False, runner.most_steps)
    engine = Engine(runner, scheduler, None, frozenset())
    for first in (1, 11):
        engine.submit(list(range(first, first + 5)), SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True))
    with Recorder(llm.decoder) as recorder:
        while engine.busy:
            list(engine.step())
    assert sizes(recorder.calls) == sizes(trace(TINY, Step("prefill", 2, 5), ON_GPU))


@pytest.mark.parametrize("recipe", [PLAIN, ON_GPU], ids=["plain", "on-gpu"])
def test_behind_the_last_attention_a_prompt_has_the_rows_that_are_wanted(recipe: Recipe) -> None:
    calls = trace(TINY, Step("prefill", 3, 7), recipe)
    rows = {(call.layer, call.label): call.shape[0] for call in calls if call.label and call.label != "embed"}
    assert {rows[0, label] for label in ("qkv", "o", "gate_up", "down")} == {21}
    assert [rows[1, label] for label in ("qkv", "o", "gate_up", "down")] == [21, 3, 3, 3]
    assert rows[None, "head"] == 3
    q_width = TINY.num_heads * TINY.head_dim
    assert [call.shape for call in calls if call.operator == "index"] == [(21, q_width), (21, TINY.hidden_size)]
    picked = [call.cost for call in calls if call.operator == "index"]
    row = TINY.dtype.itemsize * 3
    assert [cost.bytes_written for cost in picked] == [row * q_width, row * TINY.hidden_size]
    assert [cost.bytes_read for cost in picked] == [cost.bytes_written + 3 * 8 for cost in picked]


@pytest.mark.parametrize("step", [Step("decode", 3, 7), Step("prefill", 3, 1)], ids=["decode", "prompts of a token"])
def test_where_all_rows_are_wanted_none_are_picked(step: Step) -> None:
    assert "index" not in {call.operator for call in trace(TINY, step, ON_GPU)}


def test_a_batch_costs_what_it_costs_when_it_runs() -> None:
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]]
    *_, last = recorded("random:tiny", prompts)
    expected = trace(TINY, Step("decode", 3, 5))
    assert Counter((c.operator, c.label) for c in last if c.operator in ops.REGISTRY) == Counter(
        (c.operator, c.label) for c in expected if c.operator in ops.REGISTRY
    )
    real = sum(c.cost.flops for c in last if c.operator in ops.REGISTRY)
    assert real == sum(c.cost.flops for c in expected if c.operator in ops.REGISTRY)


def test_an_operator_added_to_the_decoder_appears(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ours(trace(TINY, Step("decode", 1, 7)))
    forward = DecoderLayer.forward

    def longer(self: DecoderLayer, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = forward(self, *args)
        return ops.silu_and_mul(torch.cat((hidden,) * 2, -1)), residual

    monkeypatch.setattr(DecoderLayer, "forward", longer)
    after = ours(trace(TINY, Step("decode", 1, 7)))
    assert Counter(after) - Counter(before) == Counter({("silu_and_mul", "", None): TINY.num_layers})
    assert len(after) == len(before) + TINY.num_layers


def test_pytorch_operators_in_the_decoder_appear_with_their_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of tensors, writing in place, products, several results; views and empty tensors do not."""
    forward, width = DecoderLayer.forward, TINY.hidden_size

    def longer(self: DecoderLayer, *args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, residual = forward(self, *args)
        torch.cat((hidden, hidden), -1)
        hidden.add_(hidden)
        torch.mm(hidden, hidden.new_empty(width, 5))
        torch.einsum("ti,oi->to", hidden, hidden.new_empty(7, width))
        hidden.float().topk(3)
        return hidden.view(-1, width), residual

    before = trace(TINY, Step("decode", 2, 7))
    monkeypatch.setattr(DecoderLayer, "forward", longer)
    found = trace(TINY, Step("decode", 2, 7))
    added = [call for call in found if call.operator not in {c.operator for c in before}]
    assert Counter(call.operator for call in added) == Counter(
        dict.fromkeys(("cat", "add_", "mm", "bmm", "topk"), TINY.num_layers)
    )
    row = 2 * width * 4
    costs = {call.operator: call.cost for call in added}
    assert (costs["cat"].bytes_read, costs["cat"].bytes_written) == (2 * row, 2 * row)
    assert (costs["add_"].bytes_read, costs["add_"].bytes_written) == (2 * row, row)
    assert (costs["mm"].bytes_read, costs["mm"].flops) == (row + width * 5 * 4, 2 * 2 * width * 5)
    assert costs["bmm"].flops == 2 * 2 * width * 7
    assert costs["topk"].bytes_written == 2 * 3 * (4 + 8)


def test_every_weight_is_read_once_in_a_step() -> None:
    for name in ("qwen3-0.6b", "qwen3-8b", "llama-3.2-1b", "tiny"):
        config = load_config(f"random:{name}")
        for step in (Step("decode", 1, 0), Step("decode", 5, 100), Step("prefill", 2, 33)):
            read = sum(call.weight_elements for call in trace(config, step))
            assert read * config.dtype.itemsize == config.weight_bytes_per_token()


@pytest.mark.parametrize(("phase", "length"), [("decode", 101), ("prefill", 100)])
def test_keys_and_values_are_read_once(phase: str, length: int) -> None:
    read = sum(call.kv_elements for call in trace(TINY, Step(phase, 3, 100)))
    assert read * TINY.dtype.itemsize == 3 * length * TINY.kv_bytes_per_token()


def test_the_newest_key_is_not_read_back_where_attention_writes_it() -> None:
    read = sum(call.kv_elements for call in trace(TINY, Step("decode", 3, 100), ON_GPU))
    assert read * TINY.dtype.itemsize == 3 * 100 * TINY.kv_bytes_per_token()
    assert sum(call.kv_elements for call in trace(TINY, Step("decode", 3, 0), ON_GPU)) == 0


def test_a_window_bounds_what_is_read() -> None:
    windowed = replace(TINY, sliding_windows=(16, 0))
    per_layer = TINY.kv_bytes_per_token() // TINY.dtype.itemsize // TINY.num_layers
    for recipe, own in ((PLAIN, 1), (ON_GPU, 0)):
        read = sum(call.kv_elements for call in trace(windowed, Step("decode", 1, 1000), recipe))
        assert read == per_layer * (15 + 1000 + 2 * own)


def test_labels_and_layers() -> None:
    calls = trace(load_config("random:qwen3-0.6b"), Step("decode", 1, 10))
    products = Counter(call.label for call in calls if call.operator == "linear")
    assert products == {"qkv": 28, "o": 28, "gate_up": 28, "down": 28, "head": 1}
    assert [call.layer for call in calls if call.label == "qkv"] == list(range(28))
    assert calls[0].operator == "embedding"
    assert calls[-1].operator == "sample"


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Step("encode", 1, 5), "phase must be one of decode, prefill, was 'encode'"),
        (Step("decode", 0, 5), "batch must be from 1 to 1,000,000 sequences, was 0"),
        (Step("decode", 1, -1), "context must be from 0 to 4,095 tokens for this model's decode, was -1"),
        (Step("decode", 1, 4096), "context must be from 0 to 4,095 tokens for this model's decode, was 4,096"),
        (Step("prefill", 1, 0), "context must be from 1 to 4,096 tokens for this model's prefill, was 0"),
        (
            Step("prefill", 1, 1_000_000),
            "context must be from 1 to 4,096 tokens for this model's prefill, was 1,000,000",
        ),
    ],
)
def test_steps_that_cannot_be(step: Step, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        trace(TINY, step)


def test_large_batches_take_no_memory() -> None:
    calls = trace(TINY, Step("decode", 100_000, 4000))
    assert sum(call.kv_elements for call in calls) * 4 == 100_000 * 4001 * TINY.kv_bytes_per_token()
