// Attention of several new tokens a sequence over a paged cache, as plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/types.h"
#include "decode_attention.h"

namespace rooflight {

struct PrefillAttention {
  const void* q = nullptr;
  const void* k_cache = nullptr;
  const void* v_cache = nullptr;
  const int* block_table = nullptr;   // (num_seqs, table_stride)
  const int* seq_lens = nullptr;      // (num_seqs,)
  const int* query_starts = nullptr;  // (num_seqs + 1,)
  void* out = nullptr;                // (num_tokens, num_heads, head_dim), contiguous
  float* lse = nullptr;               // (num_tokens, num_heads) or null
  int64_t q_stride = 0, q_head_stride = 0, table_stride = 0, lens_stride = 1, starts_stride = 1;
  CacheStrides k_strides, v_strides;
  float scale = 0.0f;
  int num_tokens = 0, num_seqs = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0, num_pages = 0, page_size = 0;
  int window = 0;
  bool aligned = true;  // everything to 16 bytes
  Dtype dtype = Dtype::kBFloat16;
};

// Whether the kernel takes it; else another provider has to.
bool takes_prefill_attention(const PrefillAttention& attention);
void launch_prefill_attention(const PrefillAttention& attention, cudaStream_t stream);

}  // namespace rooflight
