"""Which kernels exist, where they run, and which the tables choose."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from rooflight.kernels import choices, library
from rooflight.kernels.driver import driver
from rooflight.ops.contract import PLUMBING, REGISTRY

TRITON = {  # operator -> module under kernels/triton with a launcher of the operator's name
    "decode_attention": "decode_attention",
    "fused_add_layer_norm": "layer_norm",
    "fused_add_rms_norm": "norm",
    "fused_add_rms_norm_": "norm",
    "layer_norm": "layer_norm",
    "layer_norm_backward": "layer_norm_backward",
    "penalize_logits_": "penalties",
    "prefill_attention": "prefill_attention",
    "qk_norm_rope_attention_": "qk_norm_rope_attention",
    "qk_norm_rope_cache_": "qk_norm_rope_cache",
    "rms_norm": "norm",
    "rms_norm_backward": "norm_backward",
    "rope": "rope",
    "rope_": "rope",
    "silu_and_mul": "activation",
    "sample": "sample",
}
CUDA = (  # operators whose `.cuda` overload the compiled library implements
    "advance_decode_",
    "decode_attention",
    "embedding",
    "fused_add_rms_norm",
    "fused_add_rms_norm_",
    "linear_add_",
    "linear_add_scale_",
    "prefill_attention",
    "qk_norm_rope_attention_",
    "qk_norm_rope_cache_",
    "rms_norm",
    "rms_norm_backward",
    "rms_norm_linear",
    "rms_norm_swiglu",
    "rope",
    "rope_",
    "scaled_linear",
    "scaled_swiglu",
    "silu_and_mul",
)
# Operators whose compiled kernel calls the Triton overload for arguments that it does not take.
LEANS_ON_TRITON = {"prefill_attention"}


def interpreting() -> bool:
    """Whether Triton kernels also run on the CPU, in its interpreter (set before Triton is imported)."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def status() -> dict[str, str]:
    """Providers by name with one line each on whether and why they are there, for `rooflight info`."""
    lines = {"ref": "plain PyTorch, on every device"}
    if importlib.util.find_spec("triton") is None:
        lines["triton"] = "not installed"
    elif interpreting():
        lines["triton"] = "in the CPU interpreter (TRITON_INTERPRET=1), for tests"
    elif torch.version.cuda is None:
        lines["triton"] = "installed, but this PyTorch is a CPU build"
    elif not torch.cuda.is_available():
        lines["triton"] = "installed, but no GPU is visible"
    else:
        lines["triton"] = "on " + torch.cuda.get_device_name()
    found = driver()
    lines["cuda"] = library.load() or "compiled kernels, on " + (found.cards[0][0] if found else "no card")
    if library.load() is None and not _triton_on_cards():
        lines["cuda"] += "; without " + ", ".join(sorted(LEANS_ON_TRITON)) + ", which leans on Triton"
    return lines


def attach_all() -> None:
    """Attach every kernel that this installation can run."""
    if importlib.util.find_spec("triton") is not None:
        devices = (["cuda"] if torch.version.cuda else []) + (["cpu"] if interpreting() else [])
        for operator, module in TRITON.items():
            REGISTRY[operator].attach("triton", _lazy(f"rooflight.kernels.triton.{module}", operator), devices)
    if library.load() is None:
        for operator in CUDA:
            if operator in LEANS_ON_TRITON and not _triton_on_cards():
                continue
            (REGISTRY | PLUMBING)[operator].attach("cuda", None, ["cuda"])  # the library has brought the kernel
    choices.apply(REGISTRY)


def _triton_on_cards() -> bool:
    return importlib.util.find_spec("triton") is not None and torch.version.cuda is not None


def _lazy(module: str, launcher: str) -> Callable[..., Any]:
    """A launcher that imports its module, and with it Triton, at its first call."""

    @cache
    def load() -> Callable[..., Any]:
        if interpreting():
            from rooflight.kernels.triton import interpreter

            interpreter.repair()
        return getattr(importlib.import_module(module), launcher)  # type: ignore[no-any-return]

    def launch(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    return launch
