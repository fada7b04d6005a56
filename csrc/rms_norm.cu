// RMSNorm, alone and after a residual addition: a row is read from memory once and stays in registers.
//
//   sum = round(x + residual);  out = round(sum / sqrt(mean(sum^2) + eps) * weight)
//
// A thread holds PACKS packs of a row, neighbouring threads neighbouring packs, so that every load is coalesced and 16
// bytes wide where width and addresses allow. A block holds one row, or several where rows are many and narrow. The
// weights are asked for before the row is summed: behind the sum they would cost a launch of few rows a whole memory
// latency. Rows of common widths have kernels that know how many WARPS hold a row, without tests and loops: a third
// fewer instructions, a tenth of the time where rows are few. Rows too wide for the registers of a block are read a
// second time, from the sum that was just written.
#include <algorithm>
#include <type_traits>
#include <utility>

#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"
#include "rms_norm.h"

namespace rooflight {
namespace {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / 32;

// Rounded to the dtype, since the sum is an output itself; what is squared is the rounded value.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> add_rounded(const Pack<T, N>& a, const Pack<T, N>& b) {
  float left[N], right[N];
  to_floats(a, left);
  to_floats(b, right);
#pragma unroll
  for (int j = 0; j < N; ++j) left[j] += right[j];
  return from_floats<T>(left);
}

template <typename T, int N>
__device__ __forceinline__ float squares(const Pack<T, N>& pack) {
  float values[N], total[2] = {0.0f, 0.0f};  // two chains: each addition waits for the one before it
  to_floats(pack, values);
#pragma unroll
  for (int j = 0; j < N; ++j) total[j % 2] = fmaf(values[j], values[j], total[j % 2]);
  return total[0] + total[1];
}

template <typename T, typename W, int N>
__device__ __forceinline__ Pack<T, N> scaled(const Pack<T, N>& pack, float inverse, const Pack<W, N>& weight) {
  float values[N], factors[N];
  to_floats(pack, values);
  to_floats(weight, factors);
#pragma unroll
  for (int j = 0; j < N; ++j) values[j] = values[j] * inverse * factors[j];
  return from_floats<T>(values);
}

// WARPS: of a row, which they then fill exactly, and rows the blocks; 0: any row, in blocks of (threads, rows).
template <typename T, typename W, int N, int PACKS, int WARPS, bool ADD>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_in_registers(RmsNorm norm) {
  using Data = Pack<T, N>;
  using Weights = Pack<W, N>;
  // Weights of a thread that holds much of a row would not fit beside it; then the row hides their latency.
  constexpr bool kWeightsFirst = PACKS * sizeof(Weights) <= 64;
  constexpr int kSums = PACKS == 4 ? 2 : 1;  // one for each of two threads that would have two packs
  __shared__ alignas(16) float scratch[kMaxWarps][kSums];

  const int row_packs = norm.width / N;
  const int threads = WARPS > 0 ? WARPS * 32 : blockDim.x;
  const int thread = WARPS > 0 ? threadIdx.x % threads : threadIdx.x;
  const int row_in_block = WARPS > 0 ? threadIdx.x / threads : threadIdx.y;
  const int rows_in_block = WARPS > 0 ? blockDim.x / threads : blockDim.y;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * rows_in_block + row_in_block;
  const bool there = WARPS > 0 || row < norm.rows;
  const auto inside = [&](int i) { return WARPS > 0 || (there && thread + i * threads < row_packs); };
  const auto mine = [&](const Rows& rows) { return row_of<Data>(rows, row, sizeof(T)) + thread; };
  const Data* x = mine(norm.x);
  const Data* residual = ADD ? mine(norm.residual) : nullptr;
  const Weights* weight = static_cast<const Weights*>(norm.weight) + thread;
  wait_for_earlier_kernels_knowing(x, residual, weight);

  Data held[PACKS];
  Weights weights[kWeightsFirst ? PACKS : 1];
  float sums[kSums] = {};
  constexpr int kAtOnce = PACKS < 4 ? PACKS : PACKS == 8 && ADD ? 2 : 4;  // packs of a row in flight; more would spill
#pragma unroll
  for (int first = 0; first < PACKS; first += kAtOnce) {
    Data added[kAtOnce];
#pragma unroll
    for (int i = first; i < first + kAtOnce; ++i) {
      if (inside(i)) {
        held[i] = load(x + i * threads);
        if constexpr (ADD) added[i - first] = load(residual + i * threads);
        if constexpr (kWeightsFirst) weights[i] = load(weight + i * threads);
      }
    }
    // Loads stay in front of this, as they do in front of a barrier. Were the weights loaded as constants, the
    // assembler would ask for them where they are used.
    if (first == 0) let_next_kernel_start();
#pragma unroll
    for (int i = first; i < first + kAtOnce; ++i) {
      if (inside(i)) {
        if constexpr (ADD) {
          held[i] = add_rounded(held[i], added[i - first]);
          store(mine(norm.sum) + i * threads, held[i]);
        }
        sums[i % kSums] += squares(held[i]);
      }
    }
  }
  row_sum<WARPS, PACKS == 2>(sums, scratch, thread, row_in_block);
  const float sum = kSums == 2 ? sums[0] + sums[kSums - 1] : sums[0];
  const float inverse = rsqrtf(fmaf(sum, norm.inverse_width, norm.eps));
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    if (inside(i)) {
      if constexpr (!kWeightsFirst) weights[0] = load_shared(weight + i * threads);
      store(mine(norm.out) + i * threads, scaled(held[i], inverse, weights[kWeightsFirst ? i : 0]));
    }
  }
}

