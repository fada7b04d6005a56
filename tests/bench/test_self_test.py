"""The harness's checks of itself: they pass where they should, and they can fail. The real ones need a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.bench import card, self_test
from rooflight.bench.cell import Case
from rooflight.bench.device import Closure
from rooflight.limits.card import Bandwidth, Card
from tests.bench.fake_device import COLD_RATE, FakeDevice

SIZE = 4096  # bytes of a buffer that is copied


def copying(monkeypatch: pytest.MonkeyPatch, device: FakeDevice, rate: float) -> Card:
    """Copies on the device, and a card whose ceiling is `rate` bytes per microsecond."""

    def copy(source: torch.Tensor, target: torch.Tensor) -> None:
        sizes = {str(tensor.data_ptr()): tensor.numel() * 4 for tensor in (source, target)}
        device.launch(sizes, fixed_us=-1.0)  # without the launch

    monkeypatch.setattr(card, "COPY_METHODS", {"copy_": copy})
    ceiling = Bandwidth(2 * SIZE, rate * 1e6)
    return Card("test", device.l2_bytes, (ceiling,), node_us={"plain": 1.0}, methods={"copy": "copy_"})


@pytest.mark.parametrize(("factor", "passed"), [(1.0, True), (1.02, True), (0.98, True), (1.04, False), (0.96, False)])
def test_a_copy_must_run_at_its_ceiling(monkeypatch: pytest.MonkeyPatch, factor: float, passed: bool) -> None:
    device = FakeDevice()
    verdict = self_test.copy_at_ceiling(device, copying(monkeypatch, device, COLD_RATE * factor), SIZE)
    assert verdict.passed is passed, verdict
    assert verdict.detail.startswith(f"a copy runs at {1 / factor:.1%} of the copy ceiling")


def test_the_ceiling_is_the_better_way_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    device = FakeDevice()
    copying(monkeypatch, device, 1.0)
    slow = dict(card.COPY_METHODS)
    slow["slower"] = lambda source, target: [slow["copy_"](source, target) for _ in range(2)][:0]
    monkeypatch.setattr(card, "COPY_METHODS", slow)
    (point,), method = card.copy_bandwidths(device, [SIZE])
    assert method == "copy_"
    assert point.bytes == 2 * SIZE
    assert point.rate == pytest.approx(COLD_RATE * 1e6)


def noisy(device: FakeDevice, factors: dict[str, float]) -> Any:
    """Ours, as slow as its factor says."""

    def bind(name: str, operator: str, args: tuple[Any, ...]) -> Closure:
        def call() -> object:
            device.launch({str(args[0].data_ptr()): 5000}, fixed_us=factors[name])
            return ops.rms_norm(*args)

        return call

    return bind


def test_a_contender_against_itself_is_a_tie() -> None:
    case, device = Case("rms_norm", "bf16", 4, 64), FakeDevice()
    verdict = self_test.itself_is_a_tie(device, case, noisy(device, {"rooflight": 0.0, "rooflight again": 0.0}))
    assert verdict.passed
    assert "hot 1.000 (1.000 to 1.000)" in verdict.detail
    verdict = self_test.itself_is_a_tie(device, case, noisy(device, {"rooflight": 0.0, "rooflight again": 1.0}))
    assert not verdict.passed
    verdict = self_test.itself_is_a_tie(device, case, lambda name, operator, args: lambda: args[0])
    assert not verdict.passed
    assert verdict.detail.startswith("rms_norm bf16 4x64: wrong: result 1 is off by")


@pytest.mark.parametrize(("per_cycle", "passed"), [(100.0, True), (30.0, False)])
def test_five_per_cent_must_read_five_per_cent(per_cycle: float, passed: bool) -> None:
    """The other device needs longer for what no cycle explains, so that the difference reads as less."""
    device = FakeDevice()
    verdict = self_test.slowed_reads_slower(
        device, lambda cycles: device.kernel({}, fixed_us=cycles / self_test.SLEEP_CYCLES * per_cycle + 100 - per_cycle)
    )
    assert verdict.passed is passed, verdict
    assert "hot +" in verdict.detail
    assert "cold +" in verdict.detail


def test_a_duel_alternates() -> None:
    order: list[str] = []

    def contender(name: str, time: float) -> Any:
        def round() -> dict[str, float]:
            order.append(name)
            return {"hot_us": time + len(order)}

        return round

    first, second = self_test.duel([contender("a", 0.0), contender("b", 10.0)], rounds=3)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert (first["hot_us"].median, second["hot_us"].median) == (4.0, 13.0)
