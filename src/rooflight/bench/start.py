"""`rooflight bench start`: from the start of a process to an `LLM` that is ready, and to its first token.

Every start is a process of its own. A round is two of them: one whose caches of compiled code, of kernels and of
Python's modules, are empty folders ("cold"), and one that finds in them what the first has compiled ("warm"). Files are
in the page cache both times: weights, PyTorch, ours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rooflight.bench.environment import describe, describe_gpu
from rooflight.bench.measurement import Spread
from rooflight.bench.start_model import write_preset
from rooflight.models.load import load_config
from rooflight.models.sources import Kind, resolve

COLD, WARM = "cold", "warm"
GOALS = {COLD: 20.0, WARM: 5.0}  # seconds until ready, on a GPU
PATIENCE = 600.0  # seconds
# Whoever keeps compiled code on disk: Triton, the driver, PyTorch's run-time compilers, and Python, which would compile
# PyTorch's modules at every start (docs/lab) where the bytecode that pip leaves beside them is missing and writing it
# forbidden: so that has a folder here as well.
CACHES = (
    "TRITON_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "TORCHINDUCTOR_CACHE_DIR",
    "PYTORCH_KERNEL_CACHE_PATH",
    "PYTHONPYCACHEPREFIX",
)
WRITES = {"PYTHONDONTWRITEBYTECODE": ""}  # empty is off
# PyTorch is imported by itself, to be timed; rooflight would import it.
PROGRAM = """
from time import monotonic as now
begun = now()
import torch
torch_there = now()
from rooflight.bench.start_worker import main
main(begun, torch_there)
"""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class StartSetup:
    """What is measured. device: "cpu" or "cuda"."""

    model: str
    device: str = "cpu"
    rounds: int = 3

    def __post_init__(self) -> None:
        if self.rounds < 1:
            raise ValueError(f"rounds must be 1 or more, was {self.rounds}")


@dataclass(frozen=True)
class Start:
    """One start. Seconds; the parts add up to `ready`. compiled: kernels that are new in Triton's cache."""

    ready: float
    first_token: float
    parts: Mapping[str, float]
    compiled: int


@dataclass(frozen=True)
class StartRow:
    """All starts with one kind of cache. parts_s: of the start in the middle by `ready_s`, so that they add up."""

    cache: str
    ready_s: Spread
    first_token_s: Spread
    parts_s: Mapping[str, float]
    compiled: int
    goal_s: float | None

    @property
    def within_goal(self) -> bool | None:
        return None if self.goal_s is None else self.ready_s.median <= self.goal_s


@dataclass(frozen=True)
class StartReport:
    """weights: what was loaded, in words."""

    setup: StartSetup
    environment: Mapping[str, object]
    weights: str
    rows: tuple[StartRow, ...]

    def as_data(self) -> dict[str, object]:
        return {
            "benchmark": "start",
            "setup": asdict(self.setup),
            "environment": dict(self.environment),
            "weights": self.weights,
            "rows": [asdict(row) | {"within_goal": row.within_goal} for row in self.rows],
        }


def run(setup: StartSetup, progress: Progress = lambda *_: None) -> StartReport:
    """Measure; `progress` gets (what, done, of). ValueError for a model that is none, before anything starts."""
    load_config(setup.model)  # from the hub, if it comes from there
    environment = describe(os.cpu_count() or 1)
    environment |= describe_gpu() if setup.device == "cuda" else {"device": "cpu"}
    total = 2 * setup.rounds + 1
    starts: dict[str, list[Start]] = {COLD: [], WARM: []}
    with tempfile.TemporaryDirectory(prefix="rooflight-start-") as scratch:
        progress("writing the model", 0, total)
        model, words, skip_tokenizer = prepare(setup.model, Path(scratch))
        for index in range(setup.rounds):
            with tempfile.TemporaryDirectory(dir=scratch) as kernels:
                for turn, cache in enumerate((COLD, WARM)):
                    progress(f"{cache} start", 1 + 2 * index + turn, total)
                    starts[cache].append(launch(model, setup.device, skip_tokenizer, Path(kernels)))
    progress("done", total, total)
    goals: Mapping[str, float] = GOALS if setup.device == "cuda" else {}
    rows = tuple(row_of(cache, runs, goals.get(cache)) for cache, runs in starts.items())
    return StartReport(setup, environment, words, rows)


def prepare(model: str, scratch: Path) -> tuple[str, str, bool]:
    """What the processes load, that in words, and whether without a tokenizer. Presets become folders."""
    source = resolve(model)
    if source.kind is Kind.RANDOM:
        folder = scratch / "model"
        folder.mkdir()
        path = write_preset(source.name, folder) / "model.safetensors"
        size = path.stat().st_size / 1e9
        return (
            str(folder),
            f"{source.name} from a safetensors file of {size:.2f} GB, written before the first start",
            True,
        )
    without = source.kind is Kind.FOLDER and not (source.path / "tokenizer.json").is_file()
    return model, f"{source.name}, {'without' if without else 'with its'} tokenizer", without


def launch(model: str, device: str, skip_tokenizer: bool, kernels: Path) -> Start:
    """One process, from its start to its end. ChildProcessError with its words if it did not get to the first token."""
    caches = {name: str(kernels / name.lower()) for name in CACHES}
    for folder in caches.values():  # not everybody makes its own
        Path(folder).mkdir(exist_ok=True)
    before = compiled(kernels)
    arguments = [model, device, str(int(skip_tokenizer))]
    started = time.monotonic()
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, repr(started), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env={**os.environ, **caches, **WRITES},
            timeout=PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ChildProcessError(f"the started process did not get to its first token in {PATIENCE:g} s") from None
    reply = answer(done.stdout, done.stderr, done.returncode)
    return Start(reply["ready"], reply["first_token"], reply["parts"], compiled(kernels) - before)


def answer(out: str, errors: str, code: int) -> dict[str, Any]:
    """The worker's one line; ChildProcessError with its last words where that is an error, or not there."""
    lines = out.splitlines()
    if not lines:
        last = errors.strip().splitlines()[-1:] or ["no message"]
        raise ChildProcessError(f"the started process ended with code {code}: {last[0]}")
    reply: dict[str, Any] = json.loads(lines[-1])
    if "error" in reply:
        raise ChildProcessError(f"the started process could not get ready: {reply['error']}")
    return reply


def compiled(kernels: Path) -> int:
    """Machine code of Triton kernels that is there."""
    return sum(1 for _ in kernels.rglob("*.cubin"))


def row_of(cache: str, starts: Sequence[Start], goal: float | None) -> StartRow:
    middle = sorted(starts, key=lambda start: start.ready)[(len(starts) - 1) // 2]
    return StartRow(
        cache=cache,
        ready_s=Spread.of([start.ready for start in starts]),
        first_token_s=Spread.of([start.first_token for start in starts]),
        parts_s=dict(middle.parts),
        compiled=middle.compiled,
        goal_s=goal,
    )
