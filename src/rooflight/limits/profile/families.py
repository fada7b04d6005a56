"""Which family of operations a kernel or an operator belongs to, told from its name. The first rule that fits wins.

The order matters more than the patterns: a fused attention kernel is built with CUTLASS and named after it, a matrix
product with a SiLU at its end is a matrix product, and an element-wise kernel carries its function in its template
arguments.
"""

from __future__ import annotations

import re

MATMUL, ATTENTION, NORM, ROPE, ACTIVATION = "matmul", "attention", "norm", "rope", "activation"
SAMPLING, COPY, GATHER, REDUCTION = "softmax/sampling", "copy/cast", "embedding/gather", "reduction"
COLLECTIVE, MEMCPY, FUSED = "collective", "memcpy/memset", "fused by the compiler"
VIEW, ELEMENTWISE, OTHER = "view/allocation", "element-wise", "other"
FAMILIES = (
    *(MATMUL, ATTENTION, NORM, ROPE, ACTIVATION, SAMPLING, COPY, GATHER, REDUCTION),
    *(COLLECTIVE, MEMCPY, FUSED, VIEW, ELEMENTWISE, OTHER),
)

_COLLECTIVE = r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|cross_device_reduce|multimem|nvshmem"
_CACHE = r"reshape_and_cache|concat_and_cache|kv_?cache_(?:write|copy|store)|(?:store|set|append)_?(?:paged_?)?kv"
_ROPE = r"rotary|(?-i:(?<![a-zA-Z])rope|R[Oo]P[Ee]|Rope)"  # not the end of "property"
_NORM = r"(?:rms|layer|group|batch|instance|l2|cosine)_?norm"
_ACTIVATION = r"silu|gelu|swiglu|geglu|relu|act_and_mul|activation|hardswish|mish_|\bglu"
_SAMPLING = (
    r"soft_?max|arg_?max|arg_?min|top_?k|top_?p|(?<!up)sampl|multinomial|penalt|penaliz|logprob|exponential_|bernoulli"
)

_KERNELS = (
    (FUSED, r"^triton_(?:poi|red|per|for|unk|mix|split_scan)_"),
    (COLLECTIVE, _COLLECTIVE),
    (MEMCPY, r"^mem(?:cpy|set)\b"),
    (COPY, _CACHE),
    (ATTENTION, r"flash_(?:fwd|bwd)|flash_?attn|flash::|fmha|attention|attn|sdpa|flex_att|pagedkv|pagedparams"),
    (ATTENTION, r"flash_?mla|batch(?:decode|prefill)with|single(?:decode|prefill)with|_fwd_(?:grouped_)?kernel_stage"),
    (
        MATMUL,
        r"(?<!fb)gemm|gemv|cutlass|cublas|nvjet|xmma|split_?k|mat_?mul|scaled_mm|marlin|machete|fused_moe|gptq|awq",
    ),
    (MATMUL, r"^cijk_|\bdot_kernel|(?:^|_)b?mm(?:_|$)|triton_tem_|implicit_convolve|wgrad|dgrad|convolution"),
    (ROPE, _ROPE),
    (NORM, rf"{_NORM}|rowwisemoments|gammabeta|computegradinput|norm_(?:rows|pieces|kernel|fwd|bwd)"),
    (NORM, r"^(?:void )?(?:cudnn::)?bn_(?:fw|bw)"),
    (ACTIVATION, _ACTIVATION),
    (SAMPLING, rf"{_SAMPLING}|radix_?sort|bitonicsort|devicesort|segmented_?sort|distribution_"),
    (GATHER, r"embedding|gather|scatter|index_?(?:select|elementwise|kernel|put|copy|add|fill|func)|indexing|^_index"),
    (COPY, r"catarray|copy|_cast|cast_?kernel|transpose|permute|contiguous|quant|convert_|nchw|nhwc"),
    (REDUCTION, r"reduce|(?:^|_)(?:sum|mean|scan)_|devicescan|cumsum|scan_(?:outer|inner)|add_(?:partials|shares)"),
    (ELEMENTWISE, r"element_?wise|unrolled|pointwise|multi_tensor_apply|fill|arange|triu|tril"),
)
_ARITHMETIC = (
    r"add|sub|rsub|mul|div|pow|sqrt|rsqrt|reciprocal|neg|abs|sign|cos|sin|exp|exp2|log|sigmoid|tanh|erf|where|eq|ne|lt|"
    r"le|gt|ge|clamp\w*|fill|zero|zeros\w*|ones\w*|full\w*|arange|triu|tril|masked_fill|floor\w*|ceil|round|remainder|minimum|"
    r"maximum|isnan|isinf|lerp|addcmul|addcdiv|bitwise_\w+|logical_\w+|_foreach_\w+|__\w+__"
)
_OPERATORS = (
    (FUSED, r"^triton_(?:poi|red|per|for|unk|mix|split_scan)_"),
    (COLLECTIVE, rf"^c10d|gloo|{_COLLECTIVE}"),
    (COPY, rf"{_CACHE}|^aten::(?:copy_|clone|cat|stack|contiguous|to|_to_copy|repeat|_copy_from|_pin_memory)$"),
    (ATTENTION, r"attention|attn|fmha"),
    (
        MATMUL,
        r"^aten::_?(?:mm|addmm\w*|bmm|baddbmm|mv|addmv|dot|vdot|einsum|outer|ger)$|linear|matmul|(?<!fb)gemm|scaled_mm",
    ),
    (MATMUL, r"int_mm|grouped_mm|convolution|conv\dd|fused_moe|fused_experts|marlin|int[48]pack"),
    (ROPE, _ROPE),
    (NORM, _NORM),
    (ACTIVATION, _ACTIVATION),
    (SAMPLING, rf"{_SAMPLING}|^aten::(?:_?log_?softmax|sort|uniform_?|normal_?|rand\w*)$"),
    (GATHER, r"embedding|gather|scatter|index|^aten::(?:take\w*|masked_select|nonzero)$"),
    (REDUCTION, r"^aten::(?:sum|mean|amax|amin|max|min|cumsum|var\w*|std|\w*norm|any|all|prod|logsumexp)$"),
    (
        VIEW,
        r"^aten::(?:empty\w*|new_\w+|_?reshape\w*|_?unsafe_view|t|view\w*|transpose_?|t_|numpy_T|as_strided_?|expand\w*)$",
    ),
    (
        VIEW,
        r"^aten::(?:permute|slice|select|narrow|(?:un)?squeeze_?|split\w*|chunk|alias|detach_?|resize_?|(?:un)?flatten)$",
    ),
    (
        VIEW,
        r"^aten::(?:lift_fresh|result_type|resolve_\w+|set_|unbind|unfold|movedim|broadcast_to|diagonal|real|view_as\w*)$",
    ),
    (ELEMENTWISE, rf"^aten::(?:{_ARITHMETIC})_?$"),
)

