// Few rows (at most 8) times a large weight, with the norm before and the epilogue after it in the same kernel.
//
//   y = f(x) @ weight^T + bias;   f: nothing or RMSNorm;   then store, add to out, or silu(gate) * up
//
// Bound by the weight's way from memory. A block takes tiles of 16 (or 8) weight rows over all of K; each lane asks for
// 16 bytes at a time, all of its tile before the first is used, and before earlier kernels have ended, since weights
// never depend on them. The arithmetic is done by the tensor cores with the weight as the left operand and the rows of
// x as its 8 columns: on CUDA cores the conversions alone would take half as long as the stream (docs/lab). Which k
// stands where in a tile is free as long as both operands agree, so that a lane's 16 bytes are two tiles' worth.
// The weighted sums of a row's squares ride along and are applied at the end, where they cost no wait of their own.
#include <type_traits>

#include "common/launch.cuh"
#include "common/pack.cuh"
#include "few_rows_linear.h"

namespace rooflight {
namespace {

constexpr int kStepWidth = 32;  // k of one 16-byte load of each of four lanes
constexpr int kTileRows = 16;

// Loads of 32 k that a block's registers hold, with the norm's weights beside them or not.
constexpr int most_steps(Prologue prologue) {
  return 16 * (prologue == Prologue::kRmsNorm ? 6 : 8);
}

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

// A weight is read once by the whole card: past L1, and first to leave L2.
__device__ __forceinline__ uint4 load_weight(const void* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::256B.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from));
  return v;
}

// HALVES: 16 rows of the weight a tile, or 8 (one half; the other half of the matrix tile is zero).
template <typename T, int WARPS, int STEPS, int HALVES, Prologue PROLOGUE, Epilogue EPILOGUE>
__global__ void __launch_bounds__(WARPS * 32, 16 / WARPS) few_rows_linear(FewRowsLinear p) {
  constexpr bool kNorm = PROLOGUE == Prologue::kRmsNorm;
  constexpr int kTile = EPILOGUE == Epilogue::kSwiglu ? 8 : 8 * HALVES;  // outputs of a tile
  __shared__ float partial[WARPS][kTileRows][kFewRows + 1];
  __shared__ float squares[WARPS][kFewRows];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
  const int outputs = EPILOGUE == Epilogue::kSwiglu ? p.out_features / 2 : p.out_features;
  const int tiles = (outputs + kTile - 1) / kTile;
  const int steps = p.in_features / kStepWidth;
  const T* weight = static_cast<const T*>(p.weight);
  const int64_t second = EPILOGUE == Epilogue::kSwiglu ? outputs : 8;  // rows between the two halves of a tile

  uint4 held[STEPS][HALVES];
  const auto load_tile = [&](int tile) {
    const int row = tile * kTile + group;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int step = warp + i * WARPS;
      const int64_t k = step * kStepWidth + quad * 8;
#pragma unroll
      for (int half = 0; half < HALVES; ++half) {
        const bool inside = step < steps && (EPILOGUE == Epilogue::kSwiglu ? row < outputs : row + 8 * half < outputs);
        held[i][half] = inside ? load_weight(weight + (row + half * second) * p.in_features + k) : uint4{0, 0, 0, 0};
      }
    }
  };
  int tile = blockIdx.x;
  load_tile(tile);
  // Weights of the norm do not change either.
  uint4 scale[kNorm ? STEPS : 1];
  if constexpr (kNorm) {
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const int step = warp + i * WARPS;
      scale[i] =
          step < steps
              ? *reinterpret_cast<const uint4*>(static_cast<const T*>(p.norm_weight) + step * kStepWidth + quad * 8)
              : uint4{0, 0, 0, 0};
    }
  }
  wait_for_earlier_kernels();
  let_next_kernel_start();

  using Pack8 = Pack<T, 8>;
  uint4 column[STEPS];  // x of row `group`, at the k of this lane
  float square = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int step = warp + i * WARPS;
    const bool inside = step < steps && group < p.rows;
    const T* from = static_cast<const T*>(p.x) + group * p.x_stride + step * kStepWidth + quad * 8;
    column[i] = inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
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
      for (int w = 0; w < WARPS; ++w) sum += squares[w][group];
      inverse = rsqrtf(fmaf(sum, p.inverse_width, p.eps));
    }
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float values[8], factors[8];
      to_floats(*reinterpret_cast<const Pack8*>(&column[i]), values);
      to_floats(*reinterpret_cast<const Pack8*>(&scale[i]), factors);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[j] = values[j] * inverse * factors[j];
      const Pack8 pack = from_floats<T>(values);
      column[i] = *reinterpret_cast<const uint4*>(&pack);
    }
  }

  for (; tile < tiles; tile += gridDim.x) {
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      const uint4 low = held[i][0], high = HALVES == 2 ? held[i][HALVES - 1] : uint4{0, 0, 0, 0};
      const unsigned a0[4] = {low.x, high.x, low.y, high.y}, a1[4] = {low.z, high.z, low.w, high.w};
      const unsigned b0[2] = {column[i].x, column[i].y}, b1[2] = {column[i].z, column[i].w};
      multiply(even, a0, b0, T());
      multiply(odd, a1, b1, T());
    }
    if (tile + gridDim.x < tiles) load_tile(tile + gridDim.x);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      if (j / 2 < HALVES) partial[warp][group + 8 * (j / 2)][2 * quad + j % 2] = even[j] + odd[j];
    }
    __syncthreads();
    // One thread an output: neighbouring threads neighbouring outputs of one row of x.
    for (int place = threadIdx.x; place < kTile * p.rows; place += WARPS * 32) {
      const int row = place / kTile, output = place % kTile;
      const int column_out = tile * kTile + output;
      if (column_out < outputs) {
        float inverse = 1.0f;
        if constexpr (kNorm && !std::is_same_v<T, __half>) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < WARPS; ++w) sum += squares[w][row];
          inverse = rsqrtf(fmaf(sum, p.inverse_width, p.eps));
        }
        const auto total = [&](int from, int feature) {
          float sum = 0.0f;
#pragma unroll
          for (int w = 0; w < WARPS; ++w) sum += partial[w][from][row];
          sum *= inverse;
          return p.bias != nullptr ? sum + static_cast<float>(static_cast<const T*>(p.bias)[feature]) : sum;
        };
        T* out = static_cast<T*>(p.out) + row * p.out_stride + column_out;
        float value = total(output, column_out);
        if constexpr (EPILOGUE == Epilogue::kSwiglu) {
          value = value / (1.0f + __expf(-value)) * total(output + 8, column_out + outputs);
        }
        if constexpr (EPILOGUE == Epilogue::kAdd) value += static_cast<float>(*out);
        *out = static_cast<T>(value);
      }
    }
    __syncthreads();
  }
}

