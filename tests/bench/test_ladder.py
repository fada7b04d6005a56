"""The ladder: what its rungs switch, the arithmetic of its predictions, its rows, and a climb of a tiny model."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from rooflight.bench import ladder, results, rungs
from rooflight.bench.ladder import LadderReport, LadderSetup
from rooflight.bench.rungs import RUNGS, Estimate, Host, Machine, Rung, Work, estimate, wall_of, work_of
from rooflight.limits.card import Bandwidth
from rooflight.models.load import load_config
from rooflight.models.recipe import Recipe

MACHINE = Machine("a test's", (Bandwidth(1, 1e12),), node_us=0.5, multiprocessors=8)  # 1 MB a microsecond
TINY = load_config("random:tiny")  # 2 layers, 4 query heads over 2 KV heads, FP32
ENVIRONMENT = {
    "device": "NVIDIA Test 1", "driver": "580.1", "cpu": "A CPU", "torch": "2.99", "triton": "3.9", "commit": "abc",
    "date": "2026-12-01",
}  # fmt: skip
# Microseconds of a token by rung: the third is slower than the second, the last two do not wait for the host.
TIMES = [1000.0, 800.0, 900.0, 600.0, 500.0, 400.0, 300.0, 200.0, 100.0]


@dataclass(frozen=True)
class FakeClimb:
    per_token: float
    waited: float
    tokens: tuple[int, ...]


@dataclass
class FakeClimber:
    """Each rung takes its time, twice that in the round that warms up, a tenth more in every second round after it."""

    log: list[tuple[str, int]] = field(default_factory=list)

    def __call__(
        self, model: str | None, dtype: str, device: str, climbed: Sequence[Rung], longest: int
    ) -> FakeClimber:
        self.given = model, dtype, device, [rung.name for rung in climbed], longest
        return self

    def facts(self) -> dict[str, object]:
        return {"num_pages": 3}

    def run(self, rung: Rung, prompt: Sequence[int], max_tokens: int) -> FakeClimb:
        self.log.append((rung.name, len(prompt)))
        times = self.log.count((rung.name, len(prompt)))
        factor = 2.0 if times == 1 else 1.1 if times % 2 else 1.0
        token = TIMES[RUNGS.index(rung)] * 1e-6 * factor
        last = int(rung.recipe != RUNGS[0].recipe)
        return FakeClimb(token, token / 2 if rung.graphs else 0.0, (*range(max_tokens - 1), last))


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> LadderReport:
    monkeypatch.setattr(ladder, "environment_of", lambda device, threads: ENVIRONMENT)
    setup = LadderSetup("random:tiny", "fp32", (32, 100), max_tokens=8, rounds=3)
    return ladder.run(setup, start=FakeClimber(), machine=MACHINE)


def test_every_rung_adds_one_switch_to_those_before() -> None:
    names = [part.name for part in fields(Recipe) if part.name != "scaled"]  # which does nothing for one sequence
    switches = [
        {**{name: getattr(rung.recipe, name) for name in names}, "graphs": rung.graphs, "steps": rung.steps > 1}
        for rung in RUNGS
    ]
    assert not any(switches[0].values())
    assert all(switches[-1].values())
    added = []
    for before, after in pairwise(switches):
        changed = [name for name in after if before[name] != after[name]]
        assert [after[name] for name in changed] == [True]
        added += changed
    assert added == ["norm", "rope", "grouped", "split", "projections", "attention", "graphs", "steps"]


def test_the_work_of_a_token_by_hand() -> None:
    """Naive, a layer: 4 products, 2 head norms, RoPE, write, 2 attentions and their stack, addition, norm, SwiGLU.

    Before, between and behind two layers: norm, addition and norm, twice; embedding, head, sampler and the advance.
    """
    works = [work_of(TINY, rung.recipe, 100) for rung in RUNGS]
    assert [work.operators for work in works] == [37, 33, 27, 23, 23, 16, 14, 14, 14]
    key = 2 * 2 * 2 * 32 * 4  # layers, K and V, heads, head_dim, FP32
    assert [work.kv_bytes for work in works] == [2 * 101 * key] * 3 + [101 * key] * 3 + [100 * key] * 3
    weights = 4 * (TINY.num_parameters() - TINY.vocab_size * TINY.hidden_size)
    tied = 4 * TINY.vocab_size * TINY.hidden_size if TINY.tie_word_embeddings else 0
    for work in works:
        assert weights + tied < work.other_bytes < 1.2 * (weights + tied)
    assert works[1].other_bytes < works[0].other_bytes


def test_predictions_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 operators, 4 MB of keys and values, 8 of everything else, at 1 MB a microsecond; 2 of 8 multiprocessors."""
    monkeypatch.setattr(rungs, "work_of", lambda config, recipe, context: Work(40, 4_000_000, 8_000_000))
    found = [estimate(TINY, rung, 100, MACHINE, Host(step_us=100.0, operator_us=10.0)) for rung in RUNGS]
    assert found[0] == Estimate(100 + 400, 8 + 4 * 4, 20)
    assert found[4] == Estimate(500, 12, 20)
    assert found[6] == Estimate(500, 12, 20)
    assert found[7] == Estimate(100, 12, 20)
    assert found[8] == Estimate(12.5, 12, 20)
    assert [each.time_us for each in found[-3:]] == [500, 100, 32]


def test_the_host_by_hand() -> None:
    assert Host.of(naive_us=500.0, naive_operators=40, graph_us=100.0) == Host(100.0, 10.0)
    assert Host.of(naive_us=90.0, naive_operators=40, graph_us=100.0) == Host(100.0, 0.0)


