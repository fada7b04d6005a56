"""Which operator of a step a kernel belongs to: the kernels in their order against the calls in theirs.

A name alone does not tell: one kernel serves several products, and one product may be a norm, a kernel of the matrix
library and a sum. But both lists have the same order. So each kernel is given to a call, never one before that of the
kernel in front of it, such that most kernels are of a kind that their operator may launch, and fewest calls go without.
A kernel of no known kind stays with the one in front of it, unless the next call would go without.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

RUNNER = "runner"  # what the engine's runner does around a step, which is no operator of the model
ADVANCE = "advance_decode_"

# The first that fits. Names are those of C++ templates with their arguments, and of Triton's functions.
_KINDS = (
    ("", r"^Memset"),  # libraries clear their workspaces anywhere
    ("norm product", r"few_rows_linear<.*Prologue\)1.*Epilogue\)0"),
    ("norm gate product", r"few_rows_linear<.*Prologue\)1.*Epilogue\)2"),
    ("product sum", r"few_rows_linear<.*Prologue\)0.*Epilogue\)1|skinny_linear<.*Epilogue\)[13]"),
    ("gate product", r"skinny_linear<.*Epilogue\)2"),
    ("advance", r"advance_decode"),
    ("rope", r"rope_cache|_rope|^rope"),
    ("attention", r"decode_attention|prefill_attention|attention|attn|fmha|^_(?:prefill|decode|merge)(?:_|$)"),
    ("sample", r"^_(?:best_of_chunks|weigh_chunks|gather|draw)|sample"),
    ("gate", r"silu|swiglu"),
    ("norm", r"rms_norm|_norm"),
    ("sum of parts", r"split_?[kK]"),
    ("product", r"few_rows_linear|skinny_linear|nvjet|gemm|gemv|cutlass|cublas"),
    ("upload", r"^Memcpy HtoD"),
    ("download", r"^Memcpy DtoH"),
    ("gather", r"index|gather|scatter|embedding"),
    ("copy", r"copy|^Memcpy|[Ff]ill"),
    ("other", r"elementwise|reduce|sort|softmax|scan|topk|where|clamp"),
)
_RULES = tuple((kind, re.compile(pattern)) for kind, pattern in _KINDS)
_TORCH = ("gather", "copy", "other")  # what compositions of PyTorch operators launch
# By operator: kinds of its first kernel, and of those behind it.
_LAUNCHES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "rms_norm_linear": (("norm product", "norm"), ("product", "sum of parts")),
    "rms_norm_swiglu": (("norm gate product", "norm"), ("gate product", "product", "sum of parts", "gate")),
    "linear_add_": (("product sum", "product"), ("sum of parts", "copy", "other")),
    "linear_add_scale_": (("product sum", "product"), ("sum of parts", *_TORCH)),
    "scaled_linear": (("product",), ("sum of parts", *_TORCH)),
    "scaled_swiglu": (("gate product", "product"), ("sum of parts", "gate", *_TORCH)),
    "linear": (("product",), ("sum of parts",)),
    "rms_norm": (("norm",), ()),
    "fused_add_rms_norm_": (("norm",), ()),
    "silu_and_mul": (("gate",), ()),
    "qk_norm_rope_cache_": (("rope",), ()),
    "decode_attention": (("attention",), ()),
    "qk_norm_rope_attention_": (("attention", "rope", "copy"), ("rope", "attention")),  # one kernel, or a copy and two
    "prefill_attention": (("attention",), ()),
    "embedding": (("gather",), ()),
    "index": (("gather",), ()),
    "sample": (("sample", *_TORCH), ()),
    "_to_copy": (("copy",), ()),
    ADVANCE: (("advance", *_TORCH), ()),
    RUNNER: (("upload", "download", *_TORCH), ()),
}
_SILENT = ("all_reduce", "all_gather")  # one rank launches nothing for them
_FITS, _WRONG, _WITHOUT = 2.0, -2.0, 1.0  # points for a kernel of its call, of another's; against a call without one
_LATER = 1.5  # points against a call that begins with a kernel that others of its own come before
_UNKNOWN = 0.5  # points against a call that begins with a kernel of no known kind; less than if it went without


def kind_of(kernel: str) -> str:
    """One of the kinds above, or "" for a kernel that nobody knows."""
    return next((kind for kind, rule in _RULES if rule.search(kernel)), "")


def owners(kernels: Sequence[str], operators: Sequence[str]) -> list[int]:
    """For each kernel the place of its operator in `operators`, ascending; operators: names of calls in order."""
    if not operators:
        raise ValueError("operators must name at least one call, were none")
    kinds = [kind_of(kernel) for kernel in kernels]
    points = {kind: _points(kind, operators) for kind in set(kinds)}
    begins = {kind: _against_beginning(kind, operators) for kind in set(kinds)}
    lacks = np.array([0.0 if name in _SILENT else _WITHOUT for name in operators])
    before = np.concatenate(([0.0], np.cumsum(lacks)))  # lost where all calls in front of one go without
    places = np.arange(len(operators))
    came = np.zeros((len(kinds), len(operators)), np.int32)
    score = np.zeros(0)
    for row, kind in enumerate(kinds):
        if row == 0:
            score = points[kind] - before[:-1] - begins[kind]
            continue
        # The best call of the kernel in front among all before this one, what lies between them going without.
        ahead = score + before[1:]
        best = np.maximum.accumulate(ahead)
        where = np.maximum.accumulate(np.where(ahead >= best, places, 0))
        moved = np.concatenate(([-np.inf], best[:-1])) - before[:-1] - begins[kind]
        stays = score >= moved
        came[row] = np.where(stays, places, np.concatenate(([0], where[:-1])))
        score = np.where(stays, score, moved) + points[kind]
    return _walked_back(came, score - (before[-1] - before[1:])) if kinds else []


def _points(kind: str, operators: Sequence[str]) -> np.ndarray:
    if not kind:
        return np.zeros(len(operators))
    may = {name: sum(_LAUNCHES.get(name, ((), ())), ()) for name in set(operators)}
    return np.array([_FITS if kind in may[name] else _WRONG for name in operators])


def _against_beginning(kind: str, operators: Sequence[str]) -> np.ndarray:
    if not kind:
        return np.full(len(operators), _UNKNOWN)
    return np.array([_LATER if kind in _LAUNCHES.get(name, ((), ()))[1] else 0.0 for name in operators])


def _walked_back(came: np.ndarray, score: np.ndarray) -> list[int]:
    place = int(score.argmax())
    found = [place]
    for row in range(len(came) - 1, 0, -1):
        place = int(came[row, place])
        found.append(place)
    return found[::-1]
