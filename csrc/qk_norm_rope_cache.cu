// Q and K head norms, RoPE and the write into the paged cache: one pass from the packed projection to attention.
//
// A warp has one head of one token. Its lanes hold pairs that turn together, so that the norm's sum is one round of
// shuffles and the rotation none; FP32 from load to store. A V head is copied by the warp that has it. K goes straight
// to its slot, q back to where it was.
#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"
#include "common/rotation.cuh"
#include "common/rows.cuh"
#include "qk_norm_rope_cache.h"

namespace rooflight {
namespace {

constexpr int kWarps = 4;
constexpr int kMostPairs = 4;  // of a lane: head_dim 256
constexpr int kNeighbours = 4;

template <typename T, typename W>
__global__ void __launch_bounds__(kWarps * 32, 8) qk_norm_rope_cache(QkNormRopeCache s) {
  const int lane = threadIdx.x % 32;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int heads = s.q.heads + s.k.heads + s.v.heads;
  const int64_t token = unit / heads;
  int head = static_cast<int>(unit % heads);
  let_next_kernel_start();
  wait_for_earlier_kernels();
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

  const int half = s.rotary_dim / 2, pairs = (s.head_dim + 1) / 2;
  float first[kMostPairs], second[kMostPairs], square = 0.0f;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int p = lane + 32 * i;
    first[i] = second[i] = 0.0f;
    if (p < pairs) {
      int a, b;
      places_of_pair(p, half, s.rotary_dim, s.interleaved, a, b);
      first[i] = static_cast<float>(in[a]);
      if (b < s.head_dim) second[i] = static_cast<float>(in[b]);
      square = fmaf(first[i], first[i], fmaf(second[i], second[i], square));
    }
  }
  const W* weight = static_cast<const W*>(is_q ? s.q_weight : s.k_weight);
  float inverse = 1.0f;
  if (weight != nullptr) inverse = rsqrtf(warp_sum(square) / static_cast<float>(s.head_dim) + s.eps);
  const int64_t position = integer_at(s.positions, s.wide_positions, token);
  const float* angles = s.cos_sin + position * s.table_stride;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) {
    const int p = lane + 32 * i;
    if (p >= pairs) continue;
    int a, b;
    places_of_pair(p, half, s.rotary_dim, s.interleaved, a, b);
    float x = first[i], y = second[i];
    if (weight != nullptr) {
      x *= inverse * static_cast<float>(weight[a]);
      if (b < s.head_dim) y *= inverse * static_cast<float>(weight[b]);
    }
    if (p < half) turn(x, y, angles[p], angles[p + half]);
    out[a] = static_cast<T>(x);
    if (b < s.head_dim) out[b] = static_cast<T>(y);
  }
}

