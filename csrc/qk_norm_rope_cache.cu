// Q and K head norms, RoPE and the write into the paged cache: one pass from the packed projection to attention.
//
// A warp has one head of one token. Its lanes hold pairs that turn together, so that the norm's sum is one round of
// shuffles and the rotation none; FP32 from load to store. A V head is copied by the warp that has it. K goes straight
// to its slot, q back to where it was.
#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "qk_norm_rope_cache.h"

namespace rooflight {
namespace {

constexpr int kWarps = 4;
constexpr int kMostPairs = 4;  // of a lane: head_dim 256

template <typename T, typename W>
__global__ void __launch_bounds__(kWarps * 32, 8) qk_norm_rope_cache(QkNormRopeCache s) {
  const int lane = threadIdx.x % 32;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int heads = s.q.heads + s.k.heads + s.v.heads;
  const int64_t token = unit / heads;
  int head = static_cast<int>(unit % heads);
  wait_for_earlier_kernels();
  let_next_kernel_start();
  if (token >= s.num_tokens) return;

  const bool is_q = head < s.q.heads, is_k = !is_q && head < s.q.heads + s.k.heads;
  head -= is_q ? 0 : is_k ? s.q.heads : s.q.heads + s.k.heads;
  const Heads& from = is_q ? s.q : is_k ? s.k : s.v;
  const T* in = static_cast<const T*>(from.data) + token * from.token_stride + head * from.head_stride;
  T* out = const_cast<T*>(in);
  if (!is_q) {
    const int64_t slot = s.slots[token];
    if (slot < 0) return;
    const CacheStrides& strides = is_k ? s.k_strides : s.v_strides;
    out = static_cast<T*>(is_k ? s.k_cache : s.v_cache) + slot / s.page_size * strides.page + head * strides.head +
          slot % s.page_size * strides.token;
    if (!is_k) {
      for (int i = lane; i < s.head_dim; i += 32) out[i] = in[i];
      return;
    }
  }

  // Pair p: (first + p * step, second + p * step) of the rotated part; beyond it, two neighbours that only are scaled.
  const int half = s.rotary_dim / 2, pairs = (s.head_dim + 1) / 2;
  const auto places = [&](int p, int& a, int& b) {
    a = p < half ? (s.interleaved ? 2 * p : p) : s.rotary_dim + 2 * (p - half);
    b = p < half ? (s.interleaved ? 2 * p + 1 : p + half) : a + 1;
  };
  float first[kMostPairs], second[kMostPairs], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int p = lane + 32 * i;
    first[i] = second[i] = 0.0f;
    if (p < pairs) {
      int a, b;
      places(p, a, b);
      first[i] = static_cast<float>(in[a]);
      if (b < s.head_dim) second[i] = static_cast<float>(in[b]);
      square = fmaf(first[i], first[i], fmaf(second[i], second[i], square));
    }
  }
  const W* weight = static_cast<const W*>(is_q ? s.q_weight : s.k_weight);
  float inverse = 1.0f;
  if (weight != nullptr) inverse = rsqrtf(warp_sum(square) / static_cast<float>(s.head_dim) + s.eps);
  const int64_t position = s.wide_positions ? static_cast<const int64_t*>(s.positions)[token]
                                            : static_cast<const int32_t*>(s.positions)[token];
  const float* angles = s.cos_sin + position * s.table_stride;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int p = lane + 32 * i;
    if (p >= pairs) continue;
    int a, b;
    places(p, a, b);
    float x = first[i], y = second[i];
    if (weight != nullptr) {
      x *= inverse * static_cast<float>(weight[a]);
      if (b < s.head_dim) y *= inverse * static_cast<float>(weight[b]);
    }
    if (p < half) {
      const float cosine = angles[p], sine = angles[p + half], turned = x * cosine - y * sine;
      y = y * cosine + x * sine;
      x = turned;
    }
    out[a] = static_cast<T>(x);
    if (b < s.head_dim) out[b] = static_cast<T>(y);
  }
}

}  // namespace

bool takes_head(const QkNormRopeCache& s) {
  return s.head_dim <= 64 * kMostPairs;
}

void launch_qk_norm_rope_cache(const QkNormRopeCache& s, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(s.num_tokens) * (s.q.heads + s.k.heads + s.v.heads);
  if (units == 0 || s.head_dim == 0) return;
  with_types(s.dtype, s.weight_dtype, [&](auto data, auto weight) {
    launch(qk_norm_rope_cache<typename decltype(data)::type, typename decltype(weight)::type>,
           dim3(static_cast<unsigned>((units + kWarps - 1) / kWarps)), dim3(kWarps * 32), stream, Overlap::kBehindOurs,
           0, s);
  });
}

}  // namespace rooflight
