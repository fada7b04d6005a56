"""What is written down about the machine, with and without the driver's tool."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from typing import Any

import pytest

from rooflight.bench import environment


@pytest.mark.parametrize(
    ("name", "folder"),
    [("NVIDIA H200", "h200"), ("NVIDIA GeForce RTX 4090 D", "geforce-rtx-4090-d"), ("Tesla V100", "tesla-v100")],
)
def test_the_folder_of_a_card(name: str, folder: str) -> None:
    assert environment.gpu_folder(name) == folder


def answering(monkeypatch: pytest.MonkeyPatch, gpu: str, apps: str) -> None:
    def tool(command: Sequence[str], **_: Any) -> subprocess.CompletedProcess[str]:
        assert command[0] == "nvidia-smi"
        return subprocess.CompletedProcess(command, 0, gpu if "--query-gpu" in command[1] else apps)

    monkeypatch.setattr(subprocess, "run", tool)


@pytest.mark.parametrize(
    ("use", "apps", "idle"), [("0", "", True), ("3", "", False), ("0", "812\n", False), ("[N/A]", "", None)]
)
def test_a_card_is_idle_without_processes_and_load(
    monkeypatch: pytest.MonkeyPatch, use: str, apps: str, idle: bool | None
) -> None:
    answering(monkeypatch, f"580.159.04, {use}, 4, 345, 700.00\n", apps)
    found = environment.describe_gpu()
    assert found["idle"] is idle
    assert found["driver"] == "580.159.04"
    assert found["other_processes"] == len(apps.splitlines())
    assert found["clock_sm_mhz"] == "345"


def test_without_the_tool_nothing_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError("nvidia-smi")

    monkeypatch.setattr(subprocess, "run", absent)
    found = environment.describe_gpu()
    assert (found["idle"], found["driver"]) == (None, "unknown")


def test_a_copied_tree_may_say_its_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOFLIGHT_COMMIT", "abc123")
    assert environment.commit() == "abc123"
