"""The protocols against a device whose times are known, and the counts that they choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rooflight.bench import timing
from rooflight.bench.timing import ColdPlan, Timer, call_us, calls_of, difference_us, event_us, hot_launches, replay_us
from tests.bench.fake_device import COLD_RATE, HOT_RATE, NODE_US, FakeDevice

H200_L2 = 60 * 2**20


def nothing() -> None:
    """No argument is written, so nothing needs fresh values."""


@pytest.mark.parametrize(
    ("working_set", "sets"),
    [
        (1, 1),  # 1 x 1 element: flushed
        (4 * 32 * 4096 * 2, 1),  # 181 sets would be needed
        (3 * H200_L2 // 64, 1),  # exactly three times L2 is not more than that
        (3 * H200_L2 // 64 + 1, 65),
        (4 * 256 * 4096 * 2, 24),
        (3 * H200_L2, 3),
        (3 * H200_L2 + 1, 2),
        (4 * 16384 * 8192 * 2, 2),
    ],
)
def test_the_rotation_exceeds_three_times_the_cache_by_one_set(working_set: int, sets: int) -> None:
    plan = ColdPlan.of(working_set, H200_L2)
    assert plan.sets == sets
    assert plan.flushes is (sets == 1)
    if sets > 1:
        assert (sets - 1) * working_set > 3 * H200_L2 >= (sets - 2) * working_set


def test_a_cold_graph_makes_whole_turns() -> None:
    assert ColdPlan(24).launches(hot_us=3.0) == 168  # 7 turns: 504 us even if hot
    assert ColdPlan(2).launches(hot_us=300.0) == 2
    assert ColdPlan(65).launches(hot_us=0.0) == 975  # at most 1000 launches
    assert ColdPlan(1).launches(hot_us=0.5) == timing.FLUSHED_LAUNCHES
    assert ColdPlan(24).method(FakeDevice()) == "rotation of 24 sets"
    assert ColdPlan(1).method(FakeDevice()) == "flush by fake"


def test_the_numbers_of_launches_and_calls_have_bounds() -> None:
    assert [hot_launches(us) for us in (0.0, 2.0, 7.0, 1000.0)] == [1000, 300, 86, 20]
    assert [calls_of(us) for us in (0.0, 90.0, 200.0, 1000.0)] == [50, 50, 25, 20]


def test_call_time_is_the_hosts_and_waits_for_nothing() -> None:
    device = FakeDevice()
    assert call_us(device, device.kernel({}, host_us=8.0, fixed_us=500.0), calls=30) == pytest.approx(8.0)
    assert device.host_us >= device.gpu_us  # caught up afterwards


def test_call_time_is_the_median_of_batches() -> None:
    device = FakeDevice()
    count = 0

    def call() -> None:
        nonlocal count
        count += 1
        device.host_us += 1000.0 if count == timing.CALL_WARM_UPS + 1 else 7.0

    assert call_us(device, call, calls=10) == pytest.approx(7.0)
    assert count == timing.CALL_WARM_UPS + 10 * timing.CALL_BATCHES


def test_hot_and_cold_of_a_small_operator() -> None:
    """Its working set is far below the cache: cold needs the flush, whose own time must cancel."""
    device = FakeDevice()
    timer = Timer(device, ColdPlan.of(60, device.l2_bytes), [device.kernel({"x": 40}, out=20)], nothing)
    times = timer.round()
    assert times["call_us"] == pytest.approx(10.0)
    assert times["hot_us"] == pytest.approx(NODE_US + 60 / HOT_RATE)
    assert times["cold_us"] == pytest.approx(NODE_US + 60 / COLD_RATE)


def test_flushes_leave_nothing_behind_for_hot_times() -> None:
    """A flush marks its lines to be evicted last; what is measured next would find no place in L2."""
    device = FakeDevice()
    timer = Timer(device, ColdPlan(1), [device.kernel({"x": 40})], nothing)
    first = timer.gpu_round()
    assert first["hot_us"] == pytest.approx(NODE_US + 40 / HOT_RATE)
    assert timer.gpu_round() == pytest.approx(first)
    for _ in range(2):
        samples = timer.event_round()["event_hot_us"]  # the first of the second round finds the cache empty
        assert samples[1:] == pytest.approx([10.0 + NODE_US + 40 / HOT_RATE] * (timing.EVENT_SAMPLES - 1))


def rotating(device: FakeDevice, size: int, out: int) -> tuple[ColdPlan, list[Callable[[], object]]]:
    plan = ColdPlan.of(size + out, device.l2_bytes)
    return plan, [device.kernel({f"x{index}": size}, out=out) for index in range(plan.sets)]


def test_cold_of_a_large_operator_finds_neither_inputs_nor_outputs_in_the_cache() -> None:
    device = FakeDevice()
    plan, closures = rotating(device, 2000, 2000)
    assert plan.sets == 9
    times = Timer(device, plan, closures, nothing).round()
    assert times["hot_us"] == pytest.approx(NODE_US + 4000 / HOT_RATE)
    assert times["cold_us"] == pytest.approx(NODE_US + 4000 / COLD_RATE)


def test_without_keeping_results_the_output_would_stay_in_the_cache() -> None:
    """Why `capture` takes `keep`: the allocator hands the freed result's place to the next launch."""
    device = FakeDevice()
    plan, closures = rotating(device, 2000, 2000)
    graph = device.capture(closures * 20)
    found = replay_us(device, graph) / (20 * plan.sets)
    assert found == pytest.approx(NODE_US + 2000 / COLD_RATE + 2000 / HOT_RATE)


