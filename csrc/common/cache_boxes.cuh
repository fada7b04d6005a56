// How the copy engine finds chunks of tokens in a paged cache, and what asks it for one. Hopper and later.
//
// One lane asks for a chunk, and the engine puts it into shared memory such that neither a load of eight tokens' same
// piece nor one of two tokens' four meets in one bank (see place_in_box, and who reads which token).
#pragma once

#include "common/tensor_map.cuh"
#include "decode_attention.h"

namespace rooflight {

struct CacheBoxes {
  CUtensorMap k, v;
};

// What there is of strides, as the copy engine can count them.
inline bool boxes_take(const CacheStrides& strides) {
  constexpr int64_t kMost = int64_t{1} << 35;  // elements: eight tokens are a coordinate too
  const auto fits = [](int64_t stride) { return stride > 0 && stride < kMost && stride % 8 == 0; };
  return fits(strides.page) && fits(strides.head) && fits(strides.token);
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

// What threads have written to the cache is seen by copies that the engine begins later.
__device__ __forceinline__ void fence_cache_for_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
}

}  // namespace rooflight
