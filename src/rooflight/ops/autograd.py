"""What the dispatcher must know beyond a kernel: gradients, and which arguments are written.

A compiled kernel without an autograd formula yields None gradients in silence, and an operator that writes
its arguments does not bump their version counters; both are repaired here for every overload.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def attach_autograd(
    library: torch.library.Library,
    overload: torch._ops.OpOverload,
    setup_context: Callable[..., None] | None,
    backward: Callable[..., Any] | None,
) -> None:
    """Register the gradient; an operator without one raises in backward instead of returning None.

    The backward finds the provider that ran in `ctx.provider`.
    """
    provider = overload._schema.overload_name
    name = overload._schema.name + "." + provider
    if backward is None:

        def backward(ctx: Any, *gradients: Any) -> Any:
            raise NotImplementedError(f"{name} has no gradient")

    def remember(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.provider = provider
        if setup_context is not None:
            setup_context(ctx, inputs, output)

    torch.library.register_autograd(name, backward, setup_context=remember, lib=library)


def attach_mutation(library: torch.library.Library, overload: torch._ops.OpOverload, mutated: Sequence[str]) -> None:
    """Refuse arguments that require gradients, and bump the version of every written argument."""
    names = [a.name for a in overload._schema.arguments]
    written = [names.index(name) for name in mutated]
    name = overload._schema.name.split("::")[1] + "." + overload._schema.overload_name

    def refuse_gradients(keyset: Any, *args: Any) -> Any:
        if torch.is_grad_enabled():
            for argument, value in zip(names, args, strict=False):
                if isinstance(value, torch.Tensor) and value.requires_grad:
                    raise ValueError(
                        f"{argument} must not require gradients, was a tensor that does: "
                        f"{name} writes its results into its arguments"
                    )
        with torch._C._AutoDispatchBelowAutograd():
            return overload.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    def bump_versions(keyset: Any, *args: Any) -> Any:
        for index in written:
            torch.autograd.graph.increment_version(args[index])
        with torch._C._AutoDispatchBelowADInplaceOrView():
            return overload.redispatch(keyset & torch._C._after_ADInplaceOrView_keyset, *args)

    library.impl(name, refuse_gradients, "Autograd", with_keyset=True)
    library.impl(name, bump_versions, "ADInplaceOrView", with_keyset=True)
