"""Names of kernels and operators as profilers write them."""

from __future__ import annotations

import pytest

from rooflight.limits.profile import families
from rooflight.limits.profile.families import FAMILIES, kernel_family, operator_family, short_name

ATEN = "void at::native::"
LAMBDA = "(at::TensorIteratorBase&)::{lambda()#3}::operator()() const::{lambda(c10::BFloat16)#1}"
KERNELS = {
    families.MATMUL: [
        "nvjet_tst_128x8_64x12_4x1_v_bz_TNT",
        "nvjet_hsh_64x8_64x16_4x1_v_bz_splitK_TNT",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true>(int)",
        "void gemv2T_kernel_val<int, int, __nv_bfloat16, __nv_bfloat16, __nv_bfloat16, float, 128, 16, 4, 4>(int)",
        "std::enable_if<!(false), void>::type internal::gemvx::kernel<int, int, __nv_bfloat16, float, false, 7>(int)",
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize64x64x64_warpgroupsize1x1x1_execute_segment_k_off_kernel",
        "ampere_bf16_s16816gemm_bf16_64x64_sliced1x2_ldg8_f2f_stages_64x6_tn",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(Params)",
        "void cutlass::device_kernel<cutlass::gemm::kernel::GemmUniversal<Epilogue<LinearCombinationSilu>>>(Params)",
        "void marlin::Marlin<__nv_bfloat16, 1125899906909960l, 256, 1, 8, 8, true, 4>(int4 const*)",
        "deep_gemm::sm90_fp8_gemm_1d2d_impl",
        "fused_moe_kernel",
        "triton_tem_fused_mm_3",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HA_S_SAV_UserArgs_MT64x16x64",
    ],
    families.ATTENTION: [
        "void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<128, 64>>(params)",
        "void flash_fwd_splitkv_combine_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4, cutlass::bfloat16_t>>(params)",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<Mainloop>>>(Params)",
        "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
        "void vllm::paged_attention_v1_kernel<unsigned short, unsigned short, 128, 16, 128, false>(unsigned short*)",
        "void flashinfer::BatchDecodeWithPagedKVCacheKernel<(flashinfer::PosEncodingMode)0, 2u>(Params)",
        "kernel_unified_attention_2d",
        "triton_tem_fused_flex_attention_0",
    ],
    families.NORM: [
        f"{ATEN}(anonymous namespace)::vectorized_layer_norm_kernel<float, float, false>(int, float, float const*)",
        "std::enable_if<T2, void>::type vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, int)",
        "void rooflight::(anonymous namespace)::rms_norm_in_registers<Pack, 4>(RmsNorm)",
        "_layer_norm_rows",
        "_norm_pieces",
    ],
    families.ROPE: ["void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*)", "_apply_rope_kernel"],
    families.ACTIVATION: [
        "void vllm::act_and_mul_kernel<c10::BFloat16, &(vllm::silu_kernel<c10::BFloat16>), true>(c10::BFloat16*)",
        f"{ATEN}vectorized_elementwise_kernel<4, at::native::(anonymous namespace)::silu_kernel{LAMBDA}>(int)",
        f"{ATEN}vectorized_elementwise_kernel<4, at::native::GeluCUDAKernelImpl{LAMBDA}>(int)",
    ],
    families.SAMPLING: [
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>(float*)",
        f"{ATEN}(anonymous namespace)::cunn_SoftMaxForward<4, float, float, float, SoftMaxForwardEpilogue>(float*)",
        f"{ATEN}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>, unsigned, long>>(int)",
        f"{ATEN}sbtopk::gatherTopK<float, unsigned int, 2, false>(float*)",
        "void at_cuda_detail::cub::DeviceRadixSortOnesweepKernel<Policy, false, float, long>(int*)",
        f"{ATEN}(anonymous namespace)::distribution_elementwise_grid_stride_kernel<float, 4>(long)",
    ],
    families.COPY: [
        f"{ATEN}elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<direct_copy_kernel_cuda{LAMBDA}>>(int)",
        f"{ATEN}(anonymous namespace)::CatArrayBatchedCopy_contig<OpaqueType<2u>, unsigned int, 3, 64, 64>(int)",
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, 0>(__nv_bfloat16 const*)",
        "void vllm::dynamic_per_token_scaled_fp8_quant_kernel<c10::BFloat16>(float*)",
    ],
    families.GATHER: [
        f"{ATEN}index_elementwise_kernel<128, 4, at::native::gpu_index_kernel<at::native::index_copy>>(int)",
        f"{ATEN}vectorized_gather_kernel<16, long>(char*, char*, long*, int)",
        f"{ATEN}(anonymous namespace)::indexSelectSmallIndex<c10::BFloat16, long, unsigned int, 2, 2, -2>(int)",
    ],
    families.REDUCTION: [
        f"{ATEN}reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float>, unsigned>>(int)",
        "void at_cuda_detail::cub::DeviceScanKernel<Policy, int const*, int*>(int const*)",
    ],
    families.COLLECTIVE: [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 2>(RankData*)",
    ],
    families.MEMCPY: ["Memcpy HtoD (Pageable -> Device)", "Memset (Device)"],
    families.FUSED: [
        "triton_poi_fused_add_mul_silu_0",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_2",
        "triton_per_fused__scaled_dot_product_flash_attention_1",
    ],
    families.ELEMENTWISE: [
        f"{ATEN}vectorized_elementwise_kernel<4, at::native::FillFunctor<int>, std::array<char*, 1ul>>(int)",
        f"{ATEN}unrolled_elementwise_kernel<at::native::CUDAFunctor_add<float>, LoadWithCast<2>, StoreWithCast>(int)",
        f"{ATEN}(anonymous namespace)::elementwise_kernel_with_index<int, at::native::arange_cuda_out>(int)",
        f"{ATEN}(anonymous namespace)::multi_tensor_apply_kernel<Metadata, AdamFunctor>(int)",
    ],
    families.OTHER: ["my_kernel", "cudaDevicePropertyKernel", "upsample_nearest2d_out_frame"],
}
OPERATORS = {
    families.MATMUL: "mm addmm bmm baddbmm linear matmul _scaled_mm convolution _int_mm mv",
    families.ATTENTION: "scaled_dot_product_attention _flash_attention_forward _efficient_attention_forward",
    families.NORM: "layer_norm native_layer_norm rms_norm group_norm",
    families.ACTIVATION: "silu silu_ gelu relu_",
    families.SAMPLING: "softmax _softmax argmax topk multinomial sort exponential_",
    families.COPY: "copy_ clone cat to _to_copy contiguous",
    families.GATHER: "embedding index_select index gather scatter_ nonzero",
    families.REDUCTION: "sum mean cumsum amax",
    families.VIEW: "view t transpose as_strided slice select empty empty_like reshape _unsafe_view",
    families.ELEMENTWISE: "add add_ mul pow rsqrt neg cos fill_ where arange div_ zeros_like",
    families.OTHER: "item upsample_nearest2d",
}


