// Decode attention over a paged cache: one new token a sequence, all query heads of a KV head in one block.
//
//   out = sum_j softmax_j(scale * q . k_j) v_j
//
// Bound by the cache's way from memory, so keys and values are read once for the whole group of query heads, 16 bytes a
// lane, a warp's keys and values all asked for before the first is used. LANES lanes share a token, so 32 / LANES
// tokens go through a warp side by side, each with its own running maximum and sum; they meet at the end only.
//
// Few sequences would leave most multiprocessors idle: then a cluster of blocks shares a sequence (the long path), each
// with a part of the keys, and merges through the shared memory of its members: exact, in a fixed order, without
// scratch memory and without a second launch. Parts follow from the length on the device, so one graph serves all
// lengths; short sequences keep blocks of a cluster idle.
#include <cooperative_groups.h>

#include <type_traits>

#include "common/launch.cuh"
#include "common/pack.cuh"
#include "decode_attention.h"

namespace rooflight {
namespace {

namespace cg = cooperative_groups;

constexpr int kWarps = 4;       // three blocks fit a multiprocessor, and a cluster of 16 the smallest group of them
constexpr int kLeastPart = 64;  // keys a block should have before another one is asked to help
constexpr int kMostSplits = 16;
constexpr unsigned kAll = 0xffffffffu;

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
  static constexpr int kLanes = lanes();                                         // that share a token
  static constexpr int kOwn = (kChunks + kLanes - 1) / kLanes;                   // loads of a lane for a token
  static constexpr int kSide = 32 / kLanes;                                      // tokens side by side in a warp
  static constexpr int kUnroll = kOwn >= 4 ? 2 : kOwn == 2 ? 4 : G > 4 ? 2 : 4;  // times that many in flight
  static constexpr int kTokens = kSide * kUnroll;                                // of a warp's turn
};

__device__ __forceinline__ float weight_of(float score, float peak) {
  return peak == -INFINITY ? (score == -INFINITY ? 0.0f : score) : exp2f(score - peak);  // NaN goes on
}

// One state of online softmax absorbs another: peaks in base 2, sums and outputs relative to them.
__device__ __forceinline__ float share(float peak, float merged) {
  return peak == -INFINITY ? 0.0f : exp2f(peak - merged);
}

// 16 bytes, or their elements one by one where the tensors are not aligned.
template <bool ALIGNED, typename P>
__device__ __forceinline__ P load_pack(const P* from) {
  if constexpr (ALIGNED) return load(from);
  P pack;
#pragma unroll
  for (int j = 0; j < static_cast<int>(sizeof(pack.values) / sizeof(pack.values[0])); ++j) {
    pack.values[j] = reinterpret_cast<decltype(&pack.values[0])>(const_cast<P*>(from))[j];
  }
  return pack;
}

template <typename T, int D, int G, bool CLUSTER, bool ALIGNED>
__global__ void __launch_bounds__(kWarps * 32, ALIGNED ? 3 : 2) decode_attention(DecodeAttention a) {
  using L = Layout<T, D, G>;
  using P = Pack<T, L::kElements>;
  constexpr int E = L::kElements;
  __shared__ float outs[kWarps][G][D];
  __shared__ float peaks[kWarps][G], sums[kWarps][G];
  __shared__ float all_peak[G], all_sum[G];

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, side = lane / L::kLanes, part_lane = lane % L::kLanes;
  const int group = a.num_heads / a.num_kv_heads, tiles = (group + G - 1) / G;
  const int kv_head = blockIdx.y / tiles, first = (blockIdx.y % tiles) * G;  // first: of the group's query heads
  const int sequence = blockIdx.z;
  const int own_heads = min(G, group - first);
  wait_for_earlier_kernels();
  let_next_kernel_start();

  const int length = a.seq_lens[sequence];
  const int start = a.window > 0 ? max(0, length - a.window) : 0;
  // Parts of whole warp turns, as many as there are keys for.
  const int splits = CLUSTER ? gridDim.x : 1;
  const int wanted = CLUSTER ? min(splits, max(1, (length - start + kLeastPart - 1) / kLeastPart)) : 1;
  const int part = ((length - start + wanted - 1) / wanted + L::kTokens - 1) / L::kTokens * L::kTokens;
  const int begin = start + (CLUSTER ? static_cast<int>(blockIdx.x) * part : 0);
  const int end = min(length, begin + part);

  // A lane's part of the queries, in the base of exp2.
  float q[G][L::kOwn * E];
#pragma unroll
  for (int g = 0; g < G; ++g) {
#pragma unroll
    for (int c = 0; c < L::kOwn; ++c) {
      const int chunk = c * L::kLanes + part_lane;
      P pack = {};
      if (g < own_heads && chunk < L::kChunks) {
        const int64_t head = static_cast<int64_t>(kv_head) * group + first + g;
        pack = load(
            reinterpret_cast<const P*>(static_cast<const T*>(a.q) + sequence * a.q_stride + head * a.q_head_stride) +
            chunk);
      }
      float values[E];
      to_floats(pack, values);
#pragma unroll
      for (int j = 0; j < E; ++j) q[g][c * E + j] = values[j] * (a.scale * 1.44269504088896341f);
    }
  }

  float peak[G], sum[G], out[G][L::kOwn * E];
#pragma unroll
  for (int g = 0; g < G; ++g) {
    peak[g] = -INFINITY;
    sum[g] = 0.0f;
#pragma unroll
    for (int j = 0; j < L::kOwn * E; ++j) out[g][j] = 0.0f;
  }

  const int* table = a.block_table + sequence * a.table_stride;
  const auto page_of = [&](int token) {
    if (token >= end) return 0;
    return table[a.page_shift >= 0 ? token >> a.page_shift : token / a.page_size];
  };
  const auto place_of = [&](const CacheStrides& strides, int page, int token) {
    const int offset = a.page_shift >= 0 ? token & (a.page_size - 1) : token % a.page_size;
    return page * strides.page + kv_head * strides.head + offset * strides.token;
  };
  int pages[L::kUnroll];  // of the next turn: the table is read one turn ahead
#pragma unroll
  for (int u = 0; u < L::kUnroll; ++u) pages[u] = page_of(begin + warp * L::kTokens + u * L::kSide + side);

  for (int base = begin + warp * L::kTokens; base < end; base += kWarps * L::kTokens) {
    P keys[L::kUnroll][L::kOwn], values[L::kUnroll][L::kOwn];
#pragma unroll
    for (int u = 0; u < L::kUnroll; ++u) {
      const int token = base + u * L::kSide + side;
      const P* k =
          reinterpret_cast<const P*>(static_cast<const T*>(a.k_cache) + place_of(a.k_strides, pages[u], token));
      const P* v =
          reinterpret_cast<const P*>(static_cast<const T*>(a.v_cache) + place_of(a.v_strides, pages[u], token));
#pragma unroll
      for (int c = 0; c < L::kOwn; ++c) {
        const int chunk = c * L::kLanes + part_lane;
        const bool there = token < end && (L::kChunks % L::kLanes == 0 || chunk < L::kChunks);
        keys[u][c] = there ? load_pack<ALIGNED>(k + chunk) : P{};
        values[u][c] = there ? load_pack<ALIGNED>(v + chunk) : P{};
      }
    }
#pragma unroll
    for (int u = 0; u < L::kUnroll; ++u) {
      pages[u] = page_of(base + kWarps * L::kTokens + u * L::kSide + side);
    }
    float scores[L::kUnroll][G];
#pragma unroll
    for (int u = 0; u < L::kUnroll; ++u) {
#pragma unroll
      for (int g = 0; g < G; ++g) scores[u][g] = 0.0f;
#pragma unroll
      for (int c = 0; c < L::kOwn; ++c) {
        float k[E];
        to_floats(keys[u][c], k);
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
          for (int j = 0; j < E; ++j) scores[u][g] = fmaf(q[g][c * E + j], k[j], scores[u][g]);
        }
      }
      const bool there = base + u * L::kSide + side < end;
#pragma unroll
      for (int g = 0; g < G; ++g) {
#pragma unroll
        for (int offset = L::kLanes / 2; offset > 0; offset /= 2) {
          scores[u][g] += __shfl_xor_sync(kAll, scores[u][g], offset);
        }
        if (!there) scores[u][g] = -INFINITY;
      }
    }
#pragma unroll
    for (int g = 0; g < G; ++g) {
      float highest = peak[g];
#pragma unroll
      for (int u = 0; u < L::kUnroll; ++u) highest = fmaxf(highest, scores[u][g]);
      const float kept = share(peak[g], highest);
      peak[g] = highest;
      sum[g] *= kept;
#pragma unroll
      for (int j = 0; j < L::kOwn * E; ++j) out[g][j] *= kept;
#pragma unroll
      for (int u = 0; u < L::kUnroll; ++u) {
        scores[u][g] = weight_of(scores[u][g], highest);
        sum[g] += scores[u][g];
      }
    }
#pragma unroll
    for (int u = 0; u < L::kUnroll; ++u) {
#pragma unroll
      for (int c = 0; c < L::kOwn; ++c) {
        float v[E];
        to_floats(values[u][c], v);
#pragma unroll
        for (int g = 0; g < G; ++g) {
#pragma unroll
          for (int j = 0; j < E; ++j) out[g][c * E + j] = fmaf(scores[u][g], v[j], out[g][c * E + j]);
        }
      }
    }
  }

