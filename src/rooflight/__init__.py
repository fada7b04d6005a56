"""Rooflight: LLM operators for PyTorch, each next to its limit, and a small runtime built on them."""

from rooflight import kernels as _kernels
from rooflight import ops

__version__ = "0.1.0"
__all__ = ["__version__", "ops"]

_kernels.attach_all()
