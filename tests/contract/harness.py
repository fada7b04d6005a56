"""What the contract suite shares: which implementations there are, how one is called, and what is right.

Everything here is derived from the registry, so an operator is covered from the moment it is defined. A case is an
implementation (operator, provider, device) with arguments; results are what the operator returns, or, for one that
writes into its arguments, those arguments afterwards in schema order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rooflight import ops
from rooflight.ops import REGISTRY, AttentionMeta, Make, Operator

Args = tuple[Any, ...]
Results = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Target:
    """One implementation on one device."""

    op: Operator
    provider: str
    device: str

    @property
    def overload(self) -> torch._ops.OpOverload:
        return self.op.providers[self.provider]

    def __str__(self) -> str:
        return f"{self.op.name}.{self.provider}.{self.device}"

    def run(self, args: Args) -> Results:
        """Call the overload on these very arguments."""
        return results_of(self.op, args, self.overload(*args))

    def run_copy(self, args: Args) -> Results:
        """Call it on copies (same layout, same sharing of storage) on the target's device."""
        return self.run(copy_args(args, self.device))

    def try_run(self, args: Args) -> tuple[Results | None, str]:
        """Results of a call on these very arguments, or None and the message of the ValueError that refused them."""
        try:
            return self.run(args), ""
        except ValueError as error:
            return None, str(error)

    def run_public(self, args: Args) -> Results:
        return results_of(self.op, args, public(self.op, self.provider)(*args))


def _has_kernel(overload: torch._ops.OpOverload, device: str) -> bool:
    name = f"{overload._schema.name}.{overload._schema.overload_name}"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, device.upper())


TARGETS = [
    Target(op, provider, device)
    for _, op in sorted(REGISTRY.items())
    for provider, overload in op.providers.items()
    for device in ("cpu", "cuda")
    if _has_kernel(overload, device)
]


def as_param(target: Target, *values: Any, label: str = "") -> Any:
    marks = [pytest.mark.gpu] if target.device == "cuda" else []
    return pytest.param(target, *values, id=f"{target}-{label}" if label else str(target), marks=marks)


def each_target(keep: Callable[[Target], bool] = lambda target: True) -> pytest.MarkDecorator:
    """Parametrise over every implementation; those on a GPU carry the `gpu` mark."""
    return pytest.mark.parametrize("target", [as_param(target) for target in TARGETS if keep(target)])


def implementations(name: str) -> pytest.MarkDecorator:
    """Parametrise over the implementations of one operator."""
    return each_target(lambda target: target.op.name == name)


def gpu_targets(keep: Callable[[Target], bool] = lambda target: True) -> pytest.MarkDecorator:
    return each_target(lambda target: target.device == "cuda" and keep(target))


# Sample inputs -------------------------------------------------------------------------------------------------------


def describe(dims: Mapping[str, Any]) -> str:
    def short(value: Any) -> str:
        return "_".join(map(str, value)) or "none" if isinstance(value, tuple) else str(value)

    return ",".join(f"{key}={short(value)}" for key, value in dims.items())


def sweep_args(op: Operator, dims: Mapping[str, Any], dtype: torch.dtype | None = None, seed: int = 0) -> Args:
    return op.inputs(Make(dtype or op.dtypes[0], seed=seed), **dims)


def size_of(op: Operator, dims: Mapping[str, Any]) -> int:
    with torch.device("cpu"):
        return max((a.numel() for a in op.inputs(Make(op.dtypes[0]), **dims)[:1]), default=0)


def plain_dims(op: Operator) -> Mapping[str, Any]:
    """The dims of the sweep with the most rows, but at most 40: the everyday case."""
    rows = [rows_of(sweep_args(op, dims)) for dims in op.sweep]
    return op.sweep[max(range(len(rows)), key=lambda index: rows[index] if rows[index] <= 40 else -1)]


def odd_dims(op: Operator) -> Mapping[str, Any]:
    """Dims with several rows whose width is no power of two, where masks of a kernel's last lanes are at work."""

    def merit(dims: Mapping[str, Any]) -> tuple[bool, int]:
        first = sweep_args(op, dims)[0]
        wide = any(size > 16 and size & (size - 1) for size in first.shape[1:])
        return wide and 1 < first.shape[0] <= 40, -first.numel()

    best = max(op.sweep, key=merit)
    return best if merit(best)[0] else plain_dims(op)


def small_dims(op: Operator) -> Mapping[str, Any]:
    """The smallest dims with more than one element everywhere: for gradcheck and opcheck."""
    sized = [(size_of(op, dims), index) for index, dims in enumerate(op.sweep)]
    return op.sweep[min((size, index) for size, index in sized if size > 6)[1]]