def test_the_difference_takes_alternating_medians() -> None:
    device = FakeDevice()
    with_op = device.capture([device.flush, device.kernel({"x": 100})] * 4)
    without = device.capture([device.flush] * 4)
    assert difference_us(device, with_op, without, 4, pairs=3) == pytest.approx(NODE_US + 1.0)


def test_replays_are_queued_before_the_clock_starts() -> None:
    """A lone replay is timed without the host's launch of it, which would add 5 us here."""
    device = FakeDevice()
    graph = device.capture([device.kernel({"x": 100})] * 10)
    graph.replay()
    device.synchronize()
    assert device.laps_us([graph.replay])[0] == pytest.approx(5.0 + 10 * (NODE_US + 0.1))
    assert replay_us(device, graph, 1) == pytest.approx(10 * (NODE_US + 0.1))


def test_the_event_protocol_is_bound_by_the_host() -> None:
    """Events around a call on an idle GPU time the host; after a flush it catches up, so cold can read less."""
    device = FakeDevice(l2_bytes=1000)
    call = device.kernel({"x": 10}, host_us=30.0)
    call()
    device.synchronize()
    hot = event_us(device, call, cold=False)
    assert hot == [pytest.approx(30.0 + NODE_US + 10 / HOT_RATE)] * timing.EVENT_SAMPLES
    cold = event_us(device, call, cold=True)
    assert len(cold) == timing.EVENT_SAMPLES
    assert cold[0] == pytest.approx(NODE_US + 10 / COLD_RATE, abs=1.0)


def test_event_rounds_warm_up_once() -> None:
    device = FakeDevice()
    timer = Timer(device, ColdPlan(1), [device.kernel({"x": 10})], nothing)
    before = device.launches
    samples = timer.event_round()
    assert {name: len(values) for name, values in samples.items()} == {"event_hot_us": 50, "event_cold_us": 50}
    assert device.launches - before == 50 + 50 + 2 * 50  # warm-ups, hot, cold with a flush each
    timer.event_round()
    assert device.launches - before == 2 * (50 + 2 * 50) + 50


def test_values_are_fresh_in_every_round() -> None:
    device = FakeDevice()
    refreshed: list[int] = []
    timer = Timer(device, ColdPlan(1), [device.kernel({"x": 10})], lambda: refreshed.append(device.launches))
    assert refreshed == []
    timer.round()
    assert len(refreshed) == 2  # before the calls, and after these
    timer.event_round()
    assert len(refreshed) == 3


def test_a_first_look_that_was_disturbed_is_made_good() -> None:
    """While other processes use the GPU a launch may seem to take ten times as long; replays would be too short."""
    device = FakeDevice()
    slow = [100.0]
    plain = device.kernel({"x": 10})

    def shared() -> None:
        device.launch({"x": 10}, fixed_us=slow[0]) if slow[0] else plain()

    timer = Timer(device, ColdPlan(1), [shared], nothing)
    assert timer.hot_launches == timing.PROBE
    slow[0] = 0.0
    timer._hot = device.capture([shared] * timer.hot_launches)
    timer.round()
    assert timer.hot_launches > 500
    assert timer.round()["hot_us"] == pytest.approx(NODE_US + 10 / HOT_RATE)
