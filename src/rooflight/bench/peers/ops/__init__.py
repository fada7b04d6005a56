"""Adapters for operators that are not ours: one module for each peer, all with the same two functions.

    version() -> str                    raises PeerMissing with the reason if the peer cannot run here
    bind(operator, args) -> closure     None where the peer has no such operator

`args` are the positional arguments of our schema, tensors on the GPU. The closure takes nothing and runs the peer's
equivalent once on these very tensors, as its users would call it: the peer allocates what it usually allocates. It
returns the results in our order, or None for an operator in place, which has then written into the tensors that ours
writes. It can be captured in a CUDA graph.

The harness creates the arguments and runs the closures under `torch.inference_mode`. It binds up to 66 sets of
arguments of one shape and dtype, and wants them compiled once: what is compiled or looked up belongs into a cache by
operator, shapes and dtypes, not into each closure. It calls a closure once before it captures it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Protocol

PEERS = ("eager", "compiled", "vllm", "flashinfer", "liger", "quack", "apex")


class PeerMissing(Exception):
    """The peer cannot run here; the message says why in one line."""


class Peer(Protocol):
    """What every module in this folder is."""

    def version(self) -> str: ...

    def bind(self, operator: str, args: tuple[Any, ...]) -> Callable[[], object] | None: ...


def load(name: str) -> Peer:
    """The adapter; ValueError for a name that is none. The peer itself may still be missing: `version` tells."""
    if name not in PEERS:
        raise ValueError(f"peer must be one of {', '.join(PEERS)}, was {name!r}")
    module: Any = importlib.import_module(f"{__name__}.{name}")
    peer: Peer = module
    return peer
