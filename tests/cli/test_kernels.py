"""`rooflight kernels`: the resources of what is built, or one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rooflight.kernels import library
from tests.cli.running import invoke, refused

KERNEL = {"name": "norm<bf16, 8>", "source": "norm.cu", "architecture": "sm_90a", "registers": 40, "shared_memory": 128}


@pytest.fixture(autouse=True)
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A build of two kernels, the second of which spills."""
    path = tmp_path / "resources.json"
    kept = {**KERNEL, "stack": 0, "spill_stores": 0, "spill_loads": 0}
    spilling = {**KERNEL, "name": "wide<fp32>", "stack": 96, "spill_stores": 88, "spill_loads": 120}
    path.write_text(json.dumps({"cuda": "13.0.88", "kernels": [kept, spilling]}))
    monkeypatch.setattr(library, "RESOURCES", path)
    return path


def test_the_table_shows_each_kernel_and_counts_spills() -> None:
    result = invoke("kernels")
    assert (result.exit_code, result.stderr) == (0, "")
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "norm<bf16, 8> 90a 40 128 0 0 75 75 75 50" in lines
    assert "wide<fp32> 90a 40 128 96 208 75 75 75 50" in lines
    assert any(line.startswith("2 kernels, 1 with spills.") for line in lines)


def test_match_keeps_some_and_json_is_for_programs() -> None:
    (row,) = json.loads(invoke("kernels", "--match", "norm", "--json").stdout)
    assert (row["name"], row["registers"], row["occupancy"]["1024"]) == ("norm<bf16, 8>", 40, 0.5)


def test_without_a_build_it_is_one_line(build: Path) -> None:
    build.unlink()
    assert refused("kernels") == "no compiled kernels: `make kernels` builds them (it needs nvcc)"
