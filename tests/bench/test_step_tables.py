"""The tables of docs/profile.md, rendered from a report of steps that never ran."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from rooflight.bench import results
from rooflight.limits.trace import Step
from tests.bench.step_reports import report

SCRIPTS = Path(__file__).parents[2] / "scripts"
DECODE, PROMPT = Step("decode", 1, 1024), Step("prefill", 1, 1024)


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setattr(importlib.import_module("decode_tables"), "RESULTS", tmp_path)
    return importlib.import_module("step_tables")


def test_without_results_there_is_no_table(tables: Any) -> None:
    assert [table() for table in tables.TABLES.values()] == [""] * 5


def test_profile(tables: Any, tmp_path: Path) -> None:
    found = report(DECODE, PROMPT)
    results.write(tmp_path, "profile", found.as_data("profile"))
    decode, prompt = found.profiles
    lines = tables.profile_steps().splitlines()
    kernels = f"{decode.kernels_per_step:,.1f} | {decode.kernels_per_step:,.3g} | 0.375"
    limits = f"{decode.stream_us:,.1f} | {decode.graph_us / decode.step_us:.0%}"
    assert lines[2] == (
        f"| Decode, 1 × 1,024 tokens in the cache | {decode.step_us:,.1f} | {1.25 * decode.step_us:,.1f} "
        f"| 100.0% | 80.0% | {kernels} | {limits} |"
    )
    assert lines[3].startswith(f"| A prompt of 1,024 tokens | {prompt.step_us:,.1f} |")
    assert f"| {prompt.kernels_per_step / 1024:,.3g} |" in lines[3]
    assert "NVIDIA Test 1, driver 580.1; host A CPU" in lines[-1]
    lines = tables.profile_kernels().splitlines()
    qkv = decode.row("rms_norm_linear qkv")
    assert (
        "| **`few_rows_linear`** | `rms_norm_linear qkv` | memory | 28 | 56.0 | 0.00 "
        f"| {56 / decode.step_us:.1%} | {qkv.bytes / 1e6:,.1f} | 0.23 | {qkv.limit_us:.1f} | {qkv.limit_us / 56:.0%} |"
    ) in lines
    assert "| `advance_decode` | `advance_decode_` | launch | 1 | 2.00 |" in "\n".join(lines)
    end = lines.index("", lines.index("**A prompt of 1,024 tokens**") - 1)
    assert sum(line.startswith("| **") for line in lines[:end]) == 5


def test_measured(tables: Any, tmp_path: Path) -> None:
    steps = (DECODE, Step("decode", 512, 1024))
    found = report(*steps)
    results.write(tmp_path, "explain_measured", found.as_data("explain"))
    lines = tables.measured_steps().splitlines()
    few, many = found.profiles
    for line, profile, case in zip(lines[2:4], found.profiles, ("1 × 1,024", "512 × 1,024"), strict=True):
        times = " | ".join(f"{us:,.1f}" if us < 1000 else f"{us:,.0f}" for us in
                           (profile.stream_us, profile.graph_us, profile.foretold_us, profile.step_us))  # fmt: skip
        assert line.startswith(f"| decode {case} | {times} | {profile.error:+.0%} |")
    assert few.error > 0.2
    assert 0.1 < -many.error < 0.2
    assert "1 of 2 steps are foretold within 20 %." in lines[-1]
    lines = tables.measured_operators().splitlines()
    assert lines[0] == "| µs a step, error of what was foretold | 1 × 1,024 | 512 × 1,024 |"
    assert "| `linear_add_ o` | 56.0 +70% | 112.0 -15% |" in lines
    assert "| `advance_decode_` | 2.00 -76% | 2.00 -76% |" in lines
    lines = tables.laws().splitlines()
    assert "| `linear_add_` | to 8 | 4 | 3.40 | 100000000000% | 100000000000% | 7% |" in lines
    assert "| `linear_add_` | more | 4 | 3.40 | 100000000000% | 100000000000% | 7% |" in lines


def test_what_was_not_foretold_is_a_dash(tables: Any, tmp_path: Path) -> None:
    results.write(tmp_path, "explain_measured", report(DECODE, foretells=False).as_data("explain"))
    line = tables.measured_steps().splitlines()[2]
    assert line.split(" | ")[3:6:2] == ["–", "–"]


def test_the_generator_knows_them() -> None:
    text = (SCRIPTS / "generate_docs.py").read_text()
    assert "**step_tables.TABLES" in text
    assert '"docs/profile.md"' in text
