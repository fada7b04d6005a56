// How the copy engine finds chunks of tokens in a paged cache, and what asks it for one. Hopper and later.
//
// One lane asks for a chunk, and the engine puts it into shared memory such that neither a load of eight tokens' same
// piece nor one of two tokens' four meets in one bank (see place_in_box, and who reads which token).
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

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
  constexpr int64_t kMost = int64_t{1} << 35;  // elements: eight tokens are a coordinate too
  const auto fits = [](int64_t stride) { return stride > 0 && stride < kMost && stride % 8 == 0; };
  return fits(strides.page) && fits(strides.head) && fits(strides.token);
}

template <int N>
CUtensorMap tensor_map(Dtype dtype, const void* data, const int64_t (&sizes)[N], const int64_t (&strides)[N - 1],
                       const int (&box)[N]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status),
          "cudaGetDriverEntryPointByVersion");
    if (status != cudaDriverEntryPointSuccess) throw std::runtime_error("this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  cuuint64_t counts[N], bytes[N - 1];
  cuuint32_t boxes[N], steps[N];
  for (int i = 0; i < N; ++i) {
    counts[i] = static_cast<cuuint64_t>(sizes[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    if (i > 0) bytes[i - 1] = static_cast<cuuint64_t>(strides[i - 1]) * 2;
  }
  CUtensorMap map;
  const auto type = dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(&map, type, N, const_cast<void*>(data), counts, bytes, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

// Boxes of `tokens` tokens and kBoxWidth elements of a head in a page. Beyond head_dim there are zeros.
template <typename Attention>
CUtensorMap cache_boxes(const Attention& a, const void* cache, const CacheStrides& strides, int tokens) {
  return tensor_map<4>(a.dtype, cache, {a.head_dim, a.page_size, a.num_kv_heads, a.num_pages},
                       {strides.token, strides.head, strides.page}, {kBoxWidth, tokens, 1, 1});
}

// Heads from one page to the next, as the copy engine counts them where page and head are one coordinate; 0 if a page's
// stride is no multiple of a head's, or pages overlap. The stride of what there is one of says nothing.
template <typename Attention>
int64_t heads_a_page(const Attention& a, const CacheStrides& strides) {
  if (a.num_kv_heads == 1) return 1;
  if (a.num_pages == 1) return a.num_kv_heads;
  const int64_t heads = strides.page / strides.head;
  return strides.page % strides.head == 0 && heads >= a.num_kv_heads ? heads : 0;
}

// Boxes of 16 tokens and all of a head, for products: eight tokens lie one behind the other, 1024 bytes, with 64
// elements of each; the next 64 elements of these tokens follow, and then the next eight tokens. Coordinates: 0, 0, 0,
// eighth token, page * heads_a_page + head. A head_dim that is a multiple of 64, pages of a multiple of 16 tokens.
template <typename Attention>
CUtensorMap whole_head_boxes(const Attention& a, const void* cache, const CacheStrides& strides) {
  const int halves = a.head_dim / kBoxWidth;
  const int64_t heads = heads_a_page(a, strides), stride = a.num_kv_heads == 1 ? strides.page : strides.head;
  return tensor_map<5>(a.dtype, cache, {kBoxWidth, 8, halves, a.page_size / 8, a.num_pages * heads},
                       {strides.token, kBoxWidth, 8 * strides.token, stride}, {kBoxWidth, 8, halves, 2, 1});
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

__device__ __forceinline__ void copy_whole_heads(void* to, const CUtensorMap* map, int eighth, int page_and_head,
                                                 uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %2, %2, %3, %4}], "
      "[%5];" ::"r"(shared_address(to)),
      "l"(map), "r"(0), "r"(eighth), "r"(page_and_head), "r"(shared_address(barrier))
      : "memory");
#endif
}

// Before its first use, so that nobody waits for it then.
__device__ __forceinline__ void fetch_map(const CUtensorMap* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

// What threads have written to the cache is seen by copies that the engine begins later.
__device__ __forceinline__ void fence_cache_for_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

}  // namespace rooflight
