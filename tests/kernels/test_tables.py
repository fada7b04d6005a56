"""Data that kernels look up says what the measurements say, and serves where it fits."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rooflight.bench.environment import gpu_folder
from rooflight.kernels import choices
from rooflight.kernels.driver import Driver
from rooflight.ops import REGISTRY

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("command", [["norm_shapes.py", "check"], ["choose_providers.py", "--check"]])
def test_tables_are_what_the_results_say(command: list[str]) -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / command[0], command[1]], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("name", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"), ("Tesla T4", "tesla-t4")],
)
def test_a_card_has_one_folder_name(name: str, folder: str) -> None:
    assert choices.card_folder(name) == folder
    assert gpu_folder(name) == folder  # where the benchmark writes what the choices are made from


def test_choices_are_for_operators_and_providers_that_exist() -> None:
    found = choices.of_card("NVIDIA H200")
    assert found is not None
    for operator, choice in found["operators"].items():
        assert operator in REGISTRY
        assert choice["provider"] in ("cuda", "triton", "ref")
        assert choice["reason"].startswith("measured on this card")


def test_choices_apply_where_the_card_and_the_provider_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    operator = REGISTRY["rms_norm"]
    monkeypatch.setattr(operator, "active", dict(operator.active))
    monkeypatch.setattr(operator, "reason", dict(operator.reason))
    monkeypatch.setattr(operator, "_defaults", list(operator._defaults))
    monkeypatch.setattr(choices, "driver", lambda: Driver((13, 0), (("NVIDIA H200", (9, 0)),)))
    there = {"provider": "ref", "reason": "measured on this card: for this test"}
    absent = {"provider": "not there", "reason": "measured on this card: nor this"}
    monkeypatch.setattr(choices, "of_card", lambda name: {"operators": {"rms_norm": there, "linear": absent}})
    choices.apply(REGISTRY)
    assert (operator.active["cuda"], operator.reason["cuda"]) == ("ref", there["reason"])
    assert REGISTRY["linear"].active["cuda"] == "ref"
    assert "measured" not in REGISTRY["linear"].reason["cuda"]


def test_an_unknown_card_has_no_choices() -> None:
    assert choices.of_card("Card From Nowhere") is None
