"""Limits against measurements: a fit finds what is there, and is judged on what it did not see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rooflight.limits.accuracy import accuracy
from rooflight.limits.ceilings import ceilings
from rooflight.models.load import load_config

QWEN = load_config("random:qwen3-0.6b")
H200 = ceilings("h200")
RATE = 2 / (1 / H200.read_rate(1e12) + 1 / H200.write_rate)


def row(width: int, tokens: int, time: float, **changes: Any) -> dict[str, Any]:
    timed = {"median": time, "low": time, "high": time}
    shape = {"operator": "rms_norm", "hidden_size": width, "num_tokens": tokens, "bytes": 4 * width * tokens}
    return {**shape, "contender": "rooflight", "error": None, "hot_us": timed, "cold_us": timed, **changes}


def write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    data = {"benchmark": "ops", "environment": {"device": H200.name}, "rows": rows}
    (folder / "rms_norm.json").write_text(json.dumps(data))
    return folder


def law(width: int, tokens: int) -> float:
    """Two microseconds and 80 % of the copy rate."""
    return 2.0 + 4 * width * tokens / (0.8 * RATE) * 1e6


def test_a_law_is_found_and_holds_where_it_was_not_seen(tmp_path: Path) -> None:
    rows = [row(width, n, law(width, n)) for width in (1024, 4096) for n in (1, 64, 1024, 16384)]
    rows.append(row(4096, 1, 1e9, contender="liger"))
    fits = {(f.operator, f.protocol): f for f in accuracy(QWEN, H200, write(tmp_path, rows))}
    fit = fits["rms_norm", "cold_us"]
    assert (fit.overhead_us, fit.fraction) == (pytest.approx(2.0), pytest.approx(0.8))
    assert (fit.fitted_rows, fit.judged_rows) == (4, 4)
    assert fit.worst_error == pytest.approx(0, abs=1e-9)
    assert fits["linear_add_", ""].reason == "not measured"


def test_rows_of_other_widths_do_not_enter_the_fit(tmp_path: Path) -> None:
    """Twice as slow where it was not seen: the fit is the same, the error one half."""
    rows = [row(1024, n, law(1024, n)) for n in (1, 64, 1024)] + [row(4096, n, 2 * law(4096, n)) for n in (1, 64)]
    fit = next(f for f in accuracy(QWEN, H200, write(tmp_path, rows)) if f.protocol == "hot_us")
    assert fit.fraction == pytest.approx(0.8)
    assert fit.median_error == pytest.approx(0.5)


def test_too_few_rows_are_no_fit(tmp_path: Path) -> None:
    rows = [row(1024, 1, 2.0), row(4096, 64, 3.0), row(4096, 1024, 9.0)]
    fit = next(f for f in accuracy(QWEN, H200, write(tmp_path, rows)) if f.operator == "rms_norm")
    assert fit.reason == "not measured at width 1024"
    assert fit.fraction is None


def test_real_results_are_foretold() -> None:
    """The norms of this repository's own results, cold, at widths the fit never saw."""
    fits = accuracy(QWEN, H200, Path(__file__).resolve().parents[2] / "results" / "h200")
    for operator in ("rms_norm", "fused_add_rms_norm"):
        fit = next(f for f in fits if (f.operator, f.protocol) == (operator, "cold_us"))
        assert fit.median_error is not None
        assert fit.median_error < 0.15
        assert fit.judged_rows >= 20


@pytest.mark.parametrize("content", ["", "[]", "{", '{"benchmark": "ops", "rows": [{}]}'])
def test_files_that_are_no_results(tmp_path: Path, content: str) -> None:
    (tmp_path / "x.json").write_text(content)
    with pytest.raises(ValueError, match=r"x\.json: holds no results of `rooflight bench`"):
        accuracy(QWEN, H200, tmp_path)


def test_another_card_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="measured on NVIDIA H200, the ceilings are of NVIDIA L4: pass its --gpu"):
        accuracy(QWEN, ceilings("l4"), write(tmp_path, [row(1024, 1, 2.0)]))


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no results here; `rooflight bench all` writes them"):
        accuracy(QWEN, H200, tmp_path)
