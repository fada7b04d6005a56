"""An RMSNorm between two matrix products, half of it in each: no launch of its own, and no wait for whole rows.

    linear_add_scale_(residual, …): residual += x @ weight^T + bias
                                    scaled = residual * norm_weight,  squares = sums of squares of parts of residual
    scaled_linear(scaled, squares)  = (scaled @ weight^T) * factor + bias
    scaled_swiglu(scaled, squares)  = silu(gate) * up,   [gate | up] = (scaled @ weight^T) * factor + bias
    factor of a row                 = 1 / sqrt(sum(squares) / in_features + eps)

A norm's factor belongs to a row, so it can be taken out of the product behind it; only the norm's weight cannot, and
the product in front knows it. `scaled` is rounded to the inputs' dtype, where the norm by itself rounds what the factor
has brought near to one: BF16 has the range for it, FP16 may not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rooflight.ops import checks
from rooflight.ops.activation import SILU_AND_MUL
from rooflight.ops.contract import Args, Cost, Make, define
from rooflight.ops.fused_linear import LINEAR_ADD_, projections
from rooflight.ops.linear import LINEAR

SQUARES_PART = 64  # elements of a row whose squares have one sum
# What the compiled kernel takes (csrc/skinny_linear.cu): rows; with more than a tile's, a weight of so many elements at
# most; outputs.
LEAST_ROWS, TILE_ROWS, MOST_ROWS, MOST_SHARED, MOST_OUTPUTS = 9, 64, 256, 6144 * 1024, 65_536


def linear_add_scale_(
    residual: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    backend: str | None = None,
) -> None:
    """Add x @ weight^T + bias to residual, in place, and leave in scaled and squares what the next product needs.

    residual, scaled: (..., out_features); squares: (..., squares_parts(out_features)) FP32; x: (..., in_features);
    weight: (out_features, in_features), plain or packed; norm_weight, bias: (out_features,). All but squares of one
    dtype. residual, scaled, squares and x are different memory, and are refused if they begin at the same element.
    Raises ValueError for what does not fit. No gradient.
    What a CUDA graph must not do: as in `rms_norm_linear`.
    """
    operator = LINEAR_ADD_SCALE_.overload(x, backend)
    operator(residual, scaled, squares, x, weight, norm_weight, bias)


def scaled_linear(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """`rms_norm_linear` of a residual whose `scaled` and `squares` are x (..., in_features) and squares.

    squares: (..., squares_parts(in_features)) FP32; weight: (out_features, in_features); bias: (out_features,). Returns
    (..., out_features). Errors and the rest: as in `linear_add_scale_`.
    """
    operator = SCALED_LINEAR.overload(x, backend)
    return operator(x, squares, weight, bias, eps)  # type: ignore[no-any-return]


def scaled_swiglu(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """As `scaled_linear` with weight (2 * size, in_features), gate rows first; returns (..., size)."""
    operator = SCALED_SWIGLU.overload(x, backend)
    return operator(x, squares, weight, bias, eps)  # type: ignore[no-any-return]


def empty_scaled(residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for `scaled` and `squares` of a residual (rows, width).

    The sums of a part lie together, (1, rows) apart: the compiled kernel takes no others.
    """
    rows, width = residual.shape
    squares = torch.empty(squares_parts(width), rows, dtype=torch.float32, device=residual.device)
    return torch.empty(rows, width, dtype=residual.dtype, device=residual.device), squares.t()


