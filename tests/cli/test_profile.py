"""`rooflight profile` and `rooflight explain --measure` from the outside; what a GPU would give is made up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rooflight.bench import step_report
from rooflight.bench.step_report import SWEEP, StepsSetup
from rooflight.limits.trace import Step
from tests.bench.step_reports import MODEL, report
from tests.cli.running import invoke, refused

ASKED: list[StepsSetup] = []


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[StepsSetup]:
    ASKED.clear()

    def run(setup: StepsSetup, progress: Callable[[str, int, int], None]) -> Any:
        ASKED.append(setup)
        return report(*setup.steps, foretells=setup.foretells)

    monkeypatch.setattr(step_report, "run", run)
    monkeypatch.setattr(step_report, "gpu_name", lambda: "NVIDIA H200")
    monkeypatch.setenv("COLUMNS", "160")
    return ASKED


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("command", [("profile", "--model", MODEL), ("explain", MODEL, "--measure")])
def test_without_a_gpu_one_line_says_so(command: tuple[str, ...]) -> None:
    assert refused(*command) == "this needs a GPU, and PyTorch sees none here"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--sweep",), "--sweep and --out are for --measure"),
        (("--out", "x"), "--sweep and --out are for --measure"),
        (("--measure", "--what-if", "kv=fp8"), "--measure takes no --trace, --accuracy, --what-if or --html"),
        (("--measure", "--accuracy", "x"), "--measure takes no --trace, --accuracy, --what-if or --html"),
    ],
)
def test_options_that_do_not_go_together(options: tuple[str, ...], message: str) -> None:
    assert refused("explain", MODEL, *options) == message


def test_a_page_of_kernels(gpu: list[StepsSetup], tmp_path: Path) -> None:
    result = invoke("profile", "--model", MODEL, "--steps", "64", "--out", tmp_path)
    assert result.exit_code == 0
    assert gpu == [StepsSetup(MODEL, (Step("decode", 1, 1024), Step("prefill", 1, 1024)), 64)]
    decode = report(*gpu[0].steps).profiles[0]
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert lines[0] == f"{MODEL}, bf16, decode of 1 × 1,024 tokens in the cache, on NVIDIA H200"
    assert "GPU busy 100.0% of the step, 80.0% of the host's time" in lines
    text = f"{decode.kernels_per_step:,.1f} kernels and copies a step, {decode.kernels_per_step:,.4g} a token; the host"
    assert f"{text} launches 0.375 times a step" in lines
    assert f"Foretold from operators alone {decode.foretold_us:,.1f} µs, off by {decode.error:+.1%}" in lines
    top, rest = lines.index("The 5 most expensive of 17 kernels"), lines.index("The others")
    rows = [line.split() for line in lines[top:rest] if " memory " in line or " launch " in line]
    assert [float(row[row.index("28") + 1]) for row in rows] == [56.0] * 5
    qkv = decode.row("rms_norm_linear qkv")
    at = next(index for index, line in enumerate(lines) if line.split()[:2] == ["rms_norm_linear", "qkv"])
    figures = [f"{qkv.bytes / 1e6:.1f}", "MB", f"{qkv.limit_us:.1f}", f"{qkv.at_limit:.0%}"]
    assert lines[at - 1].split() == ["few_rows_linear", "memory", "28", "56.0", "0.00", f"{qkv.share:.1%}", *figures]
    assert lines[at].split()[2:] == ["0.23", "GF"]
    assert any(line.startswith("advance_decode ") for line in lines[rest:])
    operators = lines[lines.index("By operator") :]
    own = next(line.split() for line in operators if line.startswith("linear_add_ down"))
    down = decode.row("linear_add_ down")
    text = [f"{down.share:.1%}", f"{down.limit_us:.1f}", f"{down.at_limit:.0%}", "95.2", "+70%"]
    assert own == ["linear_add_", "down", "memory", "56.0", *text]
    assert f"{MODEL}, bf16, a prompt of 1,024 tokens, on NVIDIA H200" in lines
    data = json.loads((tmp_path / "profile.json").read_text())
    assert data["benchmark"] == "profile"
    assert {row["phase"] for row in data["rows"]} == {"decode", "prefill"}
    assert f"wrote {tmp_path}/profile.csv" in result.stdout.replace("\n", " ")


def test_tables_fit_eighty_columns(gpu: list[StepsSetup], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for command in (("profile", "--model", MODEL), ("explain", MODEL, "--measure", "--sweep")):
        text = invoke(*command).stdout
        rows = [
            line for line in text.splitlines() if " memory " in line or " launch " in line or "─" in line or "%" in line
        ]
        assert "…" not in text
        assert all(len(line) <= 80 for line in rows if not line.startswith(("GPU", "Limit", "Foretold")))


def test_without_a_prompt_and_without_laws(gpu: list[StepsSetup]) -> None:
    result = invoke("profile", "--model", MODEL, "--prompt-tokens", "0", "--no-foretell", "--batch", "8")
    assert result.exit_code == 0
    assert gpu == [StepsSetup(MODEL, (Step("decode", 8, 1024),), foretells=False)]
    assert "Foretold" not in result.stdout
    assert "prompt" not in result.stdout


def test_a_measured_step_beside_its_prediction(gpu: list[StepsSetup]) -> None:
    result = invoke("explain", MODEL, "--measure", "--batch", "1", "--context", "512")
    assert result.exit_code == 0
    assert gpu == [StepsSetup(MODEL, (Step("decode", 1, 512),))]
    page, _, measured = result.stdout.partition("Measured: decode of 1 × 512 tokens in the cache")
    assert "Step limit" in page
    row = next(line.split() for line in measured.splitlines() if line.strip().startswith("linear_add_ o"))
    assert row[:4] == ["linear_add_", "o", "memory", "56.0"]
    assert row[-2:] == ["95.2", "+70%"]


def test_the_sweep_of_the_docs(gpu: list[StepsSetup], tmp_path: Path) -> None:
    result = invoke("explain", MODEL, "--measure", "--sweep", "--out", tmp_path)
    assert result.exit_code == 0
    assert gpu[0].steps == tuple(Step("decode", batch, context) for batch, context in SWEEP)
    assert [(step.batch, step.context) for step in gpu[0].steps] == [
        (batch, context) for batch in (1, 8, 64) for context in (128, 1024, 8192)
    ]
    assert "decode 64 × 8,192" in result.stdout
    assert "of 9 steps foretold within 20%, the worst off by" in result.stdout
    data = json.loads((tmp_path / "explain_measured.json").read_text())
    assert len(data["rows"]) == len(data["profiles"]) == 9
    assert data["rows"][0]["foretold_us"] / data["rows"][0]["step_us"] - 1 == pytest.approx(data["rows"][0]["error"])


def test_json(gpu: list[StepsSetup]) -> None:
    data = json.loads(invoke("explain", MODEL, "--measure", "--phase", "prefill", "--json").stdout)
    assert data["benchmark"] == "explain"
    assert [row["phase"] for row in data["rows"]] == ["prefill"]
