// Few rows (at most 8) times a large weight, with the norm before and the epilogue after it in the same kernel.
//
//   y = f(x) @ weight^T + bias;   f: nothing or RMSNorm;   then store, add to out, or silu(gate) * up
//
// Bound by the weight's way from memory. A block takes tiles of 16 (or 8) weight rows over all of K; bulk copies bring
// them into shared memory, asked for before earlier kernels have ended, since weights never depend on them. So the
// stream goes on across launches: what is on its way costs no registers, and a block leaves room for the next kernel's.
// The arithmetic is done by the tensor cores with the weight as the left operand and the rows of x as its 8 columns: on
// CUDA cores the conversions alone would take half as long as the stream (docs/lab). Which k stands where in a tile is
// free as long as both operands agree, so that a lane's 16 bytes are two tiles' worth.
// The weighted sums of a row's squares ride along and are applied at the end, where they cost no wait of their own.
#include <type_traits>

#include "common/bulk.cuh"
#include "common/launch.cuh"
#include "common/pack.cuh"
#include "few_rows_linear.h"

namespace rooflight {
namespace {

constexpr int kStepWidth = 32;  // k of one 16-byte load of each of four lanes
constexpr int kTileRows = 16;
constexpr int kWarps = 8;
constexpr int kMostSteps = 16;           // of a warp: in_features 4096
constexpr int kPadding = 64;             // bytes between rows of a tile: neighbouring rows fall into other banks
constexpr int kMostShared = 100 * 1024;  // of a block, so that two fit a multiprocessor

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], __nv_bfloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void multiply(float (&c)[4], const unsigned (&a)[4], const unsigned (&b)[2], __half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// HALVES: 16 rows of the weight a tile, or 8 (one half; the other half of the matrix tile is zero). STEPS: of a warp.
template <typename T, int STEPS, int HALVES, Prologue PROLOGUE, Epilogue EPILOGUE>
__global__ void __launch_bounds__(kWarps * 32, STEPS <= 4 || (STEPS <= 8 && PROLOGUE == Prologue::kNone) ? 2 : 1)
    few_rows_linear(FewRowsLinear p) {
  constexpr bool kNorm = PROLOGUE == Prologue::kRmsNorm;
  constexpr bool kSwiglu = EPILOGUE == Epilogue::kSwiglu;
  constexpr int kRows = 8 * HALVES;           // of the weight in a tile
  constexpr int kTile = kSwiglu ? 8 : kRows;  // outputs of a tile
  extern __shared__ __align__(128) char ring[];
  __shared__ float partial[kWarps][kTileRows][kFewRows + 1];
  __shared__ float squares[kWarps][kFewRows];
  __shared__ uint64_t barriers[2];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int outputs = kSwiglu ? p.out_features / 2 : p.out_features;
  const int tiles = (outputs + kTile - 1) / kTile, steps = p.in_features / kStepWidth;
  const int row_bytes = p.in_features * static_cast<int>(sizeof(T)), pitch = row_bytes + kPadding;
  const int blocks = gridDim.x;
  const bool twice = blocks < tiles;  // memory for two tiles: one is asked for while the other is multiplied

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
  // Weights of the norm do not change either.
  using Pack8 = Pack<T, 8>;
  constexpr bool kScaleFirst = kNorm && STEPS <= 8;  // more would not fit beside x
  Pack8 scale[kScaleFirst ? STEPS : 1];
  const auto k_of = [&](int i) { return (warp + i * kWarps) * kStepWidth + quad * 8; };
  const auto inside = [&](int i) { return warp + i * kWarps < steps; };
  const auto load_scale = [&](int i) {
    return load(reinterpret_cast<const Pack8*>(static_cast<const T*>(p.norm_weight) + k_of(i)));
  };
  if constexpr (kScaleFirst) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (inside(i)) scale[i] = load_scale(i);
    }
  }
  __syncthreads();  // the barriers are there
  wait_for_earlier_kernels();

  uint4 column[STEPS];  // x of row `group`, at the k of this lane
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const T* from = static_cast<const T*>(p.x) + group * p.x_stride + k_of(i);
    column[i] = inside(i) && group < p.rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
  }
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float values[8];
      to_floats(*reinterpret_cast<const Pack8*>(&column[i]), values);
