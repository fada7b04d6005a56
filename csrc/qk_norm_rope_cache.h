// Between the QKV projection and attention: head norms, RoPE, and the write into the paged cache. Plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/heads.h"
#include "common/types.h"
#include "decode_attention.h"

namespace rooflight {

struct QkNormRopeCache {
  Heads q, k, v;
  const void* q_weight = nullptr;  // null: no norm
  const void* k_weight = nullptr;
  const float* cos_sin = nullptr;  // (positions, rotary_dim)
  const void* positions = nullptr;
  const int64_t* slots = nullptr;  // -1: not written
  void* k_cache = nullptr;         // (num_pages, num_kv_heads, page_size, head_dim)
  void* v_cache = nullptr;
  CacheStrides k_strides, v_strides;
  int64_t table_stride = 0;  // of cos_sin
  float eps = 0.0f;
  int num_tokens = 0, head_dim = 0, rotary_dim = 0, page_size = 0;
  bool interleaved = false, wide_positions = true;  // int64 or int32
  Dtype dtype = Dtype::kBFloat16, weight_dtype = Dtype::kBFloat16;
};

bool takes_head(const QkNormRopeCache& step);  // head_dim up to 256
void launch_qk_norm_rope_cache(const QkNormRopeCache& step, cudaStream_t stream);

}  // namespace rooflight
