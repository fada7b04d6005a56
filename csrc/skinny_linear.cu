// 9 to 256 rows times a large weight, with the epilogue after it in the same kernel, on Hopper's warpgroup products.
//
//   y = f(x) @ weight^T + bias;   then store, add to out, add to out and scale, or silu(gate) * up
//
// With so few rows a product is the weight's way from memory, and the rows' way to every multiprocessor. So the
// weight's rows are the left operand's, and the rows of x, called tokens here, its 64 columns, whether there are so
// many or not. One lane asks for both, 64 of the depth at a step: for the first steps' weights before earlier kernels
// have ended, since they depend on none. More tokens than 64 are more tiles; with more than 128, gate and up have tiles
// twice as wide and as high, so that each byte that comes to a multiprocessor is used twice as often.
//
// A norm may be half in the product in front of it, half in the one behind. Its weight scales what the product in front
// of it leaves, where each block has sums of squares of what it wrote; the factor of a row is known when all of these
// have ended, and can wait until the product behind it is done.
//
// Where there are fewer tiles than multiprocessors, a cluster of blocks shares a tile's depth. Each block has some of
// the tokens for its own: the others send it their sums of these, into memory kept for that, and it adds all in the
// order of the blocks.
#include "skinny_linear.h"

#include "common/cluster.cuh"
#include "common/launch.cuh"
#include "common/tensor_map.cuh"
#include "common/wgmma.cuh"
#include "few_rows_linear.h"

namespace rooflight {
namespace {

constexpr int kGroupRows = 64;  // of the weight: a warpgroup's
constexpr int kOwnBarrier = 1;  // of those that multiply

// A tile's block: GROUPS warpgroups, each with rows of the weight of its own, and TOKENS of them all.
template <int TOKENS, int GROUPS>
struct Block {
  static constexpr int kTokens = TOKENS, kTile = GROUPS * kGroupRows;
  static constexpr int kColumns = TOKENS / 8;         // a lane's sums go by columns of 8 tokens
  static constexpr int kThreads = GROUPS * 128;       // that multiply; one more warp asks for what they multiply
  static constexpr int kStages = GROUPS > 1 ? 4 : 6;  // steps in memory
  static constexpr int kStepBytes = (kTile + kTokens) * 2 * kBoxWidth;
};

// FLOATS: for the sums of squares, that came or that warps have.
template <typename B, bool GATHERS, int FLOATS>
struct Memory {
  char weight[B::kStages][B::kTile * 2 * kBoxWidth];  // at multiples of 1024 bytes
  char x[B::kStages][B::kTokens * 2 * kBoxWidth];
  float4 parts[GATHERS ? B::kColumns * B::kThreads : 1];  // sums that came: [block][column of this block's][thread]
  float squares[FLOATS];
  uint64_t full[B::kStages], empty[B::kStages], gathered;
};

struct Operands {
  CUtensorMap weight, x;
};

// Without branches, so that a lane's outputs go side by side. The quick division takes no divisor above 2^126: it gets
// quarters.
__device__ __forceinline__ float silu(float x) {
  return __fdividef(0.25f * x, fmaf(0.25f, __expf(-x), 0.25f));
}

template <Prologue PROLOGUE, Epilogue EPILOGUE, typename B, int SPLITS>
struct Kind {
  static constexpr bool kSwiglu = EPILOGUE == Epilogue::kSwiglu, kScaled = PROLOGUE == Prologue::kScaled;
  static constexpr bool kScales = EPILOGUE == Epilogue::kAddScale, kAdd = EPILOGUE == Epilogue::kAdd || kScales;
  static constexpr int kShare = B::kColumns / SPLITS;  // columns that are a block's own
  static constexpr int kFloats = kScaled ? B::kThreads : kScales ? B::kThreads / 32 * kShare * 8 : 1;
  using BlockMemory = Memory<B, (SPLITS > 1), kFloats>;
  static_assert(kBoxWidth == kSquaresPart && (!kScales || B::kTile == kSquaresPart));
};

// SPLITS: blocks of a tile, a cluster along x. Further tokens along y.
template <typename T, Prologue PROLOGUE, Epilogue EPILOGUE, typename B, int SPLITS>
__global__ void __launch_bounds__(B::kThreads + 32)
    skinny_linear(FusedLinear p, const __grid_constant__ Operands operands) {
  constexpr int kColumns = B::kColumns, kThreads = B::kThreads, kStages = B::kStages, kTile = B::kTile;
  using K = Kind<PROLOGUE, EPILOGUE, B, SPLITS>;
  constexpr int kShare = K::kShare;
  extern __shared__ __align__(1024) char storage[];
  auto& memory = *reinterpret_cast<typename K::BlockMemory*>(storage);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rank = blockIdx.x % SPLITS, tile = blockIdx.x / SPLITS;
  const int steps = (p.in_features + kBoxWidth - 1) / kBoxWidth;
  const int begin = steps * rank / SPLITS, count = steps * (rank + 1) / SPLITS - begin;
  // Columns with tokens: of all, and of this block's own.
  const int first_token = blockIdx.y * B::kTokens;
  const int rows = min(static_cast<int>(p.rows) - first_token, B::kTokens), columns = (rows + 7) / 8;
  const int owned = min(max(columns - rank * kShare, 0), kShare);

  const auto ask_weight = [&](int step) {
    uint64_t* full = &memory.full[step % kStages];
    expect_bytes(full, B::kStepBytes);
    copy_box(memory.weight[step % kStages], &operands.weight, (begin + step) * kBoxWidth, 0, 0, tile * (kTile / 16),
             full);
  };
  const auto ask_x = [&](int step) {
    copy_box(memory.x[step % kStages], &operands.x, (begin + step) * kBoxWidth, first_token, 0, 0,
             &memory.full[step % kStages]);
  };
  const int early = min(kStages, count);
  if (threadIdx.x == kThreads) {
    fetch_map(&operands.weight);
    fetch_map(&operands.x);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(&memory.full[stage]);
      init_barrier(&memory.empty[stage], kThreads / 32);
    }
    init_barrier(&memory.gathered);
    fence_barriers();
    if (SPLITS > 1) expect_bytes(&memory.gathered, SPLITS * owned * kThreads * sizeof(float4));
    for (int step = 0; step < early; ++step) ask_weight(step);
  }
  __syncthreads();  // the barriers are there
  if constexpr (SPLITS > 1) arrive_in_cluster();
  let_next_kernel_start();
  wait_for_earlier_kernels();

