// The embedding gather: a warp copies a piece of one row, in the widest packs that the addresses allow.
//
// It computes nothing, so it knows bits and no dtype. A row's address hangs on its id, two latencies one after the
// other: with few tokens a warp takes 32 packs and leaves the others of the row to other warps, with many it has four
// times as much on its way. An id outside the vocabulary is not followed: its row is NaN, which the sampler tells.
#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/rows.cuh"
#include "embedding.h"

namespace rooflight {
namespace {

constexpr int kWarps = 4;
constexpr int kMany = 4;  // packs of a lane

// U: unsigned integers as wide as an element. missing: the bits of NaN.
template <typename U, int N, int EACH>
__global__ void __launch_bounds__(kWarps * 32) embedding(Embedding e, int pieces, U missing) {
  using P = Pack<U, N>;
  const int lane = threadIdx.x % 32, packs = e.hidden_size / N;
  const int64_t unit = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32, token = unit / pieces;
  const int first = static_cast<int>(unit - token * pieces) * (EACH * 32) + lane;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  if (token >= e.num_tokens) return;
  const int64_t id = integer_at(e.ids, e.wide_ids, token * e.ids_stride);
  const bool there = id >= 0 && id < e.vocab_size;
  const P* row = row_of<P>(e.weight, there ? id : 0, sizeof(U));
  P values[EACH];
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
#pragma unroll
    for (int j = 0; j < N; ++j) values[i].values[j] = missing;
    if (there && first + 32 * i < packs) values[i] = load(row + first + 32 * i);
  }
  P* out = row_of<P>(e.out, token, sizeof(U));
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    if (first + 32 * i < packs) store(out + first + 32 * i, values[i]);
  }
}

template <typename U, int N, int EACH>
void launch_pieces(const Embedding& e, U missing, cudaStream_t stream) {
  const int pieces = (e.hidden_size / N + EACH * 32 - 1) / (EACH * 32);
  const int64_t blocks = (e.num_tokens * pieces + kWarps - 1) / kWarps;
  launch(embedding<U, N, EACH>, dim3(static_cast<unsigned>(blocks)), dim3(kWarps * 32), stream, Overlap::kBehindOurs, 0,
         e, pieces, missing);
}

template <typename U, int N>
void launch_packed(const Embedding& e, U missing, cudaStream_t stream) {
  constexpr int kWarpsAtOnce = 64;  // of a multiprocessor
  const int64_t warps = e.num_tokens * (e.hidden_size / N) / 32;
  if (warps <= int64_t{kWarpsAtOnce} * card().multiprocessors) return launch_pieces<U, N, 1>(e, missing, stream);
  launch_pieces<U, N, kMany>(e, missing, stream);
}

template <typename U>
void launch_sized(const Embedding& e, U missing, cudaStream_t stream) {
  const int elements = pack_elements<U, U>(e.hidden_size, nullptr, {e.weight, e.out});
  if (elements == kFullPack<U>) return launch_packed<U, kFullPack<U>>(e, missing, stream);
  launch_packed<U, 1>(e, missing, stream);
}

}  // namespace

void launch_embedding(const Embedding& e, cudaStream_t stream) {
  if (e.num_tokens == 0 || e.hidden_size == 0) return;
  switch (e.dtype) {
    case Dtype::kFloat32:
      return launch_sized<uint32_t>(e, 0x7fc00000u, stream);
    case Dtype::kFloat16:
      return launch_sized<uint16_t>(e, 0x7e00, stream);
    case Dtype::kBFloat16:
      return launch_sized<uint16_t>(e, 0x7fc0, stream);
  }
}

}  // namespace rooflight
