// Attention of one new token a sequence over a paged cache, as plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/types.h"

namespace rooflight {

// k_cache, v_cache: (num_pages, num_kv_heads, page_size, head_dim). Strides count elements; that of head_dim is 1.
struct CacheStrides {
  int64_t page = 0, head = 0, token = 0;
};

struct DecodeAttention {
  const void* q = nullptr;
  const void* k_cache = nullptr;
  const void* v_cache = nullptr;
  const int* block_table = nullptr;  // (num_seqs, table_stride)
  const int* seq_lens = nullptr;
  void* out = nullptr;   // (num_seqs, num_heads, head_dim), contiguous
  float* lse = nullptr;  // (num_seqs, num_heads) or null
  int64_t q_stride = 0, q_head_stride = 0, table_stride = 0;
  CacheStrides k_strides, v_strides;
  float scale = 0.0f;
  int num_seqs = 0, num_heads = 0, num_kv_heads = 0, head_dim = 0, num_pages = 0, page_size = 0, window = 0;
  bool aligned = true;  // everything to 16 bytes
  int splits = 0;       // parts of a sequence at most, a power of two up to 16; 0: by the rule
  Dtype dtype = Dtype::kBFloat16;
};

bool takes_head_dim(int head_dim);
// How many blocks share a sequence's keys, by blocks against multiprocessors, whatever the lengths are. blocks: that
// there are with one for each sequence and KV head. pairs_share: whether two fit a multiprocessor.
int decode_splits(int64_t blocks, bool pairs_share);
void launch_decode_attention(const DecodeAttention& attention, cudaStream_t stream);

}  // namespace rooflight
