"""Our engine watched: what is timed, what is recorded, and what a report says. The recorder is a fake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight import LLM
from rooflight.bench import recording, results, step_report
from rooflight.bench.recording import Decoding, record_decode, record_prompt, time_decode, time_prompt
from rooflight.bench.step_report import StepsReport, StepsSetup, described_errors, watch
from rooflight.engine.core import Engine
from rooflight.engine.graph_runner import GraphRunner
from rooflight.engine.scheduler import Scheduler
from rooflight.limits.laws import Law, Point
from rooflight.limits.profile.reader import Events
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.load import load_config
from tests.limits.profile import recorded

TINY = load_config("random:tiny")
MODEL = "random:tiny"
PAGES, PAGE = 200, 16


@pytest.fixture(scope="module")
def llm() -> LLM:
    """With the runner of a GPU, which runs here without graphs."""
    made = LLM(MODEL, device="cpu", max_model_len=1024, num_pages=PAGES, page_size=PAGE, prefix_cache=False)
    runner = GraphRunner(made.decoder, made.engine.runner.cache, 1024, 4, 256, graphs=False)
    made.engine = Engine(runner, Scheduler(PAGES, PAGE, 4, 256, False, runner.most_steps), None, frozenset())
    return made


class FakeRecorder:
    """Runs the work, and then gives the events of launches of our engine, each kernel 2 us."""

    def __init__(self, step: Step) -> None:
        self.step, self.launches = step, 0

    def __call__(self, work: Callable[[], object]) -> Events:
        work()
        steps = 8 if self.step.phase == "decode" else 1
        names = [name for name, _ in recorded.steps_of(TINY, Scenario(self.step, "h200"), recorded.FEW_ROWS, steps)]
        events, self.launches = Events(), 3
        for index in range(self.launches):
            for name, span in zip(names, recorded.launch_of(names, 1e5 * index).spans, strict=True):
                kind = "gpu_memcpy" if name.startswith("Mem") else "kernel"
                duration = span.end - span.start
                events.add({"ph": "X", "cat": kind, "name": name, "ts": span.start, "dur": duration})
            for name in ("cudaMemcpyAsync", "cudaGraphLaunch", "cudaMemcpyAsync"):
                events.add({"ph": "X", "cat": "cuda_runtime", "name": name, "ts": 1e5 * index, "dur": 1})
        return events


def test_sequences_decode_around_the_context_that_was_asked_for(llm: LLM) -> None:
    seen = record_decode(llm, 3, 150, 16, FakeRecorder(Step("decode", 3, 150)))
    assert abs(seen.context - 150) <= 4
    assert [launch.spans[0].start for launch in seen.launches] == [1e5, 2e5]  # without the first of three
    assert seen.host_calls == 3
    assert not llm.engine.busy
    assert llm.engine.scheduler.pool.free == PAGES


def test_decoding_gives_eight_tokens_a_launch(llm: LLM) -> None:
    with Decoding(llm, 2, 20, 100) as decoding:
        decoding.land(2)
        before = decoding.context
        assert decoding.land(3) == 24
        assert decoding.context == before + 24
    assert not llm.engine.busy


def test_a_step_is_timed_for_the_host(llm: LLM) -> None:
    clock = iter((10.0, 10.0048))
    assert time_decode(llm, 1, 150, lambda: next(clock)) == pytest.approx(4800 / (8 * recording.TIMED))


def test_a_prompt_is_timed_by_the_median(llm: LLM) -> None:
    assert time_prompt(llm, 40) > 0
    seen = record_prompt(llm, 40, FakeRecorder(Step("prefill", 1, 40)))
    assert (seen.context, len(seen.launches)) == (40, 3)
    with pytest.raises(ValueError, match="prompt_tokens must be at most 256, the tokens of a step, was 300"):
        record_prompt(llm, 300)


def test_a_context_without_room_for_what_runs_before_it_is_refused(llm: LLM) -> None:
    assert recording.least_context(8, 32) == 49  # three launches before those that are timed, and half of these
    assert recording.least_context(8, 128) == 97
    with pytest.raises(ValueError, match="context must be more than 48 tokens, which run before it, was 48"):
        time_decode(llm, 1, 48)
    assert time_decode(llm, 1, 49) > 0
    with pytest.raises(ValueError, match="context must be more than 96 tokens, which run before it, was 96"):
        record_decode(llm, 1, 96, 128)


def test_nothing_seen_is_an_error(llm: LLM) -> None:
    def blind(work: Callable[[], object]) -> Events:
        work()
        return Events()

    with pytest.raises(ValueError, match="the profiler saw no launch of the engine on a GPU"):
        record_decode(llm, 1, 150, 8, blind)
    assert not llm.engine.busy


@pytest.fixture(scope="module")
def report(llm: LLM) -> StepsReport:
    steps = (Step("decode", 1, 150), Step("prefill", 1, 40))
    setup = StepsSetup(MODEL, steps)
    laws = {("linear_add_", True): Law("linear_add_", True, 3, 1.0, 1.0, 1.0)}
    found = [watch(llm, replace(setup, steps=(step,)), "h200", laws, recorder=FakeRecorder(step))[0] for step in steps]
    return StepsReport(
        setup, {"device": "NVIDIA Test"}, {"graph_buckets": [1]}, steps, tuple(found), (), tuple(laws.values())
    )


def test_a_watched_step_is_joined_to_its_explanation(report: StepsReport) -> None:
    decode, prompt = report.profiles
    assert (decode.phase, decode.batch, decode.model, decode.dtype) == ("decode", 1, MODEL, "fp32")
    assert abs(decode.context - 150) <= 4
    assert decode.row("linear_add_ o").measured_us == pytest.approx(2 * TINY.num_layers)
    assert decode.row("linear_add_ o").foretold_us > TINY.num_layers
    assert decode.step_us == pytest.approx(2 * (decode.kernels_per_step - 2 / 8))
    assert decode.wall_us > 0
    assert (prompt.phase, prompt.context, prompt.steps) == ("prefill", 40, 1)
    assert prompt.row("prefill_attention").measured_us == pytest.approx(2 * TINY.num_layers)


def test_rows_of_results(report: StepsReport, tmp_path: Path) -> None:
    kernels, steps = report.as_data("profile"), report.as_data("explain")
    few = [row for row in kernels["rows"] if row["operator"] == "rms_norm_linear qkv" and row["phase"] == "decode"]
    assert [(row["name"], row["count"], row["us"]) for row in few] == [("few_rows_linear", 2, pytest.approx(4))]
    qkv = report.profiles[0].row("rms_norm_linear qkv")
    assert (few[0]["bytes"], few[0]["limit_us"], few[0]["wall"]) == (qkv.bytes, qkv.limit_us, qkv.wall)
    assert [(row["phase"], row["context"]) for row in steps["rows"]] == [("decode", 150), ("prefill", 40)]
    assert steps["rows"][0]["error"] == pytest.approx(report.profiles[0].error)
    assert steps["laws"][0]["overhead_us"] == 1.0
    for name, data in (("profile", kernels), ("explain_measured", steps)):
        as_json, as_csv = results.write(tmp_path, name, data)
        assert as_json.read_text().startswith('{\n "benchmark": "')
        assert len(as_csv.read_text().splitlines()) == 1 + len(data["rows"])


def test_errors_in_a_line(report: StepsReport) -> None:
    profile = report.profiles[0]
    many = [replace(profile, foretold_us=profile.step_us * (1 + error)) for error in (0.1, -0.19, 0.35)]
    assert described_errors(many) == "2 of 3 steps foretold within 20%, the worst off by 35%"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"recorded": 0}, "steps must be 1 or more, was 0"),
        ({"steps": ()}, "steps must name at least one step, were none"),
        ({"steps": (Step("decode", 0, 5),)}, "batch must be from 1 to 1,000,000 sequences, was 0"),
        (
            {"steps": (Step("decode", 1, 48),)},
            "context must be 49 tokens or more to record 32 steps around it, was 48",
        ),
        ({"steps": (Step("prefill", 2, 5),)}, "batch must be 1 for a prompt that is recorded, was 2"),
    ],
)
def test_setups_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        replace(StepsSetup(MODEL, (Step("decode", 1, 49),)), **changes).check(TINY)


def test_the_engine_has_room_for_the_largest_step() -> None:
    setup = StepsSetup(MODEL, (Step("decode", 2, 300), Step("decode", 5, 100)))
    llm = step_report.load(setup, device="cpu")
    assert llm.max_model_len == 300 + 1 + 1024
    assert llm.engine.scheduler.pool.num_pages == 5 * -(-(101 + 1024) // 16)
    assert llm.engine.scheduler.max_num_seqs == 5
    assert not llm.engine.scheduler.prefix_cache


def test_a_card_without_ceilings_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_report, "gpu_name", lambda: "NVIDIA Test 9")
    with pytest.raises(
        ValueError, match=r"the GPU must be one of a100, .* whose ceilings are known, was NVIDIA Test 9"
    ):
        step_report.card_here()
    monkeypatch.setattr(step_report, "gpu_name", lambda: "NVIDIA H200")
    assert step_report.card_here().key == "h200"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu() -> None:
    with pytest.raises(ValueError, match="needs a GPU"):
        step_report.run(StepsSetup(MODEL, (Step("decode", 1, 5),)), lambda *_: None)


def test_a_run_measures_operators_then_loads_then_watches(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    points = [Point("linear_add_", "o", (1, 256), size, 0.0, 2.0 + size) for size in (1.0, 4.0, 20.0)]

    def measure(config: Any, card: Any, phases: Any, progress: Any, recipe: Any) -> list[Point]:
        assert recipe.projections
        order.append(f"measure {config.dtype} {card.key} {phases}")
        return points

    def load(setup: StepsSetup) -> LLM:
        order.append("load")
        return llm

    monkeypatch.setattr(step_report, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(step_report, "describe_gpu", lambda: {"driver": "1"})
    monkeypatch.setattr(step_report.step_operators, "measure", measure)
    monkeypatch.setattr(step_report, "load", load)
    step = Step("decode", 1, 150)
    said: list[str] = []
    recorder = FakeRecorder(step)
    found = step_report.run(StepsSetup(MODEL, (step,)), lambda what, done, of: said.append(what), recorder)
    assert order == ["measure torch.bfloat16 h200 ('decode',)", "load"]
    assert said == ["loading the model", "timing decode of 1 x 150", "recording decode of 1 x 150"]
    (law,) = found.laws
    assert (law.operator, law.few, law.overhead_us) == ("linear_add_", True, pytest.approx(2.0))
    assert law.fraction == pytest.approx(1.0)
    assert found.points == tuple(points)
    assert found.environment["driver"] == "1"
    assert found.profiles[0].row("linear_add_ o").foretold_us > 2.0 * TINY.num_layers
    order.clear()
    without = step_report.run(StepsSetup(MODEL, (step,), foretells=False), lambda *_: None, recorder)
    assert order == ["load"]
    assert (without.laws, without.profiles[0].foretold_us) == ((), None)
    with pytest.raises(ValueError, match="context must be 49 tokens or more to record 32 steps around it, was 5"):
        step_report.run(StepsSetup(MODEL, (Step("decode", 1, 5),)), lambda *_: None)
    assert order == ["load"]
