"""Operators of a step alone: they are the calls of the step, cold where the step is, and timed as they take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from rooflight.bench import step_operators
from rooflight.bench.step_operators import ATTENTIONS, BUILDERS, closures, halved, sets_of, time_us
from rooflight.limits.ceilings import ceilings
from rooflight.limits.explanation import placed_calls
from rooflight.limits.scenario import COLLECTIVES, Placed, Scenario
from rooflight.limits.trace import Recorder, Step
from rooflight.models.decoder import Decoder
from rooflight.models.load import load_config
from tests.bench.fake_device import COLD_RATE, HOT_RATE, NODE_US, FakeDevice

TINY = load_config("random:tiny")
BF16 = replace(TINY, dtype=torch.bfloat16)


def calls(step: Step, config: Any = BF16) -> list[Placed]:
    """Of each operator and weight one."""
    placed = placed_calls(config, Scenario(step, "h200"))
    return list(
        {
            (item.call.operator, item.call.label): item for item in placed if item.call.operator not in COLLECTIVES
        }.values()
    )


@pytest.mark.parametrize("step", [Step("decode", 3, 37), Step("prefill", 2, 21)], ids=["decode", "prefill"])
def test_a_builder_calls_what_the_step_calls(step: Step) -> None:
    """The same operator with the same bytes and operations, by the tensors that it was given."""
    apart = Scenario(step, "h200", tp=2)  # of several GPUs, where attention has its step in front of it
    for item in [*calls(step), *(item for item in placed_calls(BF16, apart) if item.call.operator in ATTENTIONS)]:
        with torch.no_grad(), Recorder(Decoder(BF16, device="meta")) as recorder:
            launch = closures(BF16, step, item, FakeDevice())[0]
            made = len(recorder.calls)
            launch()
        found = recorder.calls[made]  # under inference_mode PyTorch's composites would not come apart
        assert found.operator == item.call.operator
        assert (found.shape, found.dtype) == (item.call.shape, item.call.dtype)
        assert found.cost == item.call.cost, item.call.operator


def test_every_operator_of_a_step_has_a_builder() -> None:
    operators = {item.call.operator for step in (Step("decode", 1, 9), Step("prefill", 1, 9)) for item in calls(step)}
    assert operators <= set(BUILDERS)


def test_weights_and_caches_go_round_and_what_was_just_written_does_not() -> None:
    step, device = Step("decode", 2, 100), FakeDevice(l2_bytes=100_000)
    many = {f"{i.call.operator} {i.call.label}": len(closures(BF16, step, i, device)) for i in calls(step)}
    page = 2 * TINY.num_kv_heads * 16 * TINY.head_dim * 2  # bytes of keys and values
    assert many["qk_norm_rope_attention_ q_norm"] == min(300_000 // (2 * 7 * page) + 2, 256)
    qkv = (TINY.num_heads + 2 * TINY.num_kv_heads) * TINY.head_dim * TINY.hidden_size * 2
    assert many["rms_norm_linear qkv"] == min(300_000 // qkv + 2, 256)
    assert many["sample "] == many["_to_copy "] == 1
    prompt = Step("prefill", 2, 100)
    (write,) = (item for item in calls(prompt) if item.call.operator == "qk_norm_rope_cache_")
    assert len(closures(BF16, prompt, write, device)) == 1


def test_sets_exceed_three_times_the_cache() -> None:
    assert sets_of(10, 100) == 32
    assert sets_of(1000, 100) == 2
    assert sets_of(1, 10**9) == 256


def test_a_launch_is_timed_as_it_takes_in_a_graph() -> None:
    """Cold where the buffers of a turn exceed the cache, hot where one is used again and again."""
    device = FakeDevice(l2_bytes=10_000)
    one = device.kernel({"a": 4000})
    assert time_us(device, [one]) == pytest.approx(NODE_US + 4000 / HOT_RATE, rel=0.02)
    turn = [device.kernel({f"w{index}": 4000}) for index in range(9)]
    assert time_us(device, turn) == pytest.approx(NODE_US + 4000 / COLD_RATE, rel=0.02)


def test_points_of_both_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    class Device(FakeDevice):
        def warm_clocks(self) -> None:
            self.warm = True

    def timed(device: FakeDevice, launches: list[Callable[[], object]]) -> float:
        launches[0]()
        return 7.0

    device = Device()
    monkeypatch.setattr(step_operators, "CudaDevice", lambda: device)
    monkeypatch.setattr(step_operators, "time_us", timed)
    monkeypatch.setattr(step_operators, "DECODES", ((1, 20), (2, 20)))
    said: list[str] = []
    points = step_operators.measure(BF16, ceilings("h200"), ("decode",), lambda what, done, of: said.append(what))
    assert device.warm
    assert {point.us for point in points} == {7.0}
    assert said[-1] == "measuring operators"
    shapes = {(p.operator, p.label, p.shape) for p in points}
    half = halved(BF16)
    for rows in (1, 2):
        for config in (BF16, half):
            assert ("linear_add_", "down", (rows, config.hidden_size)) in shapes
    assert "prefill_attention" not in {point.operator for point in points}
    monkeypatch.setattr(step_operators, "PREFILLS", (24,))
    prompts = step_operators.measure(BF16, ceilings("h200"), ("prefill",), lambda *_: None)
    for rows in (24, 1):  # of all layers but the last, and behind the last one's attention
        assert {"o", "gate_up", "down"} <= {point.label for point in prompts if point.shape[0] == rows}
    windowed = replace(BF16, sliding_windows=(8, 0))
    found = step_operators.measure(windowed, ceilings("h200"), ("decode",), lambda *_: None)
    assert "qk_norm_rope_attention_" in {point.operator for point in points}
    assert not step_operators.ATTENTIONS & {point.operator for point in found}
