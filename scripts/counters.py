"""DRAM bytes from hardware counters next to the logical bytes of operators: `python scripts/counters.py [OUT.json]`.

Logical bytes say what an implementation has to move; whether it moves more is for the memory controller to say. This
runs Nsight Compute (ncu) over one call of each case, on tensors much larger than L2, and exits 1 if a case moves more
than 3 % more or less than its logical bytes. Addition and then norm move five tensors where the fused operator moves
four. (PyTorch's own norm is shown and not judged: it reads a row of this width twice.)
"""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

ROWS, WIDTH = 65_536, 8192  # 1 GiB a tensor in bf16: 60 MB that stay in L2 at the end are 1 to 3 % of all bytes
METRICS = {"read": "dram__bytes_read.sum", "written": "dram__bytes_write.sum", "ns": "gpu__time_duration.sum"}
SEPARATOR = "spin_kernel"  # torch.cuda._sleep: begins each case
TOLERANCE = 0.03


@dataclass(frozen=True)
class Row:
    """Bytes, and nanoseconds of GPU time, of all kernels of a case."""

    case: str
    kernels: int
    logical_read: int
    logical_written: int
    dram_read: float
    dram_written: float
    ns: float

    @property
    def ratio(self) -> float:
        return (self.dram_read + self.dram_written) / (self.logical_read + self.logical_written)


def cases() -> dict[str, tuple[Callable[[], object], int, int]]:
    """Name -> (call, tensors read, tensors written); the weight is a millionth of a tensor."""
    from rooflight import ops

    def new() -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16)

    x, residual, weight = new(), new(), torch.randn(WIDTH, device="cuda", dtype=torch.bfloat16)

    def split(backend: str | None) -> None:
        total = x + residual
        if backend is None:
            torch.nn.functional.rms_norm(total, (WIDTH,), weight)
        else:
            ops.rms_norm(total, weight, backend=backend)

    found: dict[str, tuple[Callable[[], object], int, int]] = {
        "negation": (lambda: torch.neg(x), 1, 1),
        "add, then PyTorch's rms_norm": (lambda: split(None), 3, 2),
        "add, then rms_norm.triton": (lambda: split("triton"), 3, 2),
    }
    for provider in ("cuda", "triton"):
        if provider not in ops.REGISTRY["fused_add_rms_norm"].providers:
            raise ModuleNotFoundError(f"the {provider} provider is not here; `rooflight info` says why")
        found |= {
            f"rms_norm.{provider}": (lambda p=provider: ops.rms_norm(x, weight, backend=p), 1, 1),
            f"fused_add_rms_norm.{provider}": (
                lambda p=provider: ops.fused_add_rms_norm(x, residual, weight, backend=p), 2, 2,
            ),
            f"rms_norm_backward.{provider}": (
                lambda p=provider: ops.rms_norm_backward(residual, x, weight, backend=p), 2, 1,
            ),
        }  # fmt: skip
    return found


def child() -> None:
    """Under ncu: every case once, unprofiled first."""
    with torch.inference_mode():
        prepared = cases()
        for call, _, _ in prepared.values():
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.start()
        for call, _, _ in prepared.values():
            torch.cuda._sleep(1000)
            call()
        torch.cuda.synchronize()
        torch.cuda.profiler.stop()
    tensor = ROWS * WIDTH * 2
    print(
        "CASES "
        + json.dumps({name: [read * tensor, written * tensor] for name, (_, read, written) in prepared.items()})
    )


def profile() -> str:
    if shutil.which("ncu") is None:
        raise FileNotFoundError("ncu (Nsight Compute) is not on the PATH")
    command = ["ncu", "--csv", "--print-units", "base", "--clock-control", "none", "--profile-from-start", "off"]
    command += ["--metrics", ",".join(METRICS.values()), sys.executable, __file__, "--child"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ChildProcessError(f"ncu failed: {(done.stdout + done.stderr).strip()[-2000:]}")
    return done.stdout


def parse(output: str) -> list[Row]:
    """Rows from ncu's CSV: kernels in the order of their launch, one line a metric, cases split by SEPARATOR."""
    lines = output.splitlines()
    logical = json.loads(next(line for line in lines if line.startswith("CASES ")).removeprefix("CASES "))
    table = csv.DictReader(io.StringIO("\n".join(line for line in lines if line.startswith('"'))))
    launches: dict[str, dict[str, float | str]] = {}
    for line in table:
        launch = launches.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        launch[line["Metric Name"]] = float(line["Metric Value"].replace(",", ""))
    groups: list[list[dict[str, float | str]]] = []
    for launch in launches.values():
        if SEPARATOR in str(launch["kernel"]):
            groups.append([])
        else:
            groups[-1].append(launch)
    rows = []
    for (name, (read, written)), group in zip(logical.items(), groups, strict=True):
        sums = [sum(float(launch[metric]) for launch in group) for metric in METRICS.values()]
        rows.append(Row(name, len(group), read, written, *sums))
    return rows


def main() -> int:
    if sys.argv[1:] == ["--child"]:
        child()
        return 0
    rows = parse(profile())
    print(f"{'case':32} kernels  logical GB  DRAM read  written  DRAM/logical      us")
    for row in rows:
        logical = (row.logical_read + row.logical_written) / 1e9
        print(
            f"{row.case:32} {row.kernels:7} {logical:11.3f} {row.dram_read / 1e9:10.3f} {row.dram_written / 1e9:8.3f} "
            f"{row.ratio:13.3f} {row.ns / 1e3:7.0f}"
        )
    if len(sys.argv) > 1:
        from rooflight.bench.environment import describe, describe_gpu

        data = {
            "environment": {**describe(0), **describe_gpu()},
            "rows": [{**asdict(row), "ratio": row.ratio} for row in rows],
        }
        Path(sys.argv[1]).write_text(json.dumps(data, indent=1) + "\n")
    return int(any(abs(row.ratio - 1) > TOLERANCE for row in rows if "PyTorch" not in row.case))


if __name__ == "__main__":
    sys.exit(main())
