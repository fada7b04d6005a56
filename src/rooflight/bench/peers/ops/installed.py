"""Whether a package of another project can run here."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util

import torch

from rooflight.bench.peers.ops import PeerMissing


def require(package: str, distribution: str) -> str:
    """The version of `distribution`, whose `package` has been imported; PeerMissing with the reason otherwise."""
    if importlib.util.find_spec(package) is None:
        raise PeerMissing("not installed")
    if not torch.cuda.is_available():
        raise PeerMissing("needs a CUDA device")
    try:
        importlib.import_module(package)
    except Exception as error:  # a package of others may fail in any way, and that must not end the benchmark
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise PeerMissing(f"cannot be imported: {reason}") from error
    return version_of(distribution)


def version_of(distribution: str) -> str:
    """The version that the installed distribution states, or "unknown version"."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"
