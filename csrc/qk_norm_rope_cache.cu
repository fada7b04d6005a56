// Q and K head norms, RoPE and the write into the paged cache: one pass from the packed projection to attention.
//
// Lanes of one warp have a head, and each lane elements that turn together, so that the norm's sum is one round of
// shuffles and the rotation none; FP32 from load to store. V is copied. K goes straight to its slot, q back to where it
// was. The first kernel takes every head, a warp for each; the second one those that are common.
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

// The same for whole heads that turn by halves, which are most. A block has one token: angles are read once and serve
// several heads of LANES lanes, whose loads and stores are all of 16 bytes.
template <typename T, typename W, int LANES>
__global__ void __launch_bounds__(kWarps * 32) qk_norm_rope_cache_halves(QkNormRopeCache s) {
  constexpr int VEC = kFullPack<T>, kHalf = LANES * VEC, kGroups = kWarps * 32 / LANES, kAtOnce = 2;
  using P = Pack<T, VEC>;
  const int lane = threadIdx.x % LANES, group = threadIdx.x / LANES;
  const int64_t token = blockIdx.x;
  const int heads = s.q.heads + s.k.heads + s.v.heads, first_v = s.q.heads + s.k.heads;
  const auto row_of = [&](int head) {
    const Heads& from = head < s.q.heads ? s.q : head < first_v ? s.k : s.v;
    const int own = head - (head < s.q.heads ? 0 : head < first_v ? s.q.heads : first_v);
    return static_cast<T*>(from.data) + token * from.token_stride + own * from.head_stride;
  };
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int64_t slot = s.slots[token], page = slot / s.page_size, offset = slot - page * s.page_size;
  const float* angles = s.cos_sin + integer_at(s.positions, s.wide_positions, token) * s.table_stride + lane * VEC;
  const auto cosines = load_shared(reinterpret_cast<const Pack<float, VEC>*>(angles));
  const auto sines = load_shared(reinterpret_cast<const Pack<float, VEC>*>(angles + kHalf));

  for (int first = 0; first < heads; first += kGroups * kAtOnce) {
    P low[kAtOnce], high[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = first + i * kGroups + group;
      if (head >= heads) continue;
      const P* in = reinterpret_cast<const P*>(row_of(head)) + lane;
      low[i] = load(in);
      high[i] = load(in + LANES);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int head = first + i * kGroups + group;
      const bool there = head < heads, is_q = head < s.q.heads, is_v = head >= first_v;
      float a[VEC], b[VEC], square = 0.0f;
      to_floats(there ? low[i] : P{}, a);
      to_floats(there ? high[i] : P{}, b);
      // No lane leaves before the sum over the lanes of a head: a warp has several.
      if (s.q_weight != nullptr) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) square = fmaf(a[j], a[j], fmaf(b[j], b[j], square));
        const float inverse = rsqrtf(warp_sum(square, LANES) / static_cast<float>(2 * kHalf) + s.eps);
        const auto* weight = static_cast<const Pack<W, VEC>*>(is_q ? s.q_weight : s.k_weight) + lane;
        float low_factors[VEC], high_factors[VEC];
        to_floats(load_shared(weight), low_factors);
        to_floats(load_shared(weight + LANES), high_factors);
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          a[j] *= inverse * low_factors[j];
          b[j] *= inverse * high_factors[j];
        }
      }
      if (!there || (!is_q && slot < 0)) continue;
      P* out = reinterpret_cast<P*>(row_of(head)) + lane;
      if (!is_q) {
        const CacheStrides& strides = is_v ? s.v_strides : s.k_strides;
        out = reinterpret_cast<P*>(static_cast<T*>(is_v ? s.v_cache : s.k_cache) + page * strides.page +
                                   (head - (is_v ? first_v : s.q.heads)) * strides.head + offset * strides.token) +
              lane;
      }
      if (!is_v) {
#pragma unroll
        for (int j = 0; j < VEC; ++j) {
          const float turned = a[j] * cosines.values[j] - b[j] * sines.values[j];
          b[j] = b[j] * cosines.values[j] + a[j] * sines.values[j];
          a[j] = turned;
        }
        low[i] = from_floats<T>(a);
        high[i] = from_floats<T>(b);
      }
      store(out, low[i]);
      store(out + LANES, high[i]);
    }
  }
}

// Lanes of a head in the kernel above, or 0 where that does not take the step.
int lanes_of_head(const QkNormRopeCache& s) {
  const int neighbours = 16 / size_of(s.dtype), lanes = s.head_dim / (2 * neighbours);
  const bool whole = s.head_dim == 64 || s.head_dim == 128 || s.head_dim == 256;
  if (s.interleaved || s.rotary_dim != s.head_dim || !whole) return 0;
  const auto fits = [&](const void* data, std::initializer_list<int64_t> strides) {
    bool fine = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (const int64_t stride : strides) fine = fine && stride % neighbours == 0;
    return fine;
  };
  const auto heads = [&](const Heads& h) { return fits(h.data, {h.token_stride, h.head_stride}); };
  const auto cache = [&](const void* data, const CacheStrides& c) { return fits(data, {c.page, c.head, c.token}); };
  const bool all = heads(s.q) && heads(s.k) && heads(s.v) && cache(s.k_cache, s.k_strides) &&
                   cache(s.v_cache, s.v_strides) && fits(s.q_weight, {}) && fits(s.k_weight, {}) &&
                   fits(s.cos_sin, {}) && s.table_stride % 4 == 0;
  return all ? lanes : 0;
}

}  // namespace

bool takes_head(const QkNormRopeCache& s) {
  return s.head_dim <= 64 * kMostPairs;
}

void launch_qk_norm_rope_cache(const QkNormRopeCache& s, cudaStream_t stream) {
  const int64_t units = static_cast<int64_t>(s.num_tokens) * (s.q.heads + s.k.heads + s.v.heads);
  if (units == 0 || s.head_dim == 0) return;
  const int lanes = lanes_of_head(s);
  const int64_t blocks = lanes > 0 ? s.num_tokens : (units + kWarps - 1) / kWarps;
  const dim3 grid(static_cast<unsigned>(blocks)), block(kWarps * 32);
  with_types(s.dtype, s.weight_dtype, [&](auto data, auto weight) {
    using T = typename decltype(data)::type;
    using W = typename decltype(weight)::type;
    const auto run = [&](auto kernel) { launch(kernel, grid, block, stream, Overlap::kBehindOurs, 0, s); };
    if constexpr (sizeof(T) == 2) {
      if (lanes == 4) return run(qk_norm_rope_cache_halves<T, W, 4>);
    } else {
      if (lanes == 32) return run(qk_norm_rope_cache_halves<T, W, 32>);
    }
    if (lanes == 8) return run(qk_norm_rope_cache_halves<T, W, 8>);
    if (lanes == 16) return run(qk_norm_rope_cache_halves<T, W, 16>);
    run(qk_norm_rope_cache<T, W>);
  });
  last_captured.writing = true;  // the next launch may start while keys are on their way
}

}  // namespace rooflight
