"""One case (operator, dtype, shape) inside a measuring process: arguments, the check, a timer for each contender."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from rooflight.bench import contenders
from rooflight.bench.device import Closure, Device
from rooflight.bench.timing import ColdPlan, Timer
from rooflight.ops.contract import REGISTRY, Make

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
# Of an error, relative to the value or to the root mean square of all, whichever is larger. Loose, since peers round
# in other places; an unwritten row or a wrong weight is far outside.
ACCEPTED = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 2e-2}
IN_PLACE_WEIGHT = 2.0**-8
NO_SUCH_OPERATOR = "has no such operator"

Bind = Callable[[str, str, tuple[Any, ...]], Closure | None]


@dataclass(frozen=True)
class Case:
    """What one table row is about. dtype: a key of DTYPES."""

    operator: str
    dtype: str
    num_tokens: int
    hidden_size: int
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.operator} {self.dtype} {self.num_tokens}x{self.hidden_size}"

    @property
    def dims(self) -> dict[str, int]:
        return {"num_tokens": self.num_tokens, "hidden_size": self.hidden_size}


@dataclass(frozen=True)
class DeviceMake(Make):
    """Draws on the device itself: random numbers from the host would take longer than the measurement."""

    def randn(self, *shape: int, scale: float = 1.0, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator(self.device).manual_seed(self.seed * 1009 + salt)
        return (torch.randn(*shape, generator=generator, device=self.device) * scale).to(self.dtype)


class Cell:
    """Arguments for as many launches as the cold protocol rotates through, shared by the contenders of a process."""

    def __init__(self, case: Case, device: Device, bind: Bind = contenders.bind) -> None:
        self.case, self.device, self._bind = case, device, bind
        self.operator = REGISTRY[case.operator]
        self._pristine = self._timed = self._make()  # what is checked, and what is timed
        cost = self.operator.cost_of(*self._pristine)
        self.bytes = cost.bytes
        written = 0 if self.operator.mutates else cost.bytes_written
        self.working_set = written + sum(a.numel() * a.element_size() for a in _tensors(self._pristine))
        self.plan = ColdPlan.of(self.working_set, device.l2_bytes)
        self._expected = self._reference()
        self._sets: list[tuple[Any, ...]] = []
        self._timers: dict[str, Timer] = {}

    def facts(self) -> dict[str, Any]:
        return {"bytes": self.bytes, "working_set": self.working_set, "cold_method": self.plan.method(self.device)}

    def prepare(self, names: Sequence[str]) -> dict[str, str | None]:
        """Check contenders and capture their graphs: by name the reason why one will not be timed, or None."""
        reasons: dict[str, str | None] = {}
        for name in names:
            try:
                reasons[name] = self._prepare(name)
            except Exception as error:  # a peer may fail in any way, and the others shall still be measured
                reasons[name] = one_line(error)
                if not self.device.healthy():
                    break
        self._expected = []
        return {name: reasons.get(name, "the process failed with the contender before it") for name in names}

    def _prepare(self, name: str) -> str | None:
        args = _copy(self._pristine)
        closure = self._bind(name, self.case.operator, args)
        if closure is None:
            return NO_SUCH_OPERATOR
        wrong = self._difference(closure, args)
        if wrong:
            return wrong
        del args, closure
        self._fill_sets()
        closures = [self._bind(name, self.case.operator, args) for args in self._sets]
        ready = [closure for closure in closures if closure is not None]
        for closure in ready:
            closure()
        self._timers[name] = Timer(self.device, self.plan, ready, self._refresh)
        return None

    def round(self, contender: str) -> dict[str, float]:
        return self._timers[contender].round()

    def event_round(self, contender: str) -> dict[str, list[float]]:
        return self._timers[contender].event_round()

    def close(self) -> None:
        """Free graphs and arguments now: the timers point back here, and a collector would come late."""
        self._timers.clear()
        self._sets.clear()

    def _make(self) -> tuple[Any, ...]:
        make = DeviceMake(DTYPES[self.case.dtype], self.device.name, self.case.seed)
        return self.operator.inputs(make, **self.case.dims)

    def _reference(self) -> list[torch.Tensor]:
        """The composition in FP32, once for all contenders. Ordinary tensors: it may ask autograd."""
        with torch.inference_mode(False):
            results = self.operator.composition(*_copy(self._pristine), compute=torch.float32)
        return [results] if isinstance(results, torch.Tensor) else list(results)

    def _difference(self, closure: Closure, args: Sequence[Any]) -> str | None:
        """Why what the closure computes is wrong, or None."""
        self._poison()
        returned = closure()
        if self.operator.mutates:
            named = self.operator.bind(*args)
            results: list[Any] = [named[name] for name in self.operator.mutated]
        else:
            results = list(returned) if isinstance(returned, (tuple, list)) else [returned]
        if len(results) != len(self._expected):
            return f"wrong: gave {len(results)} results, expected {len(self._expected)}"
        accepted = ACCEPTED[DTYPES[self.case.dtype]]
        for number, (result, expected) in enumerate(zip(results, self._expected, strict=True), 1):
            if not isinstance(result, torch.Tensor) or result.shape != expected.shape:
                return f"wrong: result {number} has not the shape {tuple(expected.shape)}"
            if number == 1 and result.dtype != DTYPES[self.case.dtype]:
                return f"wrong: result 1 is {result.dtype}, which is other traffic than {DTYPES[self.case.dtype]}"
            error = relative_error(result, expected)
            if not error <= accepted:
                return f"wrong: result {number} is off by {error:.2g}, accepted is {accepted:g}"
        return None

    def _poison(self) -> None:
        """Fill the memory that the allocator will hand out for results: an unwritten element must show."""
        dtype = DTYPES[self.case.dtype]
        blocks = [torch.full_like(expected, torch.nan, dtype=dtype) for expected in self._expected]
        del blocks

    def _fill_sets(self) -> None:
        if self._sets:
            return
        if self.operator.mutates:
            # A launch in place adds the norm to the residual again and again. With small weights it stays finite
            # between two refreshes in FP16 too.
            self._timed = _copy(self._pristine)
            self.operator.bind(*self._timed)["weight"].mul_(IN_PLACE_WEIGHT)
        self._sets = [_copy(self._timed) for _ in range(self.plan.sets)]

    def _refresh(self) -> None:
        """Fresh values for the arguments that launches write into."""
        if not self.operator.mutates:
            return
        fresh = self.operator.bind(*self._timed)
        for args in self._sets:
            named = self.operator.bind(*args)
            for name in self.operator.mutated:
                named[name].copy_(fresh[name])


def relative_error(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest error of an element over its own size plus the root mean square of all; NaN if there is any."""
    if expected.numel() == 0:
        return 0.0
    wide = expected.float()
    scale = wide.abs() + wide.square().mean().sqrt()
    return float(((result.float() - wide).abs() / scale).max())


def call_once(case: Case, device: Device, names: Sequence[str], bind: Bind = contenders.bind) -> None:
    """Have compiled and loaded whatever the contenders compile or load at a first call; failures show later."""
    make = DeviceMake(DTYPES[case.dtype], device.name, case.seed)
    for name in names:
        with suppress(Exception):
            closure = bind(name, case.operator, REGISTRY[case.operator].inputs(make, **case.dims))
            if closure is not None:
                closure()
    with suppress(Exception):
        device.synchronize()


def one_line(error: Exception) -> str:
    """An error as a cell of a table."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _tensors(args: Sequence[Any]) -> list[torch.Tensor]:
    return [a for a in args if isinstance(a, torch.Tensor)]


def _copy(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple(a.clone() if isinstance(a, torch.Tensor) else a for a in args)
