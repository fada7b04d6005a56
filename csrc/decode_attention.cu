// Decode attention over a paged cache: one new token a sequence, all query heads of a KV head in one block.
//
//   out = sum_j softmax_j(scale * q . k_j) v_j
//
// Bound by the cache's way from memory, so keys and values are read once for the group of query heads. Each warp has a
// ring of chunks of neighbouring tokens in shared memory, which bulk copies fill while it works: what is on its way
// costs no registers, and a multiprocessor keeps more than a hundred kilobytes asked for. Within a warp kLanes lanes
// share a token; tokens side by side have running maxima and sums of their own and meet at the end only.
//
// Few sequences would leave most multiprocessors idle: then a cluster of blocks shares a sequence (the long path), each
// with a part of the keys, and merges through the shared memory of its members: exact, in a fixed order, without
// scratch memory and without a second launch. Parts follow from the length on the device, so one graph serves all
// lengths; short sequences keep blocks of a cluster idle.
//
// Caches whose tokens do not lie side by side in pages of a multiple of 16 go through a second, plain kernel.
#include "common/bulk.cuh"
#include "decode_attention.cuh"

namespace rooflight {
namespace {

constexpr int kMostSplits = 16;
constexpr int kWarps = 4, kManyWarps = 8;  // of a block: many where a multiprocessor has one block only
constexpr int kStages = 2;

template <typename T, int D>
constexpr int kChunkTokens = D * sizeof(T) <= 512 ? 16 : 8;  // neighbours in a page, which one bulk copy brings

template <typename T, int D, int G, int WARPS>
struct Memory {
  union {
    T ring[WARPS][kStages][2][kChunkTokens<T, D> * D];
    Meeting<WARPS, G, D> meeting;
  };
  uint64_t barriers[WARPS][kStages];
};

// A lane's part of the queries, in the base of exp2; 0 for heads that are not there.
template <typename T, int D, int G, bool ALIGNED, typename L>
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
        if constexpr (ALIGNED) {
          pack = load(reinterpret_cast<const Pack<T, L::kElements>*>(from) + chunk);
        } else {
#pragma unroll
          for (int j = 0; j < L::kElements; ++j) pack.values[j] = from[chunk * L::kElements + j];
        }
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

// Blocks of a multiprocessor, by shared memory; more than three would leave too few registers.
template <typename T, int D, int G, int WARPS>
constexpr int blocks_at_once() {
  const int fitting = 227 * 1024 / (static_cast<int>(sizeof(Memory<T, D, G, WARPS>)) + 1024);
  return fitting < 1 ? 1 : fitting > 12 / WARPS ? 12 / WARPS : fitting;
}

template <typename T, int D, int G, int WARPS, bool CLUSTER>
__global__ void __launch_bounds__(WARPS * 32, blocks_at_once<T, D, G, WARPS>())
    decode_attention_ring(DecodeAttention a) {
  using L = Layout<T, D, G>;
  using P = Pack<T, L::kElements>;
  constexpr int kChunk = kChunkTokens<T, D>;
  constexpr int kSteps = kChunk >= L::kSide ? kChunk / L::kSide : 1;  // of a warp for a chunk
  constexpr int kAtOnce = kSteps < 4 ? kSteps : 4;
  constexpr uint32_t kBytes = kChunk * D * sizeof(T);
  extern __shared__ char storage[];
  auto& memory = *reinterpret_cast<Memory<T, D, G, WARPS>*>(storage + (128 - shared_address(storage) % 128) % 128);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, side = lane / L::kLanes, part_lane = lane % L::kLanes;
  const int group = a.num_heads / a.num_kv_heads, tiles = (group + G - 1) / G;
  const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles, heads = min(G, group - tile * G);
  const int first = kv_head * group + tile * G, sequence = blockIdx.z;
  if (lane == 0) {
#pragma unroll
    for (int s = 0; s < kStages; ++s) init_barrier(&memory.barriers[warp][s]);
    fence_barriers();
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();

  const int length = a.seq_lens[sequence];
  const int oldest = a.window > 0 ? max(0, length - a.window) : 0;  // key that is seen
  const Part part =
      part_of(oldest / kChunk * kChunk, length, WARPS * kChunk, CLUSTER ? blockIdx.x : 0, CLUSTER ? gridDim.x : 1);
  const int* table = a.block_table + sequence * a.table_stride;
  const auto first_of = [&](int turn) { return part.begin + (turn * WARPS + warp) * kChunk; };
  const auto page_of = [&](int turn) { return first_of(turn) < part.end ? table[first_of(turn) / a.page_size] : 0; };
  // Lane 0 asks for the chunk of turn `turn`: neighbours in one page.
  const auto ask = [&](int turn, int64_t page) {
    const int token = first_of(turn), stage = turn % kStages, offset = token % a.page_size;
    if (token >= part.end) return;
    uint64_t* barrier = &memory.barriers[warp][stage];
    expect_bytes(barrier, 2 * kBytes);
    copy_bulk(memory.ring[warp][stage][0],
              static_cast<const T*>(a.k_cache) + page * a.k_strides.page + kv_head * a.k_strides.head + offset * D,
              kBytes, barrier);
    copy_bulk(memory.ring[warp][stage][1],
              static_cast<const T*>(a.v_cache) + page * a.v_strides.page + kv_head * a.v_strides.head + offset * D,
              kBytes, barrier);
  };
  int pages[kStages + 1];
#pragma unroll
  for (int turn = 0; turn <= kStages; ++turn) pages[turn] = lane == 0 ? page_of(turn) : 0;
  if (lane == 0) {
#pragma unroll
    for (int turn = 0; turn < kStages; ++turn) ask(turn, pages[turn]);
  }
  int next_page = pages[kStages];  // read a turn before it is needed
  float q[G][L::kValues];
  load_queries<T, D, G, true, L>(a, sequence, first, heads, part_lane, q);
  State<G, L::kValues> state;
  state.clear();
  __syncwarp();

  for (int turn = 0;; ++turn) {
    const int base = first_of(turn), stage = turn % kStages;
    if (base >= part.end) break;
    wait_barrier(&memory.barriers[warp][stage], turn / kStages % 2);
#pragma unroll 1
    for (int step = 0; step < kSteps; step += kAtOnce) {
      float scores[kAtOnce][G];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int offset = (step + u) * L::kSide + side;
        const P* keys = reinterpret_cast<const P*>(memory.ring[warp][stage][0]) + offset * L::kChunks;
#pragma unroll
        for (int g = 0; g < G; ++g) scores[u][g] = 0.0f;
#pragma unroll
        for (int c = 0; c < L::kOwn; ++c) {
          const int chunk = c * L::kLanes + part_lane;
          float k[L::kElements] = {};
          if (offset < kChunk && (L::kFull || chunk < L::kChunks)) to_floats(load(keys + chunk), k);
#pragma unroll
          for (int g = 0; g < G; ++g) {
#pragma unroll
            for (int j = 0; j < L::kElements; ++j) {
              scores[u][g] = fmaf(q[g][c * L::kElements + j], k[j], scores[u][g]);
            }
          }
        }
        const int token = base + offset;
        const bool seen = offset < kChunk && token < part.end && token >= oldest;
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
          for (int far = L::kLanes / 2; far > 0; far /= 2) scores[u][g] += __shfl_xor_sync(kAll, scores[u][g], far);
          if (!seen) scores[u][g] = -INFINITY;  // whatever the slot holds
        }
      }
      state.weigh(scores);
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const int offset = (step + u) * L::kSide + side, token = base + offset;
        const bool seen = offset < kChunk && token < part.end && token >= oldest;
        const P* values = reinterpret_cast<const P*>(memory.ring[warp][stage][1]) + offset * L::kChunks;
#pragma unroll
        for (int c = 0; c < L::kOwn; ++c) {
          const int chunk = c * L::kLanes + part_lane;
          float v[L::kElements] = {};
          if (seen && (L::kFull || chunk < L::kChunks)) to_floats(load(values + chunk), v);  // 0 * NaN would be NaN
#pragma unroll
          for (int g = 0; g < G; ++g) {
#pragma unroll
            for (int j = 0; j < L::kElements; ++j) {
              state.out[g][c * L::kElements + j] = fmaf(scores[u][g], v[j], state.out[g][c * L::kElements + j]);
            }
          }
        }
      }
    }
    __syncwarp();  // all lanes have read the stage
    if (lane == 0) {
      ask(turn + kStages, next_page);
      next_page = page_of(turn + kStages + 1);
    }
  }
  __syncthreads();  // no ring is read or written any more: its memory is the meeting's
  finish<T, D, G, WARPS, CLUSTER, L>(a, state, memory.meeting, sequence, first, heads, part.count);
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
  load_queries<T, D, G, false, L>(a, sequence, first, heads, part_lane, q);
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
  finish<T, D, G, kWarps, false, L>(a, state, meeting, sequence, first, heads, 1);
}