#pragma unroll
      for (int j = 0; j < 8; ++j) square = fmaf(values[j], values[j], square);
    }
    square += __shfl_xor_sync(0xffffffffu, square, 1);
    square += __shfl_xor_sync(0xffffffffu, square, 2);
    if (quad == 0) squares[warp][group] = square;
    float inverse = 1.0f;
    if constexpr (std::is_same_v<T, __half>) {  // the range of FP16 may not hold a row that is not normalised yet
      __syncthreads();
      float sum = 0.0f;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += squares[w][group];
      inverse = rsqrtf(fmaf(sum, p.inverse_width, p.eps));
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (!inside(i)) continue;
      float values[8], factors[8];
      to_floats(*reinterpret_cast<const Pack8*>(&column[i]), values);
      to_floats(kScaleFirst ? scale[kScaleFirst ? i : 0] : load_scale(i), factors);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = values[j] * inverse * factors[j];
      const Pack8 pack = from_floats<T>(values);
      column[i] = *reinterpret_cast<const uint4*>(&pack);
    }
  }

  for (int turn = 0; tile < tiles; ++turn, tile += blocks) {
    const int stage = twice ? turn % 2 : 0;
    wait_barrier(&barriers[stage], twice ? turn / 2 % 2 : 0);
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      if (inside(i)) {
        const char* at = ring + (stage * kRows + group) * pitch + k_of(i) * static_cast<int>(sizeof(T));
        const uint4 low = *reinterpret_cast<const uint4*>(at);
        const uint4 high = HALVES == 2 ? *reinterpret_cast<const uint4*>(at + 8 * pitch) : uint4{0, 0, 0, 0};
        const unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
        const unsigned b0[2] = {column[i].x, column[i].y}, b1[2] = {column[i].z, column[i].w};
        multiply(even, a0, b0, T());
        multiply(odd, a1, b1, T());
      }
    }
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j / 2 < HALVES) partial[warp][group + 8 * (j / 2)][2 * quad + j % 2] = even[j] + odd[j];
    }
    __syncthreads();
    if (warp == 0 && tile + 2 * blocks < tiles) ask(tile + 2 * blocks, stage);
    // One thread an output: neighbouring threads neighbouring outputs of one row of x.
    for (int place = threadIdx.x; place < kTile * p.rows; place += kWarps * 32) {
      const int row = place / kTile, output = place % kTile, feature = tile * kTile + output;
      if (feature < outputs) {
        float inverse = 1.0f;
        if constexpr (kNorm && !std::is_same_v<T, __half>) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sum += squares[w][row];
          inverse = rsqrtf(fmaf(sum, p.inverse_width, p.eps));
        }
        const auto total = [&](int from, int of) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < kWarps; ++w) sum += partial[w][from][row];
          sum *= inverse;
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

template <typename T, int STEPS, int HALVES, Prologue PROLOGUE, Epilogue EPILOGUE>
void launch_shaped(const FewRowsLinear& p, cudaStream_t stream) {
  constexpr int kTile = EPILOGUE == Epilogue::kSwiglu ? 8 : 8 * HALVES;
  const int outputs = EPILOGUE == Epilogue::kSwiglu ? p.out_features / 2 : p.out_features;
  const int tiles = (outputs + kTile - 1) / kTile;
  const int bytes = 8 * HALVES * (p.in_features * static_cast<int>(sizeof(T)) + kPadding);
  // One tile a block while those of all multiprocessors' memory do it; else two blocks each, tile after tile.
  const int at_once = 2 * kMostShared / bytes, places = card().multiprocessors;
  const bool single = tiles <= places * at_once;
  launch(few_rows_linear<T, STEPS, HALVES, PROLOGUE, EPILOGUE>, dim3(single ? tiles : 2 * places), dim3(kWarps * 32),
         stream, Overlap::kBehindOurs, single ? bytes : 2 * bytes, p);
}

template <typename T, Prologue PROLOGUE, Epilogue EPILOGUE>
void launch_for_width(const FewRowsLinear& p, cudaStream_t stream) {
  const int steps = (p.in_features / kStepWidth + kWarps - 1) / kWarps;
  // 8-row tiles where 16-row ones would leave multiprocessors without work, or take too much memory.
  const bool small = p.out_features < 16 * card().multiprocessors || p.in_features > 2048;
  const auto run = [&](auto most) {
    constexpr int kSteps = decltype(most)::value;
    if constexpr (EPILOGUE != Epilogue::kSwiglu) {
      if (small) return launch_shaped<T, kSteps, 1, PROLOGUE, EPILOGUE>(p, stream);
    }
    launch_shaped<T, kSteps, 2, PROLOGUE, EPILOGUE>(p, stream);
  };
  if (steps <= 4) return run(std::integral_constant<int, 4>());
  if (steps <= 8) return run(std::integral_constant<int, 8>());
  if (steps <= 12) return run(std::integral_constant<int, 12>());
  run(std::integral_constant<int, kMostSteps>());
}

template <typename T>
void launch_typed(const FewRowsLinear& p, cudaStream_t stream) {
  if (p.prologue == Prologue::kRmsNorm) {
    if (p.epilogue == Epilogue::kSwiglu) return launch_for_width<T, Prologue::kRmsNorm, Epilogue::kSwiglu>(p, stream);
    return launch_for_width<T, Prologue::kRmsNorm, Epilogue::kStore>(p, stream);
  }
  if (p.epilogue == Epilogue::kAdd) return launch_for_width<T, Prologue::kNone, Epilogue::kAdd>(p, stream);
  launch_for_width<T, Prologue::kNone, Epilogue::kStore>(p, stream);
}

}  // namespace

bool takes_few_rows(const FewRowsLinear& p) {
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  // Two tiles of 16 rows must fit a multiprocessor.
  const int widest = p.epilogue == Epilogue::kSwiglu ? 3072 : kMostSteps * kWarps * kStepWidth;
  return p.dtype != Dtype::kFloat32 && p.rows >= 1 && p.rows <= kFewRows && p.in_features % kStepWidth == 0 &&
         p.in_features >= kStepWidth && p.in_features <= widest && p.out_features > 0 && p.x_stride % 8 == 0 &&
         p.weight != nullptr && aligned(p.weight) && aligned(p.x) && aligned(p.norm_weight) && card().major >= 9;
}

void launch_few_rows_linear(const FewRowsLinear& p, cudaStream_t stream) {
  if (p.dtype == Dtype::kFloat16) return launch_typed<__half>(p, stream);
  launch_typed<__nv_bfloat16>(p, stream);
}

}  // namespace rooflight