def zero_dims(op: Operator) -> Mapping[str, Any]:
    empty = [dims for dims in op.sweep if rows_of(sweep_args(op, dims)) == 0]
    assert empty, f"the sweep of {op.name} has no dims with zero rows"
    return empty[0]


def rows_of(args: Args) -> int:
    return int(args[0].shape[0])


def batch_args(op: Operator, rows: int, dtype: torch.dtype | None = None) -> Args:
    """Arguments for a batch of so many rows, everything else as in the everyday case."""
    dims = dict(plain_dims(op))
    lengths = (3, 17, 32, 5, 9, 12, 1, 16, 30)
    for key in dims:
        if key in ("num_tokens", "num_seqs"):
            dims[key] = rows
        elif key in ("seq_lens", "query_lens"):
            dims[key] = lengths[:rows]
    return sweep_args(op, dims, dtype)


def tensor_names(op: Operator, args: Args) -> list[str]:
    """Names of the arguments that hold a tensor in this call."""
    return [a.name for a, value in zip(op.arguments, args, strict=False) if isinstance(value, torch.Tensor)]


def replaced(op: Operator, args: Args, name: str, value: Any) -> Args:
    index = [a.name for a in op.arguments].index(name)
    return (*args[:index], value, *args[index + 1 :])


def argument(op: Operator, args: Args, name: str) -> Any:
    return args[[a.name for a in op.arguments].index(name)]


def copy_args(args: Args, device: str | torch.device = "cpu") -> Args:
    """Copies with the same strides and offsets; arguments that share storage share it afterwards."""
    buffers: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = value.untyped_storage()._cdata, value.dtype
        if key not in buffers:
            buffers[key] = whole_buffer(value).to(device, copy=True)
        return buffers[key].as_strided(value.shape, value.stride(), value.storage_offset())

    return tuple(copy(value) for value in args)


def whole_buffer(value: torch.Tensor) -> torch.Tensor:
    """The storage behind a tensor as one row of its dtype, with what is outside the view too."""
    storage = value.untyped_storage()
    count = storage.nbytes() // value.element_size()
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(storage, 0, (count,), (1,))


# Calls ---------------------------------------------------------------------------------------------------------------


def results_of(op: Operator, args: Args, returned: Any) -> Results:
    if op.mutates:
        assert returned is None or returned == (), f"{op.name} writes into its arguments and must return nothing"
        return tuple(argument(op, args, name) for name in op.mutated)
    return returned if isinstance(returned, tuple) else (returned,)


def _attention(function: Callable[..., Any], names: Sequence[str], backend: str | None) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        named = dict(zip(names, args, strict=True))
        starts = named.get("query_starts", named["seq_lens"])
        bounds = named.get("max_query_len", 1), named["max_seq_len"]
        meta = AttentionMeta(named["block_table"], named["seq_lens"], starts, *bounds, splits=named.get("splits", 0))
        tensors = args[: names.index("block_table")]
        rest = {name: named[name] for name in ("eps", "scale", "window", "interleaved") if name in named}
        return function(*tensors, meta, **rest, backend=backend)

    return call


def public(op: Operator, backend: str | None = None) -> Callable[..., Any]:
    """The public function as a function of the schema's positional arguments, without defaults for attention."""
    names = [a.name for a in op.arguments]
    if op.name in ("prefill_attention", "decode_attention"):
        return _attention(getattr(ops, f"{op.name}_lse"), names, backend)
    function = getattr(ops, op.name)
    if op.name == "qk_norm_rope_attention_":
        return _attention(function, names, backend)
    keywords = {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}
    split = len([name for name in names if name not in keywords])

    def call(*args: Any) -> Any:
        named = dict(zip(names[split:], args[split:], strict=False))
        return function(*args[:split], **named, backend=backend)

    return call


# Results that are sums over all rows, by their place: no row has a part of them of its own.
SUMS_OVER_ROWS = {"rms_norm_backward": (1,), "layer_norm_backward": (1, 2)}


def of_rows(op: Operator, results: Results) -> Results:
    """The results that hold something for each row of the batch."""
    return tuple(r for place, r in enumerate(results) if place not in SUMS_OVER_ROWS.get(op.name, ()))


