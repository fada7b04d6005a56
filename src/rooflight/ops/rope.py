"""Rotary position embedding, alone and as one step with Q/K norm and the write into the paged cache.

Pairs (a, b) of a head turn by the angle position * frequency_i:

    a' = a cos - b sin,   b' = b cos + a sin

Half rotation pairs element i with i + rotary_dim/2 (Hugging Face, GPT-NeoX); interleaved pairs 2i with 2i + 1
(the paper: Su et al., "RoFormer", 2021). `cos_sin` is one FP32 table (max_positions, rotary_dim), cosines in the
first half of a row and sines in the second; elements of a head beyond rotary_dim stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rooflight.ops import checks
from rooflight.ops.checks import wide
from rooflight.ops.contract import Args, Cost, Make, define


def rope(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """q: (num_tokens, num_heads, head_dim), k: (num_tokens, num_kv_heads, head_dim); kernels want stride 1 in the last.

    cos_sin: FP32 (max_positions, rotary_dim), rotary_dim even and at most head_dim; positions: (num_tokens,) int32
    or int64, each below max_positions. Returns new (q, k). Differentiable in q and k. FP32 inside.
    """
    return ROPE.overload(q, backend)(q, k, cos_sin, positions, interleaved)  # type: ignore[no-any-return]


def rope_(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    backend: str | None = None,
) -> None:
    """`rope` in place; q and k may be slices of one packed qkv buffer, whose other bytes are not touched."""
    ROPE_.overload(q, backend)(q, k, cos_sin, positions, interleaved)


def _check(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> None:
    checks.is_float("q", q)
    checks.has_shape("q", q, None, None, None)
    checks.has_shape("k", k, q.shape[0], None, q.shape[2])
    checks.same_dtype("k", k, q)
    check_table(q, cos_sin, positions)
    for name, tensor in (("k", k), ("cos_sin", cos_sin), ("positions", positions)):
        checks.same_device(name, tensor, q)


def check_table(q: torch.Tensor, cos_sin: torch.Tensor, positions: torch.Tensor) -> None:
    """cos_sin and positions fit q: shared by every operator that rotates."""
    checks.has_dtype("cos_sin", cos_sin, torch.float32)
    checks.has_shape("cos_sin", cos_sin, None, None)
    if cos_sin.shape[1] % 2 or cos_sin.shape[1] > q.shape[-1]:
        checks.fail("cos_sin", f"have an even width of at most head_dim = {q.shape[-1]}", cos_sin.shape[1])
    checks.is_integer("positions", positions)
    checks.has_shape("positions", positions, q.shape[0])


def _check_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> None:
    _check(q, k, cos_sin, positions, interleaved)
    checks.no_overlap("q", q)
    checks.no_overlap("k", k)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool) -> torch.Tensor:
    """x: (num_tokens, heads, head_dim) in the computing precision; cos, sin: (num_tokens, 1, rotary_dim / 2)."""
    half = cos.shape[-1]
    head = x if 2 * half == x.shape[-1] else x[..., : 2 * half]
    # Pairs side by side, (num_tokens, heads, half, 2), or half a head apart, (num_tokens, heads, 2, half).
    order, axis = ((half, 2), -1) if interleaved else ((2, half), -2)
    a, b = head.view(*x.shape[:-1], *order).unbind(axis)
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), axis).flatten(-2)
    return turned if head is x else torch.cat((turned, x[..., 2 * half :]), -1)


def look_up(cos_sin: torch.Tensor, positions: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of every token, (num_tokens, 1, rotary_dim / 2), in the computing precision."""
    cos, sin = cos_sin.index_select(0, positions).to(dtype).unsqueeze(1).chunk(2, -1)
    return cos, sin


