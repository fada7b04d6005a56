"""Time that passes counts once, however kernels overlap."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rooflight.limits.profile.reader import Events
from rooflight.limits.profile.timeline import Launch, Span, host_calls, launches, spans_of


def test_a_dependent_kernel_takes_what_it_adds() -> None:
    """b starts while a runs and waits; c starts after a gap; d ends before c does."""
    spans = (Span("a", 10, 14), Span("b", 11, 15), Span("c", 17, 22), Span("d", 18, 20), Span("e", 21, 23))
    launch = Launch(spans)
    assert [(spent.span.name, spent.us, spent.idle_us) for spent in launch.spent()] == [
        ("a", 4, 0), ("b", 1, 0), ("c", 7, 2), ("d", 0, 0), ("e", 1, 0),
    ]  # fmt: skip
    assert launch.span_us == 13
    assert launch.busy_us == 11
    assert sum(span.end - span.start for span in spans) == 17  # what durations would say


def test_a_launch_lasts_from_its_first_kernel_to_its_last() -> None:
    """Copies for the host around them, and waiting for it, take none of the time."""
    spans = (Span("Memcpy HtoD", 0, 2), Span("a", 30, 34), Span("b", 35, 36), Span("Memcpy DtoH", 50, 51))
    launch = Launch(spans)
    assert [(spent.us, spent.idle_us) for spent in launch.spent()] == [(0, 0), (4, 0), (2, 1), (0, 0)]
    assert (launch.span_us, launch.busy_us) == (6, 5)
    copies = Launch((Span("Memcpy HtoD", 0, 2), Span("Memcpy DtoH", 3, 4)))
    assert (copies.span_us, copies.busy_us) == (4, 3)


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(0, 30)), min_size=1, max_size=30))
def test_times_add_up_to_the_span_and_gaps_to_what_is_not_busy(pairs: list[tuple[int, int]]) -> None:
    spans = sorted((Span("x", start, start + length) for start, length in pairs), key=lambda span: span.start)
    launch = Launch(tuple(spans))
    spent = launch.spent()
    assert sum(one.us for one in spent) == launch.span_us
    assert sum(one.idle_us for one in spent) == launch.span_us - launch.busy_us


def test_a_launch_begins_with_its_upload() -> None:
    names = ("late", "Memcpy HtoD (Pinned -> Device)", "k", "Memcpy DtoH", "Memcpy HtoD (Pageable)", "k", "k")
    found = launches([Span(name, index, index + 0.5) for index, name in enumerate(names)])
    assert [[span.start for span in launch.spans] for launch in found] == [[1, 2, 3], [4, 5, 6]]
    assert launches([Span("k", 0, 1)]) == []


def test_spans_and_host_calls_of_a_trace() -> None:
    events = Events()
    for name, category, start, duration in (
        ("kernel b", "kernel", 5, 2),
        ("kernel a", "kernel", 1, 3),
        ("Memcpy HtoD", "gpu_memcpy", 0, 0.5),
        ("cudaGraphLaunch", "cuda_runtime", 0, 9),
        ("cudaMemcpyAsync", "cuda_runtime", 0, 1),
        ("cuLaunchKernelEx", "cuda_driver", 0, 1),
        ("cudaEventRecord", "cuda_runtime", 0, 1),
        ("cudaStreamSynchronize", "cuda_runtime", 0, 1),
        ("aten::add", "cpu_op", 0, 1),
    ):
        events.add({"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration})
    assert spans_of(events) == [Span("Memcpy HtoD", 0, 0.5), Span("kernel a", 1, 4), Span("kernel b", 5, 7)]
    assert host_calls(events) == 3


def test_a_launch_of_one_kernel() -> None:
    (only,) = Launch((Span("k", 3, 5),)).spent()
    assert (only.us, only.idle_us) == (pytest.approx(2), 0)
