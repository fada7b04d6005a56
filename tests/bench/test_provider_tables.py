"""The tables of providers and parts in docs/decode.md, and the choices, from reports of nobody's card."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from rooflight.bench import results
from rooflight.bench.decode_parts import PARTS, PartsReport, row_of
from rooflight.bench.measurement import Spread
from rooflight.bench.step_providers import ProviderRow, ProvidersReport

SCRIPTS = Path(__file__).parents[2] / "scripts"
ROOT = SCRIPTS.parent
ENVIRONMENT = {
    "device": "NVIDIA H200", "driver": "580.1", "cpu": "A CPU", "torch": "2.99", "triton": "3.9", "commit": "abc",
    "date": "2026-12-01",
}  # fmt: skip


def row(operator: str, batch: int, context: int, provider: str, us: float, phase: str = "decode") -> ProviderRow:
    return ProviderRow(operator, phase, batch, context, provider, Spread(us, us, us), 2_000_000, 1.5, "memory")


def providers() -> ProvidersReport:
    """By mean logarithms triton is the faster `rope_`: twice as fast at one size, a tenth slower at the other. At the
    third size only one of them was measured."""
    rows = (
        row("rope_", 1, 1024, "cuda", 3.0),
        row("rope_", 1, 1024, "triton", 3.3),
        row("rope_", 8, 1024, "cuda", 200.0),
        row("rope_", 8, 1024, "triton", 100.0),
        row("rope_", 1, 4096, "cuda", 0.1, "prefill"),
        row("sample", 1, 1024, "triton", 6.0),
        row("embedding", 1, 1024, "cuda", 2.0),
        row("embedding", 1, 1024, "ref", 1234.5),
    )
    return ProvidersReport("random:qwen3-0.6b", ENVIRONMENT, "a test's", rows, {"sample.cuda": "not compiled"})


def parts() -> PartsReport:
    first = {"0": 5.1, "1": 9.0, "2": 7.0, "4": 6.0, "8": 5.5, "16": 5.0}
    second = {"0": 33.0, "1": 40.0, "2": 32.0, "4": 30.0, "8": 31.0, "16": 35.0}
    rows = [
        row_of(batch, 4096, batch * 8, 132, {n: Spread(t, t, t) for n, t in us.items()})
        for batch, us in ((1, first), (8, second))
    ]
    return PartsReport("random:qwen3-0.6b", ENVIRONMENT, 132, tuple(rows))


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    module = importlib.import_module("provider_tables")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module("choose_providers")


def test_without_results_the_tables_say_so(tables: Any) -> None:
    assert tables.TABLES.keys() == {"decode-providers", "decode-parts"}
    assert [table() for table in tables.TABLES.values()] == [tables.NOT_RECORDED] * 2


def test_the_generator_knows_them() -> None:
    assert "**provider_tables.TABLES" in (SCRIPTS / "generate_docs.py").read_text()
    text = (ROOT / "docs/decode.md").read_text()
    assert text.count("<!-- generated: decode-providers -->") == text.count("<!-- generated: decode-parts -->") == 1


def test_providers(tables: Any, tmp_path: Path) -> None:
    results.write(tmp_path, "step_providers", providers().as_data())
    lines = tables.provider_table().splitlines()
    assert lines[0] == (
        "| operator | step | MB | limit µs | cuda µs | triton µs | ref µs | next over first | of limit |"
    )
    assert lines[2:8] == [
        "| `rope_` | 1 × 1,024 | 2.00 | 1.50 | **3.00** | 3.30 | – | 1.10 | 50% |",
        "| `rope_` | 8 × 1,024 | 2.00 | 1.50 | 200.0 | **100.0** | – | 2.00 | 2% |",
        "| `rope_` | prompt of 4,096 | 2.00 | 1.50 | 0.10 | – | – |  | 1500% |",
        "| `sample` | 1 × 1,024 | 2.00 | 1.50 | – | 6.00 | – |  | 25% |",
        "| `embedding` | 1 × 1,024 | 2.00 | 1.50 | **2.00** | – | 1,234 | 617.25 | 75% |",
        "",
    ]
    assert "NVIDIA H200, driver 580.1; host A CPU" in lines[8]
    assert lines[8].endswith("commit abc, 2026-12-01. Ceilings: a test's.")
    assert lines[-1] == "- sample.cuda: not compiled"


def test_parts(tables: Any, tmp_path: Path) -> None:
    results.write(tmp_path, "decode_parts", parts().as_data())
    lines = tables.parts_table().splitlines()
    assert lines[0] == (
        "| sequences × tokens | blocks | 1 part | 2 parts | 4 parts | 8 parts | 16 parts | rule loses |"
    )
    assert lines[2:4] == [
        "| 1 × 4,096 | 8 | 9.00 | 7.00 | 6.00 | 5.50 | **5.00** |  |",
        "| 8 × 4,096 | 64 | 40.00 | **32.00** | 30.00 | 31.00 | 35.00 | 10.0% |",
    ]
    assert "what the rule takes on 132 multiprocessors" in lines[-1]
    assert "differs by up to 3.1%" in lines[-1]  # 33 us and 32
    assert len(PARTS) == 5


def test_choices_take_the_geometric_mean_of_common_sizes(choosing: Any) -> None:
    found = choosing.choices([], providers().as_data())
    assert found["card"] == "NVIDIA H200"
    assert found["origin"] == "commit abc, 2026-12-01"
    slower = (2.0 / 1.1) ** 0.5
    assert found["operators"] == {
        "embedding": {
            "provider": "cuda",
            "reason": "measured on this card: ref takes 617.25 times as long (mean of the sizes of a step)",
        },
        "rope_": {
            "provider": "triton",
            "reason": f"measured on this card: cuda takes {slower:.2f} times as long (mean of the sizes of a step)",
        },
    }


def test_choices_of_both_reports(choosing: Any, tmp_path: Path) -> None:
    """What `bench ops` has measured stays as it is; a file of another card is refused."""
    measured = choosing.reports(ROOT / "results/h200")
    before = choosing.choices(measured)
    both = choosing.choices(measured, providers().as_data())
    assert both["origin"] == before["origin"] + "; commit abc, 2026-12-01"
    assert {name: both["operators"][name] for name in before["operators"]} == before["operators"]
    assert both["operators"].keys() - before["operators"].keys() == {"embedding", "rope_"}
    assert list(both["operators"]) == sorted(both["operators"])
    own = providers().as_data()
    own["rows"] = [{**one, "operator": "rms_norm"} for one in own["rows"] if one["operator"] == "rope_"]
    assert choosing.choices(measured, own)["operators"] == before["operators"]
    own["environment"] = {**ENVIRONMENT, "device": "NVIDIA Test 1"}
    with pytest.raises(ValueError, match="choices must be of one card, were of NVIDIA H200, NVIDIA Test 1"):
        choosing.choices(measured, own)


def test_the_file_is_looked_for_where_results_are(choosing: Any, tmp_path: Path) -> None:
    assert choosing.step_report(tmp_path) is None
    results.write(tmp_path, "step_providers", providers().as_data())
    data = choosing.step_report(tmp_path)
    assert data == json.loads((tmp_path / "step_providers.json").read_text())
    assert choosing.reports(tmp_path) == []  # it is none of `bench ops`


def test_main_writes_choices_and_then_finds_them_current(
    choosing: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "results/h200").mkdir(parents=True)
    monkeypatch.setattr(choosing, "ROOT", tmp_path)
    monkeypatch.setattr(choosing, "CHOICES", tmp_path)
    results.write(tmp_path / "results/h200", "step_providers", providers().as_data())
    monkeypatch.setattr("sys.argv", ["choose_providers.py", "--check"])
    assert choosing.main() == 1
    assert not (tmp_path / "h200.json").exists()
    monkeypatch.setattr("sys.argv", ["choose_providers.py"])
    assert choosing.main() == 0
    assert json.loads((tmp_path / "h200.json").read_text())["operators"]["rope_"]["provider"] == "triton"
    monkeypatch.setattr("sys.argv", ["choose_providers.py", "--check"])
    assert choosing.main() == 0
