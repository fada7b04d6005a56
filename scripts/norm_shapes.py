"""How a row of RMSNorm is spread over threads: measure every shape, and write the table that the kernels look up.

    python scripts/norm_shapes.py measure OUT.json    on a GPU, after `make kernels`: every legal shape, hot and cold
    python scripts/norm_shapes.py write               csrc/norm_shapes.inc from results/h200/norm_shapes.json
    python scripts/norm_shapes.py check               exit 1 if the table is not what the results say

A shape is how many packs of 16 bytes a thread holds and how many rows share a block. The order of a row's sum follows
from the packs, so these may depend on the width alone and never on the number of rows, and rms_norm takes the same as
fused_add_rms_norm, so that both give the same bits. Launches follow each other as in a graph of norms: hot ones and
those of large inputs overlap, cold ones of small inputs stand behind a flush and do not.
"""

from __future__ import annotations

import ctypes
import json
import math
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rooflight.bench.device import Closure, CudaDevice

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TABLE = ROOT / "results/h200/norm_shapes.json", ROOT / "csrc/norm_shapes.inc"
WIDTHS = (128, 256, 512, 1024, 2048, 2560, 4096, 5120, 8192, 16384, 32768, 65536)  # bf16 elements: 16 to 8192 packs
TOKENS = (1, 32, 256, 1024, 16384)
MANY, VERY_MANY = TOKENS[-2:]  # rows share a block only where there are many, as in the launcher
MOST_BYTES = 1 << 30  # of one tensor
MOST_THREADS, WARP = 1024, 32
ROUNDS = 5
TIMES = ("hot_us", "cold_us")
PACKS, ROWS_PER_BLOCK = (1, 2, 4, 8), (1, 2, 4, 8, 16)
ACCEPTED, ACCEPTED_US = 1.05, 0.15  # what a case may lose to its best shape
TIE = 1.01  # within one percent packs count as equal; the mean decides
ROWS_TIE = 1.05  # within five percent fewer rows a block win: identical launches differ by as much, cold


