"""The rungs of `rooflight ladder decode`: from naive operators to what serves, and what each is expected to give.

A rung has everything of those before it and one more. What a token of batch 1 takes is predicted as

    host   = step_us / steps of a launch + operator_us * operators            without graphs; with them the first part
    memory = (weights and activations + keys and values / share) / bandwidth  of a stream of all these bytes
    launch = node_us * operators                                              a dependent kernel that does nothing
    time   = max(host, memory + launch)

and the gain of a rung as the time of the rung before over its own. step_us and operator_us are this host's, measured
in the round that warms up; bandwidth and node_us are the card's ceilings. share is the part of the card that reads keys
and values: all of it under the split rule, else one multiprocessor a KV head. Operators are those that a step calls,
counted on the decoder that runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from rooflight.limits.card import Bandwidth
from rooflight.limits.ceilings import stream_rate
from rooflight.limits.scenario import COLLECTIVES
from rooflight.limits.trace import Step, trace
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import Recipe

STEPS = 8  # of a launch, on the last rung
AFTER_THE_TRACE = 1  # the operator that moves a batch on to its next token is the runner's own
HOST_BOUND = 0.9  # of the time the host is at work rather than waiting for tokens
NAIVE = Recipe(norm=False, rope=False, grouped=False, split=False)


@dataclass(frozen=True)
class Rung:
    """One step of the ladder. why: what it changes, for a reader."""

    name: str
    why: str
    recipe: Recipe
    graphs: bool = False
    steps: int = 1


def _rungs() -> tuple[Rung, ...]:
    norm = replace(NAIVE, norm=True)
    rope = replace(norm, rope=True)
    grouped = replace(rope, grouped=True)
    split = replace(grouped, split=True)
    fused = replace(split, projections=True)
    together = replace(fused, attention=True)
    return (
        Rung("naive operators", "an operator for each formula, one after the other from the host", NAIVE),
        Rung("fused norm", "residual addition and RMSNorm are one operator", norm),
        Rung("fused QK/RoPE/append", "head norms, RoPE and cache write are one operator, not four", rope),
        Rung("grouped queries", "keys and values are read once for all query heads of a KV head", grouped),
        Rung("split rule", "the keys of a sequence are spread over the card, not one part a KV head", split),
        Rung("fused projections", "norm, SwiGLU and residual are part of the products", fused),
        Rung("attention with its step", "head norms, RoPE and cache write are part of decode attention", together),
        Rung("graph", "a step is one launch of the host", together, graphs=True),
        Rung(f"{STEPS} tokens a launch", f"{STEPS} steps are one launch of the host", together, True, STEPS),
    )


RUNGS = _rungs()


@dataclass(frozen=True)
class Machine:
    """The card's ceilings: rates of streams by their bytes, and microseconds of a kernel that does nothing."""

    origin: str
    read: tuple[Bandwidth, ...]
    node_us: float
    multiprocessors: int


@dataclass(frozen=True)
class Host:
    """Microseconds of this host: for a launch of the engine, and for each operator that it asks for by itself."""

    step_us: float
    operator_us: float

    @staticmethod
    def of(naive_us: float, naive_operators: int, graph_us: float) -> Host:
        """From the host's time of a token on the naive rung and on that with graphs of one step."""
        return Host(graph_us, max(naive_us - graph_us, 0.0) / naive_operators)


@dataclass(frozen=True)
class Work:
    """Of one token: operators, bytes of keys and values, and all others."""

    operators: int
    kv_bytes: int
    other_bytes: int

    @property
    def bytes(self) -> int:
        return self.kv_bytes + self.other_bytes


@dataclass(frozen=True)
class Estimate:
    """Microseconds of a token. See the module text."""

    host_us: float
    memory_us: float
    launch_us: float

    @property
    def time_us(self) -> float:
        return max(self.host_us, self.memory_us + self.launch_us)


@cache
def work_of(config: ModelConfig, recipe: Recipe, context: int) -> Work:
    """Of the token after `context` others, on one GPU."""
    calls = [c for c in trace(config, Step("decode", 1, context), recipe) if c.operator not in COLLECTIVES]
    kv = sum(call.kv_elements * call.dtype.itemsize for call in calls)
    total = sum(call.cost.bytes for call in calls)
    return Work(len(calls) + AFTER_THE_TRACE, kv, total - kv)


def estimate(config: ModelConfig, rung: Rung, context: int, machine: Machine, host: Host) -> Estimate:
    work = work_of(config, rung.recipe, context)
    share = 1.0 if rung.recipe.split else min(1.0, config.num_kv_heads / machine.multiprocessors)
    asked = 0 if rung.graphs else work.operators
    return Estimate(
        host.step_us / rung.steps + host.operator_us * asked,
        (work.other_bytes + work.kv_bytes / share) / stream_rate(machine.read, work.bytes) * 1e6,
        machine.node_us * work.operators,
    )


def wall_of(found_us: float, host_share: float, expected: Estimate) -> str:
    """What binds a token that took `found_us`, of which the host was at work for `host_share`.

    memory: at least half of the time is that of the bytes; launch: the rest is, kernels that wait for each other.
    """
    if host_share >= HOST_BOUND:
        return "host"
    return "memory" if expected.memory_us >= found_us / 2 else "launch"