// The same for whole heads that turn by halves, which are most: LANES lanes a head, four neighbours a load.
template <typename T, typename W, int LANES>
__global__ void __launch_bounds__(kWarps * 32) qk_norm_rope_cache_halves(QkNormRopeCache s) {
  constexpr int VEC = kNeighbours, kHalf = LANES * VEC;
  using P = Pack<T, VEC>;
  const int lane = threadIdx.x % LANES;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * (kWarps * 32 / LANES) + threadIdx.x / LANES;
  const int heads = s.q.heads + s.k.heads + s.v.heads;
  const int64_t token = unit / heads;
  int head = static_cast<int>(unit - token * heads);
  const bool is_q = head < s.q.heads, is_k = !is_q && head < s.q.heads + s.k.heads;
  head -= is_q ? 0 : is_k ? s.q.heads : s.q.heads + s.k.heads;
  const Heads& from = is_q ? s.q : is_k ? s.k : s.v;
  const P* in = reinterpret_cast<const P*>(static_cast<const T*>(from.data) + token * from.token_stride +
                                           head * from.head_stride) +
                lane;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  // No lane leaves before the sum over the lanes of a head: a warp has several.
  const bool there = token < s.num_tokens;
  const P low = there ? load(in) : P{}, high = there ? load(in + LANES) : P{};
  P* out = const_cast<P*>(in);
  bool writes = there;
  if (there && !is_q) {
    const int64_t slot = s.slots[token];
    writes = slot >= 0;
    const CacheStrides& strides = is_k ? s.k_strides : s.v_strides;
    out = reinterpret_cast<P*>(static_cast<T*>(is_k ? s.k_cache : s.v_cache) + slot / s.page_size * strides.page +
                               head * strides.head + slot % s.page_size * strides.token) +
          lane;
  }
  float a[VEC], b[VEC], square = 0.0f;
  to_floats(low, a);
  to_floats(high, b);
  const W* weight = static_cast<const W*>(is_q ? s.q_weight : s.k_weight);
  if (weight != nullptr) {
#pragma unroll
    for (int j = 0; j < VEC; ++j) square = fmaf(a[j], a[j], fmaf(b[j], b[j], square));
    const float inverse = rsqrtf(warp_sum(square, LANES) / static_cast<float>(2 * kHalf) + s.eps);
#pragma unroll
    for (int j = 0; j < VEC; ++j) {
      a[j] *= inverse * static_cast<float>(weight[lane * VEC + j]);
      b[j] *= inverse * static_cast<float>(weight[kHalf + lane * VEC + j]);
    }
  }
  if (!writes) return;
  if (!is_q && !is_k) {
    store(out, low);
    store(out + LANES, high);
    return;
  }
  const int64_t position = integer_at(s.positions, s.wide_positions, token);
  const float* angles = s.cos_sin + position * s.table_stride + lane * VEC;
#pragma unroll
  for (int j = 0; j < VEC; ++j) {  // not through `turn`, with which this kernel is compiled to another order of loads
    const float cosine = angles[j], sine = angles[kHalf + j], turned = a[j] * cosine - b[j] * sine;
    b[j] = b[j] * cosine + a[j] * sine;
    a[j] = turned;
  }
  store(out, from_floats<T>(a));
  store(out + LANES, from_floats<T>(b));
}

// Lanes of a head in the kernel above, or 0 where that does not take the step.
int lanes_of_head(const QkNormRopeCache& s) {
  const int lanes = s.head_dim / (2 * kNeighbours);
  const bool whole = s.head_dim == 64 || s.head_dim == 128 || s.head_dim == 256;
  if (s.interleaved || s.rotary_dim != s.head_dim || !whole) return 0;
  const int64_t bytes = kNeighbours * size_of(s.dtype);
  const auto fits = [&](const void* data, std::initializer_list<int64_t> strides) {
    bool fine = reinterpret_cast<uintptr_t>(data) % bytes == 0;
    for (const int64_t stride : strides) fine = fine && stride % kNeighbours == 0;
    return fine;
  };
  const auto heads = [&](const Heads& h) { return fits(h.data, {h.token_stride, h.head_stride}); };
  const auto cache = [&](const void* data, const CacheStrides& c) { return fits(data, {c.page, c.head, c.token}); };
  const bool all =
      heads(s.q) && heads(s.k) && heads(s.v) && cache(s.k_cache, s.k_strides) && cache(s.v_cache, s.v_strides);
  return all ? lanes : 0;
}

}  // namespace

bool takes_head(const QkNormRopeCache& s) {
  return s.head_dim <= 64 * kMostPairs;
}

void launch_qk_norm_rope_cache(const QkNormRopeCache& s, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(s.num_tokens) * (s.q.heads + s.k.heads + s.v.heads);
  if (units == 0 || s.head_dim == 0) return;
  const int lanes = lanes_of_head(s), at_once = kWarps * 32 / (lanes > 0 ? lanes : 32);
  const dim3 grid(static_cast<unsigned>((units + at_once - 1) / at_once)), block(kWarps * 32);
  with_types(s.dtype, s.weight_dtype, [&](auto data, auto weight) {
    using T = typename decltype(data)::type;
    using W = typename decltype(weight)::type;
    const auto run = [&](auto kernel) { launch(kernel, grid, block, stream, Overlap::kBehindOurs, 0, s); };
    if (lanes == 8) return run(qk_norm_rope_cache_halves<T, W, 8>);
    if (lanes == 16) return run(qk_norm_rope_cache_halves<T, W, 16>);
    if (lanes == 32) return run(qk_norm_rope_cache_halves<T, W, 32>);
    run(qk_norm_rope_cache<T, W>);
  });
  last_captured.writing = true;
}

}  // namespace rooflight