  if (warp == kThreads / 32) {
    if (lane == 0) {
      for (int step = 0; step < early; ++step) ask_x(step);
#pragma unroll 1
      for (int step = kStages; step < count; ++step) {
        wait_barrier(&memory.empty[step % kStages], (step / kStages - 1) & 1);
        ask_weight(step);
        ask_x(step);
      }
    }
    __syncwarp();
    if constexpr (SPLITS > 1) wait_for_cluster();
    return;
  }

  // Of a column a lane has four sums: of two tokens, one behind the other, for each of two rows of the weight, which
  // are 8 apart, or gate and up of one output. What they become begins at `out`, in the first column of the block's
  // own; `left`: tokens from there on.
  const int outputs = K::kSwiglu ? p.out_features / 2 : p.out_features;
  const int feature = (tile * kTile + warp * 16) / (K::kSwiglu ? 2 : 1) + lane / 4;
  const int token = rank * kShare * 8 + lane % 4 * 2, left = feature < outputs ? rows - token : 0;
  T* const out = static_cast<T*>(p.out) + (first_token + token) * p.out_stride + feature;
  T* const scaled = static_cast<T*>(p.scaled) + static_cast<int64_t>(first_token + token) * p.out_features + feature;
  const auto place_of = [&](T* first, int64_t stride, int j, int i) {
    return first + (8 * j + i % 2) * stride + i / 2 * 8;
  };
  const auto is_there = [&](int j, int i) { return 8 * j + i % 2 < left; };