def untouched(op: Operator, before: Args, after: Args, nothing_written: bool = False) -> None:
    """Every byte behind every argument is as before, except the elements of those that the schema says are written."""
    for name in tensor_names(op, before):
        buffers = []
        for args in (before, after):
            value = argument(op, args, name)
            buffer = whole_buffer(value).cpu().clone()
            for written in () if nothing_written else op.mutated:
                view = argument(op, args, written)
                if view.untyped_storage().data_ptr() == value.untyped_storage().data_ptr() and view.numel():
                    buffer.as_strided(view.shape, view.stride(), view.storage_offset()).zero_()
            buffers.append(buffer)
        assert same_bits(*buffers), f"{op.name} wrote outside its results, behind {name}"


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Memory from torch.empty holds NaN (the largest integer for integers) instead of what chance left there."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        assert torch.empty(3).isnan().all(), "torch.empty is not filled"
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fill


# What is right -------------------------------------------------------------------------------------------------------


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equality of bits: NaN equals itself and 0 differs from -0."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8).cpu() for t in (a, b)))


@dataclass(frozen=True)
class Expected:
    """What a call should give: the formula in FP64, and the error that plain PyTorch makes in FP32."""

    op: Operator
    truths: Results
    baselines: Results


def expect(op: Operator, args: Args) -> Expected:
    """From arguments on the CPU, as they are before the call."""

    def compose(compute: torch.dtype) -> Results:
        result = op.composition(*copy_args(args), compute=compute)
        return result if isinstance(result, tuple) else (result,)

    return Expected(op, compose(torch.float64), compose(torch.float32))


def assert_right(expected: Expected, results: Sequence[torch.Tensor], what: str = "", by_row: bool = False) -> None:
    """Results of a call against FP64 by the tolerance rule of `assert_close`."""
    op = expected.op
    assert len(results) == len(expected.truths)
    names = op.mutated or [f"output {index}" for index in range(len(results))]
    for name, *tensors in zip(names, results, expected.truths, expected.baselines, strict=True):
        assert_close(*tensors, op.tolerance, f"{op.name} {what} {name}", by_row)


def assert_close(
    result: torch.Tensor,
    truth: torch.Tensor,
    baseline: torch.Tensor,
    tolerance: float,
    what: str = "",
    by_row: bool = False,
) -> None:
    """At most `tolerance` times the largest error of the baseline, plus one rounding of the output.

    The baseline is the same formula in plain PyTorch with FP32 accumulation, rounded to the output's dtype. With
    `by_row` each row is held to its own baseline, so that a row of huge values excuses no other. The baseline's error
    counts as one FP32 rounding of the largest value at least, since few elements may be right by luck. Where the
    baseline is not finite: 4 units in the last place. NaN and infinities stand exactly where they stand in FP64,
    overflow of the dtype included.
    """
    result = result.detach().cpu()
    assert result.shape == truth.shape, f"{what}: shape {tuple(result.shape)}, not {tuple(truth.shape)}"
    if not result.is_floating_point():
        assert torch.equal(result, truth.to(result.dtype)), f"{what}: integers differ"
        return
    if result.numel() == 0:
        return
    limits = torch.finfo(result.dtype)
    truth, got = truth.double(), result.double()
    expected, base = truth.to(result.dtype).double(), baseline.to(result.dtype).double()
    assert torch.equal(got.isnan(), expected.isnan()), f"{what}: NaN at other places than in FP64"
    infinite = expected.isinf()
    assert torch.equal(got.isinf(), infinite), f"{what}: infinities at other places than in FP64"
    assert torch.equal(got[infinite], expected[infinite]), f"{what}: an infinity has the wrong sign"
    finite, size = expected.isfinite(), truth.abs()
    if result.dtype == torch.float64:  # no baseline is better: allow the rounding of sums
        bound = 64 * limits.eps * torch.where(finite, size, 0).amax(-1, keepdim=True).expand_as(size)
    else:
        base_error = torch.where(finite & base.isfinite(), (base - truth).abs(), 0)
        luck = torch.finfo(torch.float32).eps * torch.where(finite, size, 0)
        error = torch.maximum(base_error, luck)
        allowed = tolerance * (error.amax(-1, keepdim=True) if by_row else error.max())
        bound = torch.where(base.isfinite(), allowed, 4 * limits.eps * size) + limits.eps * size
    bound = bound + limits.tiny * limits.eps  # one denormal
    excess = torch.where(finite, (got - truth).abs() - bound, -1)
    if bool((excess > 0).any()):
        worst = int(excess.argmax())
        place = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), excess.shape))
        raise AssertionError(
            f"{what}: at {place} got {got[place].item():.9g}, FP64 says {truth[place].item():.9g}, allowed error "
            f"{bound[place].item():.3g}; {int((excess > 0).sum())} of {excess.numel()} elements are outside"
        )


