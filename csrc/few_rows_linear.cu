// Few rows (at most 8) times a large weight, with the norm before and the epilogue after it in the same kernel.
//
//   y = f(x) @ weight^T + bias;   f: nothing or RMSNorm;   then store, add to out, or silu(gate) * up
//
// Bound by the weight's way from memory. A block takes tiles of 16 (or 8) weight rows over all of K; bulk copies bring
// them into shared memory, asked for before earlier kernels have ended, since weights never depend on them. So the
// stream goes on across launches: what is on its way costs no registers, and a block leaves room for the next kernel's.
// The arithmetic is done by the tensor cores with the weight as the left operand and the rows of x as its 8 columns: on
// CUDA cores the arithmetic takes two thirds as long as the stream (docs/lab). Which k stands where in a tile is
// free as long as both operands agree, so that a lane's 16 bytes are two tiles' worth.
// A row's sum of squares is applied at the end, where it costs no wait of its own.
#include <type_traits>

#include "common/bulk.cuh"
#include "common/launch.cuh"
#include "common/mma.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"
#include "few_rows_linear.h"

namespace rooflight {
namespace {

constexpr int kStepWidth = 32;  // k of one 16-byte load of each of four lanes
constexpr int kTileRows = 16;
constexpr int kWarps = 8;
constexpr int kPadding = 64;          // bytes between rows of a tile: neighbouring rows fall into other banks
constexpr int kOwnShared = 6 * 1024;  // bytes of a block beside its rows
constexpr int kMostBlocks = 4;        // of a multiprocessor, by their registers
constexpr int kWidest = 4096;
constexpr int kMostSteps = kWidest / kStepWidth / kWarps, kMostSums = kWidest / 8 / 32;

// From the sums of squares of a row's parts.
__device__ __forceinline__ float inverse_norm(const float (&squares)[kMostSums], const FusedLinear& p) {
  float sum = 0.0f;
  for (int i = 0; i < (p.in_features / 8 + 31) / 32; ++i) sum += squares[i];
  return rsqrtf(fmaf(sum, p.inverse_width, p.eps));
}

// HALVES: 16 rows of the weight a tile, or 8 (one half; the other half of the matrix tile is zero).
template <typename T, int HALVES, Prologue PROLOGUE, Epilogue EPILOGUE>
__global__ void __launch_bounds__(kWarps * 32, PROLOGUE == Prologue::kNone ? 2 : 4) few_rows_linear(FusedLinear p) {
  constexpr bool kNorm = PROLOGUE == Prologue::kRmsNorm, kSwiglu = EPILOGUE == Epilogue::kSwiglu;
  // The range of FP16 may not hold a row that is not normalised yet: there the sums are known before the product.
  constexpr bool kNormFirst = kNorm && std::is_same_v<T, __half>;
  constexpr int kRows = 8 * HALVES;           // of the weight in a tile
  constexpr int kTile = kSwiglu ? 8 : kRows;  // outputs of a tile
  using Pack8 = Pack<T, 8>;
  extern __shared__ __align__(128) char storage[];
  __shared__ float partial[kWarps][kTileRows][kFewRows + 1];
  __shared__ float squares[kFewRows][kMostSums];
  __shared__ uint64_t barriers[2];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int outputs = kSwiglu ? p.out_features / 2 : p.out_features;
  const int tiles = (outputs + kTile - 1) / kTile, steps = p.in_features / kStepWidth;
  const int row_bytes = p.in_features * static_cast<int>(sizeof(T)), pitch = row_bytes + kPadding;
  const int blocks = gridDim.x, rows = static_cast<int>(p.rows);
  const bool twice = blocks < tiles;  // memory for two tiles: one is asked for while the other is multiplied
  char* const ring = storage + (kNorm ? rows * pitch : 0);  // behind the rows of x

  // The first warp asks for a tile, a row a lane. In place of rows beyond the weight's it gets the last one.
  const auto ask = [&](int tile, int stage) {
    if (lane == 0) expect_bytes(&barriers[stage], kRows * row_bytes);
    __syncwarp();
    if (lane < kRows) {
      const int wanted = tile * kTile + (kSwiglu ? lane % 8 : lane), there = wanted < outputs ? wanted : outputs - 1;
      const int64_t row = there + (kSwiglu && lane >= 8 ? outputs : 0);
      copy_bulk(ring + (stage * kRows + lane) * pitch, static_cast<const T*>(p.weight) + row * p.in_features, row_bytes,
                &barriers[stage]);
    }
  };
  int tile = blockIdx.x;
  if (warp == 0) {
    if (lane == 0) {
      init_barrier(&barriers[0]);
      init_barrier(&barriers[1]);
      fence_barriers();
    }
    __syncwarp();
    ask(tile, 0);
    if (twice && tile + blocks < tiles) ask(tile + blocks, 1);
  }
  let_next_kernel_start();

  // x: without a norm each lane has what it multiplies; with one, a row's sum needs all of it, so that the block reads
  // it together, weights it by the norm's weights and leaves it in shared memory.
  uint4 column[kNorm ? 1 : kMostSteps];
  if constexpr (!kNorm) {
    __syncthreads();  // the barriers are there
    wait_for_earlier_kernels();
#pragma unroll
    for (int i = 0; i < kMostSteps; ++i) {
      const int step = warp + i * kWarps;
      const T* from = static_cast<const T*>(p.x) + group * p.x_stride + step * kStepWidth + quad * 8;
      if (step < steps) column[i] = group < rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
    }
  } else {
    // Packs of a row, with some that are not there so that a warp never has two rows.
    const int packs = p.in_features / 8, sums = (packs + 31) / 32, items = rows * sums * 32;
    const auto scale_of = [&](int pack) {
      return pack < packs ? load(static_cast<const Pack8*>(p.norm_weight) + pack) : Pack8{};
    };
    const bool same = kWarps % sums == 0;  // a thread's pack has the same place in every row that it comes to
    const Pack8 scale = scale_of(threadIdx.x % (sums * 32));  // does not depend on earlier kernels
    wait_for_earlier_kernels();
    const auto read = [&](int item) {
      const int row = item / (sums * 32), pack = item % (sums * 32);
      const Pack8* from = reinterpret_cast<const Pack8*>(static_cast<const T*>(p.x) + row * p.x_stride);
      return item < items && pack < packs ? load(from + pack) : Pack8{};
    };
    constexpr int kAtOnce = 4;
    for (int first = threadIdx.x; first < items; first += kAtOnce * kWarps * 32) {
      Pack8 held[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) held[i] = read(first + i * kWarps * 32);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int item = first + i * kWarps * 32, row = item / (sums * 32), pack = item % (sums * 32);
        if (item >= items) continue;  // all lanes of a warp alike
        float values[8], factors[8], square = 0.0f;
        to_floats(held[i], values);
        to_floats(same ? scale : scale_of(pack), factors);
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          square = fmaf(values[j], values[j], square);
          if (!kNormFirst) values[j] *= factors[j];
        }
        if (pack < packs) store(reinterpret_cast<Pack8*>(storage + row * pitch) + pack, from_floats<T>(values));
        square = warp_sum(square);
        if (lane == 0) squares[row][pack / 32] = square;
      }
    }
    __syncthreads();
    if constexpr (kNormFirst) {
      for (int item = threadIdx.x; item < items; item += kWarps * 32) {
        const int row = item / (sums * 32), pack = item % (sums * 32);
        if (pack >= packs) continue;
        Pack8* at = reinterpret_cast<Pack8*>(storage + row * pitch) + pack;
        const float inverse = inverse_norm(squares[row], p);
        float values[8], factors[8];
        to_floats(load(at), values);
        to_floats(scale_of(pack), factors);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] *= inverse * factors[j];
        store(at, from_floats<T>(values));
      }
      __syncthreads();
    }
  }

  for (int turn = 0; tile < tiles; ++turn, tile += blocks) {
    const int stage = twice ? turn % 2 : 0;
    wait_barrier(&barriers[stage], twice ? turn / 2 % 2 : 0);
    float even[4] = {}, odd[4] = {};
    const auto add_step = [&](int step, const uint4& x) {
      const char* at = ring + (stage * kRows + group) * pitch + (step * kStepWidth + quad * 8) * sizeof(T);
      const uint4 low = *reinterpret_cast<const uint4*>(at);
      const uint4 high = HALVES == 2 ? *reinterpret_cast<const uint4*>(at + 8 * pitch) : uint4{0, 0, 0, 0};
      const unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
      const unsigned b0[2] = {x.x, x.y}, b1[2] = {x.z, x.w};
      multiply(even, a0, b0, T());
      multiply(odd, a1, b1, T());
    };
    if constexpr (kNorm) {
#pragma unroll 2
      for (int step = warp; step < steps; step += kWarps) {
        const char* at = storage + group * pitch + (step * kStepWidth + quad * 8) * sizeof(T);
        add_step(step, group < rows ? *reinterpret_cast<const uint4*>(at) : uint4{0, 0, 0, 0});
      }
    } else {
#pragma unroll
      for (int i = 0; i < kMostSteps; ++i) {
        if (warp + i * kWarps < steps) add_step(warp + i * kWarps, column[i]);
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j / 2 < HALVES) partial[warp][group + 8 * (j / 2)][2 * quad + j % 2] = even[j] + odd[j];
    }
    __syncthreads();
    if (warp == 0 && tile + 2 * blocks < tiles) ask(tile + 2 * blocks, stage);
    // One thread an output: neighbouring threads neighbouring outputs of one row of x.
    for (int place = threadIdx.x; place < kTile * rows; place += kWarps * 32) {
      const int row = place / kTile, output = place % kTile, feature = tile * kTile + output;
      if (feature < outputs) {
        const float factor = kNorm && !kNormFirst ? inverse_norm(squares[row], p) : 1.0f;
        const auto total = [&](int from, int of) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sum += partial[w][from][row];
          sum *= factor;
          return p.bias != nullptr ? sum + static_cast<float>(static_cast<const T*>(p.bias)[of]) : sum;
        };
        T* out = static_cast<T*>(p.out) + row * p.out_stride + feature;
        float value = total(output, feature);
        if constexpr (kSwiglu) value = value / (1.0f + __expf(-value)) * total(output + 8, feature + outputs);
        if constexpr (EPILOGUE == Epilogue::kAdd) value += static_cast<float>(*out);
        *out = static_cast<T>(value);
      }
    }
    if (twice) __syncthreads();  // the partial sums have been read
  }
}

