"""A report of steps that never ran: every kernel takes 2 us, and laws say 3 us a call."""

from __future__ import annotations

from rooflight.bench.step_report import StepsReport, StepsSetup
from rooflight.limits.explanation import placed_calls
from rooflight.limits.laws import Law, key_of
from rooflight.limits.profile.step import profile_step
from rooflight.limits.scenario import Scenario
from rooflight.limits.trace import Step
from rooflight.models.load import load_config
from tests.limits.profile.recorded import FEW_ROWS, MANY_ROWS, recording

MODEL = "random:qwen3-0.6b"
QWEN = load_config(MODEL)
ENVIRONMENT = {
    "device": "NVIDIA Test 1", "driver": "580.1", "cpu": "A CPU", "threads": 3, "torch": "2.99", "triton": "3.9",
    "commit": "abc", "date": "2026-12-01",
}  # fmt: skip


def report(*steps: Step, foretells: bool = True) -> StepsReport:
    profiles, laws = [], {}
    for step in steps:
        scenario = Scenario(step, "h200")
        for item in placed_calls(QWEN, scenario):
            key = key_of(item.call.operator, item.call.shape)
            laws[key] = Law(*key, points=4, overhead_us=3.4, fraction=1e9, compute_fraction=1e9, error=0.07)
        few = step.phase == "decode" and step.batch <= 8
        seen = recording(QWEN, scenario, FEW_ROWS if few else MANY_ROWS, 8 if step.phase == "decode" else 1)
        profiles.append(profile_step(MODEL, QWEN, scenario, seen, laws if foretells else None))
    found = tuple(laws.values()) if foretells else ()
    return StepsReport(StepsSetup(MODEL, steps), ENVIRONMENT, {}, steps, tuple(profiles), (), found)
