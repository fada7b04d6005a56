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


def page(*arguments: str) -> list[str]:
    result = invoke("kernels", *arguments)
    assert (result.exit_code, result.stderr) == (0, "")
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def test_every_instance_on_request() -> None:
    lines = page("--all")
    assert "norm<bf16, 8> 90a 40 128 0 0 75 75 75 50" in lines
    assert "wide<fp32> 90a 40 128 96 208 75 75 75 50" in lines
    assert any(line.startswith("2 kernels for sm_90a, 1 with spills.") for line in lines)


def test_a_line_for_a_template_with_least_and_most(build: Path) -> None:
    facts = json.loads(build.read_text())
    facts["kernels"].append({**facts["kernels"][0], "name": "norm<fp32, 4>", "registers": 72})
    build.write_text(json.dumps(facts))
    lines = page()
    assert "norm 2 40-72 128 0 0 38-75 0-50" in lines
    assert "wide 1 40 128 96 208 75 50" in lines


def test_match_keeps_some_and_json_is_for_programs() -> None:
    (row,) = json.loads(invoke("kernels", "--match", "norm", "--json").stdout)
    assert (row["name"], row["registers"], row["occupancy"]["1024"]) == ("norm<bf16, 8>", 40, 0.5)


def test_a_name_that_is_none() -> None:
    assert refused("kernels", "--match", "nobody") == "match must be a part of a kernel's name, was 'nobody'"


def test_without_a_build_it_is_one_line(build: Path) -> None:
    build.unlink()
    assert refused("kernels") == "no compiled kernels: `make kernels` builds them (it needs nvcc)"
