"""A recorded step joined to its explanation: figures that follow from times that are known."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest

from rooflight.limits.ceilings import ceilings
from rooflight.limits.explanation import explain
from rooflight.limits.laws import Law
from rooflight.limits.profile.step import Recorded, profile_step
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.load import load_config
from rooflight.models.recipe import Recipe, on_gpu
from tests.limits.profile import recorded
from tests.limits.profile.recorded import FEW_ROWS, MANY_ROWS, SOME_ROWS, launch_of, recording, steps_of

QWEN = load_config("random:qwen3-0.6b")
DECODE = Scenario(Step("decode", 1, 1024), "h200")
H200 = ceilings("h200")


def test_a_decode_step_of_few_rows() -> None:
    found = profile_step("qwen", QWEN, DECODE, recording(QWEN, DECODE))
    per_step = Counter(name for _, name in steps_of(QWEN, DECODE, FEW_ROWS, 1))
    launch = len(steps_of(QWEN, DECODE, FEW_ROWS, 8))
    assert found.step_us == pytest.approx(2 * (launch - 2) / 8)  # 2 us each, overlapped, none twice; no host's copies
    assert found.busy_us == pytest.approx(found.step_us)
    assert found.busy_of_step == pytest.approx(1)
    assert found.busy_of_wall == pytest.approx(0.8)
    assert found.kernels_per_step == pytest.approx(launch / 8)
    assert found.host_calls_per_step == 3 / 8
    for name in per_step.keys() - {"runner"}:
        row = found.row(name)
        assert row.measured_us == pytest.approx(2 * per_step[name]), name
        assert row.kernels == per_step[name]
    assert found.row("runner").measured_us == pytest.approx(2 * 3 / 8)
    assert sum(row.share for row in found.rows) == pytest.approx(1)
    assert sum(row.measured_us or 0 for row in found.rows) == pytest.approx(found.step_us)


def test_limits_and_work_are_those_of_the_explanation() -> None:
    found, explained = profile_step("q", QWEN, DECODE, recording(QWEN, DECODE)), explain("q", QWEN, DECODE)
    for row in explained.rows:
        own = found.row(row.name)
        assert (own.calls, own.bytes, own.flops, own.wall) == (row.calls, row.bytes, row.flops, row.wall)
        assert own.limit_us == pytest.approx(row.limit_us)
    qkv = found.row("rms_norm_linear qkv")
    assert qkv.at_limit == pytest.approx(51 / 56, abs=0.02)  # 235 MB at 4.6 TB/s, measured 28 times 2 us
    assert (found.graph_us, found.stream_us) == (explained.graph_us, explained.stream_us)
    assert found.row("advance_decode_").limit_us is None
    assert found.row("advance_decode_").wall == "launch"


def test_one_kernel_of_two_products_is_two_rows() -> None:
    found = profile_step("q", QWEN, DECODE, recording(QWEN, DECODE))
    few = [(k.operator, k.count) for k in found.kernels if k.name == "few_rows_linear"]
    assert Counter(dict(few)) == Counter(
        {
            "rms_norm_linear qkv": 28,
            "linear_add_ o": 28,
            "rms_norm_swiglu gate_up": 28,
            "linear_add_ down": 28,
            "rms_norm_linear head": 1,
        }
    )
    assert [k.us for k in found.kernels] == sorted((k.us for k in found.kernels), reverse=True)


def test_an_operator_of_several_kernels_is_one_row() -> None:
    scenario = Scenario(Step("decode", 512, 1024), "h200")
    found = profile_step("q", QWEN, scenario, recording(QWEN, scenario, MANY_ROWS))
    gate_up = found.row("rms_norm_swiglu gate_up")
    assert (gate_up.calls, gate_up.kernels, gate_up.measured_us) == (28, 84, pytest.approx(168))
    own = {k.name: k.count for k in found.kernels if k.operator == "rms_norm_swiglu gate_up"}
    assert own == {"rms_norm_in_registers": 28, recorded.NVJET: 28, "silu_and_mul": 28}


def test_norms_between_products_are_those_that_ran() -> None:
    """On Hopper with its kernel, on other cards, and where the decoder's recipe says so."""

    def rows(gpu: str, kernels: Mapping[str, tuple[str, ...]], recipe: Recipe | None = None) -> dict[str, float]:
        scenario = Scenario(Step("decode", 64, 1024), gpu)
        seen = recording(QWEN, scenario, kernels, recipe=recipe)
        found = profile_step("q", QWEN, scenario, seen, recipe=recipe)
        return {row.name: row.kernels for row in found.rows}

    hopper, ampere = rows("h200", SOME_ROWS), rows("a100", MANY_ROWS)
    assert (hopper["linear_add_scale_ o"], hopper["scaled_swiglu gate_up"], hopper["scaled_linear qkv"]) == (28, 28, 27)
    assert (ampere["linear_add_ o"], ampere["rms_norm_swiglu gate_up"]) == (56, 84)
    assert not [name for name in ampere if "scale" in name]
    without = rows("h200", MANY_ROWS, replace(on_gpu(QWEN.dtype, True), scaled=False))
    assert without == ampere