# Why a batch of rows may have other bits than the rows one by one: by operator, or by implementation.
_REDUCTION = "PyTorch's reductions on a GPU share a row among fewer threads, in another order, when there are more rows"
_LIBRARY = "the matrix library picks another kernel, with another order of sums, for another number of rows"
_PARTS = "the number of parts that a sequence is cut into depends on the number of sequences"
_PROGRAMS = "a small batch has its keys split over more programs, so its sums have other parts"
NOT_BATCH_INVARIANT = {
    "linear": _LIBRARY,
    "rms_norm_linear": _LIBRARY,
    "rms_norm_swiglu": _LIBRARY,
    "linear_add_": _LIBRARY,
    "linear_add_scale_": _LIBRARY,
    "scaled_linear": _LIBRARY,
    "scaled_swiglu": _LIBRARY,
    "prompt_attention": "a token sees those before it: a batch of fewer has other products",
    "decode_attention.cuda.cuda": _PARTS,
    "qk_norm_rope_attention_.cuda.cuda": _PARTS,
    "rms_norm.ref.cuda": _REDUCTION,
    "rms_norm_backward.ref.cuda": _REDUCTION,
    "fused_add_rms_norm.ref.cuda": _REDUCTION,
    "fused_add_rms_norm_.ref.cuda": _REDUCTION,
    "layer_norm.ref.cuda": _REDUCTION,
    "layer_norm_backward.ref.cuda": _REDUCTION,
    "fused_add_layer_norm.ref.cuda": _REDUCTION,
    "qk_norm_rope_cache_.ref.cuda": _REDUCTION,
    "qk_norm_rope_attention_.ref.cuda": _REDUCTION,
    "decode_attention.triton.cuda": _PROGRAMS,
    "qk_norm_rope_attention_.triton.cuda": _PROGRAMS,
}


def why_not_batch_invariant(target: Target) -> str:
    """Empty where the same row must give the same bits at any batch size."""
    return NOT_BATCH_INVARIANT.get(target.op.name, "") or NOT_BATCH_INVARIANT.get(str(target), "")


# Layouts -------------------------------------------------------------------------------------------------------------

SENTINEL = 77


def _spread(value: torch.Tensor, shape: Sequence[int], select: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    fill = float("nan") if value.is_floating_point() else (True if value.dtype == torch.bool else SENTINEL)
    view = select(torch.full(tuple(shape), fill, dtype=value.dtype, device=value.device))
    assert view.shape == value.shape
    view.copy_(value)
    return view


def row_slice(value: torch.Tensor) -> torch.Tensor:
    """[..., 1 : 1 + n] of a wider buffer: rows with a stride that is not their width."""
    width = value.shape[-1]
    return _spread(value, (*value.shape[:-1], width + 3), lambda buffer: buffer[..., 1 : 1 + width])


def odd_offset(value: torch.Tensor) -> torch.Tensor:
    """buf[1 : 1 + n]: contiguous, one element past any alignment."""
    count = value.numel()
    return _spread(value, (count + 2,), lambda buffer: buffer[1 : 1 + count].view(value.shape))


def every_other(value: torch.Tensor) -> torch.Tensor:
    return _spread(value, (*value.shape[:-1], 2 * value.shape[-1]), lambda buffer: buffer[..., ::2])


def transposed(value: torch.Tensor) -> torch.Tensor:
    """Column-major in the last two dimensions."""
    if value.dim() < 2:
        return every_other(value)
    return _spread(value.mT, value.mT.shape, lambda buffer: buffer).mT


def swapped_heads(value: torch.Tensor) -> torch.Tensor:
    """The first two dimensions exchanged in memory, as after transpose(0, 1)."""
    if value.dim() < 3:
        return row_slice(value)
    return _spread(value.transpose(0, 1), value.transpose(0, 1).shape, lambda buffer: buffer).transpose(0, 1)


LAYOUTS = {f.__name__: f for f in (row_slice, odd_offset, every_other, transposed, swapped_heads)}


def is_clear_refusal(message: str, name: str) -> bool:
    """Whether a message names the argument it is about, says what it must be and what it was."""
    return message.startswith(f"{name} must ") and ", was " in message


def ulps_apart(a: torch.Tensor, b: torch.Tensor) -> int:
    """The largest distance of two tensors of one dtype in units in the last place, counted over the number line."""

    def steps(tensor: torch.Tensor) -> torch.Tensor:
        bits = tensor.detach().cpu().contiguous().view({2: torch.int16, 4: torch.int32}[tensor.element_size()]).long()
        lowest = -(1 << (8 * tensor.element_size() - 1))
        return torch.where(bits >= 0, bits, lowest - bits)

    assert a.dtype == b.dtype
    assert a.isfinite().all()
    assert b.isfinite().all()
    return int((steps(a) - steps(b)).abs().max())