  // Asked for now, so that nobody waits for them behind the products.
  T bias[2] = {}, gain[2] = {}, held[kShare][4] = {};
  if (p.bias != nullptr && feature < outputs) {
#pragma unroll
    for (int i = 0; i < 2; ++i) bias[i] = static_cast<const T*>(p.bias)[feature + i * (K::kSwiglu ? outputs : 8)];
  }
  if constexpr (K::kAdd) {
#pragma unroll
    for (int j = 0; j < kShare; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (is_there(j, i)) held[j][i] = *place_of(out, p.out_stride, j, i);
      }
    }
  }

  if constexpr (K::kScales) {
    if (feature < outputs) {
#pragma unroll
      for (int i = 0; i < 2; ++i) gain[i] = static_cast<const T*>(p.norm_weight)[feature + i * 8];
    }
  }
  // A thread has some of a token's sums of squares, which are needed behind the products.
  constexpr int kSharers = kThreads / B::kTokens, kAtOnce = 16;
  float squares[kAtOnce] = {};
  const auto square_at = [&](int i) {  // a step has a sum
    const int own = threadIdx.x % B::kTokens, step = threadIdx.x / B::kTokens + kSharers * i;
    return own < rows && step < steps ? p.squares[step * p.squares_stride + first_token + own] : 0.0f;
  };
  if constexpr (K::kScaled) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) squares[i] = square_at(i);
  }

  float sums[kColumns * 4] = {};
#pragma unroll 1
  for (int step = 0; step < count; ++step) {
    const int stage = step % kStages;
    wait_barrier(&memory.full[stage], step / kStages & 1);
    const GroupOperand a =
        operand_at(shared_address(memory.weight[stage] + warp / 4 * kGroupRows * 2 * kBoxWidth), 1024);
    const GroupOperand b = operand_at(shared_address(memory.x[stage]), 1024);
    settle(sums);
    begin_products();
#pragma unroll
    for (int i = 0; i < kBoxWidth; i += kGroupDepth) multiply_group<T, true>(sums, a + 2 * i, b + 2 * i);
    commit_products();
    wait_products<1>();  // those of the step before have read their memory
    if (step > 0 && lane == 0) arrive(&memory.empty[(step - 1) % kStages]);
  }
  wait_products<0>();
  settle(sums);
  if constexpr (K::kScaled) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) sum += squares[i];
    for (int i = kAtOnce; kSharers * i < steps; ++i) sum += square_at(i);  // of rows wider than 2,048
    memory.squares[threadIdx.x] = sum;
  }

  const auto sums_of = [&](int column) {
    return float4{sums[4 * column], sums[4 * column + 1], sums[4 * column + 2], sums[4 * column + 3]};
  };
  const auto finish = [&](int j, float4 sum) {
    if constexpr (K::kScaled) {
      const float* shared = memory.squares + token + 8 * j;
      float factors[2] = {};
#pragma unroll
      for (int i = 0; i < kThreads; i += B::kTokens) {
        factors[0] += shared[i], factors[1] += shared[i + 1];
      }
#pragma unroll
      for (float& factor : factors) factor = rsqrtf(fmaf(factor, p.inverse_width, p.eps));
      sum.x *= factors[0], sum.y *= factors[1], sum.z *= factors[0], sum.w *= factors[1];
    }
    const float first = static_cast<float>(bias[0]), second = static_cast<float>(bias[1]);
    const float values[4] = {sum.x + first, sum.y + first, sum.z + second, sum.w + second};
    float2 kept_squares = {};  // of two tokens, one behind the other
#pragma unroll
    for (int i = 0; i < (K::kSwiglu ? 2 : 4); ++i) {
      float value = values[i];
      if constexpr (K::kSwiglu) value = silu(value) * values[i + 2];
      if constexpr (K::kAdd) value += static_cast<float>(held[j][i]);
      if (!is_there(j, i)) continue;
      const T rounded = static_cast<T>(value);
      *place_of(out, p.out_stride, j, i) = rounded;
      if constexpr (K::kScales) {
        const float kept = static_cast<float>(rounded);
        *place_of(scaled, p.out_features, j, i) = static_cast<T>(kept * static_cast<float>(gain[i / 2]));
        float& square = i % 2 == 0 ? kept_squares.x : kept_squares.y;
        square = fmaf(kept, kept, square);
      }
    }
    if constexpr (K::kScales) {  // of the warp's 16 features
#pragma unroll
      for (int apart = 4; apart < 32; apart *= 2) {
        kept_squares.x += __shfl_xor_sync(0xffffffffu, kept_squares.x, apart);
        kept_squares.y += __shfl_xor_sync(0xffffffffu, kept_squares.y, apart);
      }
      if (lane < 4) reinterpret_cast<float2*>(memory.squares + (warp * kShare + j) * 8)[lane] = kept_squares;
    }
  };
  if constexpr (SPLITS == 1) {
    if constexpr (K::kScaled) meet(kOwnBarrier, kThreads);
#pragma unroll
    for (int j = 0; j < kShare; ++j) finish(j, sums_of(j));
  } else {
    wait_for_cluster();  // all barriers are there: long ago
#pragma unroll
    for (int column = 0; column < kColumns; ++column) {
      if (column >= columns) break;
      const int to = column / kShare, slot = rank * kShare + column % kShare;
      send(address_at(&memory.parts[slot * kThreads + threadIdx.x], to), address_at(&memory.gathered, to),
           sums_of(column));
    }
    if constexpr (K::kScaled) meet(kOwnBarrier, kThreads);
    wait_barrier_of_cluster(&memory.gathered, 0);
#pragma unroll
    for (int j = 0; j < kShare; ++j) {
      if (j >= owned) break;
      float4 sum = memory.parts[j * kThreads + threadIdx.x];
#pragma unroll
      for (int from = 1; from < SPLITS; ++from) {
        const float4 part = memory.parts[(from * kShare + j) * kThreads + threadIdx.x];
        sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
      }
      finish(j, sum);
    }
  }
  if constexpr (K::kScales) {  // and of the tile's 64
    meet(kOwnBarrier, kThreads);
    const int own = threadIdx.x, at = rank * kShare * 8 + own;
    if (own < kShare * 8 && at < rows) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kThreads / 32; ++i) sum += memory.squares[i * kShare * 8 + own];
      p.squares_out[tile * p.squares_stride + first_token + at] = sum;
    }
  }
}