def test_a_prompt() -> None:
    scenario = Scenario(Step("prefill", 1, 1024), "h200")
    found = profile_step("q", QWEN, scenario, recording(QWEN, scenario, MANY_ROWS, steps=1))
    assert found.row("prefill_attention").measured_us == pytest.approx(56)
    assert found.row("index").kernels == 2  # of attention's result and of the residual, in the last layer
    assert found.row("linear_add_ down").kernels == 56
    assert found.row("index").measured_us == pytest.approx(4)
    assert found.sequence_tokens == 1024
    assert "advance_decode_" not in {row.name for row in found.rows}


def test_few_rows_of_a_prompts_last_layer_are_foretold_by_the_law_of_few() -> None:
    names = ("embedding", "rms_norm_linear", "rms_norm_swiglu", "linear_add_", "sample", "index", "_to_copy")
    names += ("qk_norm_rope_cache_", "prefill_attention")
    laws = {(name, few): Law(name, few, 3, 1.0 if few else 10.0, 1e9, 1e9) for name in names for few in (True, False)}
    scenario = Scenario(Step("prefill", 1, 1024), "h200")
    found = profile_step("q", QWEN, scenario, recording(QWEN, scenario, MANY_ROWS, steps=1), laws)
    for name in ("linear_add_ o", "rms_norm_swiglu gate_up", "linear_add_ down"):
        assert found.row(name).foretold_us == pytest.approx(27 * 10 + 1), name
    assert found.row("rms_norm_linear qkv").foretold_us == pytest.approx(28 * 10)
    assert found.row("rms_norm_linear head").foretold_us == pytest.approx(1)


def test_foretold_beside_measured() -> None:
    """Laws that say 3 us a call whatever it is: all operators but those without a kernel and a law of their own."""
    names = ("embedding", "rms_norm_linear", "rms_norm_swiglu", "linear_add_", "sample")
    laws = {(name, True): Law(name, True, 3, 3.0, 1e9, 1e9) for name in (*names, "_to_copy")}
    found = profile_step("q", QWEN, DECODE, recording(QWEN, DECODE), laws)
    assert found.row("linear_add_ o").foretold_us == pytest.approx(84)
    assert found.row("linear_add_ o").error == pytest.approx(0.5)
    assert found.lawless == ("qk_norm_rope_attention_",)
    attention = found.row("qk_norm_rope_attention_")
    assert attention.foretold_us == pytest.approx(attention.limit_us, rel=0.02)
    calls = 28 * 4 + 4  # layers; embedding, head, cast, sampler
    expected = 3 * calls + attention.foretold_us + H200.node_us
    assert found.foretold_us == pytest.approx(expected)
    assert found.error == pytest.approx(expected / found.step_us - 1)
    without = profile_step("q", QWEN, DECODE, recording(QWEN, DECODE))
    assert (without.foretold_us, without.error, without.row("sample").error) == (None, None, None)


def test_launches_of_other_lengths_do_not_count() -> None:
    eight, one = recording(QWEN, DECODE, us=2.0), recording(QWEN, DECODE, steps=1, us=50.0)
    mixed = replace(eight, launches=(*one.launches, *eight.launches))
    found = profile_step("q", QWEN, DECODE, mixed)
    assert found.launches == 2
    assert found.step_us == profile_step("q", QWEN, DECODE, eight).step_us
    with pytest.raises(ValueError, match=r"the recording must hold a launch of 4 steps, had \[1, 8\]"):
        profile_step("q", QWEN, DECODE, replace(mixed, steps=4))


def test_gaps_are_idle_and_a_part_of_what_follows() -> None:
    names = [name for name, _ in steps_of(QWEN, DECODE, FEW_ROWS, 8)]
    gapped = Recorded((launch_of(names, us=2.0, overlap=-0.5),), 8, 1e4, 3.0)
    found = profile_step("q", QWEN, DECODE, gapped)
    attention = next(kernel for kernel in found.kernels if kernel.operator == "qk_norm_rope_attention_")
    assert (attention.us, attention.idle_us) == (pytest.approx(56), pytest.approx(14))
    assert found.busy_of_step == pytest.approx(0.75, abs=0.01)


def test_data_is_json_with_the_ratios() -> None:
    data = json.loads(json.dumps(profile_step("q", QWEN, DECODE, recording(QWEN, DECODE)).as_data()))
    assert data["busy_of_wall"] == pytest.approx(0.8)
    qkv = next(row for row in data["rows"] if row["name"] == "rms_norm_linear qkv")
    assert qkv["at_limit"] == pytest.approx(qkv["limit_us"] / qkv["measured_us"])
    assert len(data["kernels"]) == 17
