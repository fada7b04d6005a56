// Gradients of RMSNorm. With r = 1 / sqrt(mean(x^2) + eps), n = x r and g = grad_out * weight:
//
//   grad_x = r (g - n mean(g n)) [+ grad_residual],   grad_weight = sum over rows of grad_out * n
//
// Nothing is kept from the forward pass but x: r comes out of the row that has to be read anyway. Each block walks
// every gridDim.x-th row, asks for the next row before it sums the present one, and keeps its share of the weight
// gradient in FP32 registers. The shares are added by a second kernel in a fixed order, so the weight gradient has the
// same bits in every run on the same kind of card; no atomics.
#include <algorithm>

#include "common/bulk.cuh"
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
constexpr int kBlockThreads = PACKS <= 2 ? 256 : 512;
template <int PACKS>
constexpr int kBlocks = PACKS <= 2 ? 3 : 1;

// One thread's part of a row.
template <typename T, int N, int PACKS, bool ADD>
struct RowPart {
  Pack<T, N> x[PACKS], grad[PACKS], residual[ADD ? PACKS : 1];

  __device__ __forceinline__ void load(const RmsNormBackward& norm, int64_t row, int row_packs) {
    using Data = Pack<T, N>;
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place < row_packs) {
        x[i] = load_once(row_of<Data>(norm.x, row, sizeof(T)) + place);
        grad[i] = load_once(row_of<Data>(norm.grad_out, row, sizeof(T)) + place);
        if constexpr (ADD) residual[i] = load_once(row_of<Data>(norm.grad_residual, row, sizeof(T)) + place);
      }
    }
  }

  // From shared memory: x, the gradient and the residual's gradient one after the other.
  __device__ __forceinline__ void read(const Pack<T, N>* stage, int row_packs) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place < row_packs) {
        x[i] = stage[place];
        grad[i] = stage[place + row_packs];
        if constexpr (ADD) residual[i] = stage[place + 2 * row_packs];
      }
    }
  }
};

// Adds x^2 and x * grad * weight of one pack to sums. Fused operations are written out, here and below, so that every
// kernel rounds alike: a row has the same bits whichever of them its batch takes.
template <typename T, typename W, int N>
__device__ __forceinline__ void add_to_sums(float (&sums)[2], const Pack<T, N>& x, const Pack<T, N>& grad,
                                            const Pack<W, N>& weight) {
  float values[N], gradients[N], factors[N];
  to_floats(x, values);
  to_floats(grad, gradients);
  to_floats(weight, factors);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    sums[0] = fmaf(values[j], values[j], sums[0]);
    sums[1] = fmaf(__fmul_rn(values[j], gradients[j]), factors[j], sums[1]);
  }
}

struct RowScale {
  float inverse;     // r
  float correction;  // r^2 mean(g n) / r, the factor of x in grad_x
};

__device__ __forceinline__ RowScale scale_of(const float (&sums)[2], int width, float eps) {
  const float inverse = __frsqrt_rn(sums[0] / width + eps);  // rsqrtf is off by up to two units: too much for FP32
  return {inverse, inverse * inverse * inverse * (sums[1] / width)};
}

// grad_x of one pack; the share of the weight gradient is added to `share`.
template <typename T, typename W, int N, bool ADD>
__device__ __forceinline__ Pack<T, N> gradient(const Pack<T, N>& x, const Pack<T, N>& grad, const Pack<W, N>& weight,
                                               const Pack<T, N>& residual, RowScale scale, float (&share)[N]) {
  float values[N], gradients[N], factors[N], more[N];
  to_floats(x, values);
  to_floats(grad, gradients);
  to_floats(weight, factors);
  if constexpr (ADD) to_floats(residual, more);
#pragma unroll
  for (int j = 0; j < N; ++j) {
    share[j] = fmaf(__fmul_rn(values[j], gradients[j]), scale.inverse, share[j]);
    const float away = __fmul_rn(values[j], -scale.correction);
    const float result = fmaf(__fmul_rn(gradients[j], factors[j]), scale.inverse, away);
    values[j] = ADD ? __fadd_rn(result, more[j]) : result;
  }
  return from_floats<T>(values);
}

