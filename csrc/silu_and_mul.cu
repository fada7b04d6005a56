// out = silu(gate) * up with gate and up side by side in a row: 16 bytes of each a thread, FP32 in between.
//
// Three tensors' halves of traffic; the exponential and the division hide behind them. Both halves of a row must be
// aligned for a wide load: where the size is odd, packs get narrower.
#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/rows.cuh"
#include "silu_and_mul.h"

namespace rooflight {
namespace {

constexpr int kThreads = 256;

template <typename T>
__device__ __forceinline__ float silu(float x) {
  return x / (1.0f + (sizeof(T) == 4 ? expf(-x) : __expf(-x)));  // the fast one is exact enough for half types
}

template <typename T, int N>
__global__ void __launch_bounds__(kThreads) silu_and_mul(SiluAndMul s) {
  using P = Pack<T, N>;
  const int packs = s.size / N;
  const int64_t place = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t row = place / packs;
  const int pack = static_cast<int>(place - row * packs);
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (row >= s.rows) return;
  const P* x = row_of<P>(s.x, row, sizeof(T));
  float gate[N], up[N];
  to_floats(load(x + pack), gate);
  to_floats(load(x + packs + pack), up);
#pragma unroll
  for (int j = 0; j < N; ++j) gate[j] = silu<T>(gate[j]) * up[j];
  store(row_of<P>(s.out, row, sizeof(T)) + pack, from_floats<T>(gate));
}

template <typename T, int N>
void launch_packed(const SiluAndMul& s, cudaStream_t stream) {
  const int64_t blocks = (s.rows * (s.size / N) + kThreads - 1) / kThreads;
  launch(silu_and_mul<T, N>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads), stream, Overlap::kBehindOurs, 0, s);
}

template <typename T>
void launch_typed(const SiluAndMul& s, cudaStream_t stream) {
  const int elements = pack_elements<T, T>(s.size, nullptr, {s.x, s.out});
  if (elements == kFullPack<T>) return launch_packed<T, kFullPack<T>>(s, stream);
  if constexpr (sizeof(T) == 2) {
    if (elements == 4) return launch_packed<T, 4>(s, stream);
  }
  if (elements == 2) return launch_packed<T, 2>(s, stream);
  launch_packed<T, 1>(s, stream);
}

}  // namespace

void launch_silu_and_mul(const SiluAndMul& s, cudaStream_t stream) {
  if (s.rows == 0 || s.size == 0) return;
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