  // Tokens side by side in a warp meet, then the warps of the block.
#pragma unroll
  for (int g = 0; g < G; ++g) {
    float highest = peak[g];
#pragma unroll
    for (int offset = L::kLanes; offset < 32; offset *= 2)
      highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, offset));
    const float kept = share(peak[g], highest);
    float total = sum[g] * kept;
#pragma unroll
    for (int offset = L::kLanes; offset < 32; offset *= 2) total += __shfl_xor_sync(kAll, total, offset);
    if (lane == 0) {
      peaks[warp][g] = highest;
      sums[warp][g] = total;
    }
#pragma unroll
    for (int c = 0; c < L::kOwn; ++c) {
      const int chunk = c * L::kLanes + part_lane;
#pragma unroll
      for (int j = 0; j < E; ++j) {
        float value = out[g][c * E + j] * kept;
#pragma unroll
        for (int offset = L::kLanes; offset < 32; offset *= 2) value += __shfl_xor_sync(kAll, value, offset);
        if (side == 0 && chunk < L::kChunks) outs[warp][g][chunk * E + j] = value;
      }
    }
  }
  __syncthreads();
  T* results = static_cast<T*>(a.out) + (static_cast<int64_t>(sequence) * a.num_heads + kv_head * group + first) * D;
  float* lse =
      a.lse == nullptr ? nullptr : a.lse + static_cast<int64_t>(sequence) * a.num_heads + kv_head * group + first;
  const auto finish = [&](int g, int d, float highest, float total, float value) {
    results[g * D + d] = static_cast<T>(total == 0.0f ? 0.0f : value / total);  // not > 0: NaN goes on
    if (lse != nullptr && d == 0) {
      lse[g] = total == 0.0f ? -INFINITY : highest * 0.693147180559945309f + logf(total);
    }
  };
  const auto of_block = [&](int g, float& highest, float& total) {
    highest = -INFINITY;
    total = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) highest = fmaxf(highest, peaks[w][g]);
