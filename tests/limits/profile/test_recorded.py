"""The trace of transformers' decode that was recorded on an H200, as results keep it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rooflight.limits.ceilings import ceilings
from rooflight.limits.profile.analysis import Profile, read_profile

TRACE = Path(__file__).parents[3] / "results/h200/transformers_decode.json.gz"
LAYERS, STEPS = 28, 4


@pytest.fixture(scope="module")
def profile() -> Profile:
    return read_profile(TRACE, ceilings("h200"))


def test_the_host_is_what_a_step_waits_for(profile: Profile) -> None:
    assert profile.gpus[0] == profile.ceilings == "NVIDIA H200"
    assert len(profile.steps) == STEPS
    assert profile.host_share > 0.9
    assert profile.verdict.kind == "host"
    assert profile.launches.graphs == 0
    # Every kernel has its own launch, and nothing else launches.
    assert profile.launches.calls == profile.kernels


def test_families_count_the_layers(profile: Profile) -> None:
    calls = {family.name: family.calls for family in profile.families}
    assert calls["attention"] == calls["activation"] == LAYERS * STEPS
    assert calls["reduction"] == (4 * LAYERS + 1) * STEPS  # four norms a layer and the last one
    assert calls["matmul"] >= (7 * LAYERS + 1) * STEPS
    assert sum(family.share for family in profile.families) == pytest.approx(1)
    assert sum(family.total_us for family in profile.families) == pytest.approx(sum(r.total_us for r in profile.rows))


def test_the_five_most_expensive_have_walls_and_limits(profile: Profile) -> None:
    top = profile.rows[:5]
    assert [row.operators[0] for row in top] == ["aten::mm", "aten::mm", "aten::mul", "aten::copy_", "aten::mean"]
    assert {row.wall for row in top} == {"memory", "launch"}
    assert [row.total_us for row in top] == sorted((row.total_us for row in top), reverse=True)
    for row in top:
        assert row.limit_us is not None
        assert 0.4 < row.limit_us < row.mean_us
        assert row.at_limit == pytest.approx(row.limit_us / row.mean_us, rel=0.01)


def test_the_heads_product_reads_the_head(profile: Profile) -> None:
    """151,936 x 1024 in BF16 for one row: its limit is about the time of reading 311 MB."""
    head = max((row for row in profile.rows if row.operators[:1] == ("aten::mm",)), key=lambda row: row.limit_us or 0)
    assert head.calls == STEPS
    assert head.wall == "memory"
    assert head.limit_us == pytest.approx(311.2e6 / ceilings("h200").read_rate(311.2e6) * 1e6, rel=0.05)
    assert head.at_limit is not None
    assert head.at_limit > 0.8
