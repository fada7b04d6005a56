"""Matrix products with what stands before and after them in a decoder layer.

    rms_norm_linear(x) = rms_norm(x) @ weight^T + bias
    rms_norm_swiglu(x) = silu(gate) * up,   [gate | up] = rms_norm(x) @ weight^T + bias
    linear_add_(residual, x): residual += x @ weight^T + bias

FP32 between the matrix unit and the one rounding at the end; what the matrix unit multiplies has the inputs' dtype. At
a few rows a product is the way of its weight from memory, and a norm or a sum that is a launch of its own costs as
much as a tenth of it: these save the launches. Up to 256 rows the norm is a launch of its own, and at more they
are the parts one after the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from rooflight.ops import checks
from rooflight.ops.activation import SILU_AND_MUL
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.linear import LINEAR
from rooflight.ops.norm import RMS_NORM


def rms_norm_linear(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """x: (..., in_features); norm_weight: (in_features,); weight: (out_features, in_features); bias: (out_features,).

    All of one dtype; the weight plain or packed. Returns (..., out_features). Raises ValueError for what does not fit.
    No gradient. In a CUDA graph the `.cuda` kernel reads the weights before the kernel in front of it has ended:
    that one must not write them.
    """
    operator = RMS_NORM_LINEAR.overload(x, backend)
    return operator(x, norm_weight, weight, bias, eps)  # type: ignore[no-any-return]


def rms_norm_swiglu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """As `rms_norm_linear` with weight (2 * size, in_features), gate rows first; returns (..., size)."""
    operator = RMS_NORM_SWIGLU.overload(x, backend)
    return operator(x, norm_weight, weight, bias, eps)  # type: ignore[no-any-return]


def linear_add_(
    residual: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Add x @ weight^T + bias to residual (..., out_features), in place; residual and x are different memory.

    Rounded once where the sum is in the product's epilogue, as on a GPU, else after the product and after the sum.
    x, weight, bias and what holds for them: as in `rms_norm_linear`.
    """
    LINEAR_ADD_.overload(x, backend)(residual, x, weight, bias)


