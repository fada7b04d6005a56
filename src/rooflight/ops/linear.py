"""Matrix product with an optional bias, and the embedding gather: the two operators that read weight matrices.

    linear(x) = x @ weight^T + bias        embedding(ids)_t = weight[ids_t]

The reference hands the product to PyTorch, which accumulates in FP32 and rounds once. On a CPU the weight may be
packed into the blocked layout of PyTorch's matrix library (oneDNN): same operator, same values to rounding, but a
single row then streams the weight at the speed of memory, where the plain layout reached half of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from rooflight.ops import checks
from rooflight.ops.contract import Args, Cost, Make, define


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, backend: str | None = None
) -> torch.Tensor:
    """x: (..., in_features); weight: (out_features, in_features), plain or packed; bias: (out_features,) or None.

    All of one dtype. A weight is packed by `pack_weight`.

    Returns (..., out_features). Raises ValueError for shapes, dtypes or devices that do not fit. No gradient yet.
    """
    return LINEAR.overload(x, backend)(x, weight, bias)  # type: ignore[no-any-return]


def embedding(ids: torch.Tensor, weight: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Rows of weight (vocab_size, hidden_size) for ids (...) of int32 or int64; returns (..., hidden_size).

    An id outside the vocabulary raises IndexError on the CPU. On a GPU nobody may wait to hear of it: the compiled
    kernel reads nothing and gives a row of NaN, the reference is undefined. No gradient yet.
    """
    return EMBEDDING.overload(ids, backend)(ids, weight)  # type: ignore[no-any-return]


def pack_weight(weight: torch.Tensor) -> torch.Tensor:
    """A CPU weight (out_features, in_features) in the layout that `linear` reads fastest, for any number of rows.

    Returns a new opaque tensor that only `linear` understands, or the weight itself where PyTorch has no packed
    product for it (another device, FP16 or FP64, a build without oneDNN).
    """
    if weight.is_mkldnn:
        return weight  # packed already
    packable = weight.device.type == "cpu" and weight.numel() > 0 and torch.backends.mkldnn.is_available()
    if weight.dtype == torch.bfloat16:
        packable = packable and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if not packable or weight.dtype not in (torch.float32, torch.bfloat16):
        return weight
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), 1)  # type: ignore[no-any-return]


def _check_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
    checks.is_float("x", x)
    checks.has_rows("x", x)
    checks.has_shape("weight", weight, None, x.shape[-1])
    checks.same_dtype("weight", weight, x)
    checks.same_device("weight", weight, x)
    if bias is not None:
        checks.has_shape("bias", bias, weight.shape[0])
        checks.same_dtype("bias", bias, x)
        checks.same_device("bias", bias, x)


def _linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return F.linear(x, weight, bias)


def _linear_packed(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    if x.numel() == 0:
        return _linear_fake(x, weight, bias)
    rows = x if x.dim() > 1 else x.unsqueeze(0)
    out = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return out.view(*x.shape[:-1], weight.shape[0])  # type: ignore[no-any-return]


def _linear_fake(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _linear_composition(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, compute: torch.dtype
) -> torch.Tensor:
    product = torch.einsum("...i,oi->...o", x.to(compute), weight.to(compute))
    return product if bias is None else product + bias.to(compute)


def _linear_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    x, weight, bias = args["x"], args["weight"], args["bias"]
    rows, size = x.numel() // max(x.shape[-1], 1), x.element_size()
    read = (x.numel() + weight.numel() + (0 if bias is None else bias.numel())) * size
    return Cost(read, rows * weight.shape[0] * size, 2 * rows * weight.numel(), unit="tensor")


def _linear_inputs(make: Make, num_tokens: int, in_features: int, out_features: int, bias: bool = False) -> Args:
    weight = make.randn(out_features, in_features, scale=in_features**-0.5, salt=1)
    return make.randn(num_tokens, in_features), weight, make.randn(out_features, salt=2) if bias else None


LINEAR = define(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor",
    reference=_linear_reference,
    fake=_linear_fake,
    cost=_linear_cost,
    composition=_linear_composition,
    inputs=_linear_inputs,
    check=_check_linear,
    sweep=[{"num_tokens": n, "in_features": 64, "out_features": 48, "bias": bool(n % 2)} for n in (0, 1, 33)]
    + [{"num_tokens": 3, "in_features": i, "out_features": o} for i, o in ((1, 7), (255, 33), (769, 5), (64, 0))],
    workloads={
        f"qwen3-0.6b {name} {tokens}": {"num_tokens": tokens, "in_features": i, "out_features": o}
        for tokens in (1, 32, 1024)
        for name, i, o in (
            ("qkv", 1024, 4096),
            ("o", 2048, 1024),
            ("gate_up", 1024, 6144),
            ("down", 3072, 1024),
            ("head", 1024, 151936),
        )
    },
)
# A packed weight has a dispatch key of its own, so the layout chooses the product.
LINEAR.implement("ref", _linear_packed, "MkldnnCPU")


def _check_embedding(ids: torch.Tensor, weight: torch.Tensor) -> None:
    checks.is_integer("ids", ids)
    checks.is_float("weight", weight)
    checks.has_shape("weight", weight, None, None)
    checks.same_device("weight", weight, ids)


def _embedding_reference(ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.embedding(ids, weight)


def _embedding_cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    ids, weight = args["ids"], args["weight"]
    rows = ids.numel() * weight.shape[1] * weight.element_size()
    return Cost(rows + ids.numel() * ids.element_size(), rows, 0)


def _embedding_inputs(make: Make, num_tokens: int, vocab_size: int, hidden_size: int) -> Args:
    ids = torch.randint(vocab_size, (num_tokens,), generator=make.generator()).to(make.device)
    return ids, make.randn(vocab_size, hidden_size)


EMBEDDING = define(
    "embedding",
    "(Tensor ids, Tensor weight) -> Tensor",
    reference=_embedding_reference,
    fake=lambda ids, weight: weight.new_empty(*ids.shape, weight.shape[1]),
    cost=_embedding_cost,
    composition=lambda ids, weight, *, compute: weight.to(compute)[ids.long()],
    inputs=_embedding_inputs,
    check=_check_embedding,
    sweep=[{"num_tokens": n, "vocab_size": 103, "hidden_size": 64} for n in (0, 1, 33)]
    + [{"num_tokens": 3, "vocab_size": 11, "hidden_size": size} for size in (1, 7, 255)],
    workloads={f"qwen3-0.6b {n}": {"num_tokens": n, "vocab_size": 151936, "hidden_size": 1024} for n in (1, 32, 1024)},
)