// What a block keeps over all its rows: the weights, where they fit, and its share of their gradient.
template <typename T, typename W, int N, int PACKS, bool ADD>
struct BlockShare {
  using Weights = Pack<W, N>;
  static constexpr bool kHeld = PACKS * sizeof(Weights) <= 32;  // else asked for again with each row, from L1
  Weights held[kHeld ? PACKS : 1];
  float share[PACKS][N];

  static __device__ __forceinline__ Weights ask(const RmsNormBackward& norm, int place) {
    return load_shared(static_cast<const Weights*>(norm.weight) + place);
  }

  __device__ __forceinline__ Weights weights(const RmsNormBackward& norm, int i, int place) const {
    if constexpr (kHeld) return held[i];
    return ask(norm, place);
  }

  __device__ __forceinline__ void start(const RmsNormBackward& norm, int row_packs) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if constexpr (kHeld) {
        if (place < row_packs) held[i] = ask(norm, place);
      }
#pragma unroll
      for (int j = 0; j < N; ++j) share[i][j] = 0.0f;
    }
  }

  __device__ __forceinline__ RowScale sum(const RmsNormBackward& norm, const RowPart<T, N, PACKS, ADD>& part,
                                          int row_packs, float (*scratch)[2]) const {
    float sums[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place < row_packs) add_to_sums(sums, part.x[i], part.grad[i], weights(norm, i, place));
    }
    row_sum(sums, scratch);
    return scale_of(sums, norm.width, norm.eps);
  }

  __device__ __forceinline__ void finish_row(const RmsNormBackward& norm, int64_t row,
                                             const RowPart<T, N, PACKS, ADD>& part, RowScale scale, int row_packs) {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place < row_packs) {
        store(row_of<Pack<T, N>>(norm.grad_x, row, sizeof(T)) + place,
              gradient<T, W, N, ADD>(part.x[i], part.grad[i], weights(norm, i, place), part.residual[ADD ? i : 0],
                                     scale, share[i]));
      }
    }
  }

  // To the block's row of partial, or, where there is one block, to where it belongs.
  __device__ __forceinline__ void write(const RmsNormBackward& norm, int row_packs) const {
#pragma unroll
    for (int i = 0; i < PACKS; ++i) {
      const int place = threadIdx.x + i * blockDim.x;
      if (place >= row_packs) continue;
      float* to = norm.partial + static_cast<int64_t>(blockIdx.x) * norm.width + place * N;
      W* alone = static_cast<W*>(norm.grad_weight) + place * N;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        if (norm.partial_rows == 1) {
          alone[j] = static_cast<W>(share[i][j]);
        } else {
          to[j] = share[i][j];
        }
      }
    }
  }
};

constexpr int kMostStages = 8;  // rows in flight in each block

template <typename T, typename W, int N, int PACKS, bool ADD>
__global__ void __launch_bounds__(kBlockThreads<PACKS>, kBlocks<PACKS>)
    backward_streamed(RmsNormBackward norm, int stages) {
#if __CUDA_ARCH__ >= 900
  using Data = Pack<T, N>;
  constexpr int kTensors = ADD ? 3 : 2;
  extern __shared__ __align__(128) unsigned char ring_bytes[];
  __shared__ uint64_t arrived[kMostStages];
  __shared__ float scratch[2][kMaxWarps][2];  // two, so that one barrier a row is enough
  Data* ring = reinterpret_cast<Data*>(ring_bytes);
  const int row_packs = norm.width / N;

  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) init_barrier(&arrived[stage]);
  }
  __syncthreads();
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const auto ask_for = [&](int64_t row, int stage) {
    const unsigned bytes = row_packs * sizeof(Data);
    Data* to = ring + static_cast<int64_t>(stage) * kTensors * row_packs;
    expect_bytes(&arrived[stage], kTensors * bytes);
    copy_bulk(to, row_of<Data>(norm.x, row, sizeof(T)), bytes, &arrived[stage]);
    copy_bulk(to + row_packs, row_of<Data>(norm.grad_out, row, sizeof(T)), bytes, &arrived[stage]);
    if constexpr (ADD) {
      copy_bulk(to + 2 * row_packs, row_of<Data>(norm.grad_residual, row, sizeof(T)), bytes, &arrived[stage]);
    }
  };
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < stages; ++stage) {
      const int64_t row = blockIdx.x + static_cast<int64_t>(stage) * gridDim.x;
      if (row < norm.rows) ask_for(row, stage);
    }
  }
  BlockShare<T, W, N, PACKS, ADD> block;
  block.start(norm, row_packs);
  int stage = 0, turn = 0;
  unsigned parity = 0;
  for (int64_t row = blockIdx.x; row < norm.rows; row += gridDim.x) {
    wait_for_bytes(&arrived[stage], parity);
    RowPart<T, N, PACKS, ADD> part;
    part.read(ring + static_cast<int64_t>(stage) * kTensors * row_packs, row_packs);
    const RowScale scale = block.sum(norm, part, row_packs, scratch[turn]);
    if (blockDim.x <= 32) __syncwarp();
    // The sum had a barrier in it: every thread has read its part, so the place is free for a later row.
    const int64_t later = row + static_cast<int64_t>(stages) * gridDim.x;
    if (threadIdx.x == 0 && later < norm.rows) ask_for(later, stage);
    block.finish_row(norm, row, part, scale, row_packs);
    turn ^= 1;
    if (++stage == stages) {
      stage = 0;
      parity ^= 1;
    }
  }
  block.write(norm, row_packs);