def _check(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    _check_product(x, weight, bias)
    checks.has_shape("norm_weight", norm_weight, x.shape[-1])
    checks.same_dtype("norm_weight", norm_weight, x)
    checks.same_device("norm_weight", norm_weight, x)
    if not eps >= 0:
        checks.fail("eps", "be zero or more", eps)


def _check_product(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    check = LINEAR.check
    assert check is not None
    check(x, weight, bias)


def _check_swiglu(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    _check(x, norm_weight, weight, bias, eps)
    if weight.shape[0] % 2:
        checks.fail("weight", "have an even number of rows (gate and up)", weight.shape[0])


def _check_add(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    checks.is_float("residual", residual)
    checks.has_rows("residual", residual)
    checks.has_shape("x", x, *residual.shape[:-1], None)
    checks.same_dtype("x", x, residual)
    checks.same_device("x", x, residual)
    checks.has_shape("weight", weight, residual.shape[-1], x.shape[-1])
    _check_product(x, weight, bias)
    checks.no_overlap("residual", residual)
    checks.not_read("residual", residual, "x", x)


def _norm_product(
    x: torch.Tensor, norm_weight: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> torch.Tensor:
    product: torch.Tensor = LINEAR.providers["ref"](RMS_NORM.reference(x, norm_weight, eps), weight, bias)
    return product


def _reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    return _norm_product(x, norm_weight, weight, bias, eps)


def _swiglu_reference(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    gated: torch.Tensor = SILU_AND_MUL.reference(_norm_product(x, norm_weight, weight, bias, eps))
    return gated


def _add_reference(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> None:
    residual.add_(LINEAR.providers["ref"](x, weight, bias))


def _composition(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    compute: torch.dtype,
) -> torch.Tensor:
    """The baseline rounds the norm to the dtype, as the matrix unit takes it."""
    normed = F.rms_norm(x.to(compute), x.shape[-1:], norm_weight.to(compute), eps)
    if compute == torch.float32:
        normed = normed.to(x.dtype).float()
    product = torch.einsum("...i,oi->...o", normed, weight.to(compute))
    return product if bias is None else product + bias.to(compute)


def _swiglu_composition(*args: Any, compute: torch.dtype) -> torch.Tensor:
    product = _composition(*args, compute=compute)
    if compute == torch.float32:  # the parts one after the other round here too
        product = product.to(args[0].dtype).float()
    gate, up = product.chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def _add_composition(
    residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, compute: torch.dtype
) -> torch.Tensor:
    product: torch.Tensor = LINEAR.composition(x, weight, bias, compute=compute)
    if compute == torch.float32:
        product = product.to(x.dtype).float()
    return residual.to(compute) + product


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    product = LINEAR.cost(args, hints)
    norm = args["norm_weight"].numel() * args["norm_weight"].element_size()
    return Cost(product.bytes_read + norm, product.bytes_written, product.flops, unit="tensor")


def _swiglu_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    whole = _cost(args, hints)
    return Cost(whole.bytes_read, whole.bytes_written // 2, whole.flops, unit="tensor")


def _add_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    product, residual = LINEAR.cost(args, hints), args["residual"]
    read = product.bytes_read + residual.numel() * residual.element_size()
    return Cost(read, product.bytes_written, product.flops + residual.numel(), unit="tensor")


def _inputs(make: Make, num_tokens: int, in_features: int, out_features: int, bias: bool = False) -> Args:
    norm_weight = 1 + make.randn(in_features, scale=0.2, salt=3)
    weight = make.randn(out_features, in_features, scale=in_features**-0.5, salt=1)
    return make.randn(num_tokens, in_features), norm_weight, weight, _bias(make, out_features, bias), 1e-6


def _add_inputs(make: Make, num_tokens: int, in_features: int, out_features: int, bias: bool = False) -> Args:
    weight = make.randn(out_features, in_features, scale=in_features**-0.5, salt=1)
    residual = make.randn(num_tokens, out_features, salt=4)
    return residual, make.randn(num_tokens, in_features), weight, _bias(make, out_features, bias)


def _bias(make: Make, size: int, wanted: bool) -> torch.Tensor | None:
    return make.randn(size, salt=2) if wanted else None


# Up to eight rows are one tile of a kernel, up to 64 of another, and up to 256 several of those. The first one takes no
# widths but multiples of 32; the second one of 8, and outputs of 16.
_SWEEP = [{"num_tokens": n, "in_features": 64, "out_features": 48, "bias": bool(n % 2)} for n in (0, 1, 8, 33, 65)] + [
    {"num_tokens": n, "in_features": i, "out_features": o}
    for n, i, o in (
        *((3, 255, 34), (5, 769, 6), (2, 1024, 70), (7, 3072, 18), (1, 96, 1000), (4, 2048, 10)),
        *((9, 200, 80), (16, 1096, 176), (20, 255, 34), (64, 264, 1008), (130, 264, 176)),
    )
]


def projections(*shapes: tuple[str, int, int], rows: Sequence[int] = (1, 8, 64)) -> dict[str, dict[str, int]]:
    """Workloads of so many rows each; shapes: name, in_features, out_features."""
    return {
        f"qwen3-0.6b {name} {tokens}": {"num_tokens": tokens, "in_features": i, "out_features": o}
        for tokens in rows
        for name, i, o in shapes
    }


def _define(name: str, schema: str, fake: Callable[..., Any], **parts: Any) -> Any:
    return define(name, schema, fake=fake, sweep=_SWEEP, **parts)


RMS_NORM_LINEAR = _define(
    "rms_norm_linear",
    "(Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias=None, float eps=1e-6) -> Tensor",
    lambda x, norm_weight, weight, bias=None, eps=1e-6: x.new_empty(*x.shape[:-1], weight.shape[0]),
    reference=_reference,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check,
    workloads=projections(("qkv", 1024, 4096), ("head", 1024, 151936)),
)
RMS_NORM_SWIGLU = _define(
    "rms_norm_swiglu",
    "(Tensor x, Tensor norm_weight, Tensor weight, Tensor? bias=None, float eps=1e-6) -> Tensor",
    lambda x, norm_weight, weight, bias=None, eps=1e-6: x.new_empty(*x.shape[:-1], weight.shape[0] // 2),
    reference=_swiglu_reference,
    cost=_swiglu_cost,
    composition=_swiglu_composition,
    inputs=_inputs,
    check=_check_swiglu,
    workloads=projections(("gate_up", 1024, 6144)),
)
LINEAR_ADD_ = _define(
    "linear_add_",
    "(Tensor(a!) residual, Tensor x, Tensor weight, Tensor? bias=None) -> ()",
    lambda residual, x, weight, bias=None: None,
    reference=_add_reference,
    cost=_add_cost,
    composition=_add_composition,
    inputs=_add_inputs,
    check=_check_add,
    workloads=projections(("o", 2048, 1024), ("down", 3072, 1024)),
)
# A weight packed for a CPU has a dispatch key of its own; the product inside chooses by it.
for _operator in (RMS_NORM_LINEAR, RMS_NORM_SWIGLU, LINEAR_ADD_):
    _operator.implement("ref", _operator.reference, "MkldnnCPU")
