"""The operator contract: one definition, from which everything else follows.

An `Operator` says once what an operator is: schema, reference, fake, gradient, cost, sample inputs and
the composition that its tolerance is derived from. Implementations ("providers") attach themselves
as overloads of the same schema, `rooflight::rms_norm.ref`, `.cuda`, `.triton`, and share fake and gradient.
The reference is attached at once; kernels attach theirs from `rooflight.kernels`.

A dispatcher key has one owner per overload, so implementations that can be chosen per call need overloads.
`torch.library.custom_op` is not used: it costs 9 to 17 us per call against 2 here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from rooflight.ops.autograd import attach_autograd, attach_mutation

NAMESPACE = "rooflight"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")
PREFERENCE = ("cuda", "triton", "ref")  # on a GPU without measured choices: the first that is there
REGISTRY: dict[str, Operator] = {}
PLUMBING: dict[
    str, Operator
] = {}  # what an engine needs of a device beside the model: providers, but no contract suite

Args = tuple[Any, ...]
Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Cost:
    """What one call must move and compute, whatever the implementation.

    bytes_read and bytes_written count each logical element once; flops are counted on `unit`: "fp32" (the
    CUDA cores) or "tensor" (the matrix units of the inputs' dtype).
    """

    bytes_read: int
    bytes_written: int
    flops: int
    unit: str = "fp32"

    @property
    def bytes(self) -> int:
        return self.bytes_read + self.bytes_written


@dataclass(frozen=True)
class Make:
    """Where and how sample inputs are made: the same seed gives the same inputs on every device."""

    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    seed: int = 0

    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)

    def randn(self, *shape: int, scale: float = 1.0, salt: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1009 + salt)
        return (torch.randn(*shape, generator=generator) * scale).to(self.device, self.dtype)


@dataclass
class Operator:
    """One operator. See the module text; `define` makes and registers it."""

    name: str
    schema: str  # "(Tensor x, Tensor weight, float eps) -> Tensor", as in native_functions
    reference: Callable[..., Any]
    fake: Callable[..., Any]
    cost: Callable[[Mapping[str, Any], Mapping[str, Any]], Cost]
    composition: Callable[..., Any]  # (*args, compute=dtype): independent PyTorch composition of the formula
    inputs: Callable[..., Args]  # (make, **dims) -> positional arguments
    sweep: Sequence[Mapping[str, Any]]  # small dims for the contract suite: 0, 1 and many rows, odd widths
    workloads: Mapping[str, Mapping[str, Any]]  # dims taken from real models, for the benchmark
    awkward: Mapping[str, Callable[[Make], Args]] = field(default_factory=dict)
    check: Callable[..., None] | None = None  # raises ValueError before anything runs
    setup_context: Callable[..., None] | None = None
    backward: Callable[..., Any] | None = None
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float16, torch.bfloat16)
    tolerance: float = 2.0  # times the error of the FP32 composition against FP64, plus one output rounding
    capturable_reference: bool = True  # False: the reference reads lengths on the host
    providers: dict[str, torch._ops.OpOverload] = field(default_factory=dict, init=False)
    serves: dict[str, frozenset[str]] = field(default_factory=dict, init=False)  # provider -> device types
    active: dict[str, str] = field(default_factory=dict, init=False)  # device type -> provider
    reason: dict[str, str] = field(default_factory=dict, init=False)  # device type -> why that one
    # `active` as a call looks it up, where Python's time shows: on anything but a GPU, on a GPU.
    _defaults: list[str] = field(default_factory=lambda: ["ref", "ref"], init=False)

    @property
    def mutates(self) -> bool:
        return bool(self.mutated)

    @property
    def mutated(self) -> tuple[str, ...]:
        """Names of the arguments that the operator writes into, in schema order."""
        return tuple(a.name for a in self.arguments if a.alias_info is not None and a.alias_info.is_write)

    @property
    def arguments(self) -> Sequence[Any]:
        return self.providers["ref"]._schema.arguments

    def bind(self, *args: Any) -> dict[str, Any]:
        """Arguments by name, defaults filled in."""
        bound = {a.name: a.default_value for a in self.arguments}
        bound.update(zip(bound, args, strict=False))
        return bound

    def cost_of(self, *args: Any, **hints: Any) -> Cost:
        """The cost of a call; hints are host values that tensors cannot tell a tracer (`seq_lens`, …)."""
        return self.cost(self.bind(*args), hints)

    def attach(self, provider: str, implementation: Callable[..., Any] | None, device_types: Sequence[str]) -> None:
        """Add an implementation as the overload `rooflight::<name>.<provider>`.

        With `implementation=None` only the schema is defined: a compiled library brings the kernel.
        """
        overload_name = f"{self.name}.{provider}"
        LIBRARY.define(overload_name + self.schema, tags=(torch.Tag.pt2_compliant_tag,))
        if implementation is not None:
            for device_type in device_types:
                self.implement(provider, implementation, device_type.upper())
        torch.library.register_fake(f"{NAMESPACE}::{overload_name}", _with_checks(self.fake, self.check), lib=LIBRARY)
        overload = getattr(getattr(torch.ops.rooflight, self.name), provider)
        self.providers[provider] = overload
        self.serves[provider] = frozenset(device_types)
        if self.mutates:
            attach_mutation(LIBRARY, overload, self.mutated)
        else:
            attach_autograd(LIBRARY, overload, self.setup_context, self.backward)
        for device_type in device_types:
            self._prefer(device_type, provider)

    def implement(self, provider: str, implementation: Callable[..., Any], dispatch_key: str) -> None:
        """Give a provider's overload its kernel for one dispatch key, behind the operator's checks."""
        LIBRARY.impl(f"{self.name}.{provider}", _with_checks(implementation, self.check), dispatch_key)

    def _prefer(self, device_type: str, provider: str) -> None:
        current = self.active.get(device_type)
        if device_type == "cpu" and provider != "ref":  # the interpreter is for tests: only on request
            return
        if current is None or PREFERENCE.index(provider) < PREFERENCE.index(current):
            self.choose(device_type, provider, "first present in the order " + ", ".join(PREFERENCE))

    def choose(self, device_type: str, provider: str, reason: str) -> None:
        """Make `provider` the default on a device type; `reason` is what `rooflight info` prints."""
        if provider not in self.providers:
            raise ValueError(f"{self.name} has no provider {provider!r}; it has {', '.join(self.providers)}")
        self.active[device_type] = provider
        self.reason[device_type] = reason
        self._defaults[:] = [self.active.get(device, "ref") for device in ("cpu", "cuda")]

    def overload(self, tensor: torch.Tensor, backend: str | None) -> torch._ops.OpOverload:
        """The overload that a call on `tensor`'s device uses: argument, then context, then table."""
        provider = backend or _forced["backend"]
        if provider is None:
            provider = self._defaults[int(tensor.is_cuda)]
        elif not self._runs(provider, tensor.device.type):
            if backend is None:  # a context asks for what is there and leaves the rest alone
                return self.providers[self._defaults[int(tensor.is_cuda)]]
            there = [name for name in self.providers if self._runs(name, tensor.device.type)]
            raise ValueError(
                f"{self.name}: backend must be one of {there} for tensors on {tensor.device.type}, was {backend!r}; "
                "`rooflight info` says what is missing"
            )
        return self.providers[provider]

    def _runs(self, provider: str, device_type: str) -> bool:
        """Whether the provider is there for tensors on such a device. Tensors without values are every one's."""
        return provider in self.providers and (
            provider == "ref" or device_type == "meta" or device_type in self.serves[provider]
        )


_forced: dict[str, str | None] = {"backend": None}


@contextmanager
def backend(provider: str | None) -> Iterator[None]:
    """Within the context every operator that has `provider` uses it (process-wide); None restores the table."""
    if provider is not None and provider not in PREFERENCE:
        raise ValueError(f"backend must be one of {list(PREFERENCE)} or None, was {provider!r}")
    before = _forced["backend"]
    _forced["backend"] = provider
    try:
        yield
    finally:
        _forced["backend"] = before


def define(name: str, schema: str, *, plumbing: bool = False, **parts: Any) -> Operator:
    """Make an operator, attach its reference on every device, and enter it in the registry (or in PLUMBING)."""
    operator = Operator(name=name, schema=schema, **parts)
    operator.attach("ref", operator.reference, ("cpu", "cuda"))
    (PLUMBING if plumbing else REGISTRY)[name] = operator
    return operator


def _with_checks(implementation: Callable[..., Any], check: Callable[..., None] | None) -> Callable[..., Any]:
    if check is None:
        return implementation

    def checked(*args: Any, **kwargs: Any) -> Any:
        check(*args, **kwargs)
        return implementation(*args, **kwargs)

    return checked