# Of a C++ signature: the type of the result; the names in template arguments that say what a kernel computes; those
# among them that only wrap another.
_RESULT = re.compile(r"^(?:void |std::enable_if<.*?>::type )")
_FUNCTION = re.compile(r"\w*(?:_kernel|Functor|[a-z]Ops|FwdSm\d|BwdSm\d|cutlass_\d)\w*")
_WRAPPER = re.compile(r"gpu_kernel_impl|gpu_index_kernel|^(?:A?B?Unary|Binary)Functor|traits$")


def _compiled(rules: tuple[tuple[str, str], ...]) -> tuple[tuple[str, re.Pattern[str]], ...]:
    return tuple((family, re.compile(pattern, re.IGNORECASE)) for family, pattern in rules)


_KERNEL_RULES, _OPERATOR_RULES = _compiled(_KERNELS), _compiled(_OPERATORS)


def kernel_family(name: str, operator: str | None = None) -> str:
    """The family of a GPU kernel, copy or fill by its name, or else by the operator that launched it."""
    family = _first(_KERNEL_RULES, name)
    return operator_family(operator) if family == OTHER and operator is not None else family


def operator_family(name: str) -> str:
    """The family of a host operator such as aten::mm."""
    return _first(_OPERATOR_RULES, name)


def short_name(name: str, longest: int = 64) -> str:
    """A kernel's name without types and parameters; what makes an element-wise kernel or a reduction its own is kept.

    "void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, …>(int, …)" becomes
    "vectorized_elementwise_kernel<FillFunctor>". Control characters become "?".
    """
    name = "".join(character if character.isprintable() else "?" for character in name)
    if "(" in name or "<" in name:
        name = _undecorated(name)
    return name if len(name) <= longest else f"{name[: longest // 2]}…{name[-((longest - 1) // 2) :]}"


def _undecorated(name: str) -> str:
    if name.startswith(("Memcpy", "Memset")):
        return name
    name = _RESULT.sub("", name.replace("(anonymous namespace)::", ""))
    head, _, arguments = name.partition("<")
    parts = head.partition("(")[0].strip().split("::")
    base = "::".join(parts[-2:]) if parts[-1] == "kernel" else parts[-1]
    inner = [found for found in _FUNCTION.findall(arguments.partition("(")[0]) if not _WRAPPER.search(found)]
    return f"{base}<{inner[0]}>" if inner else base


def _first(rules: tuple[tuple[str, re.Pattern[str]], ...], name: str) -> str:
    return next((family for family, rule in rules if rule.search(name)), OTHER)