using Narrow = Block<64, 1>;
using Wide = Block<128, 2>;
static_assert(2 * (sizeof(Memory<Narrow, true, Narrow::kThreads>) + 1024) <= 228 * 1024,
              "two blocks of a multiprocessor");

// Tiles of weight rows, and of tokens.
template <typename B>
dim3 tiles_of(const FusedLinear& p) {
  return dim3((p.out_features + B::kTile - 1) / B::kTile, static_cast<unsigned>(p.rows + B::kTokens - 1) / B::kTokens);
}

// Blocks of a tile: doubled as long as most multiprocessors have one block and few have two, and each block has two
// steps to do.
int splits_of(const FusedLinear& p) {
  constexpr int kMost = 8, kLeastSteps = 2;
  const dim3 tiles = tiles_of<Narrow>(p);
  const int blocks = static_cast<int>(tiles.x * tiles.y), steps = (p.in_features + kBoxWidth - 1) / kBoxWidth;
  int splits = 1;
  while (splits < kMost && 2 * (2 * splits * blocks) <= 3 * card().multiprocessors &&
         steps / (2 * splits) >= kLeastSteps) {
    splits *= 2;
  }
  return splits;
}

template <typename T, Prologue PROLOGUE, Epilogue EPILOGUE, typename B, int SPLITS>
void launch_shaped(const FusedLinear& p, cudaStream_t stream) {
  // Boxes of the weight are pairs of eight rows: neighbours, or eight of gate and eight of up.
  const int64_t width = p.in_features, pairs = p.out_features / 16;
  const bool swiglu = EPILOGUE == Epilogue::kSwiglu;
  const int64_t other = (swiglu ? p.out_features / 2 : 8) * width, next = (swiglu ? 8 : 16) * width;
  const Operands operands{
      tensor_map<4>(p.dtype, p.weight, {width, 8, 2, pairs}, {width, other, next}, {kBoxWidth, 8, 2, B::kTile / 16}),
      tensor_map<4>(p.dtype, p.x, {width, p.rows, 1, 1}, {p.x_stride, p.x_stride, p.x_stride},
                    {kBoxWidth, B::kTokens, 1, 1})};
  const dim3 tiles = tiles_of<B>(p);
  constexpr int kShared = sizeof(typename Kind<PROLOGUE, EPILOGUE, B, SPLITS>::BlockMemory);
  launch_cluster(skinny_linear<T, PROLOGUE, EPILOGUE, B, SPLITS>, dim3(tiles.x * SPLITS, tiles.y),
                 dim3(B::kThreads + 32), SPLITS, stream, Overlap::kBehindOurs, kShared, p, operands);
}