template <typename T, int HALVES, Prologue PROLOGUE, Epilogue EPILOGUE>
void launch_shaped(const FusedLinear& p, cudaStream_t stream) {
  constexpr int kTile = EPILOGUE == Epilogue::kSwiglu ? 8 : 8 * HALVES;
  const int outputs = EPILOGUE == Epilogue::kSwiglu ? p.out_features / 2 : p.out_features;
  const int tiles = (outputs + kTile - 1) / kTile, places = card().multiprocessors;
  const int row = p.in_features * static_cast<int>(sizeof(T)) + kPadding;
  const auto bytes = [&](int stages) {
    return (8 * HALVES * stages + (PROLOGUE == Prologue::kRmsNorm ? static_cast<int>(p.rows) : 0)) * row;
  };
  // One tile a block while all blocks run at once; else as many blocks as do with memory for two tiles each.
  const auto at_once = [&](int stages) {
    const int fitting = card().shared / (bytes(stages) + kOwnShared);
    return fitting < kMostBlocks ? fitting : kMostBlocks;
  };
  const bool single = tiles <= places * at_once(1);
  launch(few_rows_linear<T, HALVES, PROLOGUE, EPILOGUE>, dim3(single ? tiles : places * at_once(2)), dim3(kWarps * 32),
         stream, Overlap::kBehindOurs, bytes(single ? 1 : 2), p);
}

