// Decode attention for whatever the kernel of chunks does not take: FP32, any page size, strides and alignment.
//
// Element by element, one sequence and two query heads a block: right, not fast.
#include "common/pack.cuh"
#include "decode_attention.cuh"

namespace rooflight {
namespace {

constexpr int kWarps = 4;

// G query heads of one KV head go through a warp together; kLanes lanes share a token, kSide tokens stand side by side.
template <typename T, int D, int G>
struct Layout {
  static constexpr int kElements = 16 / sizeof(T);  // of one load
  static constexpr int kChunks = D / kElements;     // loads of a token
  static constexpr int chunks_a_lane() {
    int chunks = 32 / (G * kElements);  // 32 accumulators a lane, or more if one load is already more
    chunks = chunks < 1 ? 1 : chunks > 4 ? 4 : chunks;
    while ((kChunks + chunks - 1) / chunks > 32) chunks *= 2;
    return chunks;
  }
  static constexpr int lanes() {
    int lanes = 1;
    while (lanes * chunks_a_lane() < kChunks) lanes *= 2;
    return lanes;
  }
  static constexpr int kLanes = lanes();
  static constexpr int kOwn = (kChunks + kLanes - 1) / kLanes;  // loads of a lane for a token
  static constexpr int kSide = 32 / kLanes;
  static constexpr int kValues = kOwn * kElements;  // of a head that a lane has
};

// What a warp has of G heads after its last key.
template <int G, int VALUES>
struct State {
  float peak[G], sum[G], out[G][VALUES];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      peak[g] = -INFINITY;
      sum[g] = 0.0f;
#pragma unroll
      for (int j = 0; j < VALUES; ++j) out[g][j] = 0.0f;
    }
  }

  // Scores become weights relative to the highest so far, and what is there is put in relation to it.
  template <int N>
  __device__ __forceinline__ void weigh(float (&scores)[N][G]) {
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float highest = peak[g];
#pragma unroll
      for (int u = 0; u < N; ++u) highest = fmaxf(highest, scores[u][g]);
      const float kept = share(peak[g], highest);
      peak[g] = highest;
      sum[g] *= kept;
#pragma unroll
      for (int j = 0; j < VALUES; ++j) out[g][j] *= kept;
#pragma unroll
      for (int u = 0; u < N; ++u) {
        scores[u][g] = weight_of(scores[u][g], highest);
        sum[g] += scores[u][g];
      }
    }
  }
};

// A lane's part of the queries, in the base of exp2; 0 for heads that are not there.
template <typename T, int D, int G, typename L>
__device__ __forceinline__ void load_queries(const DecodeAttention& a, int sequence, int first, int heads,
                                             int part_lane, float (&q)[G][L::kValues]) {
#pragma unroll
  for (int g = 0; g < G; ++g) {
    const T* from = static_cast<const T*>(a.q) + sequence * a.q_stride + (first + g) * a.q_head_stride;
#pragma unroll
    for (int c = 0; c < L::kOwn; ++c) {
      const int chunk = c * L::kLanes + part_lane;
      Pack<T, L::kElements> pack = {};
      if (g < heads && chunk < L::kChunks) {
#pragma unroll
        for (int j = 0; j < L::kElements; ++j) pack.values[j] = from[chunk * L::kElements + j];
      }
      float values[L::kElements];
      to_floats(pack, values);
#pragma unroll
      for (int j = 0; j < L::kElements; ++j) {
        q[g][c * L::kElements + j] = values[j] * (a.scale * 1.44269504088896341f);
      }
    }
  }
}

