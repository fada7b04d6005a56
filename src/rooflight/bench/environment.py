"""Where a measurement was taken: hardware, versions, commit, date."""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import date
from importlib import metadata
from pathlib import Path

import torch

# Instruction sets that decide how fast a CPU multiplies matrices.
CPU_FLAGS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")


def cpu_name() -> str:
    return _cpu_facts().get("model name") or platform.processor() or platform.machine()


def cpu_flags() -> list[str]:
    """Which of `CPU_FLAGS` this CPU has."""
    facts = _cpu_facts()
    flags = facts.get("flags", facts.get("Features", "")).split()
    return [flag for flag in CPU_FLAGS if flag in flags]


def _cpu_facts() -> dict[str, str]:
    """Of the first processor in /proc/cpuinfo; nothing where there is none."""
    try:
        first = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


def commit() -> str:
    """The commit of the source tree, with `+` if files differ from it; "unknown" outside a checkout.

    ROOFLIGHT_COMMIT says it where the tree was copied without its history.
    """
    given = os.environ.get("ROOFLIGHT_COMMIT")
    if given:
        return given
    here = Path(__file__).parent
    try:
        revision = _git(here, "rev-parse", "--short=12", "HEAD")
        changed = _git(here, "status", "--porcelain", "--untracked-files=no", "--", ":/src", ":/csrc")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return revision + ("+" if changed else "")


def _git(folder: Path, *args: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def describe(threads: int) -> dict[str, object]:
    """The environment as plain data for a results file."""
    return {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "cpu": cpu_name(),
        "cpu_flags": cpu_flags(),
        "cores": os.cpu_count(),
        "threads": threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
    }


def describe_gpu() -> dict[str, object]:
    """What a figure of the first GPU depends on beside `describe`; whether anything else uses it right now.

    Asks the driver's own tool and keeps the GPU untouched. `idle` is None where the tool cannot be asked. Call it
    before the measurement's own processes start.
    """
    asked = ("driver_version", "utilization.gpu", "memory.used", "clocks.sm", "power.limit")
    values = _nvidia_smi("--query-gpu=" + ",".join(asked))
    use = dict(zip(asked, values[0].split(", "), strict=False)) if values else {}
    users = _nvidia_smi("--query-compute-apps=pid")
    busy = use.get("utilization.gpu", "")
    others = len(users) if users is not None else None
    return {
        "driver": use.get("driver_version", "unknown"),
        "cuda": torch.version.cuda,
        "triton": version("triton"),
        "idle": others == 0 and busy == "0" if others is not None and busy.isdigit() else None,
        "other_processes": others,
        "utilization_percent": busy or None,
        "memory_used_mib": use.get("memory.used"),
        "clock_sm_mhz": use.get("clocks.sm"),
        "power_limit_w": use.get("power.limit"),
    }


def _nvidia_smi(query: str) -> list[str] | None:
    """Lines of an answer about the GPU that PyTorch calls the first, or None."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits", "-i", _first_gpu()]
    try:
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line for line in done.stdout.splitlines() if line.strip()]


def _first_gpu() -> str:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return visible or "0"


def gpu_folder(name: str) -> str:
    """The folder of a card's results: "NVIDIA H200" -> "h200", "NVIDIA GeForce RTX 4090 D" -> "geforce-rtx-4090-d"."""
    words = name.lower().split()
    return "-".join(words[1:] if len(words) > 1 and words[0] in ("nvidia", "amd") else words)
