"""NVIDIA Apex's norms, through its Python functions; they take weights of any dtype and write x's.

Never run here: Apex has to be built against the PyTorch at hand, and no wheel carries it. Where it is installed it is
checked against our reference before it is timed, like every peer.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

from rooflight.bench.peers.ops.installed import require


def version() -> str:
    return require("apex", "apex")


def bind(operator: str, args: tuple[Any, ...]) -> Callable[[], object] | None:
    if operator not in ("rms_norm", "layer_norm"):
        return None
    norms: Any = importlib.import_module("apex.normalization.fused_layer_norm")
    x, weight, *rest = args
    if operator == "rms_norm":
        return lambda: norms.fused_rms_norm_affine(x, weight, weight.shape, rest[0])
    bias, eps = rest
    return None if bias is None else lambda: norms.fused_layer_norm_affine(x, weight, bias, weight.shape, eps)