// The second read comes from the sum that this block has written (from x without a residual): it is in L2 still.
template <typename T, typename W, int N, bool ADD>
__global__ void __launch_bounds__(kMaxThreads) rms_norm_read_twice(RmsNorm norm) {
  using Data = Pack<T, N>;
  using Weights = Pack<W, N>;
  __shared__ float scratch[kMaxWarps][1];
  const int row_packs = norm.width / N;
  const int64_t row = blockIdx.x;
  const Data* x = row_of<Data>(norm.x, row, sizeof(T));
  const Data* again = ADD ? row_of<Data>(norm.sum, row, sizeof(T)) : x;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  float sum[1] = {0.0f};
#pragma unroll 4
  for (int place = threadIdx.x; place < row_packs; place += blockDim.x) {
    Data pack = load(x + place);
    if constexpr (ADD) {
      pack = add_rounded(pack, load(row_of<Data>(norm.residual, row, sizeof(T)) + place));
      store(row_of<Data>(norm.sum, row, sizeof(T)) + place, pack);
    }
    sum[0] += squares(pack);
  }
  row_sum(sum, scratch);
  const float inverse = rsqrtf(fmaf(sum[0], norm.inverse_width, norm.eps));
  const Weights* weight = static_cast<const Weights*>(norm.weight);
#pragma unroll 4
  for (int place = threadIdx.x; place < row_packs; place += blockDim.x) {
    store(row_of<Data>(norm.out, row, sizeof(T)) + place,
          scaled(load(again + place), inverse, load_shared(weight + place)));
  }
}

// Calls run with the number of warps that `threads` are, if there are kernels for it: the widths of common models.
template <int... WARPS, typename Run>
bool run_with_one_of(std::integer_sequence<int, WARPS...>, int threads, Run run) {
  return ((threads == WARPS * 32 && run(std::integral_constant<int, WARPS>())) || ...);
}

template <int PACKS, typename Run>
bool run_with(int threads, Run run) {
  if constexpr (PACKS == 1) return run_with_one_of(std::integer_sequence<int, 2, 3, 4, 6, 8, 10>(), threads, run);
  if constexpr (PACKS == 2)
    return run_with_one_of(std::integer_sequence<int, 1, 2, 4, 6, 8, 10, 12, 14, 16>(), threads, run);
  if constexpr (PACKS == 4)
    return run_with_one_of(std::integer_sequence<int, 3, 4, 5, 6, 7, 8, 10, 16>(), threads, run);
  return false;
}

