"""One case inside a process: the arguments, the check of every contender, fresh values for operators in place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.bench.cell import NO_SUCH_OPERATOR, Case, Cell, DeviceMake, call_once, relative_error
from rooflight.bench.contenders import AGAIN, OURS, PROVIDERS, VERSIONS, bind, chosen, is_default, missing, version
from rooflight.bench.device import Closure
from rooflight.bench.library import load
from rooflight.bench.ops_setup import OPERATORS
from rooflight.bench.peers.ops import PEERS
from tests.bench.fake_device import FakeDevice

NORM = Case("rms_norm", "bf16", 6, 64)
ADD = Case("fused_add_rms_norm", "fp16", 6, 64)
IN_PLACE = Case("fused_add_rms_norm_", "fp16", 6, 64)


def binding(device: FakeDevice, run: Callable[..., object]) -> Callable[[str, str, tuple[Any, ...]], Closure]:
    """A contender that runs a function on the CPU and tells the device of the buffers it touched."""

    def bound(name: str, operator: str, args: tuple[Any, ...]) -> Closure:
        def call() -> object:
            device.launch({str(a.data_ptr()): a.numel() for a in args if isinstance(a, torch.Tensor)})
            return run(*args)

        return call

    return bound


def prepared(case: Case, run: Callable[..., object], device: FakeDevice | None = None) -> str | None:
    device = device or FakeDevice()
    return Cell(case, device, binding(device, run)).prepare(["peer"])["peer"]


@pytest.mark.parametrize("operator", OPERATORS)
def test_ours_pass_the_check_of_every_operator(operator: str) -> None:
    device = FakeDevice()
    for dtype in ("fp32", "fp16", "bf16"):
        cell = Cell(Case(operator, dtype, 6, 64), device, binding(device, getattr(ops, operator)))
        assert cell.prepare([OURS, AGAIN]) == {OURS: None, AGAIN: None}
        assert set(cell.round(OURS)) == {"call_us", "hot_us", "cold_us"}
        assert set(cell.event_round(AGAIN)) == {"event_hot_us", "event_cold_us"}


def test_bytes_and_working_set_are_the_operators_own() -> None:
    row, weight = 6 * 64 * 2, 64 * 2
    norm, add, in_place = (Cell(case, FakeDevice()) for case in (NORM, ADD, IN_PLACE))
    assert (norm.bytes, norm.working_set) == (2 * row + weight, 2 * row + weight)
    assert (add.bytes, add.working_set) == (4 * row + weight, 4 * row + weight)
    assert (in_place.bytes, in_place.working_set) == (4 * row + weight, 2 * row + weight)
    assert norm.facts() == {"bytes": norm.bytes, "working_set": norm.working_set, "cold_method": "rotation of 20 sets"}


def test_arguments_are_those_of_the_operators_inputs() -> None:
    """On a CPU the device's own draws are the same as the contract suite's."""
    ours = DeviceMake(torch.bfloat16, "cpu", 3).randn(4, 5, scale=2.0, salt=1)
    assert torch.equal(ours, ops.Make(torch.bfloat16, "cpu", 3).randn(4, 5, scale=2.0, salt=1))


def without_weight(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return ops.rms_norm(x, torch.ones_like(weight), eps)


def last_row_missing(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = torch.full_like(x, float("nan"))
    out[:-1] = ops.rms_norm(x[:-1], weight, eps)
    return out


def last_row_old(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    out = ops.rms_norm(x, weight, eps)
    out[-1] = 0
    return out


def twice_rounded(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As a peer may do it."""
    return ops.rms_norm(x, torch.ones_like(weight), eps) * weight


@pytest.mark.parametrize(
    ("case", "run", "reason"),
    [
        (NORM, without_weight, "wrong: result 1 is off by "),
        (NORM, last_row_missing, "wrong: result 1 is off by nan"),
        (NORM, last_row_old, "wrong: result 1 is off by "),
        (NORM, lambda x, weight, eps: ops.rms_norm(x, weight, eps)[:-1], "wrong: result 1 has not the shape (6, 64)"),
        (NORM, lambda *args: None, "wrong: result 1 has not the shape"),
        (ADD, lambda x, residual, weight, eps: ops.rms_norm(x + residual, weight, eps), "wrong: gave 1 results"),
        (ADD, lambda x, r, w, eps: ops.fused_add_rms_norm(x, r, w, eps)[::-1], "wrong: result 1 is off by"),
        (IN_PLACE, lambda *args: None, "wrong: result 1 is off by"),
    ],
)
def test_a_wrong_contender_gets_a_reason_and_no_time(case: Case, run: Callable[..., object], reason: str) -> None:
    found = prepared(case, run)
    assert found is not None
    assert found.startswith(reason)


def test_rounding_in_another_place_is_accepted() -> None:
    assert prepared(NORM, twice_rounded) is None


