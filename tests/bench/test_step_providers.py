"""Providers of a step's operators: calls are those of the step, each runs with its provider, and the card is asked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.bench import interleaved, results, step_providers
from rooflight.bench.interleaved import interleaved_us
from rooflight.bench.measurement import Spread
from rooflight.bench.step_operators import BUILDERS, sets_of
from rooflight.bench.step_providers import OTHERS, STEPS, TRACED, calls, measure, providers_of
from rooflight.limits.bounds import memory_us
from rooflight.limits.ceilings import ceilings
from rooflight.limits.scenario import Placed
from rooflight.limits.trace import Recorder, Step
from rooflight.models.decoder import Decoder
from rooflight.models.load import load_config
from rooflight.ops.contract import REGISTRY, _forced
from tests.bench.fake_device import NODE_US, FakeDevice

BF16 = replace(load_config("random:tiny"), dtype=torch.bfloat16)
QWEN = replace(load_config("random:qwen3-0.6b"), dtype=torch.bfloat16)
SMALL = (Step("decode", 2, 20), Step("decode", 3, 40), Step("prefill", 1, 24))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_providers, "STEPS", SMALL)


def test_the_calls_are_those_of_the_steps_each_once() -> None:
    found = list(calls(QWEN))
    sizes = {name: [(s.phase, s.batch, s.context) for s, call in found if call.operator == name] for name in TRACED}
    decodes = [("decode", step.batch, step.context) for step in STEPS[:4]]
    prompts = [("prefill", 1, 512), ("prefill", 1, 4096)]
    assert sizes == {
        "qk_norm_rope_attention_": decodes,
        "decode_attention": decodes,
        "prefill_attention": prompts,
        "qk_norm_rope_cache_": decodes + prompts,
        "silu_and_mul": decodes + prompts,
        "rope_": decodes + prompts,
        "embedding": decodes + prompts,
        "sample": decodes,  # a prompt's one row is that of the first
    }
    assert [call.shape for _, call in found if call.operator == "penalize_logits_"] == [
        (batch, 151936) for batch in (1, 8, 64, 256)
    ]
    assert sum(len(steps) for steps in sizes.values()) + 4 == len(found)


def test_bytes_by_hand() -> None:
    """64 sequences of 1025 tokens in 65 pages, 8 KV heads of 128, keys and values, two bytes; queries of 16 heads."""
    found = {call.operator: call.cost for step, call in calls(QWEN) if step == Step("decode", 64, 1024)}
    cache = 64 * 1025 * 2 * 8 * 128 * 2
    queries, table = 64 * 16 * 128 * 2, 4 * 64 * 65
    assert found["decode_attention"].bytes_read == cache + queries + table
    assert found["silu_and_mul"].bytes == 64 * 3 * 3072 * 2
    logits = 64 * 151936
    assert found["penalize_logits_"].bytes == logits * (4 + 4 + 1 + 4) + 64 * 20 + 64 * 16 * 12


@pytest.mark.usefixtures("small")
def test_a_builder_calls_what_was_traced() -> None:
    """With the same bytes, by the tensors that it was given."""
    for step, call in calls(BF16):
        item = Placed(call, call.cost, "bf16")
        with torch.no_grad(), Recorder(Decoder(BF16, device="meta")) as recorder:
            launches = (BUILDERS | OTHERS)[call.operator](BF16, step, item, FakeDevice())
            made = len(recorder.calls)
            launches[0]()
        found = recorder.calls[made]
        assert (found.operator, found.shape, found.dtype) == (call.operator, call.shape, call.dtype)
        assert found.cost == call.cost, call.operator


def test_penalties_are_of_other_sequences_in_each_turn_and_leave_logits_alone() -> None:
    (call,) = (call for step, call in calls(BF16) if step == STEPS[1] and call.operator == "penalize_logits_")
    device = FakeDevice(l2_bytes=100_000)
    launches = OTHERS["penalize_logits_"](BF16, STEPS[1], Placed(call, call.cost, "fp32"), device)
    assert len(launches) == sets_of(8 * BF16.vocab_size * 5, 100_000) > 2
    seen: list[tuple[torch.Tensor, ...]] = []
    original = ops.penalize_logits_
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "penalize_logits_", lambda *args: (seen.append(args), original(*args)))
        for launch in launches:
            launch()
    assert torch.cat([args[-1] for args in seen]).tolist() == list(range(8 * len(launches)))
    logits, counts, mask, repetition, *_ = seen[0]
    assert logits.abs().max() < 1e-6
    assert counts.shape == mask.shape == (8 * len(launches), BF16.vocab_size)
    assert counts.sum() > 0
    assert repetition.tolist() == [1.0] * 8


def test_heads_that_are_turned_again_and_again_keep_their_length() -> None:
    (call,) = (call for step, call in calls(BF16) if step == STEPS[1] and call.operator == "rope_")
    seen: list[torch.Tensor] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, "rope_", lambda *args: (seen.append(args[0].norm(dim=2)), ops.rope(*args)))
        (launch,) = OTHERS["rope_"](BF16, STEPS[1], Placed(call, call.cost, "bf16"), FakeDevice())
        turned, _ = launch()[1]  # type: ignore[index]
    torch.testing.assert_close(turned.norm(dim=2), seen[0], rtol=0.01, atol=0)


def test_providers_are_the_kernels_that_are_here(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("embedding", "rope_", "sample"):
        there = REGISTRY[name].providers["ref"]
        monkeypatch.setattr(REGISTRY[name], "providers", {"ref": there, "triton": there, "cuda": there})
    assert providers_of("rope_") == ["cuda", "triton"]
    assert providers_of("embedding") == ["cuda", "triton", "ref"]
    monkeypatch.setattr(REGISTRY["sample"], "providers", {"ref": there})
    assert providers_of("sample") == []


def fakes(device: FakeDevice, fails: str = "") -> Callable[..., Any]:
    """Launches that take 2, 5 or 9 us by the backend that is asked for while they are captured."""
    extra = {"cuda": 2.0, "triton": 5.0, "ref": 9.0}

    def build(config: Any, step: Step, item: Placed, given: FakeDevice) -> list[Callable[[], object]]:
        def launch() -> None:
            backend = _forced["backend"]
            assert backend is not None
            if backend == fails:
                raise ValueError("head_dim must be 64, was 16\nand more")
            device.launch({}, fixed_us=extra[backend])

        return [launch, launch]

    return build


def faked(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, fails: str = "") -> None:
    monkeypatch.setattr(step_providers, "STEPS", SMALL)
    for table in ("BUILDERS", "OTHERS"):
        monkeypatch.setattr(step_providers, table, dict.fromkeys((*TRACED, "penalize_logits_"), fakes(device, fails)))
    names = {"embedding": ["cuda", "ref"], "sample": ["triton"], "silu_and_mul": []}
    monkeypatch.setattr(step_providers, "providers_of", lambda name: names.get(name, ["cuda", "triton"]))


def test_every_provider_is_timed_as_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    device, card = FakeDevice(), ceilings("h200")
    faked(monkeypatch, device)
    said: list[str] = []
    rows, missing = measure(QWEN, card, device, lambda what, done, of: said.append(what))
    times = {"cuda": NODE_US + 2, "triton": NODE_US + 5, "ref": NODE_US + 9}
    assert all(row.us.median == pytest.approx(times[row.provider], rel=0.02) for row in rows)
    by_operator = {name: [row.provider for row in rows if row.operator == name] for name in TRACED}
    assert by_operator["decode_attention"] == ["cuda", "triton"] * 2
    assert by_operator["embedding"] == ["cuda", "ref"] * 3
    assert by_operator["sample"] == ["triton"] * 3  # the prompt has one row
    assert missing == {"silu_and_mul": "no kernel of it is here; `rooflight info` says why"}
    assert said[0] == "measuring qk_norm_rope_attention_"
    assert said[-1] == "measuring operators"
    row = next(row for row in rows if row.operator == "sample" and row.batch == 3)
    cost = next(call.cost for step, call in calls(QWEN) if call.operator == "sample" and step.batch == 3)
    assert (row.phase, row.context, row.bytes) == ("decode", 40, cost.bytes)
    floor = memory_us(cost.bytes_read, cost.bytes_written, card, 1e12)
    assert row.limit_us == pytest.approx(max(floor, card.node_us))
    assert row.wall == ("memory" if floor > card.node_us else "launch")


def test_a_provider_that_refuses_is_named_and_the_others_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    faked(monkeypatch, device, fails="cuda")
    rows, missing = measure(QWEN, ceilings("h200"), device, lambda *_: None)
    assert {row.provider for row in rows} == {"triton", "ref"}
    assert missing["rope_.cuda, prefill 1 24"] == "head_dim must be 64, was 16"
    device.working = False
    with pytest.raises(ValueError, match="head_dim must be 64"):
        measure(QWEN, ceilings("h200"), device, lambda *_: None)


def test_contenders_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    order: list[float] = []
    timed = interleaved.replay_us

    def noted(given: FakeDevice, graph: Any, replays: int) -> float:
        order.append(timed(given, graph, replays))
        return order[-1]

    monkeypatch.setattr(interleaved, "replay_us", noted)
    found, refused = interleaved_us(device, {"a": [device.kernel({})], "b": [device.kernel({}, fixed_us=999)]})
    assert refused == {}
    assert found["a"].median == pytest.approx(NODE_US, rel=0.02)
    assert found["b"].median == pytest.approx(NODE_US + 999, rel=0.02)
    assert len(order) == 2 * interleaved.ROUNDS
    assert interleaved.ROUNDS >= 7
    assert all(first < second for first, second in zip(order[::2], order[1::2], strict=True))


def test_results(tmp_path: Path) -> None:
    row = step_providers.ProviderRow("rope_", "decode", 8, 1024, "cuda", Spread(2.0, 1.9, 2.2), 800, 0.5, "launch")
    report = step_providers.ProvidersReport(
        "a model", {"device": "NVIDIA Test 1"}, "a test's", (row,), {"b.cuda": "no"}
    )
    data = report.as_data()
    assert data["benchmark"] == "step_providers"
    assert data["setup"] == {"model": "a model", "dtype": "bf16", "rounds": interleaved.ROUNDS}
    assert data["missing"] == {"b.cuda": "no"}
    _, table = results.write(tmp_path, "step_providers", data)
    assert table.read_text().splitlines() == [
        "operator,phase,batch,context,provider,us.median,us.low,us.high,bytes,limit_us,wall",
        "rope_,decode,8,1024,cuda,2.0,1.9,2.2,800,0.5,launch",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        step_providers.run("random:tiny")