def _reference(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = look_up(cos_sin, positions, wide(q[:0]).dtype)
    # Into fresh tensors: a result that is a view could not be written by its user while autograd records.
    q_out, k_out = (x.new_empty(x.shape).copy_(rotate(wide(x), cos, sin, interleaved)) for x in (q, k))
    return q_out, k_out


def _reference_in_place(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> None:
    q_turned, k_turned = _reference(q, k, cos_sin, positions, interleaved)  # both first: q and k may share memory
    q.copy_(q_turned)
    k.copy_(k_turned)


def _fake(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _composition(
    q: torch.Tensor,
    k: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    interleaved: bool,
    *,
    compute: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As multiplication of complex numbers: an independent way to say the same."""
    half = cos_sin.shape[1] // 2
    turn = torch.complex(cos_sin[positions, :half].to(compute), cos_sin[positions, half:].to(compute))[:, None]

    def apply(x: torch.Tensor) -> torch.Tensor:
        head = x[..., : 2 * half].to(compute)
        order = (*x.shape[:-1], half, 2) if interleaved else (*x.shape[:-1], 2, half)
        pairs = head.reshape(order) if interleaved else head.reshape(order).transpose(-1, -2)
        product = torch.complex(pairs[..., 0], pairs[..., 1]) * turn
        turned = torch.stack((product.real, product.imag), -1)
        flat = (turned if interleaved else turned.transpose(-1, -2)).reshape(head.shape)
        return torch.cat((flat, x[..., 2 * half :].to(compute)), -1)

    return apply(q), apply(k)


def _setup(ctx: Any, inputs: Args, output: Any) -> None:
    _, _, cos_sin, positions, ctx.interleaved = inputs
    ctx.save_for_backward(cos_sin, positions)


def _backward(ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor) -> tuple[Any, ...]:
    """The inverse of a rotation is the rotation by the negative angle."""
    cos_sin, positions = ctx.saved_tensors
    half = cos_sin.shape[1] // 2
    inverse = torch.cat((cos_sin[:, :half], -cos_sin[:, half:]), 1)
    # Gradients come as they come, also expanded with stride 0, which a kernel would refuse.
    grad_q, grad_k = (grad if grad.stride(-1) == 1 else grad.contiguous() for grad in (grad_q, grad_k))
    grad_q, grad_k = rope(grad_q, grad_k, inverse, positions, interleaved=ctx.interleaved, backend=ctx.provider)
    return grad_q, grad_k, None, None, None


def _cost(args: Mapping[str, Any], hints: Mapping[str, Any]) -> Cost:
    q, k, cos_sin, positions = args["q"], args["k"], args["cos_sin"], args["positions"]
    heads = (q.numel() + k.numel()) * q.element_size()
    table = positions.numel() * (cos_sin.shape[1] * 4 + positions.element_size())
    return Cost(heads + table, heads, 3 * (q.shape[1] + k.shape[1]) * q.shape[0] * cos_sin.shape[1])


def table(make: Make, max_positions: int, rotary_dim: int, theta: float = 1e6) -> torch.Tensor:
    """A default RoPE table for sample inputs; models build theirs in `models/rope_table.py`."""
    frequencies = theta ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    angles = torch.outer(torch.arange(max_positions, dtype=torch.float64), frequencies)
    return torch.cat((angles.cos(), angles.sin()), 1).float().to(make.device)


def _inputs(
    make: Make,
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Args:
    positions = torch.randint(50, (num_tokens,), generator=make.generator()).to(make.device)
    q = make.randn(num_tokens, num_heads, head_dim)
    k = make.randn(num_tokens, num_kv_heads, head_dim, salt=1)
    return q, k, table(make, 50, rotary_dim or head_dim), positions, interleaved


def packed_heads(
    make: Make, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v as views of one packed qkv buffer, as the decoder has them."""
    widths = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
    parts = make.randn(num_tokens, sum(widths), salt=3).split(widths, -1)
    q, k, v = (part.unflatten(-1, (-1, head_dim)) for part in parts)
    return q, k, v


def _strided(make: Make) -> Args:
    """Head strides of q and k differ: the shape that made a kernel walk k with q's stride."""
    q, k = make.randn(8, 64, 256)[..., :64], make.randn(8, 2624, salt=1)[:, :64].view(8, 1, 64)
    return q, k, table(make, 8, 64), torch.arange(8, device=make.device), False


def _packed(make: Make) -> Args:
    q, k, _ = packed_heads(make, 5, 4, 2, 64)
    return q, k, table(make, 9, 32), torch.tensor([8, 0, 3, 3, 1], device=make.device), False


_PARTS: dict[str, Any] = {
    "cost": _cost,
    "composition": _composition,
    "inputs": _inputs,
    "sweep": [{"num_tokens": n, "num_heads": 4, "num_kv_heads": 2, "head_dim": 64} for n in (0, 1, 33)]
    + [
        {"num_tokens": 3, "num_heads": 3, "num_kv_heads": 1, "head_dim": d, "rotary_dim": r, "interleaved": i}
        for d, r, i in ((64, 64, True), (80, 32, False), (80, 32, True), (128, 128, False), (6, 2, False))
    ],
    "workloads": {
        f"qwen3-0.6b {n}": {"num_tokens": n, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128} for n in (1, 32, 1024)
    },
    "awkward": {"strided": _strided, "packed": _packed},
}

ROPE = define(
    "rope",
    "(Tensor q, Tensor k, Tensor cos_sin, Tensor positions, bool interleaved=False) -> (Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    check=_check,
    setup_context=_setup,
    backward=_backward,
    **_PARTS,
)
ROPE_ = define(
    "rope_",
    "(Tensor(a!) q, Tensor(b!) k, Tensor cos_sin, Tensor positions, bool interleaved=False) -> ()",
    reference=_reference_in_place,
    fake=lambda q, k, cos_sin, positions, interleaved=False: None,
    check=_check_in_place,
    **_PARTS,
)
