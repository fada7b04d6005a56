"""Captures that fail, without a GPU: what PyTorch would do is played."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from rooflight.engine.capture import captured

CAPTURE: Any = "capture"


class Device:
    """Streams by name; `fails` says where a capture ends: before it begins, or never."""

    def __init__(self, fails: bool) -> None:
        self.fails, self.current, self.modes = fails, "caller", list[str]()

    @contextmanager
    def stream(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: str, capture_error_mode: str) -> Iterator[None]:
        self.modes.append(capture_error_mode)
        self.current = stream  # PyTorch leaves it so if the capture cannot begin
        if self.fails:
            raise torch.OutOfMemoryError("no more")
        try:
            yield
        finally:
            self.current = "caller"


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    played = Device(request.param)
    monkeypatch.setattr(torch.cuda, "stream", played.stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: played.current)
    monkeypatch.setattr(torch.cuda, "graph", played.graph)
    return played


@pytest.mark.parametrize("device", [True], indirect=True)
def test_a_graph_whose_capture_could_not_begin_is_never_destroyed(device: Device) -> None:
    graph: Any = object()
    before = sys.getrefcount(graph)
    with pytest.raises(torch.OutOfMemoryError), captured(graph, None, CAPTURE, "global"):
        raise AssertionError("it began")
    assert sys.getrefcount(graph) == before + 1
    assert device.current == "caller"


@pytest.mark.parametrize("device", [False], indirect=True)
def test_a_step_that_fails_within_a_capture_lets_the_graph_go(device: Device) -> None:
    graph: Any = object()
    before = sys.getrefcount(graph)
    seen = []

    def step() -> None:
        seen.append(device.current)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), captured(graph, None, CAPTURE, "thread_local"):
        step()
    assert seen == ["capture"]
    assert sys.getrefcount(graph) == before
    assert (device.current, device.modes) == ("caller", ["thread_local"])
