"""SwiGLU's element-wise half on a packed projection.

    silu_and_mul([gate | up])_i = silu(gate_i) * up_i,   silu(g) = g / (1 + exp(-g))

Shazeer, "GLU Variants Improve Transformer", 2020. FP32 inside, one rounding at the end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rooflight.ops import checks
from rooflight.ops.checks import wide
from rooflight.ops.contract import Args, Cost, Make, define


def silu_and_mul(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """x: (..., 2 * size), gate in the first half and up in the second, any strides. Returns (..., size), contiguous.

    Differentiable. Raises ValueError if the last dimension is odd or the dtype is not a float.
    """
    return SILU_AND_MUL.overload(x, backend)(x)  # type: ignore[no-any-return]


def _check(x: torch.Tensor) -> None:
    checks.is_float("x", x)
    checks.has_rows("x", x)
    if x.shape[-1] % 2:
        checks.fail("x", "have an even last dimension (gate and up)", x.shape[-1])


def _reference(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(wide(gate)).mul_(up).to(x.dtype).contiguous()


def _fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // 2)


def _composition(x: torch.Tensor, *, compute: torch.dtype) -> torch.Tensor:
    gate, up = x.to(compute).chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def _setup(ctx: Any, inputs: Args, output: Any) -> None:
    ctx.save_for_backward(inputs[0])


def _backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    gate, up = wide(x).chunk(2, -1)
    sigmoid = torch.sigmoid(gate)
    g = wide(gradient)
    grad_gate = g * up * sigmoid * (1 + gate * (1 - sigmoid))
    return torch.cat((grad_gate, g * gate * sigmoid), -1).to(x.dtype)


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    x = args["x"]
    read = x.numel() * x.element_size()
    return Cost(read, read // 2, 5 * x.numel() // 2)


def _inputs(make: Make, num_tokens: int, intermediate_size: int) -> Args:
    return (make.randn(num_tokens, 2 * intermediate_size),)


def _extreme(make: Make) -> Args:
    limits = torch.finfo(make.dtype)
    values = torch.tensor([0.0, float("inf"), float("-inf"), float("nan"), limits.tiny, limits.max, limits.min, -90.0])
    gate, up = torch.meshgrid(values, torch.tensor([0.0, 1.0, -2.0]), indexing="ij")
    return (torch.cat((gate, up), -1).to(make.device, make.dtype),)


SILU_AND_MUL = define(
    "silu_and_mul",
    "(Tensor x) -> Tensor",
    reference=_reference,
    fake=_fake,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    setup_context=_setup,
    backward=_backward,
    sweep=[{"num_tokens": n, "intermediate_size": 96} for n in (0, 1, 33)]
    + [{"num_tokens": 3, "intermediate_size": size} for size in (1, 7, 255, 769, 1234, 3420)],
    workloads={f"qwen3-0.6b {n}x3072": {"num_tokens": n, "intermediate_size": 3072} for n in (1, 32, 256, 1024, 16384)},
    awkward={"extremes": _extreme},
)
