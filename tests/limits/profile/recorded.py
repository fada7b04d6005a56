"""Recordings of steps that never ran: kernels as our engine launches them, with times that are known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rooflight.limits.explanation import name_of, placed_calls
from rooflight.limits.profile.step import Recorded
from rooflight.limits.profile.timeline import Launch, Span
from rooflight.limits.scenario import Scenario
from rooflight.models.config import ModelConfig
from rooflight.models.recipe import Recipe

FEW = (
    "void rooflight::(anonymous namespace)::few_rows_linear<__nv_bfloat16, 8, 2, (rooflight::Prologue){}, "
    "(rooflight::Epilogue){}>(rooflight::FusedLinear)"
)
SKINNY = (
    "void rooflight::(anonymous namespace)::skinny_linear<__nv_bfloat16, (rooflight::Prologue){}, "
    "(rooflight::Epilogue){}, rooflight::(anonymous namespace)::Block<64, 1>, 8>"
    "(rooflight::FusedLinear, rooflight::(anonymous namespace)::Operands)"
)
SAMPLER = ("_best_of_chunks", "_weigh_chunks", "_gather", "_draw")
NORM = "void rooflight::(anonymous namespace)::rms_norm_in_registers<__nv_bfloat16, __nv_bfloat16>(rooflight::RmsNorm)"
GATE = "void rooflight::(anonymous namespace)::silu_and_mul<__nv_bfloat16, 8>(rooflight::SiluAndMul)"
NVJET, SPLIT = "nvjet_sm90_tst_64x8_64x16_4x1_v_bz_TNT", "void cublasLt::splitKreduce_kernel<32, 16, int, float>(int)"
ROPE = "void rooflight::(anonymous namespace)::qk_norm_rope_cache_halves<__nv_bfloat16, 2>(rooflight::QkNormRopeCache)"
RING = "void rooflight::(anonymous namespace)::decode_attention_ring<__nv_bfloat16, 128, 2, 4>(DecodeAttention)"
STEP = (
    "void rooflight::decode_attention_chunks<__nv_bfloat16, 128, 4, true, rooflight::QkNormRopeCache>"
    "(rooflight::DecodeAttention, rooflight::QkNormRopeCache)"
)
ADVANCE = "rooflight::(anonymous namespace)::advance_decode(rooflight::AdvanceDecode)"
TAKE = "void at::native::vectorized_gather_kernel<16, long>(char*, char*, long*)"
FLOAT = (
    "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>(int)"
)
INDEX = "void at::native::index_elementwise_kernel<128, 4>(long)"
UPLOAD, DOWNLOAD = "Memcpy HtoD (Pinned -> Device)", "Memcpy DtoH (Device -> Pinned)"
BEFORE = (INDEX, "void at::native::elementwise_kernel<clamp>(int)", "void at::native::elementwise_kernel<where>(int)")

FEW_ROWS: Mapping[str, tuple[str, ...]] = {
    "rms_norm_linear": (FEW.format(1, 0),),
    "rms_norm_swiglu": (FEW.format(1, 2),),
    "linear_add_": (FEW.format(0, 1),),
    "linear_add_scale_": (SKINNY.format(0, 3),),
    "scaled_linear": (SKINNY.format(2, 0),),
    "scaled_swiglu": (SKINNY.format(2, 2),),
    "qk_norm_rope_cache_": (ROPE,),
    "decode_attention": (RING,),
    "qk_norm_rope_attention_": (STEP,),
    "prefill_attention": ("_prefill",),
    "embedding": (TAKE,),
    "index": (INDEX,),
    "_to_copy": (FLOAT,),
    "sample": SAMPLER,
    "all_reduce": (),
    "all_gather": (),
}
MANY_ROWS = {
    **FEW_ROWS,
    "rms_norm_linear": (NORM, NVJET),
    "rms_norm_swiglu": (NORM, NVJET, GATE),
    "linear_add_": (NVJET, SPLIT),
}
SOME_ROWS = {
    **FEW_ROWS,
    "rms_norm_linear": (NORM, SKINNY.format(0, 0)),
    "rms_norm_swiglu": (NORM, SKINNY.format(0, 2)),
    "linear_add_": (SKINNY.format(0, 1),),
}
TWO_KERNELS = {**FEW_ROWS, "qk_norm_rope_attention_": (FLOAT, ROPE, RING)}  # where one does not take the layout


def steps_of(
    config: ModelConfig,
    scenario: Scenario,
    kernels: Mapping[str, tuple[str, ...]],
    steps: int,
    recipe: Recipe | None = None,
) -> list[tuple[str, str]]:
    """(kernel, operator as tables name it) of a launch, in order."""
    found = [(name, "runner") for name in (UPLOAD, *BEFORE)]
    for _ in range(steps):
        for item in placed_calls(config, scenario, recipe):
            found += [(name, name_of(item.call)) for name in kernels[item.call.operator]]
        if scenario.step.phase == "decode":
            found.append((ADVANCE, "advance_decode_"))
    return [*found, (DOWNLOAD, "runner")]


def launch_of(names: Iterable[str], begin: float = 0.0, us: float = 2.0, overlap: float = 0.5) -> Launch:
    """Each ends `us` after the one before; kernels start `overlap` before that, copies for the host do not."""
    spans, now = [], begin
    for name in names:
        early = 0.0 if name in (UPLOAD, DOWNLOAD) or spans[-1].name == UPLOAD else overlap
        spans.append(Span(name, now - early, now + us))
        now += us
    return Launch(tuple(spans))


def recording(
    config: ModelConfig,
    scenario: Scenario,
    kernels: Mapping[str, tuple[str, ...]] = FEW_ROWS,
    steps: int = 8,
    launches: int = 2,
    us: float = 2.0,
    recipe: Recipe | None = None,
) -> Recorded:
    names = [name for name, _ in steps_of(config, scenario, kernels, steps, recipe)]
    found = [launch_of(names, begin=1e6 * index, us=us) for index in range(launches)]
    return Recorded(tuple(found), steps, wall_us=found[0].span_us / steps * 1.25, host_calls=3.0)