def squares_parts(width: int) -> int:
    """How many sums of squares a row has."""
    return -(-width // SQUARES_PART)


def scaled_rows(shapes: Iterable[tuple[int, int]]) -> range:
    """Rows that the compiled kernel of these operators takes, with weights (out_features, in_features) of all of these
    shapes. With others the reference serves, and is slower than a norm by itself."""
    shapes = list(shapes)
    if not all(out % 16 == 0 and out <= MOST_OUTPUTS and width % 8 == 0 for out, width in shapes):
        return range(0)
    return range(LEAST_ROWS, 1 + (MOST_ROWS if all(o * w <= MOST_SHARED for o, w in shapes) else TILE_ROWS))


def _check_squares(squares: torch.Tensor, data: torch.Tensor) -> None:
    checks.has_dtype("squares", squares, torch.float32)
    checks.has_shape("squares", squares, *data.shape[:-1], squares_parts(data.shape[-1]))
    checks.same_device("squares", squares, data)


def _check_sum(
    residual: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    check = LINEAR_ADD_.check
    assert check is not None
    check(residual, x, weight, bias)
    checks.same_shape("scaled", scaled, residual)
    checks.same_dtype("scaled", scaled, residual)
    checks.same_device("scaled", scaled, residual)
    checks.no_overlap("scaled", scaled)
    checks.not_the_same("scaled", scaled, "residual", residual)
    _check_squares(squares, residual)
    checks.no_overlap("squares", squares)
    for name, written in (("residual", residual), ("scaled", scaled)):
        checks.not_the_same("squares", squares, name, written)
    for name, written in (("scaled", scaled), ("squares", squares)):
        checks.not_read(name, written, "x", x)
    checks.has_shape("norm_weight", norm_weight, residual.shape[-1])
    checks.same_dtype("norm_weight", norm_weight, residual)
    checks.same_device("norm_weight", norm_weight, residual)


def _check_product(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    check = LINEAR.check
    assert check is not None
    check(x, weight, bias)
    _check_squares(squares, x)
    if not eps >= 0:
        checks.fail("eps", "be zero or more", eps)


def _check_swiglu(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> None:
    _check_product(x, squares, weight, bias, eps)
    if weight.shape[0] % 2:
        checks.fail("weight", "have an even number of rows (gate and up)", weight.shape[0])


def _sums_of_squares(rows: torch.Tensor) -> torch.Tensor:
    width = rows.shape[-1]
    squares = F.pad(rows.square(), (0, squares_parts(width) * SQUARES_PART - width))
    return squares.view(*rows.shape[:-1], squares_parts(width), SQUARES_PART).sum(-1)


def _sum_reference(
    residual: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> None:
    LINEAR_ADD_.reference(residual, x, weight, bias)
    torch.mul(residual, norm_weight, out=scaled)
    squares.copy_(_sums_of_squares(checks.wide(residual)))


def _reference(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    product = checks.wide(LINEAR.providers["ref"](x, weight))
    mean = squares.to(product.dtype).sum(-1, keepdim=True) / max(x.shape[-1], 1)
    product = product * torch.rsqrt(mean + eps)
    return (product if bias is None else product + bias).to(x.dtype)


def _swiglu_reference(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    gated: torch.Tensor = SILU_AND_MUL.reference(_reference(x, squares, weight, bias, eps))
    return gated


def _rounded(value: torch.Tensor, dtype: torch.dtype, compute: torch.dtype) -> torch.Tensor:
    """The baseline in FP32 rounds where the parts one after the other do."""
    return value.to(dtype).float() if compute == torch.float32 else value


def _sum_composition(
    residual: torch.Tensor,
    scaled: torch.Tensor,
    squares: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    norm_weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    total = _rounded(LINEAR_ADD_.composition(residual, x, weight, bias, compute=compute), x.dtype, compute)
    parts = [part.pow(2).sum(-1) for part in total.split(64, -1)]
    return total, total * norm_weight.to(compute), torch.stack(parts, -1)


def _composition(
    x: torch.Tensor,
    squares: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    compute: torch.dtype,
) -> torch.Tensor:
    product = _rounded(torch.einsum("...i,oi->...o", x.to(compute), weight.to(compute)), x.dtype, compute)
    mean = torch.einsum("...p->...", squares.to(compute)) / max(x.shape[-1], 1)
    scaled = product / torch.sqrt(mean + eps)[..., None]
    return scaled if bias is None else scaled + bias.to(compute)


def _swiglu_composition(*args: Any, compute: torch.dtype) -> torch.Tensor:
    gate, up = _rounded(_composition(*args, compute=compute), args[0].dtype, compute).chunk(2, -1)
    return gate / (1 + torch.exp(-gate)) * up


def _sum_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    total = LINEAR_ADD_.cost(args, hints)
    norm = args["norm_weight"].numel() * args["norm_weight"].element_size()
    left = args["scaled"].numel() * args["scaled"].element_size() + _bytes_of(args["squares"])
    flops = total.flops + 3 * args["residual"].numel()
    return Cost(total.bytes_read + norm, total.bytes_written + left, flops, unit="tensor")


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    product = LINEAR.cost(args, hints)
    return Cost(product.bytes_read + _bytes_of(args["squares"]), product.bytes_written, product.flops, unit="tensor")


def _swiglu_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    whole = _cost(args, hints)
    return Cost(whole.bytes_read, whole.bytes_written // 2, whole.flops, unit="tensor")


def _bytes_of(squares: torch.Tensor) -> int:
    return squares.numel() * squares.element_size()


def _sum_inputs(make: Make, num_tokens: int, in_features: int, out_features: int, bias: bool = False) -> Args:
    residual, x, weight, added = LINEAR_ADD_.inputs(make, num_tokens, in_features, out_features, bias)
    squares = make.randn(squares_parts(out_features), num_tokens, salt=6).float().t()
    norm_weight = 1 + make.randn(out_features, scale=0.2, salt=3)
    return residual, make.randn(num_tokens, out_features, salt=5), squares, x, weight, norm_weight, added


def _inputs(
    make: Make, num_tokens: int, in_features: int, out_features: int, bias: bool = False, eps: float = 1e-6
) -> Args:
    """Sums about as large as those of x, but not x's own: on two devices these would differ by a rounding."""
    x, weight, added = LINEAR.inputs(make, num_tokens, in_features, out_features, bias)
    squares = SQUARES_PART * (1 + make.randn(squares_parts(in_features), num_tokens, scale=0.2, salt=6)).abs()
    return x, squares.float().t(), weight, added, eps


# The kernel takes 9 to 256 rows, widths that are multiples of 8, and outputs of 16.
_SWEEP = [{"num_tokens": n, "in_features": 64, "out_features": 48, "bias": bool(n % 2)} for n in (0, 1, 8, 33, 65)] + [
    {"num_tokens": n, "in_features": i, "out_features": o}
    for n, i, o in (
        *((3, 255, 34), (5, 769, 6), (2, 1024, 70)),
        *((9, 200, 80), (16, 1096, 176), (20, 255, 34), (64, 264, 1008), (130, 264, 176)),
    )
]


_ROWS = (16, 64, 256)  # of the workloads
# An eps that counts as much as the squares.
_SCALED_SWEEP: list[dict[str, Any]] = [*_SWEEP, {"num_tokens": 17, "in_features": 200, "out_features": 80, "eps": 0.5}]


LINEAR_ADD_SCALE_ = define(
    "linear_add_scale_",
    "(Tensor(a!) residual, Tensor(b!) scaled, Tensor(c!) squares, Tensor x, Tensor weight, Tensor norm_weight, "
    "Tensor? bias=None) -> ()",
    fake=lambda residual, scaled, squares, x, weight, norm_weight, bias=None: None,
    sweep=_SWEEP,
    reference=_sum_reference,
    cost=_sum_cost,
    composition=_sum_composition,
    inputs=_sum_inputs,
    check=_check_sum,
    workloads=projections(("o", 2048, 1024), ("down", 3072, 1024), rows=_ROWS),
)
SCALED_LINEAR = define(
    "scaled_linear",
    "(Tensor x, Tensor squares, Tensor weight, Tensor? bias=None, float eps=1e-6) -> Tensor",
    fake=lambda x, squares, weight, bias=None, eps=1e-6: x.new_empty(*x.shape[:-1], weight.shape[0]),
    sweep=_SCALED_SWEEP,
    reference=_reference,
    cost=_cost,
    composition=_composition,
    inputs=_inputs,
    check=_check_product,
    workloads=projections(("qkv", 1024, 4096), rows=_ROWS),
)
SCALED_SWIGLU = define(
    "scaled_swiglu",
    "(Tensor x, Tensor squares, Tensor weight, Tensor? bias=None, float eps=1e-6) -> Tensor",
    fake=lambda x, squares, weight, bias=None, eps=1e-6: x.new_empty(*x.shape[:-1], weight.shape[0] // 2),
    sweep=_SCALED_SWEEP,
    reference=_swiglu_reference,
    cost=_swiglu_cost,
    composition=_swiglu_composition,
    inputs=_inputs,
    check=_check_swiglu,
    workloads=projections(("gate_up", 1024, 6144), rows=_ROWS),
)
# A weight packed for a CPU has a dispatch key of its own; the product inside chooses by it.
for _operator in (LINEAR_ADD_SCALE_, SCALED_LINEAR, SCALED_SWIGLU):
    _operator.implement("ref", _operator.reference, "MkldnnCPU")