def legal_shapes(row_packs: int, tokens: int) -> Iterator[tuple[int, int]]:
    """(packs, rows_per_block)"""
    for packs in PACKS:
        threads = -(-row_packs // packs)
        if threads > MOST_THREADS or (packs > 1 and threads < WARP):
            continue
        for rows in ROWS_PER_BLOCK:
            if rows == 1 or (tokens >= MANY and threads * rows > WARP and threads * rows <= MOST_THREADS):
                yield packs, rows


def measure(out: Path) -> None:
    from rooflight.bench.device import CudaDevice
    from rooflight.bench.environment import describe, describe_gpu

    device = CudaDevice()
    device.warm_clocks(2000)
    rows: list[dict[str, Any]] = []
    for width in WIDTHS:
        for tokens in TOKENS:
            for add in (False, True):
                if tokens * width * 2 <= MOST_BYTES:
                    rows += _measure_case(device, tokens, width, add)
    out.write_text(json.dumps({"environment": {**describe(0), **describe_gpu()}, "rows": rows}, indent=1) + "\n")


def _measure_case(device: CudaDevice, tokens: int, width: int, add: bool) -> list[dict[str, Any]]:
    """Medians of interleaved rounds of every legal shape, microseconds of GPU time, in bf16."""
    from rooflight.bench.timing import ColdPlan, Timer

    tensors = 4 if add else 2
    plan = ColdPlan.of(tensors * tokens * width * 2, device.l2_bytes)
    sets = [[torch.randn(tokens, width, device="cuda").bfloat16() for _ in range(tensors)] for _ in range(plan.sets)]
    weight = torch.randn(width, device="cuda").bfloat16()
    timers = {}
    for shape in legal_shapes(width // 8, tokens):
        closures = [_launch(tensors, weight, shape) for tensors in sets]
        for call in closures:
            call()
        timers[shape] = Timer(device, plan, closures, refresh=lambda: None)
    rounds: dict[tuple[int, int], list[dict[str, float]]] = defaultdict(list)
    for turn in range(ROUNDS):
        for shape in timers if turn % 2 else reversed(list(timers)):
            rounds[shape].append(timers[shape].gpu_round())
    return [
        {
            "hidden_size": width,
            "num_tokens": tokens,
            "add": add,
            "packs": packs,
            "rows_per_block": rows,
            **{key: round(median(time[key] for time in times), 4) for key in TIMES},
        }
        for (packs, rows), times in rounds.items()
    ]


def _launch(tensors: list[torch.Tensor], weight: torch.Tensor, shape: tuple[int, int]) -> Closure:
    tokens, width = tensors[0].shape
    x, out, residual, total = [*(tensor.data_ptr() for tensor in tensors), None, None][:4]

    def call() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        code = _shaped()(stream, 2, x, residual, weight.data_ptr(), out, total, tokens, width, 1e-6, *shape)
        if code:
            raise RuntimeError(f"launch with packs, rows a block {shape} failed: CUDA error {code}")

    return call


@cache
def _shaped() -> Any:
    from rooflight.kernels import library

    function = ctypes.CDLL(str(library.LIBRARY)).rooflight_rms_norm_shaped
    pointer, number = ctypes.c_void_p, ctypes.c_int
    function.argtypes = [pointer, number, *[pointer] * 5, ctypes.c_int64, number, ctypes.c_float, number, number]
    return function


Case = tuple[int, bool]  # tokens, add
Shape = tuple[int, int]  # packs, rows_per_block


def table() -> str:
    """For each width the packs whose worst case, of all batches with and without addition, hot and cold, is best."""
    data = json.loads(RESULTS.read_text())
    widths: dict[int, dict[Case, dict[Shape, float]]] = defaultdict(dict)
    for width, case, rows in _cases(data["rows"]):
        best = {key: min(row[key] for row in rows) for key in TIMES}
        accepted = {key: max(ACCEPTED * best[key], best[key] + ACCEPTED_US) for key in TIMES}
        widths[width][case] = {
            (row["packs"], row["rows_per_block"]): max(row[key] / accepted[key] for key in TIMES) for row in rows
        }
    lines = [
        "// Generated by scripts/norm_shapes.py from results/h200/norm_shapes.json; do not edit.",
        f"// {data['environment']['device']}, commit {data['environment']['commit']}, {data['environment']['date']}.",
        "// {packs of 16 bytes in a row at most, packs a thread, {rows a block at many and at very many rows, alone},",
        "// {with an addition}}",
    ]
    for width in sorted(widths):
        packs, chosen = _choose(widths[width])
        alone, added = (
            ", ".join(str(chosen.get((tokens, add), 1)) for tokens in (MANY, VERY_MANY)) for add in (False, True)
        )
        lines.append(f"{{{width // 8}, {packs}, {{{{{alone}}}, {{{added}}}}}}},")
    return "\n".join(lines) + "\n"


def _cases(rows: list[dict[str, Any]]) -> Iterator[tuple[int, Case, list[dict[str, Any]]]]:
    def key(row: dict[str, Any]) -> tuple[int, int, bool]:
        return row["hidden_size"], row["num_tokens"], row["add"]

    for (width, tokens, add), group in groupby(sorted(rows, key=key), key):
        yield width, (tokens, add), list(group)


def _choose(cases: dict[Case, dict[Shape, float]]) -> tuple[int, dict[Case, int]]:
    """Packs, and rows a block by case. A score is time over what is accepted."""
    scores = {}
    for packs in {packs for shapes in cases.values() for packs, _ in shapes}:
        best = {case: _fewest_rows(shapes, packs) for case, shapes in cases.items()}
        worst = max(cases[case][packs, rows] for case, rows in best.items())
        mean = sum(math.log(cases[case][packs, rows]) for case, rows in best.items()) / len(best)
        scores[packs] = max(1.0, worst), mean, best  # whatever is accepted everywhere is decided by the mean
    least = min(worst for worst, _, _ in scores.values())
    packs = min((p for p in scores if scores[p][0] <= least * TIE), key=lambda p: scores[p][1])
    return packs, scores[packs][2]


def _fewest_rows(shapes: dict[Shape, float], packs: int) -> int:
    scores = {rows: score for (p, rows), score in shapes.items() if p == packs}
    return min(rows for rows, score in scores.items() if score <= min(scores.values()) * ROWS_TIE)


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
