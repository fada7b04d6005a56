"""Rooflight: LLM operators for PyTorch, each next to its limit, and a small runtime built on them.

`rooflight.ops` are the operators; `LLM`, `AsyncEngine` and `SamplingParams` are the runtime, imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rooflight import kernels as _kernels
from rooflight import ops

if TYPE_CHECKING:
    from rooflight.engine import LLM, AsyncEngine, Chunk, Completion, EngineStopped, SamplingParams, Timing

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncEngine",
    "Chunk",
    "Completion",
    "EngineStopped",
    "SamplingParams",
    "Timing",
    "__version__",
    "ops",
]
_RUNTIME = frozenset(__all__) - {"__version__", "ops"}

_kernels.attach_all()


def __getattr__(name: str) -> Any:
    """Import the runtime when it is asked for: operators alone need none of it."""
    if name in _RUNTIME:
        from rooflight import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'rooflight' has no attribute {name!r}")
