// Gradients of RMSNorm. With r = 1 / sqrt(mean(x^2) + eps), n = x r and g = grad_out * weight:
//
//   grad_x = r (g - n mean(g n)) [+ grad_residual],   grad_weight = sum over rows of grad_out * n
//
// Nothing is kept from the forward pass but x: r comes out of the row that has to be read anyway. Each block walks
// every gridDim.x-th row, asks for the next row before it sums the present one, and keeps its share of the weight
// gradient in FP32 registers. The shares are added by a second kernel in a fixed order, so the weight gradient has the
// same bits in every run on the same kind of card; no atomics.
#include <algorithm>

#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "rms_norm.h"

namespace rooflight {
namespace {

constexpr int kWideThreads = 1024;
constexpr int kMaxWarps = kWideThreads / 32;

// Threads of a block that holds rows in registers, and how many such blocks share a multiprocessor: with more, a
// thread's registers would not hold its part of a row, of the weights and of their gradient.
template <int PACKS>
constexpr int kBlockThreads = PACKS == 1 ? 256 : 512;
template <int PACKS>
constexpr int kBlocks = PACKS == 1 ? 3 : 1;

// One thread's part of a row, as it was read.
template <typename T, int N, int PACKS>
struct RowPart {
  Pack<T, N> x[PACKS], grad[PACKS];

  __device__ __forceinline__ void ask(const RmsNormBackward& norm, int64_t row, int row_packs) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place < row_packs) {
        x[i] = load(row_of<Pack<T, N>>(norm.x, row, sizeof(T)) + place);
        grad[i] = load(row_of<Pack<T, N>>(norm.grad_out, row, sizeof(T)) + place);
      }
    }
  }
};

// The products of one pack that both the sums and the gradients need. Fused operations are written out, here and below,
// so that every kernel rounds alike: a row has the same bits whichever of them its batch takes.
template <int N>
struct Terms {
  float x[N], by_x[N], by_weight[N];  // x, grad * x, grad * weight

  template <typename T, typename W>
  __device__ __forceinline__ void set(const Pack<T, N>& values, const Pack<T, N>& grad, const Pack<W, N>& weight) {
    float gradients[N], factors[N];
    to_floats(values, x);
    to_floats(grad, gradients);
    to_floats(weight, factors);
#pragma unroll
    for (int j = 0; j < N; ++j) {
      by_x[j] = __fmul_rn(gradients[j], x[j]);
      by_weight[j] = __fmul_rn(gradients[j], factors[j]);
    }
  }

  // Adds x^2 and x * grad * weight.
  __device__ __forceinline__ void add_to(float (&sums)[2]) const {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      sums[0] = fmaf(x[j], x[j], sums[0]);
      sums[1] = fmaf(x[j], by_weight[j], sums[1]);
    }
  }
};

struct RowScale {
  float inverse;     // r
  float correction;  // r^2 mean(g n), the factor of x in grad_x
};

__device__ __forceinline__ RowScale scale_of(const float (&sums)[2], float inverse_width, float eps) {
  const float inverse =
      __frsqrt_rn(fmaf(sums[0], inverse_width, eps));  // rsqrtf is off by up to two units: too much for FP32
  return {inverse, inverse * (inverse * (inverse * (sums[1] * inverse_width)))};
}

// grad_x of one pack; the share of the weight gradient is added to `share`.
template <typename T, int N, bool ADD>
__device__ __forceinline__ Pack<T, N> gradient(const Terms<N>& terms, const Pack<T, N>& residual, RowScale scale,
                                               float (&share)[N]) {
  float values[N], more[N];
  if constexpr (ADD) to_floats(residual, more);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    share[j] = fmaf(terms.by_x[j], scale.inverse, share[j]);
    values[j] = fmaf(terms.by_weight[j], scale.inverse, __fmul_rn(terms.x[j], -scale.correction));
    if constexpr (ADD) values[j] = __fadd_rn(values[j], more[j]);
  }
  return from_floats<T>(values);
}

