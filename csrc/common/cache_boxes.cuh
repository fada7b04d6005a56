// How the copy engine finds chunks of tokens in a paged cache, and what asks it for one. Hopper and later.
//
// One lane asks for a chunk, and the engine puts it into shared memory such that neither a load of several tokens' same
// piece nor one of two tokens' four meets in one bank: copies by lanes take the same bytes' way, but 6 to 10 % more
// time (docs/lab).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <algorithm>
#include <stdexcept>
#include <string>

#include "common/bulk.cuh"
#include "common/launch.cuh"
#include "decode_attention.h"

namespace rooflight {

constexpr int kBoxWidth = 64;  // elements of 2 bytes: a row of 128 bytes

struct CacheBoxes {
  CUtensorMap k, v;
};

// What there is of strides, as the copy engine can count them.
inline bool boxes_take(const CacheStrides& strides) {
  constexpr int64_t kMost = int64_t{1} << 38;
  const auto fits = [](int64_t stride) { return stride > 0 && stride < kMost && stride % 8 == 0; };
  return fits(strides.page) && fits(strides.head) && fits(strides.token);
}

// Boxes of `tokens` tokens and kBoxWidth elements of a head in a page. Beyond head_dim there are zeros.
template <typename Attention>
CUtensorMap cache_boxes(const Attention& a, const void* cache, const CacheStrides& strides, int tokens) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status),
          "cudaGetDriverEntryPointByVersion");
    if (status != cudaDriverEntryPointSuccess) throw std::runtime_error("this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  CUtensorMap map;
  const auto size = [](int64_t count) { return static_cast<cuuint64_t>(count); };
  const cuuint64_t sizes[4] = {size(a.head_dim), size(a.page_size), size(a.num_kv_heads), size(std::max(1, a.num_pages))};
  const cuuint64_t bytes[3] = {size(strides.token) * 2, size(strides.head) * 2, size(strides.page) * 2};
  const cuuint32_t box[4] = {kBoxWidth, static_cast<cuuint32_t>(tokens), 1, 1}, steps[4] = {1, 1, 1, 1};
  const auto type = a.dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(&map, type, 4, const_cast<void*>(cache), sizes, bytes, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

// Where a 16-byte piece of a token's row is in a box at an address that is a multiple of 1024.
__device__ __forceinline__ int place_in_box(int token, int piece) {
  return token * 128 + (piece ^ (token & 7)) * 16;
}

__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int first, int token, int head, int page,
                                         uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(first), "r"(token), "r"(head), "r"(page), "r"(shared_address(barrier))
      : "memory");
#endif
}

// Before its first use, so that nobody waits for it then.
__device__ __forceinline__ void fetch_map(const CUtensorMap* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// What threads have written is seen by copies that the engine begins later.
__device__ __forceinline__ void fence_for_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

}  // namespace rooflight