template <typename T, Prologue PROLOGUE, Epilogue EPILOGUE>
void launch_split(const FusedLinear& p, cudaStream_t stream) {
  if constexpr (EPILOGUE == Epilogue::kSwiglu) {
    if (p.rows > Wide::kTokens) return launch_shaped<T, PROLOGUE, EPILOGUE, Wide, 1>(p, stream);
  }
  switch (splits_of(p)) {
    case 1:
      return launch_shaped<T, PROLOGUE, EPILOGUE, Narrow, 1>(p, stream);
    case 2:
      return launch_shaped<T, PROLOGUE, EPILOGUE, Narrow, 2>(p, stream);
    case 4:
      return launch_shaped<T, PROLOGUE, EPILOGUE, Narrow, 4>(p, stream);
    default:
      return launch_shaped<T, PROLOGUE, EPILOGUE, Narrow, 8>(p, stream);
  }
}

template <typename T, Prologue PROLOGUE>
void launch_behind(const FusedLinear& p, cudaStream_t stream) {
  if (p.epilogue == Epilogue::kSwiglu) return launch_split<T, PROLOGUE, Epilogue::kSwiglu>(p, stream);
  launch_split<T, PROLOGUE, Epilogue::kStore>(p, stream);
}

template <typename T>
void launch_typed(const FusedLinear& p, cudaStream_t stream) {
  if (p.epilogue == Epilogue::kAdd) return launch_split<T, Prologue::kNone, Epilogue::kAdd>(p, stream);
  if (p.epilogue == Epilogue::kAddScale) return launch_split<T, Prologue::kNone, Epilogue::kAddScale>(p, stream);
  if (p.prologue == Prologue::kScaled) return launch_behind<T, Prologue::kScaled>(p, stream);
  launch_behind<T, Prologue::kNone>(p, stream);
}

}  // namespace

bool takes_skinny(const FusedLinear& p) {
  constexpr int kMostRows = 256, kMostOutputs = 65536;  // a vocabulary's product is no faster here than PyTorch's
  // Of a weight whose product of more rows than a tile's was seen to be worth it. Larger ones read it anew for each
  // tile of tokens, and have less to gain from what goes on beside a product.
  constexpr int64_t kMostShared = int64_t{6144} * 1024;
  const auto aligned = [](const void* data) { return reinterpret_cast<uintptr_t>(data) % 16 == 0; };
  return p.dtype != Dtype::kFloat32 && p.prologue != Prologue::kRmsNorm && p.rows > kFewRows && p.rows <= kMostRows &&
         p.in_features > 0 && p.in_features % 8 == 0 && p.out_features > 0 && p.out_features % 16 == 0 &&
         (p.rows <= Narrow::kTokens || int64_t{p.in_features} * p.out_features <= kMostShared) &&
         p.out_features <= kMostOutputs && p.x_stride >= p.in_features && p.x_stride % 8 == 0 && p.contiguous &&
         aligned(p.weight) && aligned(p.x) && card().major == 9;
}

void launch_skinny_linear(const FusedLinear& p, cudaStream_t stream) {
  if (p.dtype == Dtype::kFloat16) return launch_typed<__half>(p, stream);
  launch_typed<__nv_bfloat16>(p, stream);
}

}  // namespace rooflight