#endif
}

template <typename T, typename W, int N, int PACKS, bool ADD>
__global__ void __launch_bounds__(kBlockThreads<PACKS>, kBlocks<PACKS>) backward_in_registers(RmsNormBackward norm) {
  constexpr bool kAskAhead = PACKS * N * sizeof(T) <= 16;  // a second row beside the first, where registers allow
  __shared__ float scratch[2][kMaxWarps][2];
  const int row_packs = norm.width / N;
  wait_for_earlier_kernels();
  let_next_kernel_start();

  BlockShare<T, W, N, PACKS, ADD> block;
  block.start(norm, row_packs);
  RowPart<T, N, PACKS, ADD> part, ahead;
  int64_t row = blockIdx.x;
  part.load(norm, row, row_packs);
  for (int turn = 0; row < norm.rows; turn ^= 1) {
    const int64_t next = row + gridDim.x;
    if constexpr (kAskAhead) {
      if (next < norm.rows) ahead.load(norm, next, row_packs);
    }
    const RowScale scale = block.sum(norm, part, row_packs, scratch[turn]);
    block.finish_row(norm, row, part, scale, row_packs);
    row = next;
    if constexpr (kAskAhead) {
      part = ahead;
    } else if (row < norm.rows) {
      part.load(norm, row, row_packs);
    }
  }
  block.write(norm, row_packs);
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
      add_to_sums(sums, load_once(x + place), load_once(grad + place), load_shared(weight + place));
    }
    row_sum(sums, scratch[turn]);
    const RowScale scale = scale_of(sums, norm.width, norm.eps);
    for (int place = threadIdx.x; place < row_packs; place += blockDim.x) {
      float share[N];
#pragma unroll
      for (int j = 0; j < N; ++j) share[j] = partial[place * N + j];
      Data residual;
      if constexpr (ADD) residual = load_once(row_of<Data>(norm.grad_residual, row, sizeof(T)) + place);
      store(row_of<Data>(norm.grad_x, row, sizeof(T)) + place,
            gradient<T, W, N, ADD>(load_once(x + place), load_once(grad + place), load_shared(weight + place), residual,
                                   scale, share));
#pragma unroll
      for (int j = 0; j < N; ++j) partial[place * N + j] = share[j];
    }
  }
}

constexpr int kColumns = 8, kLanes = 128;  // of a block that adds shares: 32 bytes, a whole sector, of each row

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
#pragma unroll 4
    for (int row = lane; row < norm.partial_rows; row += kLanes) {
      sum += norm.partial[static_cast<int64_t>(row) * norm.width + column];
    }
  }
  sums[within][lane] = sum;
  __syncthreads();
  const int warp = threadIdx.x / 32, thread = threadIdx.x % 32;
  if (warp < kColumns && blockIdx.x * kColumns + warp < norm.width) {
    float total = 0.0f;
#pragma unroll
    for (int i = thread; i < kLanes; i += 32) total += sums[warp][i];
    total = warp_sum(total);
    if (thread == 0) static_cast<W*>(norm.grad_weight)[blockIdx.x * kColumns + warp] = static_cast<W>(total);
  }
}