// 8-row tiles where 16-row ones would leave multiprocessors without work, or take too much memory.
bool takes_small_tiles(const FusedLinear& p) {
  return p.out_features < 16 * card().multiprocessors || p.in_features > 2048;
}

template <typename T, Prologue PROLOGUE, Epilogue EPILOGUE>
void launch_for_width(const FusedLinear& p, cudaStream_t stream) {
  if constexpr (EPILOGUE != Epilogue::kSwiglu) {
    if (takes_small_tiles(p)) {
      return launch_shaped<T, 1, PROLOGUE, EPILOGUE>(p, stream);
    }
  }
  launch_shaped<T, 2, PROLOGUE, EPILOGUE>(p, stream);
}

template <typename T>
void launch_typed(const FusedLinear& p, cudaStream_t stream) {
  if (p.prologue == Prologue::kRmsNorm) {
    if (p.epilogue == Epilogue::kSwiglu) return launch_for_width<T, Prologue::kRmsNorm, Epilogue::kSwiglu>(p, stream);
    return launch_for_width<T, Prologue::kRmsNorm, Epilogue::kStore>(p, stream);
  }
  if (p.epilogue == Epilogue::kAdd) return launch_for_width<T, Prologue::kNone, Epilogue::kAdd>(p, stream);
  launch_for_width<T, Prologue::kNone, Epilogue::kStore>(p, stream);
}

}  // namespace

bool takes_few_rows(const FusedLinear& p) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  // Two tiles, and x where there is a norm, must fit a block.
  const bool small = p.epilogue != Epilogue::kSwiglu && takes_small_tiles(p);
  const int rows = 2 * (small ? 8 : 16) + (p.prologue == Prologue::kRmsNorm ? kFewRows : 0);
  const int bytes = rows * (p.in_features * 2 + kPadding) + kOwnShared;
  return p.dtype != Dtype::kFloat32 && p.rows >= 1 && p.rows <= kFewRows && p.in_features % kStepWidth == 0 &&
         p.in_features >= kStepWidth && p.in_features <= kWidest && bytes <= card().block_shared &&
         p.out_features > 0 && p.x_stride % 8 == 0 && p.contiguous && aligned(p.weight) && aligned(p.x) &&
         aligned(p.norm_weight) && card().major >= 9;
}

void launch_few_rows_linear(const FusedLinear& p, cudaStream_t stream) {
  if (p.dtype == Dtype::kFloat16) return launch_typed<__half>(p, stream);
  launch_typed<__nv_bfloat16>(p, stream);
}

}  // namespace rooflight
