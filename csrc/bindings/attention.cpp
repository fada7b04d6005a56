// Attention over the paged cache, and the step that fills it, as PyTorch operators.
#include <array>
#include <optional>
#include <tuple>

#include "bindings/common.h"
#include "bindings/heads.h"
#include "decode_attention.h"
#include "prefill_attention.h"
#include "qk_norm_rope_attention.h"
#include "qk_norm_rope_cache.h"

namespace rooflight {
namespace {

// A cache (num_pages, num_kv_heads, page_size, head_dim).
CacheStrides check_cache(const Operand& cache, const Operand& first, int64_t num_kv_heads, int64_t head_dim) {
  cache.check_same_dtype(first);
  cache.check_same_device(first);
  cache.check_shape({-1, num_kv_heads, -1, head_dim});
  cache.check_rows();
  return {cache.strides()[0], cache.strides()[1], cache.strides()[2]};
}

// What attention over a paged cache takes, one new token a sequence or several: q (tokens, num_heads, head_dim),
// caches, a table and lengths of num_seqs sequences (-1: of any number).
template <typename Attention>
void check_paged(Attention& a, const Operand& q, const Operand& k_cache, const Operand& v_cache, const Operand& table,
                 const Operand& lens, int64_t num_seqs, double scale, int64_t window) {
  a.dtype = q.check_values();
  q.check_shape({-1, -1, -1});
  const int64_t num_heads = q.sizes()[1], head_dim = q.sizes()[2];
  k_cache.check_shape({-1, -1, -1, head_dim});
  const int64_t num_kv_heads = k_cache.sizes()[1];
  if (num_kv_heads == 0 || num_heads % num_kv_heads != 0) {
    fail("q", "have a multiple of num_kv_heads = " + std::to_string(num_kv_heads) + " heads",
         std::to_string(num_heads));
  }
  a.k_strides = check_cache(k_cache, q, num_kv_heads, head_dim);
  v_cache.check_same_shape(k_cache);
  a.v_strides = check_cache(v_cache, q, num_kv_heads, head_dim);
  q.check_rows();
  for (const Operand* operand : {&table, &lens}) {
    operand->check_dtype(ScalarType::Int);
    operand->check_same_device(q);
  }
  lens.check_shape({num_seqs});
  table.check_shape({lens.sizes()[0], -1});
  table.check_rows();
  if (window < 0) fail("window", "be 0 (off) or more", std::to_string(window));
  a.aligned = q.aligned(16) && k_cache.aligned(16) && v_cache.aligned(16);
  a.q = q.data();
  a.k_cache = k_cache.data();
  a.v_cache = v_cache.data();
  a.block_table = static_cast<const int*>(table.data());
  a.seq_lens = static_cast<const int*>(lens.data());
  a.q_stride = q.strides()[0];
  a.q_head_stride = q.strides()[1];
  a.table_stride = table.strides()[0];
  a.scale = static_cast<float>(scale);
  a.num_seqs = static_cast<int>(lens.sizes()[0]);
  a.num_heads = static_cast<int>(num_heads);
  a.num_kv_heads = static_cast<int>(num_kv_heads);
  a.head_dim = static_cast<int>(head_dim);
  a.num_pages = static_cast<int>(k_cache.sizes()[0]);
  a.page_size = static_cast<int>(k_cache.sizes()[2]);
  a.window = static_cast<int>(window < INT32_MAX ? window : 0);  // a wider one hides nothing
}

DecodeAttention checked_decode_attention(const Operand& q, const Operand& k_cache, const Operand& v_cache,
                                         const Operand& table, const Operand& lens, double scale, int64_t window,
                                         int64_t splits) {
  DecodeAttention a;
  q.check_shape({-1, -1, -1});
  const int64_t num_seqs = q.sizes()[0];
  check_paged(a, q, k_cache, v_cache, table, lens, num_seqs, scale, window);
  if (!takes_head_dim(a.head_dim)) {
    fail("q", "have a head_dim of 64, 80, 128 or 256 for the cuda provider", std::to_string(a.head_dim));
  }
  if (num_seqs > 1 && lens.strides()[0] != 1) fail("seq_lens", "have stride 1", std::to_string(lens.strides()[0]));
  constexpr int64_t kMostSeqs = 65535;  // of a grid's third dimension
  if (num_seqs > kMostSeqs) fail("q", "have 65535 sequences at most for the cuda provider", std::to_string(num_seqs));
  if (splits < 0) fail("splits", "be 0 (the provider's rule) or more", std::to_string(splits));
  if (splits > 0) {  // the largest power of two that is not above it
    a.splits = 1;
    while (a.splits < 16 && 2 * a.splits <= splits) a.splits *= 2;
  }
  return a;
}

std::tuple<Tensor, Tensor> decode_attention(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                            const Tensor& table_tensor, const Tensor& lens_tensor,
                                            int64_t /* max_seq_len */, double scale, int64_t window, bool return_lse,
                                            int64_t splits) {
  const Operand q("q", q_tensor), k_cache("k_cache", k_tensor), v_cache("v_cache", v_tensor);
  const Operand table("block_table", table_tensor), lens("seq_lens", lens_tensor);
  DecodeAttention a = checked_decode_attention(q, k_cache, v_cache, table, lens, scale, window, splits);
  Tensor out = empty_like(q);
  const int64_t lse_sizes[2] = {a.num_seqs, a.num_heads}, none[1] = {0};
  Tensor lse =
      return_lse ? empty(lse_sizes, 2, ScalarType::Float, q.device()) : empty(none, 1, ScalarType::Float, q.device());
  a.out = out.data_ptr();
  a.lse = return_lse ? static_cast<float*>(lse.data_ptr()) : nullptr;
  const DeviceGuard guard(q.device());
  launch_decode_attention(a, current_stream(q.device()));
  return {out, lse};
}

// What the Triton kernel takes, beyond what ours does.
std::tuple<Tensor, Tensor> prefill_attention_in_triton(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache,
                                                       const Tensor& table, const Tensor& lens, const Tensor& starts,
                                                       int64_t max_query_len, int64_t max_seq_len, double scale,
                                                       int64_t window, bool return_lse) {
  using torch::stable::detail::from;
  std::array<StableIValue, 11> stack{from(q),     from(k_cache), from(v_cache),       from(table),
                                     from(lens),  from(starts),  from(max_query_len), from(max_seq_len),
                                     from(scale), from(window),  from(return_lse)};
  TORCH_ERROR_CODE_CHECK(
      torch_call_dispatcher("rooflight::prefill_attention", "triton", stack.data(), TORCH_ABI_VERSION));
  return {torch::stable::detail::to<Tensor>(stack[0]), torch::stable::detail::to<Tensor>(stack[1])};
}

std::tuple<Tensor, Tensor> prefill_attention(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                             const Tensor& table_tensor, const Tensor& lens_tensor,
                                             const Tensor& starts_tensor, int64_t max_query_len, int64_t max_seq_len,
                                             double scale, int64_t window, bool return_lse) {
  const Operand q("q", q_tensor), k_cache("k_cache", k_tensor), v_cache("v_cache", v_tensor);
  const Operand table("block_table", table_tensor), lens("seq_lens", lens_tensor);
  const Operand starts("query_starts", starts_tensor);
  PrefillAttention a;
  check_paged(a, q, k_cache, v_cache, table, lens, -1, scale, window);
  constexpr int kMostHeads = 128;  // of the Triton kernel
  if (a.num_heads / a.num_kv_heads > kMostHeads) {
    fail("q", "have at most 128 heads a KV head for the cuda provider", std::to_string(a.num_heads / a.num_kv_heads));
  }
  const int64_t num_tokens = q.sizes()[0], num_seqs = lens.sizes()[0];
  starts.check_dtype(ScalarType::Int);
  starts.check_same_device(q);
  starts.check_shape({num_seqs + 1});
  a.query_starts = static_cast<const int*>(starts.data());
  a.lens_stride = lens.strides()[0];
  a.starts_stride = starts.strides()[0];
  a.num_tokens = static_cast<int>(num_tokens);
  const auto fits = [](int64_t count) { return count < INT32_MAX / 2; };
  const bool counts = fits(num_tokens) && fits(q.sizes()[1]) && fits(num_seqs) && fits(k_cache.sizes()[0]);
  const int64_t lse_sizes[2] = {num_tokens, q.sizes()[1]}, none[1] = {0};
  const DeviceGuard guard(q.device());
  if (!counts || !takes_prefill_attention(a)) {
    return prefill_attention_in_triton(q_tensor, k_tensor, v_tensor, table_tensor, lens_tensor, starts_tensor,
                                       max_query_len, max_seq_len, scale, window, return_lse);
  }
  Tensor out = empty_like(q);
  Tensor lse =
      return_lse ? empty(lse_sizes, 2, ScalarType::Float, q.device()) : empty(none, 1, ScalarType::Float, q.device());
  a.out = out.data_ptr();
  a.lse = return_lse ? static_cast<float*>(lse.data_ptr()) : nullptr;
  launch_prefill_attention(a, current_stream(q.device()));
  return {out, lse};
}

QkNormRopeCache checked_qk_norm_rope_cache(const Operand& q, const Operand& k, const Operand& v,
                                           const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                                           const Operand& cos_sin, const Operand& positions, const Operand& slots,
                                           const Operand& k_cache, const Operand& v_cache, double eps,
                                           bool interleaved) {
  QkNormRopeCache s;
  s.dtype = s.weight_dtype = q.check_values();
  q.check_shape({-1, -1, -1});
  const int64_t tokens = q.sizes()[0], head_dim = q.sizes()[2];
  k.check_shape({tokens, -1, head_dim});
  v.check_same_shape(k);
  if (q_weight.has_value() != k_weight.has_value()) {
    fail("k_weight", "be given together with q_weight or not at all", "only one of the two");
  }
  for (const Operand* operand : {&k, &v}) {
    operand->check_same_dtype(q);
    operand->check_same_device(q);
  }
  if (q_weight) {
    const Operand one("q_weight", *q_weight), other("k_weight", *k_weight);
    s.weight_dtype = one.check_weight(q);
    other.check_weight(q);
    other.check_same_dtype(one);
    s.q_weight = one.data();
    s.k_weight = other.data();
  }
  const Angles angles = angles_of(cos_sin, positions, q);
  slots.check_dtype(ScalarType::Long);
  for (const Operand* operand : {&positions, &slots}) {
    operand->check_shape({tokens});
    operand->check_same_device(q);
    if (tokens > 1 && operand->strides()[0] != 1) {
      fail(operand->name(), "have stride 1", std::to_string(operand->strides()[0]));
    }
  }
  s.k_strides = check_cache(k_cache, q, k.sizes()[1], head_dim);
  v_cache.check_same_shape(k_cache);
  s.v_strides = check_cache(v_cache, q, k.sizes()[1], head_dim);
  for (const Operand* operand : {&k_cache, &v_cache}) operand->check_not_expanded();
  s.q = heads_of(q);
  s.k = heads_of(k);
  s.v = heads_of(v);
  s.cos_sin = angles.cos_sin;
  s.table_stride = angles.table_stride;
  s.positions = angles.positions;
  s.wide_positions = angles.wide_positions;
  s.slots = static_cast<const int64_t*>(slots.data());
  s.k_cache = k_cache.data();
  s.v_cache = v_cache.data();
  s.eps = static_cast<float>(eps);
  s.num_tokens = static_cast<int>(tokens);
  s.head_dim = static_cast<int>(head_dim);
  s.rotary_dim = angles.rotary_dim;
  s.page_size = static_cast<int>(k_cache.sizes()[2]);
  s.interleaved = interleaved;
  if (!takes_head(s)) fail("q", "have a head_dim of 256 at most for the cuda provider", std::to_string(head_dim));
  return s;
}

void qk_norm_rope_cache(Tensor q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                        const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                        const Tensor& cos_sin_tensor, const Tensor& positions_tensor, const Tensor& slots_tensor,
                        Tensor k_cache_tensor, Tensor v_cache_tensor, double eps, bool interleaved) {
  const Operand q("q", q_tensor), k("k", k_tensor), v("v", v_tensor);
  const Operand cos_sin("cos_sin", cos_sin_tensor), positions("positions", positions_tensor);
  const Operand slots("slots", slots_tensor), k_cache("k_cache", k_cache_tensor), v_cache("v_cache", v_cache_tensor);
  const QkNormRopeCache s = checked_qk_norm_rope_cache(q, k, v, q_weight, k_weight, cos_sin, positions, slots, k_cache,
                                                       v_cache, eps, interleaved);
  q.check_not_expanded();
  const DeviceGuard guard(q.device());
  launch_qk_norm_rope_cache(s, current_stream(q.device()));
}

void qk_norm_rope_attention(Tensor out_tensor, const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                            const std::optional<Tensor>& q_weight, const std::optional<Tensor>& k_weight,
                            const Tensor& cos_sin_tensor, const Tensor& positions_tensor, const Tensor& slots_tensor,
                            Tensor k_cache_tensor, Tensor v_cache_tensor, const Tensor& table_tensor,
                            const Tensor& lens_tensor, int64_t /* max_seq_len */, double eps, double scale,
                            int64_t window, bool interleaved, int64_t splits) {
  const Operand out("out", out_tensor), q("q", q_tensor), k("k", k_tensor), v("v", v_tensor);
  const Operand cos_sin("cos_sin", cos_sin_tensor), positions("positions", positions_tensor);
  const Operand slots("slots", slots_tensor), k_cache("k_cache", k_cache_tensor), v_cache("v_cache", v_cache_tensor);
  const Operand table("block_table", table_tensor), lens("seq_lens", lens_tensor);
  out.check_values();
  out.check_shape({-1, -1, -1});
  check_beside(q, out);
  DecodeAttention a = checked_decode_attention(q, k_cache, v_cache, table, lens, scale, window, splits);
  QkNormRopeCache s = checked_qk_norm_rope_cache(q, k, v, q_weight, k_weight, cos_sin, positions, slots, k_cache,
                                                 v_cache, eps, interleaved);
  out.check_not_expanded();
  const DeviceGuard guard(q.device());
  const cudaStream_t stream = current_stream(q.device());
  // The kernels write one head behind the other.
  Tensor written = out.is_contiguous() ? out_tensor : empty_like(out);
  a.out = written.data_ptr();
  if (takes_one_kernel(a, s)) {
    launch_qk_norm_rope_attention(a, s, stream);
  } else {
    Tensor turned = empty_like(q);  // the first kernel turns in place, and q stays as it is
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(turned.get(), q_tensor.get(), 0));
    a.q = s.q.data = turned.data_ptr();
    a.q_stride = s.q.token_stride = q.sizes()[1] * q.sizes()[2];
    a.q_head_stride = s.q.head_stride = q.sizes()[2];
    a.aligned = k_cache.aligned(16) && v_cache.aligned(16);
    launch_qk_norm_rope_cache(s, stream);
    launch_decode_attention(a, stream);
  }
  if (!out.is_contiguous()) TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(out_tensor.get(), written.get(), 0));
}

STABLE_TORCH_LIBRARY_IMPL(rooflight, CUDA, library) {
  library.impl("decode_attention.cuda", TORCH_BOX(&decode_attention));
  library.impl("prefill_attention.cuda", TORCH_BOX(&prefill_attention));
  library.impl("qk_norm_rope_attention_.cuda", TORCH_BOX(&qk_norm_rope_attention));
  library.impl("qk_norm_rope_cache_.cuda", TORCH_BOX(&qk_norm_rope_cache));
}

}  // namespace
}  // namespace rooflight