template <typename T, int WARPS, int STEPS, int HALVES, Prologue PROLOGUE, Epilogue EPILOGUE>
void launch_shaped(const FewRowsLinear& p, cudaStream_t stream) {
  constexpr int kTile = EPILOGUE == Epilogue::kSwiglu ? 8 : 8 * HALVES;
  const int outputs = EPILOGUE == Epilogue::kSwiglu ? p.out_features / 2 : p.out_features;
  const int tiles = (outputs + kTile - 1) / kTile;
  const int most = card().multiprocessors * (1024 / (WARPS * 32));  // blocks that run at once
  launch(few_rows_linear<T, WARPS, STEPS, HALVES, PROLOGUE, EPILOGUE>, dim3(tiles < most ? tiles : most),
         dim3(WARPS * 32), stream, Overlap::kBehindOurs, 0, p);
}

// Shapes: warps of a block and loads of a lane that hold all of K. In order of K.
template <typename T, Prologue PROLOGUE, Epilogue EPILOGUE>
void launch_for_width(const FewRowsLinear& p, cudaStream_t stream) {
  const int steps = p.in_features / kStepWidth;
  // Where 16-row tiles would leave multiprocessors without work, 8-row tiles.
  const bool small = EPILOGUE != Epilogue::kSwiglu && p.out_features < 16 * 2 * card().multiprocessors;
  const auto run = [&](auto warps, auto loads) {
    constexpr int kWarps = decltype(warps)::value, kLoads = decltype(loads)::value;
    if constexpr (kWarps * kLoads <= most_steps(PROLOGUE)) {
      if (steps > kWarps * kLoads) return false;
      if constexpr (EPILOGUE != Epilogue::kSwiglu) {
        if (small) {
          launch_shaped<T, kWarps, kLoads, 1, PROLOGUE, EPILOGUE>(p, stream);
          return true;
        }
      }
      launch_shaped<T, kWarps, kLoads, 2, PROLOGUE, EPILOGUE>(p, stream);
      return true;
    }
    return false;
  };
  using std::integral_constant;
  const bool done = run(integral_constant<int, 8>(), integral_constant<int, 3>()) ||
                    run(integral_constant<int, 8>(), integral_constant<int, 4>()) ||
                    run(integral_constant<int, 16>(), integral_constant<int, 4>()) ||
                    run(integral_constant<int, 16>(), integral_constant<int, 6>()) ||
                    run(integral_constant<int, 16>(), integral_constant<int, 8>());
  if (!done) throw std::runtime_error("few_rows_linear: in_features is too wide");  // see takes_few_rows
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
  return p.dtype != Dtype::kFloat32 && p.rows >= 1 && p.rows <= kFewRows && p.in_features % kStepWidth == 0 &&
         p.in_features >= kStepWidth && p.in_features / kStepWidth <= most_steps(p.prologue) && p.out_features > 0 &&
         p.x_stride % 8 == 0 && p.weight != nullptr && aligned(p.weight) && aligned(p.x) && aligned(p.norm_weight);
}

void launch_few_rows_linear(const FewRowsLinear& p, cudaStream_t stream) {
  if (p.dtype == Dtype::kFloat16) return launch_typed<__half>(p, stream);
  launch_typed<__nv_bfloat16>(p, stream);
}

}  // namespace rooflight
