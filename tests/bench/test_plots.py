"""The plot of an operator from its results, without a GPU."""

from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import pytest

from rooflight.bench import plots
from rooflight.bench.contenders import NAMES
from rooflight.bench.ops import run
from rooflight.bench.ops_setup import OpsSetup
from tests.bench.fake_processes import FakeProcesses


def results(**parts: Any) -> dict[str, Any]:
    start = FakeProcesses(speed={"rooflight": 1.0, "liger": 1.3, "eager": 2.5}, wrong={"quack": "wrong: off"})
    setup = {"operators": ("rms_norm",), "contenders": ("rooflight", "eager", "liger", "quack")}
    return run(OpsSetup(**{**setup, **parts}), start=start).as_data()


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_a_plot_shows_both_dtypes_and_everyone_that_was_measured(tmp_path: Path, ending: str) -> None:
    pytest.importorskip("matplotlib")
    path = plots.draw(results(), tmp_path / f"rms_norm.{ending}")
    content = path.read_bytes()
    assert len(content) > 10_000
    if ending == "png":
        assert content.startswith(b"\x89PNG")


def test_a_plot_is_of_one_operator() -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(ValueError, match="rows must be of one operator, were of layer_norm, rms_norm"):
        plots.draw(results(operators=("rms_norm", "layer_norm")), Path("never.png"))


def test_no_two_contenders_look_the_same() -> None:
    looks = {tuple(plots._style(name)[key] for key in ("color", "marker", "linestyle")) for name in NAMES}
    assert len(looks) == len(NAMES)


def test_without_matplotlib_there_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    assert plots.missing() == "matplotlib is not installed (pip install 'rooflight[plots]')"
