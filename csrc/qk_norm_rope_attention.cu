// Head norms, RoPE, the write into the cache and decode attention in one kernel.
//
// Between the product before it and attention there is a launch less, and the keys and values of a sequence's earlier
// tokens depend on no product: with few sequences they are on their way while it runs. The kernel is that of
// decode_attention_chunks.cuh.
#include "qk_norm_rope_attention.h"

#include "decode_attention_chunks.cuh"

namespace rooflight {
namespace {

bool aligned16(const void* data, int64_t stride, int64_t size) {
  return (reinterpret_cast<uintptr_t>(data) | static_cast<uint64_t>(stride * size)) % 16 == 0;
}

template <typename Run>
void with_head(const DecodeAttention& a, Run run) {
  const auto typed = [&](auto type) {
    if (a.head_dim == 64) run(type, std::integral_constant<int, 64>());
    if (a.head_dim == 128) run(type, std::integral_constant<int, 128>());
    if (a.head_dim == 256) run(type, std::integral_constant<int, 256>());
  };
  if (a.dtype == Dtype::kFloat16) typed(__half());
  if (a.dtype == Dtype::kBFloat16) typed(__nv_bfloat16());
}

}  // namespace

bool takes_one_kernel(const DecodeAttention& a, const QkNormRopeCache& s) {
  const int64_t size = size_of(a.dtype);
  const auto heads = [&](const Heads& h) {
    return aligned16(h.data, h.token_stride, size) && h.head_stride * size % 16 == 0;
  };
  const bool fits = heads(s.q) && heads(s.k) && heads(s.v) && aligned16(s.cos_sin, s.table_stride, sizeof(float)) &&
                    aligned16(s.q_weight, 0, 0) && aligned16(s.k_weight, 0, 0);
  const bool norm = s.q_weight == nullptr || s.weight_dtype == a.dtype;
  if (!fits || !norm || s.interleaved || s.rotary_dim != a.head_dim || a.num_heads == 0) return false;
  bool takes = false;
  with_head(a, [&](auto type, auto width) {
    takes = chunks_take<decltype(type), decltype(width)::value, QkNormRopeCache>(a);
  });
  return takes;
}

void launch_qk_norm_rope_attention(const DecodeAttention& a, const QkNormRopeCache& s, cudaStream_t stream) {
  if (a.num_seqs == 0) return;
  with_head(
      a, [&](auto type, auto width) { launch_chunks_by_rule<decltype(type), decltype(width)::value>(a, s, stream); });
}

}  // namespace rooflight
