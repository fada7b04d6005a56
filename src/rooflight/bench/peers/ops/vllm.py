"""vLLM's compiled operators, of an installed vLLM or of its library alone.

The environment variable ROOFLIGHT_VLLM_LIBRARY names the file `_C_stable_libtorch.abi3.so` of a vLLM wheel (0.23 and
later have it): it loads without the rest of vLLM. vLLM's kernels ask for weights of x's dtype, and round the
normalised row to that dtype before they multiply it by the weight, one rounding more than our definition has.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rooflight.bench.peers.ops import PeerMissing
from rooflight.bench.peers.ops.installed import version_of

VARIABLE = "ROOFLIGHT_VLLM_LIBRARY"
_LIBRARY = "_C_stable_libtorch.abi3.so"


def version() -> str:
    _load()
    return version_of("vllm")


def bind(operator: str, args: tuple[Any, ...]) -> Callable[[], object] | None:
    if operator == "rms_norm":
        return _bind_rms_norm(*args)
    if operator == "fused_add_rms_norm_":
        return _bind_fused_add_rms_norm_in_place(*args)
    return None  # it has no fused addition that leaves its arguments, no backward and no layer norm


def _bind_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6) -> Callable[[], object] | None:
    if weight.dtype != x.dtype:
        return None
    _load()
    kernel = torch.ops._C.rms_norm

    def run() -> torch.Tensor:
        out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
        kernel(out, x, weight, eps)
        return out

    return run


def _bind_fused_add_rms_norm_in_place(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> Callable[[], object] | None:
    if weight.dtype != x.dtype:
        return None
    _load()
    kernel = torch.ops._C.fused_add_rms_norm
    return lambda: kernel(x, residual, weight, eps)


@functools.cache
def _load() -> None:
    library = _find()
    if not torch.cuda.is_available():
        raise PeerMissing("needs a CUDA device")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        raise PeerMissing(f"cannot be loaded: {str(error).splitlines()[0]}") from error


def _find() -> Path:
    named = os.environ.get(VARIABLE)
    if named:
        if not Path(named).is_file():
            raise PeerMissing(f"{VARIABLE} names no file: {named}")
        return Path(named)
    package = importlib.util.find_spec("vllm")
    for folder in (package.submodule_search_locations or ()) if package else ():
        if (Path(folder) / _LIBRARY).is_file():
            return Path(folder) / _LIBRARY
    raise PeerMissing(f"has no {_LIBRARY}" if package else "not installed")
