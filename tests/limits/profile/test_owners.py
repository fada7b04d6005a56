"""Kernels find their operators by order and kind."""

from __future__ import annotations

import pytest

from rooflight.limits.explanation import name_of, placed_calls
from rooflight.limits.profile.owners import ADVANCE, RUNNER, kind_of, owners
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.load import load_config
from tests.limits.profile import recorded

QWEN = load_config("random:qwen3-0.6b")


@pytest.mark.parametrize(("phase", "steps"), [("decode", 1), ("decode", 8), ("prefill", 1)])
@pytest.mark.parametrize(
    "kernels",
    [recorded.FEW_ROWS, recorded.SOME_ROWS, recorded.MANY_ROWS, recorded.TWO_KERNELS],
    ids=["few", "some", "many", "two"],
)
def test_every_kernel_of_a_launch_is_given_to_its_call(
    phase: str, kernels: dict[str, tuple[str, ...]], steps: int
) -> None:
    """Each to the very call, not only to one of the same operator."""
    placed = placed_calls(QWEN, Scenario(Step(phase, 1, 100), "h200"))
    ends = [ADVANCE] if phase == "decode" else []
    operators = [RUNNER, *([item.call.operator for item in placed] + ends) * steps, RUNNER]
    names, expected, place = [recorded.UPLOAD, *recorded.BEFORE], [0] * 4, 1
    for _ in range(steps):
        for item in placed:
            own = kernels[item.call.operator]
            names += own
            expected += [place] * len(own)
            place += 1
        if ends:
            names.append(recorded.ADVANCE)
            expected.append(place)
            place += 1
    found = owners([*names, recorded.DOWNLOAD], operators)
    assert found == [*expected, place]
    assert operators[place] == RUNNER


def test_an_unknown_kernel_stays_with_the_one_in_front_of_it() -> None:
    calls = ["rms_norm_linear", "qk_norm_rope_cache_", "decode_attention"]
    assert owners([recorded.NVJET, "mystery", recorded.ROPE, "mystery", recorded.RING, "mystery"], calls) == [
        0, 0, 1, 1, 2, 2,
    ]  # fmt: skip


def test_an_unknown_kernel_serves_a_call_that_has_no_other() -> None:
    calls = ["rms_norm_linear", "qk_norm_rope_cache_", "decode_attention"]
    assert owners([recorded.NVJET, "a_new_kernel", recorded.RING], calls) == [0, 1, 2]


def test_calls_without_kernels_are_passed() -> None:
    calls = ["embedding", "all_reduce", "rms_norm_linear", "linear_add_", "rms_norm_swiglu"]
    assert owners([recorded.TAKE, recorded.FEW.format(1, 2)], calls) == [0, 4]
    assert owners([], calls) == []
    with pytest.raises(ValueError, match="operators must name at least one call, were none"):
        owners(["k"], [])


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        (recorded.FEW.format(1, 0), "norm product"),
        (recorded.FEW.format(1, 2), "norm gate product"),
        (recorded.FEW.format(0, 1), "product sum"),
        (recorded.FEW.format(0, 0), "product"),
        (recorded.SKINNY.format(0, 0), "product"),
        (recorded.SKINNY.format(2, 0), "product"),
        (recorded.SKINNY.format(0, 1), "product sum"),
        (recorded.SKINNY.format(0, 3), "product sum"),
        (recorded.SKINNY.format(0, 2), "gate product"),
        (recorded.SKINNY.format(2, 2), "gate product"),
        (recorded.NVJET, "product"),
        (recorded.SPLIT, "sum of parts"),
        (recorded.NORM, "norm"),
        (recorded.GATE, "gate"),
        (recorded.ROPE, "rope"),
        (recorded.RING, "attention"),
        (recorded.STEP, "attention"),
        ("_prefill", "attention"),
        ("_merge", "attention"),
        ("_gather", "sample"),
        ("_draw", "sample"),
        (recorded.ADVANCE, "advance"),
        (recorded.TAKE, "gather"),
        (recorded.INDEX, "gather"),
        (recorded.FLOAT, "copy"),
        ("Memcpy DtoD (Device -> Device)", "copy"),
        (recorded.UPLOAD, "upload"),
        (recorded.DOWNLOAD, "download"),
        ("Memset (Device)", ""),
        ("something else", ""),
    ],
)
def test_kinds(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind


def test_names_of_the_helper_are_the_tables() -> None:
    """What the tests of steps rest on."""
    names = {name for _, name in recorded.steps_of(QWEN, Scenario(Step("decode", 1, 5), "h200"), recorded.FEW_ROWS, 1)}
    calls = placed_calls(QWEN, Scenario(Step("decode", 1, 5), "h200"))
    assert names == {name_of(item.call) for item in calls} | {"runner", "advance_decode_"}
