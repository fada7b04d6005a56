// Rotary position embedding: every element read once, turned in FP32, written once.
//
// A thread has two packs of a head that turn together: half of the rotated part apart, or, interleaved, neighbours that
// hold whole pairs. So it needs nothing of other threads, and q may be turned in place. Beyond the rotated part a pair
// of packs is copied. Blocks have heads of one token, whose cosines and sines they read from L1 after the first.
#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/rotation.cuh"
#include "common/rows.cuh"
#include "rope.h"

namespace rooflight {
namespace {

constexpr int kMostThreads = 256;

// Neighbours of the table: 16 bytes at a time where a pack has so many angles.
template <int N>
__device__ __forceinline__ void load_angles(const float* from, float (&angles)[N]) {
  constexpr int kWide = N < 4 ? N : 4;
#pragma unroll
  for (int i = 0; i < N; i += kWide) {
    const auto pack = load(reinterpret_cast<const Pack<float, kWide>*>(from + i));
#pragma unroll
    for (int j = 0; j < kWide; ++j) angles[i + j] = pack.values[j];
  }
}

template <int N>
__device__ __forceinline__ void turn_packs(float (&x)[N], float (&y)[N], const float (&cosine)[N],
                                           const float (&sine)[N], bool interleaved) {
  if constexpr (N > 1) {
    if (interleaved) {
#pragma unroll
      for (int j = 0; j < N / 2; ++j) {
        turn(x[2 * j], x[2 * j + 1], cosine[j], sine[j]);
        turn(y[2 * j], y[2 * j + 1], cosine[N / 2 + j], sine[N / 2 + j]);
      }
      return;
    }
  }
#pragma unroll
  for (int j = 0; j < N; ++j) turn(x[j], y[j], cosine[j], sine[j]);
}

template <typename T, int N>
__global__ void __launch_bounds__(kMostThreads) rope(Rope s) {
  using P = Pack<T, N>;
  const int packs = s.head_dim / N, half = s.angles.rotary_dim / (2 * N), pairs = (packs + 1) / 2;
  const int64_t token = blockIdx.x;  // 64 bits: times a stride it passes 2^31
  const int place = static_cast<int>(blockIdx.y * blockDim.x + threadIdx.x);
  int head = place / pairs;
  const int pair = place - head * pairs;
  const bool is_q = head < s.q.heads;
  if (!is_q) head -= s.q.heads;
  const Heads& from = is_q ? s.q : s.k;
  const Heads& to = is_q ? s.q_out : s.k_out;
  const P* in = reinterpret_cast<const P*>(static_cast<const T*>(from.data) + token * from.token_stride +
                                           head * from.head_stride);
  P* out = reinterpret_cast<P*>(static_cast<T*>(to.data) + token * to.token_stride + head * to.head_stride);
  int first, second;
  places_of_pair(pair, half, 2 * half, s.interleaved, first, second);
  const bool turns = pair < half, two = second < packs;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (head >= from.heads || (!turns && in == out)) return;
  // First, since the angles' addresses hang on it.
  const int64_t position =
      turns ? integer_at(s.angles.positions, s.angles.wide_positions, token * s.angles.positions_stride) : 0;
  P low = load(in + first), high = two ? load(in + second) : P{};
  if (turns) {
    const float* table = s.angles.cos_sin + position * s.angles.table_stride + pair * N;
    float x[N], y[N], cosine[N], sine[N];
    load_angles(table, cosine);
    load_angles(table + half * N, sine);
    to_floats(low, x);
    to_floats(high, y);
    turn_packs(x, y, cosine, sine, s.interleaved);
    low = from_floats<T>(x);
    high = from_floats<T>(y);
  }
  store(out + first, low);
  if (two) store(out + second, high);
}

// Whether all addresses, and the two parts of a head, are multiples of so many elements.
template <typename T>
bool fits_packs(const Rope& s, int elements) {
  const auto fits = [&](const Heads& h) {
    return reinterpret_cast<uintptr_t>(h.data) % (elements * sizeof(T)) == 0 && h.token_stride % elements == 0 &&
           h.head_stride % elements == 0;
  };
  const bool table = reinterpret_cast<uintptr_t>(s.angles.cos_sin) % 16 == 0 && s.angles.table_stride % 4 == 0;
  return table && s.head_dim % elements == 0 && s.angles.rotary_dim % (2 * elements) == 0 && fits(s.q) && fits(s.k) &&
         fits(s.q_out) && fits(s.k_out);
}

template <typename T, int N>
void launch_packed(const Rope& s, cudaStream_t stream) {
  const int pairs = (s.head_dim / N + 1) / 2, all = pairs * (s.q.heads + s.k.heads);
  const int pieces = (all + kMostThreads - 1) / kMostThreads;
  const int threads = ((all + pieces - 1) / pieces + 31) / 32 * 32;  // no piece much smaller than the others
  const dim3 grid(s.num_tokens, pieces), block(threads);
  launch(rope<T, N>, grid, block, stream, Overlap::kBehindOurs, 0, s);
}

template <typename T>
void launch_typed(const Rope& s, cudaStream_t stream) {
  if (fits_packs<T>(s, kFullPack<T>)) return launch_packed<T, kFullPack<T>>(s, stream);
  launch_packed<T, 1>(s, stream);
}

}  // namespace

void launch_rope(const Rope& s, cudaStream_t stream) {
  if (s.num_tokens == 0 || s.head_dim == 0 || s.q.heads + s.k.heads == 0) return;
  switch (s.dtype) {
    case Dtype::kFloat32:
      return launch_typed<float>(s, stream);
    case Dtype::kFloat16:
      return launch_typed<__half>(s, stream);
    case Dtype::kBFloat16:
      return launch_typed<__nv_bfloat16>(s, stream);
  }
}

}  // namespace rooflight