constexpr int kShareVector = 4;  // floats a store: four bytes at a time, each sector of L2 would be written eight times

template <typename T, typename W, int N, int PACKS, bool ADD>
__global__ void __launch_bounds__(kBlockThreads<PACKS>, kBlocks<PACKS>) backward_in_registers(RmsNormBackward norm) {
  using Data = Pack<T, N>;
  using Weights = Pack<W, N>;
  // Of what would be wanted in registers, as much as fits: the products of this row beside the next one, the weights.
  constexpr bool kKeepTerms = PACKS <= 2, kHoldWeights = PACKS * sizeof(Weights) <= (ADD ? 16 : 32);
  __shared__ float scratch[2][kMaxWarps][2];  // two, so that one barrier a row is enough
  const int row_packs = norm.width / N;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  Weights held[kHoldWeights ? PACKS : 1] = {};
  alignas(16) float share[PACKS][N] = {};
  const auto ask_weights = [&](int place) { return load_shared(static_cast<const Weights*>(norm.weight) + place); };
  const auto weights = [&](int i, int place) {
    if constexpr (kHoldWeights) return held[i];
    return ask_weights(place);
  };
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int place = threadIdx.x + i * blockDim.x;
    if (kHoldWeights && place < row_packs) held[i] = ask_weights(place);
  }
  RowPart<T, N, PACKS> part;
  part.ask(norm, blockIdx.x, row_packs);
  int turn = 0;
  for (int64_t row = blockIdx.x; row < norm.rows; row += gridDim.x, turn ^= 1) {
    const int64_t next = row + gridDim.x;
    Data residual[ADD ? PACKS : 1];
    Terms<N> kept[kKeepTerms ? PACKS : 1];
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place < row_packs) {
        if constexpr (ADD) residual[i] = load(row_of<Data>(norm.grad_residual, row, sizeof(T)) + place);
        Terms<N>& terms = kept[kKeepTerms ? i : 0];
        terms.set(part.x[i], part.grad[i], weights(i, place));
        terms.add_to(sums);
      }
    }
    // Only now, into the same registers: asked for earlier, the next row would be counted with the present one, and the
    // products above would wait for both.
    if (kKeepTerms && next < norm.rows) part.ask(norm, next, row_packs);
    row_sum(sums, scratch[turn]);
    const RowScale scale = scale_of(sums, norm.inverse_width, norm.eps);
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place < row_packs) {
        Terms<N>& terms = kept[kKeepTerms ? i : 0];
        if (!kKeepTerms) terms.set(part.x[i], part.grad[i], weights(i, place));
        store(row_of<Data>(norm.grad_x, row, sizeof(T)) + place,
              gradient<T, N, ADD>(terms, residual[ADD ? i : 0], scale, share[i]));
      }
    }
    if (!kKeepTerms && next < norm.rows) part.ask(norm, next, row_packs);
  }
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int place = threadIdx.x + i * blockDim.x;
    if (place >= row_packs) continue;
    if (norm.partial_rows == 1) {  // the only block: this is the whole sum
      store(static_cast<Weights*>(norm.grad_weight) + place, from_floats<W>(share[i]));
      continue;
    }
    constexpr int kWide = N < kShareVector ? N : kShareVector;
    using Part = Pack<float, kWide>;
    Part* to =
        reinterpret_cast<Part*>(norm.partial + static_cast<int64_t>(blockIdx.x) * norm.width) + place * (N / kWide);
#pragma unroll
    for (int j = 0; j < N; j += kWide) store(to + j / kWide, *reinterpret_cast<const Part*>(&share[i][j]));
  }
}