def test_a_contender_that_fails_leaves_the_others_alone() -> None:
    device = FakeDevice()

    def some(name: str, operator: str, args: tuple[Any, ...]) -> Closure | None:
        def fails() -> object:
            raise RuntimeError("out of\nluck")

        good = binding(device, ops.rms_norm)(name, operator, args)
        return {"fails": fails, "lacks": None, "good": good}[name]

    found = Cell(NORM, device, some).prepare(["fails", "lacks", "good"])
    assert found == {"fails": "RuntimeError: out of luck", "lacks": NO_SUCH_OPERATOR, "good": None}
    device.working = False  # a fault that ends a CUDA context
    found = Cell(NORM, device, some).prepare(["fails", "lacks", "good"])
    assert found["good"] == found["lacks"] == "the process failed with the contender before it"


def test_in_place_values_stay_finite_and_are_fresh_in_every_round() -> None:
    """In FP16 some hundred launches on the same residual would overflow with weights as they are."""
    device = FakeDevice(l2_bytes=100)
    cell = Cell(Case("fused_add_rms_norm_", "fp16", 1, 8192), device, binding(device, ops.fused_add_rms_norm_))
    assert cell.prepare([OURS, AGAIN]) == {OURS: None, AGAIN: None}  # the second is checked after the first was timed
    start = [tensor.clone() for tensor in cell._timed[:2]]
    timer = cell._timers[OURS]
    for _ in range(4000):
        timer.closures[0]()
    x, residual = cell._sets[0][:2]
    assert not torch.equal(residual, start[1])
    assert x.isfinite().all()
    assert residual.isfinite().all()
    timer.refresh()
    for args in cell._sets:
        assert torch.equal(args[0], start[0])
        assert torch.equal(args[1], start[1])


def test_closing_frees_the_arguments() -> None:
    device = FakeDevice()
    cell = Cell(NORM, device, binding(device, ops.rms_norm))
    cell.prepare([OURS])
    cell.close()
    assert (cell._timers, cell._sets) == ({}, [])


def test_the_error_is_relative_to_the_value_or_to_all() -> None:
    expected = torch.tensor([3.0, 4.0, 0.0, 0.0])  # root mean square 2.5
    assert relative_error(expected, expected) == 0
    assert relative_error(expected + torch.tensor([0.0, 0.0, 0.5, 0.0]), expected) == pytest.approx(0.2)
    assert relative_error(expected + torch.tensor([0.55, 0.0, 0.0, 0.0]), expected) == pytest.approx(0.1)
    assert relative_error(torch.full_like(expected, float("nan")), expected) != 0
    assert relative_error(torch.empty(0, 4), torch.empty(0, 4)) == 0


def test_the_first_call_of_everything_passes_over_failures() -> None:
    device, called = FakeDevice(), []

    def some(name: str, operator: str, args: tuple[Any, ...]) -> Closure | None:
        if name == "bad":
            raise RuntimeError
        return None if name == "lacks" else lambda: called.append(name)

    call_once(NORM, device, ["bad", "lacks", "good"], some)
    assert called == ["good"]


def test_contenders_by_default_and_by_name() -> None:
    assert chosen(()) == (OURS, AGAIN, *PROVIDERS, *PEERS)
    assert chosen(["liger", OURS]) == (OURS, AGAIN, "liger")
    assert chosen(["versions"]) == VERSIONS
    assert chosen(["eager"]) == ("eager",)
    with pytest.raises(ValueError, match=r"contender must be one of rooflight, .*apex or versions, was 'nobody'"):
        chosen(["nobody", OURS])


def test_our_contenders_run_the_public_function(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(3, 8), torch.randn(8)
    expected = ops.rms_norm(x, weight, 1e-6)
    for name in (OURS, AGAIN):
        closure = bind(name, "rms_norm", (x, weight, 1e-6))
        assert closure is not None
        assert torch.equal(closure(), expected)  # type: ignore[arg-type]
        assert version(name, "rms_norm").endswith(" " + ops.REGISTRY["rms_norm"].active["cuda"])
    assert bind("rooflight.triton", "linear", (x, x)) is None  # has no such kernel
    assert missing(OURS) is None
    assert version("rooflight.triton", "rms_norm").endswith(" triton")
    monkeypatch.setitem(ops.REGISTRY["rms_norm"].active, "cuda", "triton")
    assert is_default("rooflight.triton", "rms_norm")
    assert not is_default("rooflight.cuda", "rms_norm")


def test_older_versions_need_the_bench_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rooflight.bench.library.PATH", load.__wrapped__.__globals__["PATH"] / "not there")
    load.cache_clear()
    try:
        assert missing("version1") == "the bench library is not built (make kernels)"
        assert bind("version1", "rms_norm", ()) is None
        with pytest.raises(ValueError, match="not built"):
            bind("version1", "fused_add_rms_norm_", ())
    finally:
        load.cache_clear()


def test_a_peer_that_cannot_be_imported_is_named() -> None:
    for peer in ("vllm", "flashinfer", "quack"):
        assert missing(peer)
    assert missing("eager") is None
