"""How a row of RMSNorm is spread over threads: measure every shape, and write the table that the kernels look up.

    python scripts/norm_shapes.py measure OUT.json    on a GPU, after `make kernels`: every legal shape, hot and cold
    python scripts/norm_shapes.py write               csrc/norm_shapes.inc from results/h200/norm_shapes.json
    python scripts/norm_shapes.py check               exit 1 if the table is not what the results say

A shape is how many packs of 16 bytes a thread holds, how many rows share a block, and whether launches overlap. The
order of a row's sum follows from the packs, so these may depend on the width alone and never on the number of rows.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rooflight.bench.device import Closure, CudaDevice

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TABLE = ROOT / "results/h200/norm_shapes.json", ROOT / "csrc/norm_shapes.inc"
WIDTHS = (512, 1024, 2048, 4096, 5120, 8192, 16384, 32768, 65536)  # bf16 elements: 64 to 8192 packs
TOKENS = (1, 32, 256, 1024, 16384)
MOST_BYTES = 1 << 30  # of one tensor
MOST_THREADS = 1024
ROUNDS = 7
SHAPE = ("packs", "rows_per_block", "overlap")
TIE, ROWS_TIE = 1.01, 1.003  # within one percent the simpler shape wins, within less the fewer rows a block


def legal_shapes(row_packs: int, tokens: int) -> Iterator[tuple[int, int, int]]:
    """(packs, rows_per_block, overlap): rows share a block only in large batches, as the launcher does it."""
    for packs in (1, 2, 4, 8):
        threads = -(-row_packs // packs)
        if threads > MOST_THREADS or (packs > 1 and threads < 32):
            continue
        yield packs, 1, 1
        if packs <= 2:
            yield packs, 1, 0
        for rows in (2, 4):
            if tokens >= 16384 and threads * rows <= MOST_THREADS:
                yield packs, rows, 1


def measure(out: Path) -> None:
    from rooflight.bench.device import CudaDevice
    from rooflight.bench.environment import describe, describe_gpu

    device = CudaDevice()
    device.warm_clocks(2000)
    rows: list[dict[str, Any]] = []
    for width in WIDTHS:
        for tokens in TOKENS:
            if tokens * width * 2 <= MOST_BYTES:
                rows += _measure_case(device, tokens, width)
    out.write_text(json.dumps({"environment": {**describe(0), **describe_gpu()}, "rows": rows}, indent=1) + "\n")


def _measure_case(device: CudaDevice, tokens: int, width: int) -> list[dict[str, Any]]:
    """Medians of interleaved rounds of every legal shape, microseconds of GPU time, in place in bf16."""
    from rooflight.bench.timing import ColdPlan, Timer

    plan = ColdPlan.of(2 * tokens * width * 2, device.l2_bytes)
    sets = [tuple(_random(tokens, width) for _ in range(2)) for _ in range(plan.sets)]
    weight = _random(width)

    def refresh() -> None:
        for tensor in sets[0]:
            tensor.normal_()

    timers = {}
    for shape in legal_shapes(width // 8, tokens):
        closures = [_launch(x, residual, weight, shape) for x, residual in sets]
        for call in closures:
            call()
        timers[shape] = Timer(device, plan, closures, refresh)
    rounds: dict[tuple[int, int, int], list[dict[str, float]]] = defaultdict(list)
    for turn in range(ROUNDS):
        for shape in timers if turn % 2 else reversed(list(timers)):
            rounds[shape].append(timers[shape].gpu_round())
    return [
        {
            **dict(zip(("hidden_size", "num_tokens", *SHAPE), (width, tokens, *shape), strict=True)),
            **{key: median(time[key] for time in times) for key in ("hot_us", "cold_us")},
        }
        for shape, times in rounds.items()
    ]


def _random(*size: int) -> torch.Tensor:
    return torch.randn(*size, device="cuda").bfloat16()


def _launch(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, shape: tuple[int, int, int]) -> Closure:
    tokens, width = x.shape

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        pointers = x.data_ptr(), residual.data_ptr(), weight.data_ptr()
        code = _shaped()(stream, 2, *pointers, tokens, width, 1e-6, *shape)
        if code:
            raise RuntimeError(f"launch with {dict(zip(SHAPE, shape, strict=True))} failed: CUDA error {code}")

    return call


@cache
def _shaped() -> Any:
    from rooflight.kernels import library

    function = ctypes.CDLL(str(library.LIBRARY)).rooflight_add_rms_norm_shaped
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, pointer, pointer, pointer, ctypes.c_int64, number, ctypes.c_float]
    function.argtypes += [number] * len(SHAPE)
    return function


def table() -> str:
    """The shape with the smallest geometric mean over tokens, hot and cold, of time over the best time of that case."""
    data = json.loads(RESULTS.read_text())
    scores: dict[int, dict[tuple[int, int, int], float]] = {}
    cases: dict[tuple[int, int], list[dict[str, Any]]] = defaultdict(list)
    for row in data["rows"]:
        cases[row["hidden_size"], row["num_tokens"]].append(row)
    lost: dict[int, dict[tuple[int, int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for (width, _), rows in cases.items():
        best = {key: min(row[key] for row in rows) for key in ("hot_us", "cold_us")}
        for row in rows:
            shape = row["packs"], row["rows_per_block"], row["overlap"]
            lost[width][shape] += [math.log(row[key] / best[key]) for key in best]
    for width, shapes in lost.items():
        everywhere = max(map(len, shapes.values()))
        scores[width] = {shape: sum(logs) / len(logs) for shape, logs in shapes.items() if len(logs) == everywhere}
    lines = [
        "// Generated by scripts/norm_shapes.py from results/h200/norm_shapes.json; do not edit.",
        f"// {data['environment']['device']}, commit {data['environment']['commit']}, {data['environment']['date']}.",
        "// {packs of 16 bytes in a row at most, {packs a thread, rows a block at large batches, overlap}}",
    ]
    for width in sorted(scores):
        packs, _, overlap = _simplest(scores[width])
        rows = _rows_per_block(cases.get((width, 16384), []), packs, overlap)
        lines.append(f"{{{width // 8}, {{{packs}, {rows}, {'true' if overlap else 'false'}}}}},")
    return "\n".join(lines) + "\n"


def _simplest(scores: dict[tuple[int, int, int], float]) -> tuple[int, int, int]:
    good = [shape for shape, score in scores.items() if score <= min(scores.values()) + math.log(TIE)]
    return min(good)  # fewest packs, one row a block


def _rows_per_block(rows: list[dict[str, Any]], packs: int, overlap: int) -> int:
    times = {
        row["rows_per_block"]: row["cold_us"] for row in rows if (row["packs"], row["overlap"]) == (packs, overlap)
    }
    return min((count for count in times if times[count] <= min(times.values()) * ROWS_TIE), default=1)


def main() -> int:
    match sys.argv[1:]:
        case ["measure", out]:
            measure(Path(out))
        case ["write"]:
            TABLE.write_text(table())
        case ["check"]:
            if TABLE.read_text() != table():
                print("csrc/norm_shapes.inc is not what the results say; run scripts/norm_shapes.py write")
                return 1
        case _:
            print(__doc__)
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