#pragma unroll
    for (int w = 0; w < kWarps; ++w) total += sums[w][g] * share(peaks[w][g], highest);
  };
  const auto value_of_block = [&](int g, int d, float highest) {
    float value = 0.0f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) value += outs[w][g][d] * share(peaks[w][g], highest);
    return value;
  };
  if constexpr (!CLUSTER) {
    for (int place = threadIdx.x; place < own_heads * D; place += kWarps * 32) {
      const int g = place / D, d = place % D;
      float highest, total;
      of_block(g, highest, total);
      finish(g, d, highest, total, value_of_block(g, d, highest));
    }
  } else {
    const cg::cluster_group cluster = cg::this_cluster();
    // The block's own state into outs[0], then each member merges its share of the outputs of all.
    for (int place = threadIdx.x; place < own_heads * D; place += kWarps * 32) {
      const int g = place / D, d = place % D;
      float highest, total;
      of_block(g, highest, total);
      outs[0][g][d] = value_of_block(g, d, highest);
      if (d == 0) {
        all_peak[g] = highest;
        all_sum[g] = total;
      }
    }
    cluster.sync();
    const int members = cluster.num_blocks();
    for (int place = threadIdx.x + cluster.block_rank() * kWarps * 32; place < own_heads * D;
         place += members * kWarps * 32) {
      const int g = place / D, d = place % D;
      float highest = -INFINITY, total = 0.0f, value = 0.0f;
#pragma unroll 8
      for (int m = 0; m < wanted; ++m) highest = fmaxf(highest, *cluster.map_shared_rank(&all_peak[g], m));
#pragma unroll 8
      for (int m = 0; m < wanted; ++m) {
        const float kept = share(*cluster.map_shared_rank(&all_peak[g], m), highest);
        total += *cluster.map_shared_rank(&all_sum[g], m) * kept;
        value += *cluster.map_shared_rank(&outs[0][g][d], m) * kept;
      }
      finish(g, d, highest, total, value);
    }
    cluster.sync();  // nobody leaves while its memory is read
  }
}