// Rows too wide for registers: x and the gradient are read twice, the share of the weight gradient lives in memory.
template <typename T, typename W, int N, bool ADD>
__global__ void __launch_bounds__(kWideThreads) backward_read_twice(RmsNormBackward norm) {
  using Data = Pack<T, N>;
  using Weights = Pack<W, N>;
  __shared__ float scratch[2][kMaxWarps][2];
  const int row_packs = norm.width / N;
  const Weights* weight = static_cast<const Weights*>(norm.weight);
  float* partial = norm.partial + static_cast<int64_t>(blockIdx.x) * norm.width;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  for (int place = threadIdx.x; place < norm.width; place += blockDim.x) partial[place] = 0.0f;
  __syncthreads();  // below, a thread adds to elements that others have cleared
  int turn = 0;
  for (int64_t row = blockIdx.x; row < norm.rows; row += gridDim.x, turn ^= 1) {
    const Data* x = row_of<Data>(norm.x, row, sizeof(T));
    const Data* grad = row_of<Data>(norm.grad_out, row, sizeof(T));
    float sums[2] = {0.0f, 0.0f};
    for (int place = threadIdx.x; place < row_packs; place += blockDim.x) {
      Terms<N> terms;
      terms.set(load(x + place), load(grad + place), load_shared(weight + place));
      terms.add_to(sums);
    }
    row_sum(sums, scratch[turn]);
    const RowScale scale = scale_of(sums, norm.inverse_width, norm.eps);
    for (int place = threadIdx.x; place < row_packs; place += blockDim.x) {
      float share[N];
#pragma unroll
      for (int j = 0; j < N; ++j) share[j] = partial[place * N + j];
      Terms<N> terms;
      terms.set(load(x + place), load(grad + place), load_shared(weight + place));
      Data residual;
      if constexpr (ADD) residual = load(row_of<Data>(norm.grad_residual, row, sizeof(T)) + place);
      store(row_of<Data>(norm.grad_x, row, sizeof(T)) + place, gradient<T, N, ADD>(terms, residual, scale, share));
#pragma unroll
      for (int j = 0; j < N; ++j) partial[place * N + j] = share[j];
    }
  }
}

constexpr int kColumns = 8, kLanes = 32;  // of a block that adds shares: 32 bytes, a whole sector, of each row

// grad_weight[column] = sum of partial[:, column]: each lane every kLanes-th row, then the lanes, in a fixed order.
template <typename W>
__global__ void __launch_bounds__(kColumns* kLanes) add_shares(RmsNormBackward norm) {
  __shared__ float sums[kColumns][kLanes + 1];
  const int within = threadIdx.x % kColumns, lane = threadIdx.x / kColumns;
  const int column = blockIdx.x * kColumns + within;
  wait_for_earlier_kernels();
  let_next_kernel_start();
  float sum = 0.0f;
  if (column < norm.width) {
#pragma unroll 8
    for (int row = lane; row < norm.partial_rows; row += kLanes) {
      sum += norm.partial[static_cast<int64_t>(row) * norm.width + column];
    }
  }
  sums[within][lane] = sum;
  __syncthreads();
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  if (blockIdx.x * kColumns + warp < norm.width) {  // each warp one column
    const float total = warp_sum(sums[warp][thread]);
    if (thread == 0) static_cast<W*>(norm.grad_weight)[blockIdx.x * kColumns + warp] = static_cast<W>(total);
  }
}

// How a row of so many packs is held: packs a thread (0: too wide), threads a block, blocks a multiprocessor.
struct BlockPlan {
  int packs, threads, blocks;
};

template <int PACKS>
BlockPlan plan_with(int row_packs) {
  const int needed = (row_packs + PACKS - 1) / PACKS;
  const int threads = (needed + 31) / 32 * 32;
  return {PACKS, threads, std::clamp(kBlocks<PACKS> * kBlockThreads<PACKS> / threads, 1, 8)};
}