template <typename T, int D, int G, int WARPS>
void launch_ring(const DecodeAttention& a, int splits, cudaStream_t stream) {
  const int tiles = (a.num_heads / a.num_kv_heads + G - 1) / G;
  const dim3 grid(splits, a.num_kv_heads * tiles, a.num_seqs), block(WARPS * 32);
  constexpr int kShared = sizeof(Memory<T, D, G, WARPS>) + 128;
  const auto kernel =
      splits == 1 ? decode_attention_ring<T, D, G, WARPS, false> : decode_attention_ring<T, D, G, WARPS, true>;
  launch_cluster(kernel, grid, block, splits, stream, Overlap::kBehindOurs, kShared, a);
}

template <typename T, int D, int G>
void launch_split(const DecodeAttention& a, cudaStream_t stream) {
  const int tiles = (a.num_heads / a.num_kv_heads + G - 1) / G;
  const int64_t blocks = int64_t{a.num_seqs} * a.num_kv_heads * tiles;
  const int splits = a.splits > 0 ? a.splits : decode_splits(blocks);
  if constexpr (sizeof(Memory<T, D, G, kManyWarps>) < 226 * 1024) {
    // Not with large clusters: they would find no place beside other kernels' blocks.
    if (splits <= 2 && blocks * splits <= card().multiprocessors)
      return launch_ring<T, D, G, kManyWarps>(a, splits, stream);
  }
  launch_ring<T, D, G, kWarps>(a, splits, stream);
}

