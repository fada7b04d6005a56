"""Argument checks shared by the operators: each raises ValueError naming argument, wish and fact."""

from __future__ import annotations

import torch

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int32, torch.int64)


def fail(argument: str, must: str, was: object) -> None:
    raise ValueError(f"{argument} must {must}, was {was}")


def is_float(argument: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in FLOATS:
        fail(argument, "be float32, float16, bfloat16 or float64", tensor.dtype)


def is_integer(argument: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in INTEGERS:
        fail(argument, "be int32 or int64", tensor.dtype)


def has_dtype(argument: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        fail(argument, f"be {dtype}", tensor.dtype)


def has_shape(argument: str, tensor: torch.Tensor, *shape: int | None) -> None:
    """Exact sizes; None leaves a dimension free."""
    have = tensor.shape
    if len(have) != len(shape):
        _wrong_shape(argument, have, shape)
    for size, wish in zip(have, shape):  # noqa: B905 - a decode step makes thousands of checks, so they are bare loops
        if wish is not None and size != wish:
            _wrong_shape(argument, have, shape)


def _wrong_shape(argument: str, have: torch.Size, shape: tuple[int | None, ...]) -> None:
    wish = ", ".join("any" if n is None else str(n) for n in shape)
    fail(argument, f"have shape ({wish})", tuple(have))


def has_rows(argument: str, tensor: torch.Tensor) -> None:
    if tensor.dim() < 1:
        fail(argument, "have at least one dimension", "a scalar")


def same_device(argument: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.device != other.device:
        fail(argument, f"be on {other.device}", tensor.device)


def same_dtype(argument: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.dtype != other.dtype:
        fail(argument, f"be {other.dtype}", tensor.dtype)


def same_shape(argument: str, tensor: torch.Tensor, other: torch.Tensor) -> None:
    if tensor.shape != other.shape:
        fail(argument, f"have shape {tuple(other.shape)}", tuple(tensor.shape))


def no_overlap(argument: str, tensor: torch.Tensor) -> None:
    """A tensor that is written must not hold the same element twice (an expanded tensor does)."""
    strides = tensor.stride()
    if 0 in strides and any(s == 0 and n > 1 for s, n in zip(strides, tensor.shape, strict=True)):
        fail(argument, "not be expanded (stride 0), since it is written", f"strides {tensor.stride()}")


def logit_rows(logits: torch.Tensor, halves: bool = False, **rows: tuple[torch.Tensor, torch.dtype]) -> None:
    """logits (num_seqs, vocab_size) FP32 with a vocabulary, and per-row parameters (num_seqs,) of their dtypes.

    halves: FP16 and BF16 are taken too.
    """
    if not halves:
        has_dtype("logits", logits, torch.float32)
    elif logits.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        fail("logits", "be torch.float32, torch.float16 or torch.bfloat16", logits.dtype)
    has_shape("logits", logits, None, None)
    if logits.shape[1] == 0:
        fail("logits", "have a vocabulary of at least one token", tuple(logits.shape))
    for name, (tensor, dtype) in rows.items():
        has_dtype(name, tensor, dtype)
        has_shape(name, tensor, logits.shape[0])
        same_device(name, tensor, logits)


def not_the_same(argument: str, tensor: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """Two arguments that are both written must not begin at the same byte; slices of one buffer are fine."""
    if _begin_together(tensor, other):
        fail(argument, f"not share {name}'s memory, since both are written", "the same memory")


def not_read(argument: str, tensor: torch.Tensor, name: str, other: torch.Tensor) -> None:
    """An argument that is written must not begin where one begins that is read meanwhile."""
    if _begin_together(tensor, other):
        fail(argument, f"not be {name}, which is read meanwhile", "the same memory")


def _begin_together(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if not torch._C._is_alias_of(tensor, other):  # type: ignore[attr-defined]
        return False
    begins = [t.storage_offset() * t.element_size() for t in (tensor, other)]
    return begins[0] == begins[1] and tensor.numel() > 0 and other.numel() > 0


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in the precision that operators compute in: FP64 for FP64, else FP32."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()
