"""Laws of operators: found where there is one, kept apart by rows, summed to steps."""

from __future__ import annotations

import pytest

from rooflight.limits.ceilings import ceilings
from rooflight.limits.explanation import name_of, placed_calls
from rooflight.limits.laws import Law, Point, bound_of, fit, foretell
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.load import load_config

QWEN, H200 = load_config("random:qwen3-0.6b"), ceilings("h200")


def point(memory: float, compute: float, us: float, rows: int = 1, operator: str = "linear_add_") -> Point:
    return Point(operator, "o", (rows, 1024), memory, compute, us)


def test_a_law_is_found() -> None:
    streams = [point(size, 0.1, 1.5 + size / 0.8) for size in (1.0, 2.0, 70.0)]
    products = [point(3.0, work, 1.5 + work / 0.6, rows=1) for work in (10.0, 40.0)]
    law = fit([*streams, *products])["linear_add_", True]
    assert (law.overhead_us, law.fraction) == (pytest.approx(1.5), pytest.approx(0.8))
    assert law.compute_fraction == pytest.approx(0.6)
    assert law.points == 5
    assert law.error == pytest.approx(0, abs=1e-9)
    assert law.us(8.0, 1.0) == pytest.approx(11.5)
    assert law.us(8.0, 60.0) == pytest.approx(101.5)


def test_few_and_many_rows_have_laws_of_their_own() -> None:
    laws = fit([point(s, 0, 1 + s, rows=8) for s in (1, 2, 9)] + [point(s, 0, 5 + 2 * s, rows=9) for s in (1, 2, 9)])
    assert laws["linear_add_", True].overhead_us == pytest.approx(1)
    assert laws["linear_add_", False].overhead_us == pytest.approx(5)
    assert laws["linear_add_", False].fraction == pytest.approx(0.5)


def test_sizes_that_are_alike_tell_an_overhead_and_no_rate() -> None:
    law = fit([point(2.0, 0, 3.0), point(2.1, 0, 3.1), point(2.2, 0, 3.2)])["linear_add_", True]
    assert (law.overhead_us, law.fraction) == (pytest.approx(1.0), 1.0)
    law = fit([point(2.0, 0, 1.0), point(2.0, 0, 1.0)])["linear_add_", True]  # out of L2
    assert (law.overhead_us, law.fraction) == (0.0, pytest.approx(2.0))


def test_the_error_is_the_worst_of_the_fit() -> None:
    law = fit([point(1, 0, 2), point(10, 0, 11), point(100, 0, 101), point(50, 0, 102)])["linear_add_", True]
    errors = [abs(law.us(m, 0) / us - 1) for m, us in ((1, 2), (10, 11), (100, 101), (50, 102))]
    assert law.error == pytest.approx(max(errors))
    assert law.error > 0.2


def test_a_step_is_the_sum_of_its_calls() -> None:
    """With laws that say the limit, what is foretold is the limits; without one, the limit counts and is named."""
    placed = placed_calls(QWEN, Scenario(Step("decode", 4, 500), "h200"))
    operators = {item.call.operator for item in placed} - {"sample"}
    laws = {(name, True): Law(name, True, 3, 0.25, 0.5, 0.5) for name in operators}
    found, lawless = foretell(placed, laws, H200)
    assert lawless == ("sample",)
    expected: dict[str, float] = {}
    for item in placed:
        limit = bound_of(item.call, item.cost, item.format, H200)
        own = limit.limit_us if item.call.operator == "sample" else 0.25 + 2 * max(limit.memory_us, limit.compute_us)
        expected[name_of(item.call)] = expected.get(name_of(item.call), 0) + own
    assert found == pytest.approx(expected)
    assert set(found) == {name_of(item.call) for item in placed}


def test_many_rows_do_not_take_the_law_of_few() -> None:
    placed = placed_calls(QWEN, Scenario(Step("decode", 300, 500), "h200"))
    _, lawless = foretell(placed, {("linear_add_", True): Law("linear_add_", True, 3, 0, 1, 1)}, H200)
    assert {"linear_add_ o", "linear_add_ down"} <= set(lawless)
