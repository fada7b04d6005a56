"""Who is measured: our operators, their older versions, and the peers, by name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

import rooflight
from rooflight import ops
from rooflight.bench import library
from rooflight.bench.device import Closure
from rooflight.bench.peers.ops import PEERS, PeerMissing, load

OURS, AGAIN = "rooflight", "rooflight again"  # the second is the first once more: what differs between them is noise
PROVIDERS = ("rooflight.cuda", "rooflight.triton")
VERSIONS = tuple(f"version{number}" for number in library.VERSIONS)
VERSIONED = "fused_add_rms_norm_"
NAMES = (OURS, AGAIN, *PROVIDERS, *VERSIONS, *PEERS)


def chosen(asked: Sequence[str]) -> tuple[str, ...]:
    """Names in the order of `NAMES`; nothing asked for means all but the older versions, "versions" all of these.

    The A/A row comes with ours. ValueError for names that are none.
    """
    wanted = set(asked) if asked else set(NAMES) - set(VERSIONS)
    if "versions" in wanted:
        wanted = wanted - {"versions"} | set(VERSIONS)
    if OURS in wanted:
        wanted.add(AGAIN)
    unknown = sorted(wanted - set(NAMES))
    if unknown:
        raise ValueError(f"contender must be one of {', '.join(NAMES)} or versions, was {unknown[0]!r}")
    return tuple(name for name in NAMES if name in wanted)


def is_default(name: str, operator: str) -> bool:
    """Whether one of `PROVIDERS` is what "rooflight" runs on a GPU anyway."""
    return name == f"rooflight.{ops.REGISTRY[operator].active.get('cuda')}"


def missing(name: str) -> str | None:
    """Why a contender cannot run here at all, or None."""
    if name in PEERS:
        try:
            load(name).version()
        except PeerMissing as error:
            return str(error)
        except Exception as error:  # an installed peer may fail in any way when it is imported
            return f"cannot be imported: {type(error).__name__}: {error}"
    if name in VERSIONS and library.load()[0] is None:
        return library.load()[1]
    return None


def version(name: str, operator: str) -> str:
    """What stands beside the name in results: the version of a peer, the provider of ours."""
    if name in PEERS:
        return load(name).version()
    if name in VERSIONS:
        return "bench library"
    provider = ops.REGISTRY[operator].active.get("cuda", "ref") if name in (OURS, AGAIN) else name.partition(".")[2]
    return f"{rooflight.__version__} {provider}"


def bind(name: str, operator: str, args: tuple[Any, ...]) -> Closure | None:
    """A closure that runs the contender once on these arguments, or None where it has no such operator."""
    if name in PEERS:
        return load(name).bind(operator, args)
    if name in VERSIONS:
        return _older(int(name.removeprefix("version")), args) if operator == VERSIONED else None
    if name in (OURS, AGAIN):
        return partial(getattr(ops, operator), *args)
    provider = name.partition(".")[2]
    if provider not in ops.REGISTRY[operator].providers:
        return None
    return partial(getattr(ops, operator), *args, backend=provider)


def _older(number: int, args: tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]) -> Closure:
    kernels, reason = library.load()
    if kernels is None:
        raise ValueError(reason)
    return partial(kernels.version, number, *args)