template <typename T, int D>
void launch_for_layout(const DecodeAttention& a, cudaStream_t stream) {
  const int group = a.num_heads / a.num_kv_heads;
  const auto side_by_side = [](const CacheStrides& strides) { return strides.token == D; };
  const bool ring = a.aligned && a.page_size % kChunkTokens<T, D> == 0 && side_by_side(a.k_strides) &&
                    side_by_side(a.v_strides) && card().major >= 9;
  if (ring && group == 1) return launch_split<T, D, 1>(a, stream);
  if (ring && group == 2) return launch_split<T, D, 2>(a, stream);
  if (ring) return launch_split<T, D, 4>(a, stream);
  const dim3 grid(1, a.num_kv_heads * ((group + 1) / 2), a.num_seqs);
  launch(decode_attention_plain<T, D>, grid, dim3(kWarps * 32), stream, Overlap::kBehindOurs, 0, a);
}

template <typename T>
void launch_typed(const DecodeAttention& a, cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:
      return launch_for_layout<T, 64>(a, stream);
    case 80:
      return launch_for_layout<T, 80>(a, stream);
    case 128:
      return launch_for_layout<T, 128>(a, stream);
    case 256:
      return launch_for_layout<T, 256>(a, stream);
  }
}

}  // namespace

bool takes_head_dim(int head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 128 || head_dim == 256;
}

int decode_splits(int64_t blocks) {
  const int64_t places = card().multiprocessors;
  int splits = 1;
  while (splits < kMostSplits && blocks * splits * 2 <= places) splits *= 2;
  return splits;
}

void launch_decode_attention(const DecodeAttention& a, cudaStream_t stream) {
  if (a.num_seqs == 0) return;
  switch (a.dtype) {
    case Dtype::kFloat32:
      return launch_typed<float>(a, stream);
    case Dtype::kFloat16:
      return launch_typed<__half>(a, stream);
    case Dtype::kBFloat16:
      return launch_typed<__nv_bfloat16>(a, stream);
  }
}

}  // namespace rooflight