template <typename T, int D, int G, bool ALIGNED>
void launch_grouped(const DecodeAttention& a, cudaStream_t stream) {
  const int group = a.num_heads / a.num_kv_heads, tiles = (group + G - 1) / G;
  const int splits = a.splits > 0 ? a.splits : decode_splits(a.num_seqs, a.num_kv_heads, group);
  const dim3 grid(splits, a.num_kv_heads * tiles, a.num_seqs), block(kWarps * 32);
  if (splits == 1) {
    return launch(decode_attention<T, D, G, false, ALIGNED>, grid, block, stream, Overlap::kBehindOurs, 0, a);
  }
  launch_cluster(decode_attention<T, D, G, true, ALIGNED>, grid, block, splits, stream, Overlap::kBehindOurs, 0, a);
}

template <typename T, int D>
void launch_for_group(const DecodeAttention& a, cudaStream_t stream) {
  const int group = a.num_heads / a.num_kv_heads;
  if (!a.aligned) return launch_grouped<T, D, 2, false>(a, stream);
  if (group == 1) return launch_grouped<T, D, 1, true>(a, stream);
  if (group == 2) return launch_grouped<T, D, 2, true>(a, stream);
  launch_grouped<T, D, 4, true>(a, stream);
}

template <typename T>
void launch_typed(const DecodeAttention& a, cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:
      return launch_for_group<T, 64>(a, stream);
    case 80:
      return launch_for_group<T, 80>(a, stream);
    case 128:
      return launch_for_group<T, 128>(a, stream);
    case 256:
      return launch_for_group<T, 256>(a, stream);
  }
}

}  // namespace

bool takes_head_dim(int head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 128 || head_dim == 256;
}

int decode_splits(int num_seqs, int num_kv_heads, int group) {
  const int64_t blocks = static_cast<int64_t>(num_seqs) * num_kv_heads * ((group + 3) / 4);
  int splits = 1;
  while (splits < kMostSplits && blocks * splits * 2 <= 2 * card().multiprocessors) splits *= 2;
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
