"""The ctypes face of the compiled bench library, against a stand-in that writes down its arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import library


class StandIn:
    """A loaded library: every function answers with `code`."""

    def __init__(self, code: int = 0) -> None:
        self.calls: list[tuple[Any, ...]] = []
        for name in ("rl_empty", "rl_read", "rl_unmark", "rl_chase", "rl_version"):
            setattr(self, name, self._function(name, code))

    def _function(self, name: str, code: int) -> Any:
        def call(*args: Any) -> int:
            self.calls.append((name, *args))
            return code

        return call


def loaded(monkeypatch: pytest.MonkeyPatch, stand_in: StandIn) -> library.BenchLibrary:
    monkeypatch.setattr("ctypes.CDLL", lambda path: stand_in)
    monkeypatch.setattr(library, "_stream", lambda: 77)
    return library.BenchLibrary(Path("any.so"))


def test_the_functions_get_the_stream_and_plain_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in = StandIn()
    kernels = loaded(monkeypatch, stand_in)
    data, out = torch.zeros(10), torch.zeros(1)
    x, residual, weight = torch.zeros(3, 8).bfloat16(), torch.zeros(3, 8).bfloat16(), torch.zeros(8).bfloat16()
    kernels.empty(5, 132, 256, pdl=True)
    kernels.read(data, out)
    kernels.read(data, out, flush=True)
    kernels.unmark(data)
    kernels.chase(data.int(), 64, out)
    kernels.version(2, x, residual, weight, 1e-6)
    pointers = (x.data_ptr(), residual.data_ptr(), weight.data_ptr())
    assert stand_in.calls[4][:2] + stand_in.calls[4][3:] == ("rl_chase", 77, 64, out.data_ptr())
    assert stand_in.calls == [
        ("rl_empty", 77, 5, 132, 256, 1),
        ("rl_read", 77, data.data_ptr(), 40, out.data_ptr(), 0),
        ("rl_read", 77, data.data_ptr(), 40, out.data_ptr(), 1),
        ("rl_unmark", 77, data.data_ptr(), 40),
        stand_in.calls[4],
        ("rl_version", 77, 2, 2, *pointers, 3, 8, 1e-6),
    ]


def test_an_error_of_cuda_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = loaded(monkeypatch, StandIn(code=700))
    with pytest.raises(RuntimeError, match="failed with CUDA error 700"):
        kernels.empty(1, 1, 32)


def test_older_versions_take_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = loaded(monkeypatch, StandIn())
    x = torch.zeros(3, 8).half()
    with pytest.raises(ValueError, match=r"weight must be torch.float16 as x .*, was torch.float32"):
        kernels.version(1, x, x, torch.zeros(8), 1e-6)


def test_a_library_that_is_not_there_or_no_library_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "broken.so"
    broken.write_text("no library")
    for path, words in ((tmp_path / "none.so", "not built"), (broken, "cannot be loaded")):
        monkeypatch.setattr(library, "PATH", path)
        kernels, reason = library.load.__wrapped__()
        assert kernels is None
        assert words in reason
