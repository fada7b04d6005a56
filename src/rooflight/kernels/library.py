"""The compiled kernels: where the library is, whether it can run here, and what its kernels use.

`make kernels` builds it. One file serves every PyTorch from 2.10 on; it holds its own CUDA runtime and machine code for
the architectures that it was built for, so it needs a driver and a card that know these.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from rooflight.kernels.driver import Driver, driver

FOLDER = Path(__file__).parent / "lib"
LIBRARY = FOLDER / "librooflight.so"
RESOURCES = FOLDER / "resources.json"  # written by the build
OLDEST_TORCH = (2, 10)


@dataclass(frozen=True)
class Kernel:
    """One kernel for one architecture. Bytes, except registers (of 32 bits, a thread)."""

    name: str
    source: str
    architecture: str
    registers: int
    shared_memory: int
    stack: int
    spill_stores: int
    spill_loads: int

    def occupancy(self, threads: int) -> float | None:
        """Share of a multiprocessor's warps that are there at once with blocks of so many threads, as registers,
        shared memory and the block limit allow; None if such a block does not fit. Limits of compute capability 9.0.
        """
        warps = -(-threads // 32)
        registers_of_warp = -(-self.registers * 32 // 256) * 256
        by_registers = 65_536 // registers_of_warp // warps
        by_shared = (228 * 1024) // (self.shared_memory + 1024)  # 1 KiB of each block is the system's
        blocks = min(by_registers, by_shared, 64 // warps, 32)
        return blocks * warps / 64 if blocks else None


def build_facts() -> dict[str, Any] | None:
    """What the build wrote: {"cuda": version, "kernels": [...]}; None if nothing, or nothing whole, is there."""
    try:
        facts = json.loads(RESOURCES.read_text())
        [Kernel(**kernel) for kernel in facts["kernels"]]
        int(facts["cuda"].split(".")[0])
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None
    return facts  # type: ignore[no-any-return]


def kernels() -> list[Kernel]:
    facts = build_facts()
    return [Kernel(**kernel) for kernel in facts["kernels"]] if facts else []


def why_not() -> str | None:
    """Why the library cannot be used here, or None if it can."""
    facts = build_facts()
    if facts is None or not LIBRARY.exists():
        return "not built; `make kernels` builds it"
    if torch.version.cuda is None:
        return "built, but this PyTorch is a CPU build"
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < OLDEST_TORCH:
        return f"built, but needs PyTorch 2.10 or newer, this is {torch.__version__}"
    return _refused_by(driver(), facts)


def _refused_by(found: Driver | None, facts: dict[str, Any]) -> str | None:
    if found is None or not found.cards:
        return "built, but no NVIDIA card is visible"
    needed = int(facts["cuda"].split(".")[0])
    if found.cuda[0] < needed:
        have = ".".join(map(str, found.cuda))
        return f"built, but its CUDA {needed} runtime needs a newer driver, this one runs CUDA {have}"
    architectures = {kernel["architecture"] for kernel in facts["kernels"]}
    for name, (major, minor) in found.cards:
        if not any(_runs_on(architecture, major, minor) for architecture in architectures):
            return f"built for {', '.join(sorted(architectures))}, not for {name} (sm_{major}{minor})"
    return None


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Machine code runs on its own architecture, and without a suffix on later ones of the same major number."""
    digits = architecture.removeprefix("sm_")
    if digits[-1] in "af":
        return digits[:-1] == f"{major}{minor}"
    return int(digits[:-1]) == major and int(digits[-1]) <= minor


@cache
def load() -> str | None:
    """Load the library once. None, or the reason why it is not loaded."""
    reason = why_not()
    if reason is None:
        try:
            torch.ops.load_library(LIBRARY)
        except OSError as error:
            reason = f"built, but does not load: {str(error).splitlines()[0]}"
    return reason
