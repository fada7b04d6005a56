"""How operators run on a GPU. A kernel attaches itself to the operator it implements; operators know no kernel.

Importing this package only attaches launchers: Triton and the compiled kernels are loaded at the first call.
"""

from rooflight.kernels.providers import attach_all, status

__all__ = ["attach_all", "status"]