@pytest.mark.parametrize(
    ("found", "share", "wall"), [(500, 0.95, "host"), (500, 0.9, "host"), (24, 0.5, "memory"), (25, 0.5, "launch")]
)
def test_walls(found: float, share: float, wall: str) -> None:
    assert wall_of(found, share, Estimate(100, 12, 20)) == wall


def test_rows(report: LadderReport) -> None:
    rows = report.rows
    assert [(row.prompt_tokens, row.rung) for row in rows] == [(n, rung.name) for n in (32, 100) for rung in RUNGS]
    for place, row in enumerate(rows):
        rung = place % len(RUNGS)
        time, before = TIMES[rung], TIMES[rung - 1]
        token = row.per_token_us
        assert (token.median, token.low, token.high) == pytest.approx((time, time, 1.1 * time))
        assert row.tokens_per_s.median == pytest.approx(1e6 / time)
        assert row.tokens_per_s.low == pytest.approx(1e6 / 1.1 / time)
        assert row.gain == (None if rung == 0 else pytest.approx(before / time))
        assert row.slower == (rung == 2)
        assert row.host_share == pytest.approx(0.5 if rung > 6 else 1.0)
        assert row.same_tokens == (8 if rung == 0 else 7)
    assert [row.wall for row in rows[: len(RUNGS)]] == ["host"] * 7 + ["launch"] * 2


def test_predicted_gains_are_of_this_host_and_its_warm_up_round(report: LadderReport) -> None:
    """2000 us of the naive rung's 37 operators, and 200 of 400 us that the rung with graphs did not wait."""
    assert report.host.step_us == pytest.approx(200.0)
    assert report.host.operator_us == pytest.approx(1800.0 / 37)
    first, second, *_, graph, last = report.rows[: len(RUNGS)]
    assert first.expected.host_us == pytest.approx(2000.0)
    assert second.predicted_gain == pytest.approx(2000.0 / (200 + 33 * 1800 / 37))
    assert graph.expected.time_us == pytest.approx(200.0)
    assert last.predicted_gain == pytest.approx(200.0 / 25.0)
    assert first.predicted_gain is None


def test_rungs_take_turns_in_alternating_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ladder, "environment_of", lambda device, threads: ENVIRONMENT)
    climber, seen = FakeClimber(), []
    setup = LadderSetup("random:tiny", "fp32", (32, 100), max_tokens=8, rounds=1)
    ladder.run(setup, lambda *step: seen.append(step), climber, MACHINE)
    names = [rung.name for rung in RUNGS]
    assert climber.given == ("random:tiny", "fp32", "cuda", names, 108)
    assert [name for name, length in climber.log if length == 32] == [*reversed(names), *names]
    assert [step[1:] for step in seen] == [(0, 4), (0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 0}, r"^rounds must be 1 or more, was 0"),
        ({"max_tokens": 1}, r"^max_tokens must be 2 or more to time a token, was 1"),
        ({"prompts": ()}, r"^prompts must be lengths of 1 or more, each once, was \(\)"),
        ({"prompts": (4, 4)}, r"^prompts must be lengths of 1 or more, each once, was \(4, 4\)"),
        ({"dtype": "int8"}, r"^dtype must be one of "),
    ],
)
def test_setups_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LadderSetup(**changes)


def test_a_prompt_beyond_the_context_is_refused() -> None:
    with pytest.raises(ValueError, match="must fit the context of 4096 tokens, were 4000 and 128"):
        ladder.run(LadderSetup("random:tiny", "fp32", (4000,)), start=FakeClimber(), machine=MACHINE)


def test_a_climb_of_a_tiny_model() -> None:
    """On the CPU there are no graphs, and all rungs give the same tokens: their roundings are FP32's."""
    setup = LadderSetup("random:tiny", "fp32", (5, 40), max_tokens=11, rounds=1, device="cpu")
    report = ladder.run(setup, machine=MACHINE)
    assert [row.same_tokens for row in report.rows] == [11] * 2 * len(RUNGS)
    assert all(row.per_token_us.median > 0 and 0 < row.host_share <= 1 for row in report.rows)
    assert report.engine == {"max_model_len": 51, "num_pages": 5, "page_size": 16}


@pytest.fixture
def tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    module = importlib.import_module("ladder_tables")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


def test_the_table_of_the_docs(tables: Any, tmp_path: Path, report: LadderReport) -> None:
    assert tables.TABLES["ladder-decode"]() == ""
    results.write(tmp_path, "ladder", report.as_data())
    lines = tables.TABLES["ladder-decode"]().splitlines()
    assert lines[0] == "| prompt | rung | tok/s | µs per token | gain | predicted | operators | MB | wall |"
    assert lines[2] == "| 32 | naive operators | 1,000 | 1,000 ±10% |  |  | 37 | 1 | host |"
    row = report.rows[2]
    assert lines[4] == (
        f"| 32 | fused QK/RoPE/append | 1,111 | 900 ±10% | 0.89 (slower) | {row.predicted_gain:.2f} | 27 | 1 | host |"
    )
    assert lines[11].startswith("| 100 | naive operators |")
    text = "\n".join(lines)
    assert "48.6 µs an operator and 200 µs a launch of this host, 0.50 µs a kernel" in text
    assert "The first 7 rungs ask for every operator from the host." in text
    assert "NVIDIA Test 1, driver 580.1; host A CPU;" in text
    assert lines[-1] == "- 8 tokens a launch: 8 steps are one launch of the host"


def test_the_generator_knows_the_table() -> None:
    assert "**ladder_tables.TABLES" in (Path(__file__).parents[2] / "scripts/generate_docs.py").read_text()