// Any strides and any page size: element by element, one sequence and two query heads a block.
template <typename T, int D>
__global__ void __launch_bounds__(kWarps * 32) decode_attention_plain(DecodeAttention a) {
  constexpr int G = 2;
  using L = Layout<T, D, G>;
  __shared__ Meeting<kWarps, G, D> meeting;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, side = lane / L::kLanes, part_lane = lane % L::kLanes;
  const int group = a.num_heads / a.num_kv_heads, tiles = (group + G - 1) / G;
  const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles, heads = min(G, group - tile * G);
  const int first = kv_head * group + tile * G, sequence = blockIdx.z;
  let_next_kernel_start();
  wait_for_earlier_kernels();
  const int length = a.seq_lens[sequence], start = a.window > 0 ? max(0, length - a.window) : 0;
  float q[G][L::kValues];
  load_queries<T, D, G, L>(a, sequence, first, heads, part_lane, q);
  State<G, L::kValues> state;
  state.clear();
  for (int base = start + warp * L::kSide; base < length; base += kWarps * L::kSide) {
    const int token = base + side;
    const bool seen = token < length;
    const int page = seen ? a.block_table[sequence * a.table_stride + token / a.page_size] : 0;
    const int offset = token % a.page_size;
    const T* k = static_cast<const T*>(a.k_cache) + page * a.k_strides.page + kv_head * a.k_strides.head +
                 offset * a.k_strides.token;
    const T* v = static_cast<const T*>(a.v_cache) + page * a.v_strides.page + kv_head * a.v_strides.head +
                 offset * a.v_strides.token;
    float scores[1][G] = {};
#pragma unroll
    for (int i = 0; i < L::kValues; ++i) {
      const int d = (i / L::kElements * L::kLanes + part_lane) * L::kElements + i % L::kElements;
      const float key = seen && d < D ? static_cast<float>(k[d]) : 0.0f;
#pragma unroll
      for (int g = 0; g < G; ++g) scores[0][g] = fmaf(q[g][i], key, scores[0][g]);
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
#pragma unroll
      for (int far = L::kLanes / 2; far > 0; far /= 2) scores[0][g] += __shfl_xor_sync(kAll, scores[0][g], far);
      if (!seen) scores[0][g] = -INFINITY;
    }
    state.weigh(scores);
#pragma unroll
    for (int i = 0; i < L::kValues; ++i) {
      const int d = (i / L::kElements * L::kLanes + part_lane) * L::kElements + i % L::kElements;
      const float value = seen && d < D ? static_cast<float>(v[d]) : 0.0f;
#pragma unroll
      for (int g = 0; g < G; ++g) state.out[g][i] = fmaf(scores[0][g], value, state.out[g][i]);
    }
  }
  // Tokens side by side in a warp meet.
#pragma unroll
  for (int g = 0; g < G; ++g) {
    float highest = state.peak[g];
#pragma unroll
    for (int far = L::kLanes; far < 32; far *= 2) highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, far));
    const float kept = share(state.peak[g], highest);
    float total = state.sum[g] * kept;
#pragma unroll
    for (int far = L::kLanes; far < 32; far *= 2) total += __shfl_xor_sync(kAll, total, far);
    if (lane == 0) {
      meeting.peaks[warp][g] = highest;
      meeting.sums[warp][g] = total;
    }
#pragma unroll
    for (int i = 0; i < L::kValues; ++i) {
      const int d = (i / L::kElements * L::kLanes + part_lane) * L::kElements + i % L::kElements;
      float value = state.out[g][i] * kept;
#pragma unroll
      for (int far = L::kLanes; far < 32; far *= 2) value += __shfl_xor_sync(kAll, value, far);
      if (side == 0 && d < D) meeting.outs[warp][g][d] = value;
    }
  }
  __syncthreads();
  finish_alone<T, D>(a, meeting, sequence, first, heads);
}

}  // namespace

template <typename T, int D>
void launch_plain_decode_attention(const DecodeAttention& a, cudaStream_t stream) {
  const dim3 grid(1, a.num_kv_heads * ((a.num_heads / a.num_kv_heads + 1) / 2), a.num_seqs);
  launch(decode_attention_plain<T, D>, grid, dim3(kWarps * 32), stream, Overlap::kBehindOurs, 0, a);
}

#define ROOFLIGHT_FOR_HEADS(T)                                                               \
  template void launch_plain_decode_attention<T, 64>(const DecodeAttention&, cudaStream_t);  \
  template void launch_plain_decode_attention<T, 80>(const DecodeAttention&, cudaStream_t);  \
  template void launch_plain_decode_attention<T, 128>(const DecodeAttention&, cudaStream_t); \
  template void launch_plain_decode_attention<T, 256>(const DecodeAttention&, cudaStream_t);
ROOFLIGHT_FOR_HEADS(float)
ROOFLIGHT_FOR_HEADS(__half)
ROOFLIGHT_FOR_HEADS(__nv_bfloat16)
#undef ROOFLIGHT_FOR_HEADS

}  // namespace rooflight