BlockPlan plan_block(int row_packs) {
  if (row_packs <= kBlockThreads<1>) return plan_with<1>(row_packs);
  if (row_packs <= 2 * kBlockThreads<2>) return plan_with<2>(row_packs);
  if (row_packs <= 4 * kBlockThreads<4>) return plan_with<4>(row_packs);
  return {0, kWideThreads, 1};
}

template <typename T, typename W, int N, bool ADD>
void launch_shaped(const RmsNormBackward& norm, cudaStream_t stream) {
  const BlockPlan plan = plan_block(norm.width / N);
  const dim3 grid(norm.partial_rows), block(plan.threads);
  switch (plan.packs) {
    case 1:
      launch(backward_in_registers<T, W, N, 1, ADD>, grid, block, stream, Overlap::kBehindOurs, 0, norm);
      break;
    case 2:
      launch(backward_in_registers<T, W, N, 2, ADD>, grid, block, stream, Overlap::kBehindOurs, 0, norm);
      break;
    case 4:
      launch(backward_in_registers<T, W, N, 4, ADD>, grid, block, stream, Overlap::kBehindOurs, 0, norm);
      break;
    default:
      launch(backward_read_twice<T, W, N, ADD>, grid, block, stream, Overlap::kBehindOurs, 0, norm);
  }
  if (plan.packs > 0 && norm.partial_rows == 1) return;  // the one block wrote the weight gradient itself
  launch(add_shares<W>, dim3((norm.width + kColumns - 1) / kColumns), dim3(kColumns * kLanes), stream, Overlap::kAlways,
         0, norm);
}

template <typename T, typename W, int N>
void launch_packed(const RmsNormBackward& norm, cudaStream_t stream) {
  if (norm.grad_residual.data != nullptr) return launch_shaped<T, W, N, true>(norm, stream);
  launch_shaped<T, W, N, false>(norm, stream);
}

template <typename T, typename W>
void launch_typed(const RmsNormBackward& norm, cudaStream_t stream) {
  const int elements =
      pack_elements<T, W>(norm.width, norm.weight, {norm.x, norm.grad_out, norm.grad_residual, norm.grad_x});
  if (elements == kFullPack<T>) {
    launch_packed<T, W, kFullPack<T>>(norm, stream);
  } else if (elements == 4) {
    if constexpr (sizeof(T) == 2) launch_packed<T, W, 4>(norm, stream);
  } else if (elements == 2) {
    launch_packed<T, W, 2>(norm, stream);
  } else {
    launch_packed<T, W, 1>(norm, stream);
  }
}

}  // namespace

int backward_partial_rows(int64_t rows, int width, Dtype dtype) {
  // Blocks enough to fill the multiprocessors; but each writes a row of FP32 that is read again: beyond 64 blocks and a
  // MiB of these, each gets four rows at least. Two rows are best left to one block. Rows too wide for registers have
  // their shares in memory anyway; these take 64 MiB at most.
  if (rows <= 2) return 1;
  const BlockPlan plan = plan_block(static_cast<int>((static_cast<int64_t>(width) * size_of(dtype) + 15) / 16));
  const int64_t multiprocessors = card().multiprocessors, row_bytes = static_cast<int64_t>(width) * 4;
  const int64_t cheap = plan.packs > 0 ? std::max<int64_t>(64, (1 << 20) / row_bytes) : multiprocessors;
  const int64_t in_scratch = std::max<int64_t>(1, (64 << 20) / row_bytes);
  return static_cast<int>(std::min({rows, multiprocessors * plan.blocks, std::max(cheap, rows / 4), in_scratch}));
}

void launch_rms_norm_backward(const RmsNormBackward& norm, cudaStream_t stream) {
  if (norm.rows == 0 || norm.width == 0) return;
  with_types(norm.dtype, norm.weight_dtype, [&](auto data, auto weight) {
    launch_typed<typename decltype(data)::type, typename decltype(weight)::type>(norm, stream);
  });
}

}  // namespace rooflight