@pytest.mark.parametrize(("family", "name"), [(family, name) for family, names in KERNELS.items() for name in names])
def test_kernels(family: str, name: str) -> None:
    assert kernel_family(name) == family


@pytest.mark.parametrize(("family", "names"), OPERATORS.items())
def test_operators(family: str, names: str) -> None:
    assert {name: operator_family(f"aten::{name}") for name in names.split()} == dict.fromkeys(names.split(), family)


@pytest.mark.parametrize(
    ("name", "family"),
    [
        ("rooflight::linear", families.MATMUL),
        ("rooflight::rms_norm", families.NORM),
        ("rooflight::qk_norm_rope_cache_", families.ROPE),
        ("rooflight::decode_attention", families.ATTENTION),
        ("rooflight::qk_norm_rope_attention_", families.ATTENTION),
        ("rooflight::sample", families.SAMPLING),
        ("vllm::unified_attention_with_output", families.ATTENTION),
        ("_C::silu_and_mul", families.ACTIVATION),
        ("_C_cache_ops::reshape_and_cache_flash", families.COPY),
        ("c10d::allreduce_", families.COLLECTIVE),
        ("fbgemm::permute_2D_sparse_data", families.OTHER),  # no matrix product, whatever its library is called
    ],
)
def test_operators_of_others(name: str, family: str) -> None:
    assert operator_family(name) == family


def test_every_family_is_listed_once() -> None:
    assert len(set(FAMILIES)) == len(FAMILIES)
    assert set(KERNELS) | set(OPERATORS) == set(FAMILIES)


def test_an_unknown_kernel_is_what_its_operator_is() -> None:
    assert kernel_family("_backward_rows", "rooflight::rms_norm_backward") == families.NORM
    assert kernel_family("nvjet_tst_8x8", "aten::add") == families.MATMUL  # but its own name comes first
    assert kernel_family("my_kernel", "mine::op") == families.OTHER


@pytest.mark.parametrize(
    ("name", "short"),
    [
        (KERNELS[families.COPY][0], "elementwise_kernel<direct_copy_kernel_cuda>"),
        (KERNELS[families.ELEMENTWISE][0], "vectorized_elementwise_kernel<FillFunctor>"),
        (KERNELS[families.REDUCTION][0], "reduce_kernel<MeanOps>"),
        (KERNELS[families.NORM][1], "fused_add_rms_norm_kernel"),
        ("std::enable_if<!(false), void>::type internal::gemvx::kernel<int>(int)", "gemvx::kernel"),
        ("Memcpy HtoD (Pageable -> Device)", "Memcpy HtoD (Pageable -> Device)"),
        ("aten::mm", "aten::mm"),
        ("evil\x1b[31m\nname", "evil?[31m?name"),
        ("", ""),
    ],
)
def test_short_names(name: str, short: str) -> None:
    assert short_name(name) == short


def test_long_names_are_cut_in_the_middle() -> None:
    assert short_name("a" * 50 + "b" * 50, 11) == "aaaaa…bbbbb"
    assert len(short_name("x" * 1000, 64)) == 64
