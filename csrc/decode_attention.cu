// Decode attention over a paged cache: one new token a sequence, all query heads of a KV head in one block.
//
//   out = sum_j softmax_j(scale * q . k_j) v_j
//
// Bound by the cache's way from memory, so keys and values are read once for the group of query heads. Each warp has a
// ring of chunks of 16 tokens in shared memory, which the copy engine fills while it works. The products are done by
// the tensor cores with tokens and head_dim as their 16 rows and query heads as their 8 columns: on CUDA cores the same
// work is eight times the instructions and, for one warp, slower than memory (docs/lab).
//
//   scores (16 tokens, 8 heads) = K (16, D) @ Q^T (D, 8)        out^T (D, 8) += V^T (D, 16) @ weights (16, 8)
//
// Few sequences would leave most multiprocessors idle: then a cluster of blocks shares a sequence (the long path), each
// with a part of the keys, and merges through the shared memory of its members: exact, in a fixed order, without
// scratch memory and without a second launch. Parts follow from the length on the device, so one graph serves all
// lengths; short sequences keep blocks of a cluster idle.
//
// FP32, pages that are no multiple of 16 tokens, and strides that the copy engine cannot count go through a second,
// plain kernel.
#include "decode_attention_chunks.cuh"

namespace rooflight {
namespace {

template <typename T, int D>
void launch_for_layout(const DecodeAttention& a, cudaStream_t stream) {
  if constexpr (sizeof(T) == 2) {
    if (chunks_take<T, D, Nothing>(a)) return launch_chunks_by_rule<T, D>(a, Nothing{}, stream);
  }
  launch_plain_decode_attention<T, D>(a, stream);
}

template <typename T>
void launch_typed(const DecodeAttention& a, cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:
      return launch_for_layout<T, 64>(a, stream);
    case 80:
      return launch_for_layout<T, 80>(a, stream);
    case 128:
      return launch_for_layout<T, 128>(a, stream);
    case 256:
      return launch_for_layout<T, 256>(a, stream);
  }
}

}  // namespace

bool takes_head_dim(int head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 128 || head_dim == 256;
}

int decode_splits(int64_t blocks, bool pairs_share) {
  const int64_t places = card().multiprocessors;
  int splits = 1;
  while (splits < kMostSplits && blocks * splits * 2 <= places) splits *= 2;
  // Pairs may also share a multiprocessor; larger clusters find no room for all of their blocks at once.
  return splits == 1 && pairs_share && blocks <= places ? 2 : splits;
}

void launch_decode_attention(const DecodeAttention& a, cudaStream_t stream) {
  if (a.num_seqs == 0 || a.num_heads == 0) return;
  switch (a.dtype) {
    case Dtype::kFloat32:
      return launch_typed<float>(a, stream);
    case Dtype::kFloat16:
      return launch_typed<__half>(a, stream);
    case Dtype::kBFloat16:
      return launch_typed<__nv_bfloat16>(a, stream);
  }
}

}  // namespace rooflight