template <typename T, typename W, int N, int PACKS, bool ADD>
void launch_in_registers(const RmsNorm& norm, RowShape shape, cudaStream_t stream) {
  const int row_packs = norm.width / N, needed = (row_packs + PACKS - 1) / PACKS;
  constexpr int kStep = PACKS == 2 ? 64 : 32;  // for halves of whole warps
  int threads = 1;
  while (threads < 32 && threads < needed) threads *= 2;
  if (needed > 32) threads = (needed + kStep - 1) / kStep * kStep;
  int rows_per_block = std::clamp(shape.rows_per_block, 1, kMaxThreads / threads);
  if (threads < 32) rows_per_block = (rows_per_block * threads + 31) / 32 * 32 / threads;  // a block is whole warps
  const auto run = [&](auto warps) {
    if (warps > 0) {
      while (norm.rows % rows_per_block != 0) rows_per_block /= 2;
    }
    const int64_t blocks = (norm.rows + rows_per_block - 1) / rows_per_block;
    launch(rms_norm_in_registers<T, W, N, PACKS, warps, ADD>, dim3(static_cast<unsigned>(blocks)),
           warps > 0 ? dim3(threads * rows_per_block) : dim3(threads, rows_per_block), stream, Overlap::kBehindOurs, 0,
           norm);
    return true;
  };
  if (row_packs == PACKS * threads && run_with < N == kFullPack<T> && !(ADD && PACKS == 4) ? PACKS : 0 > (threads, run))
    return;
  run(std::integral_constant<int, 0>());
}

template <typename T, typename W, int N, bool ADD>
void launch_shaped(const RmsNorm& norm, RowShape shape, cudaStream_t stream) {
  const int row_packs = norm.width / N;
  const auto takes = [&](int packs) { return shape.packs <= packs && row_packs <= packs * kMaxThreads; };
  if constexpr (N == kFullPack<T>) {
    if (takes(1)) return launch_in_registers<T, W, N, 1, ADD>(norm, shape, stream);
    if (takes(2)) return launch_in_registers<T, W, N, 2, ADD>(norm, shape, stream);
    if (takes(4)) return launch_in_registers<T, W, N, 4, ADD>(norm, shape, stream);
  }
  if (takes(8)) return launch_in_registers<T, W, N, 8, ADD>(norm, shape, stream);
  launch(rms_norm_read_twice<T, W, N, ADD>, dim3(static_cast<unsigned>(norm.rows)), dim3(kMaxThreads), stream,
         Overlap::kBehindOurs, 0, norm);
}

template <typename T, typename W, int N>
void launch_packed(const RmsNorm& norm, RowShape shape, cudaStream_t stream) {
  if (norm.residual.data != nullptr) return launch_shaped<T, W, N, true>(norm, shape, stream);
  launch_shaped<T, W, N, false>(norm, shape, stream);
}

template <typename T, typename W>
void launch_typed(const RmsNorm& norm, RowShape shape, cudaStream_t stream) {
  const int elements = pack_elements<T, W>(norm.width, norm.weight, {norm.x, norm.residual, norm.out, norm.sum});
  if (shape.packs == 0) {
    shape = forward_shape(norm.width / elements, elements == kFullPack<T>, norm.rows, norm.residual.data != nullptr);
  }
  if (elements == kFullPack<T>) return launch_packed<T, W, kFullPack<T>>(norm, shape, stream);
  if constexpr (sizeof(T) == 2) {
    if (elements == 4) return launch_packed<T, W, 4>(norm, shape, stream);
  }
  if (elements == 2) return launch_packed<T, W, 2>(norm, shape, stream);
  launch_packed<T, W, 1>(norm, shape, stream);
}

}  // namespace

RowShape forward_shape(int row_packs, bool full_packs, int64_t rows, bool add) {
  struct Entry {
    int row_packs;
    RowShape shapes[2][3];  // alone and with an addition; few, many and very many rows
  };
  static constexpr Entry kTable[] = {
#include "norm_shapes.inc"
  };
  constexpr int kMany = 512, kVeryMany = 4096;  // half way between the 256, 1024 and 16384 rows that were measured
  if (!full_packs) return {8, 1};
  for (const Entry& entry : kTable) {
    if (row_packs <= entry.row_packs) return entry.shapes[add][(rows >= kMany) + (rows >= kVeryMany)];
  }
  return {8, 1};
}

void launch_rms_norm(const RmsNorm& norm, RowShape shape, cudaStream_t stream) {
  if (norm.rows == 0 || norm.width == 0) return;  // an empty grid is a launch error
  with_types(norm.dtype, norm.weight_dtype, [&](auto data, auto weight) {
    launch_typed<typename decltype(data)::type, typename decltype(weight)::type>(norm, shape, stream);
  });
}

void launch_rms_norm(const RmsNorm& norm, cudaStream_t stream) {
  launch_rms_norm(norm, RowShape{}, stream);
}

}  // namespace rooflight
