"""What this machine and this installation are, as plain values. Reads, never changes; imports torch only."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from rooflight import __version__, kernels, ops
from rooflight.bench.environment import cpu_flags, cpu_name
from rooflight.models.checkpoint.base import CheckpointError
from rooflight.models.sources import embedded_default


def environment() -> dict[str, Any]:
    """Versions, processors, memory in bytes, the default model; None for what is not there."""
    return {
        "rooflight": __version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": torch.__version__,
        "triton": _version("triton"),
        "cuda": torch.version.cuda,
        "gpus": _gpus(),
        "cpu": _cpu(),
        "memory": _memory(),
        "default_model": _default_model(),
    }


def operators() -> dict[str, Any]:
    """Of each operator its providers, and for each kind of device the active one and the reason."""
    return {
        name: {"providers": list(operator.providers), "active": dict(operator.active), "reason": dict(operator.reason)}
        for name, operator in sorted(ops.REGISTRY.items())
    }


def providers() -> dict[str, str]:
    return kernels.status()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpus() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": card.name,
                "memory_bytes": card.total_memory,
                "capability": f"{card.major}.{card.minor}",
                "multiprocessors": card.multi_processor_count,
            }
        )
    return found


def _cpu() -> dict[str, Any]:
    return {
        "name": cpu_name(),
        "cores": _physical_cores(),
        "logical_cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "flags": cpu_flags(),
        "torch_capability": torch.backends.cpu.get_cpu_capability(),
    }


def _read(path: str) -> str:
    """A file of Linux, or nothing where there is none."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _physical_cores() -> int | None:
    """Pairs of socket and core; None where the system does not tell."""
    cores = set()
    for block in _read("/proc/cpuinfo").split("\n\n"):
        facts = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in block.splitlines())}
        if "core id" in facts:
            cores.add((facts.get("physical id"), facts["core id"]))
    return len(cores) or None


def _memory() -> dict[str, int | None]:
    """Bytes in all, and bytes that programs can still get (Linux: caches can be given up, so more than is free)."""
    kilobytes = dict(line.split(":") for line in _read("/proc/meminfo").splitlines() if ":" in line)
    available = kilobytes.get("MemAvailable")
    return {
        "total_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "available_bytes": None if available is None else int(available.split()[0]) * 1024,
    }


def _default_model() -> dict[str, Any] | None:
    try:
        path = embedded_default()
    except CheckpointError:
        return None
    return {"path": str(path), "bytes": path.stat().st_size}