constexpr bool kOverlap = true;  // programmatic dependent launch, also between the two kernels here

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

template <typename T, typename W, int N, int PACKS, bool ADD>
void launch_in_block(const RmsNormBackward& norm, BlockPlan plan, cudaStream_t stream) {
  const dim3 grid(norm.partial_rows), block(plan.threads);
  if constexpr (N == kFullPack<T>) {
    constexpr int kForRings = 200 * 1024;  // bytes of shared memory of a multiprocessor, of 227 KiB
    const int stage_bytes = (ADD ? 3 : 2) * norm.width * static_cast<int>(sizeof(T));
    const int stages = std::min(kForRings / plan.blocks / stage_bytes, kMostStages);
    // A ring pays once it turns; with fewer rows it only puts a copy between memory and registers.
    if (card().major >= 9 && stages >= 2 && norm.rows >= 4 * norm.partial_rows) {
      const auto kernel = backward_streamed<T, W, N, PACKS, ADD>;
      launch(kernel, grid, block, stream, kOverlap, stages * stage_bytes, norm, stages);
      return;
    }
  }
  launch(backward_in_registers<T, W, N, PACKS, ADD>, grid, block, stream, kOverlap, 0, norm);
}

template <typename T, typename W, int N, bool ADD>
void launch_shaped(const RmsNormBackward& norm, cudaStream_t stream) {
  const BlockPlan plan = plan_block(norm.width / N);
  switch (plan.packs) {
    case 1:
      launch_in_block<T, W, N, 1, ADD>(norm, plan, stream);
      break;
    case 2:
      launch_in_block<T, W, N, 2, ADD>(norm, plan, stream);
      break;
    case 4:
      launch_in_block<T, W, N, 4, ADD>(norm, plan, stream);
      break;
    default:
      launch(backward_read_twice<T, W, N, ADD>, dim3(norm.partial_rows), dim3(kWideThreads), stream, kOverlap, 0, norm);
  }
  if (plan.packs > 0 && norm.partial_rows == 1) return;  // the one block wrote the weight gradient itself
  const dim3 grid((norm.width + kColumns - 1) / kColumns);
  launch(add_shares<W>, grid, dim3(kColumns * kLanes), stream, kOverlap, 0, norm);
}

template <typename T, typename W, int N>
void launch_packed(const RmsNormBackward& norm, cudaStream_t stream) {
  if (norm.grad_residual.data != nullptr) return launch_shaped<T, W, N, true>(norm, stream);
  launch_shaped<T, W, N, false>(norm, stream);
}

template <typename T, typename W>
void launch_typed(const RmsNormBackward& norm, cudaStream_t stream) {
  const int elements =
      pack_elements<T, W>(norm.rows, norm.width, norm.weight, {norm.x, norm.grad_out, norm.grad_residual, norm.grad_x});
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
  // Blocks enough to fill the multiprocessors; but each writes a row of FP32 that is read again, so a small batch gives
  // each four rows at least, and wide rows do not get more than 64 MiB of scratch. Two rows are best left to one block.
  if (rows <= 2) return 1;
  const int64_t multiprocessors = card().multiprocessors;
  const int64_t full = multiprocessors * plan_block((width * size_of(dtype) + 15) / 16).blocks;
  const int64_t busy = std::max(multiprocessors, rows / 4);
  const int64_t in_scratch = std::max<int64_t>(1, (64 << 20) / (static_cast<int64_t>(width) * 4));
  return static_cast<int>(std::min({rows, full, busy, in_scratch}));
}

void launch_rms_norm_backward(const RmsNormBackward& norm, cudaStream_t stream) {
  if (norm.rows == 0 || norm.width == 0) return;
  with_types(norm.dtype, norm.weight_dtype, [&](auto data, auto weight) {
    launch_typed<typename decltype(data)::type, typename decltype(weight)::type>(norm, stream);
  });
}

}  // namespace rooflight
