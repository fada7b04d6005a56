"""How a row of RMSNorm is spread over threads: measure every shape, and write the table that the kernels look up.

    python scripts/norm_shapes.py measure OUT.json    on a GPU, after `make kernels`: every legal shape, hot and cold
    python scripts/norm_shapes.py write               csrc/norm_shapes.inc from results/h200/norm_shapes.json
    python scripts/norm_shapes.py check               exit 1 if the table is not what the results say

A shape is how many packs of 16 bytes a thread holds and how many rows share a block. The order of a row's sum must
follow from its width alone, never from the batch, and be the same for rms_norm and fused_add_rms_norm, so that both
give the same bits. Two packs a thread and four add in the same order (csrc/common/reduce.cuh): between these the batch
and the operator may decide. Launches follow each other as in a graph of norms: hot ones and those of large inputs
overlap, cold ones of small inputs stand behind a flush and do not.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import groupby, product
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
BATCHES = ((1, 32, 256), (1024,), (16384,))  # few, many and very many rows, as the launcher tells them apart
MANY = 1024
ORDERS = ((1,), (2, 4), (8,))  # packs that add a row in the same order
MOST_BYTES = 1 << 30  # of one tensor
MOST_THREADS, WARP = 1024, 32
ROUNDS = 5
TIMES = ("hot_us", "cold_us")
PACKS, ROWS_PER_BLOCK = (1, 2, 4, 8), (1, 2, 4, 8, 16)
ACCEPTED, ACCEPTED_US = 1.05, 0.15  # what a case may lose to its best shape
TIE = 1.05  # within five percent fewer rows a block win: identical launches differ by as much, cold


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
    """For each width the order whose worst case is best: of all batches, with and without addition, hot and cold."""
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
        "// {packs of 16 bytes in a row at most, {alone, with an addition}}; in these {packs a thread, rows a block}",
        "// at few, many and very many rows",
    ]
    for width in sorted(widths):
        shapes = _choose(widths[width])
        forms = (", ".join(f"{{{p}, {r}}}" for p, r in shapes[add]) for add in (False, True))
        lines.append(f"{{{width // 8}, {{{{{'}, {'.join(forms)}}}}}}},")
    return "\n".join(lines) + "\n"


def _cases(rows: list[dict[str, Any]]) -> Iterator[tuple[int, Case, list[dict[str, Any]]]]:
    def key(row: dict[str, Any]) -> tuple[int, int, bool]:
        return row["hidden_size"], row["num_tokens"], row["add"]

    for (width, tokens, add), group in groupby(sorted(rows, key=key), key):
        yield width, (tokens, add), list(group)


def _choose(cases: dict[Case, dict[Shape, float]]) -> dict[bool, list[Shape]]:
    """Shapes by operator and batch. A score is time over what is accepted."""
    found = []
    for order in ORDERS:
        shapes: dict[bool, list[Shape]] = {False: [], True: []}
        scores = []
        for add, batch in product((False, True), BATCHES):
            group = [cases[tokens, add] for tokens in batch if (tokens, add) in cases]
            worst = (
                {
                    shape: max(scores[shape] for scores in group)
                    for shape in set.intersection(*map(set, group))
                    if shape[0] in order
                }
                if group
                else {(order[-1], 1): 0.0}
            )
            if not worst:
                break
            shapes[add].append(_simplest(worst))
            scores.append(worst[shapes[add][-1]])
        else:
            found.append((max(1.0, max(scores)), sum(scores), shapes))
    return min(found, key=lambda entry: entry[:2])[2]  # what is accepted everywhere is decided by the sum


def _simplest(worst: dict[Shape, float]) -> Shape:
    """Within a few percent fewer rows a block, then fewer packs."""
    good = [shape for shape, score in worst.items() if score <= min(worst.values()) * TIE]
    return min(good, key=lambda shape: (shape[1], worst[shape]))


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
