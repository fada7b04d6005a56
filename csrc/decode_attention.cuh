// What the kernels of decode attention share: which keys a block has, and how parts of a softmax meet.
#pragma once

#include <cooperative_groups.h>

#include "common/launch.cuh"
#include "common/pack.cuh"
#include "decode_attention.h"

namespace rooflight {

constexpr int kLeastPart = 64;  // keys a block should have before another one is asked to help
constexpr unsigned kAll = 0xffffffffu;

__device__ __forceinline__ float weight_of(float score, float peak) {
  return peak == -INFINITY ? (score == -INFINITY ? 0.0f : score) : exp2f(score - peak);  // NaN goes on
}

// One state of online softmax absorbs another: peaks in base 2, sums and outputs relative to them.
__device__ __forceinline__ float share(float peak, float merged) {
  return peak == -INFINITY ? 0.0f : exp2f(peak - merged);
}

// Which keys a block has. Parts are multiples of `turn` keys, as many as there are keys for.
struct Part {
  int begin, end, count;
};

__device__ __forceinline__ Part part_of(int start, int length, int turn, int index, int most) {
  const int count = min(most, max(1, (length - start + kLeastPart - 1) / kLeastPart));
  const int size = ((length - start + count - 1) / count + turn - 1) / turn * turn;
  const int begin = start + index * size;
  return {begin, min(length, begin + size), count};
}

// Shared memory of a block in which its warps meet.
template <int WARPS, int G, int D>
struct Meeting {
  float outs[WARPS][G][D];
  float peaks[WARPS][G], sums[WARPS][G];
  float peak[G], sum[G];
};

// What a warp has, in the meeting's memory: the warps of the block meet, then the blocks of the cluster, and the result
// is written. first: the heads' first one of all query heads. heads: of the G that exist. parts: blocks of the cluster
// with keys.
template <typename T, int D, int G, int WARPS, bool CLUSTER>
__device__ __forceinline__ void finish(const DecodeAttention& a, Meeting<WARPS, G, D>& meeting, int sequence, int first,
                                       int heads, int parts) {
  __syncthreads();
  const int64_t head = static_cast<int64_t>(sequence) * a.num_heads + first;
  const auto write = [&](int g, int d, float highest, float total, float value) {
    static_cast<T*>(a.out)[(head + g) * D + d] = static_cast<T>(total == 0.0f ? 0.0f : value / total);  // NaN goes on
    if (a.lse != nullptr && d == 0) {
      a.lse[head + g] = total == 0.0f ? -INFINITY : highest * 0.693147180559945309f + logf(total);
    }
  };
  const bool alone = !CLUSTER || parts == 1;
  if (CLUSTER && alone && blockIdx.x != 0) return;  // no keys, and nobody waits
  for (int place = threadIdx.x; place < heads * D; place += WARPS * 32) {
    const int g = place / D, d = place % D;
    float highest = -INFINITY, total = 0.0f, value = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; ++w) highest = fmaxf(highest, meeting.peaks[w][g]);
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
      const float kept = share(meeting.peaks[w][g], highest);
      total += meeting.sums[w][g] * kept;
      value += meeting.outs[w][g][d] * kept;
    }
    if (alone) {
      write(g, d, highest, total, value);
    } else {
      meeting.outs[0][g][d] = value;  // nobody else reads or writes this place
      if (d == 0) {
        meeting.peak[g] = highest;
        meeting.sum[g] = total;
      }
    }
  }
#if __CUDA_ARCH__ >= 900  // Hopper and later have clusters
  if constexpr (CLUSTER) {
    if (alone) return;
    const cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    cluster.sync();
    const int members = cluster.num_blocks();
    for (int place = threadIdx.x + cluster.block_rank() * WARPS * 32; place < heads * D;
         place += members * WARPS * 32) {
      const int g = place / D, d = place % D;
      float highest = -INFINITY, total = 0.0f, value = 0.0f;
#pragma unroll 8
      for (int m = 0; m < parts; ++m) highest = fmaxf(highest, *cluster.map_shared_rank(&meeting.peak[g], m));
#pragma unroll 8
      for (int m = 0; m < parts; ++m) {
        const float kept = share(*cluster.map_shared_rank(&meeting.peak[g], m), highest);
        total += *cluster.map_shared_rank(&meeting.sum[g], m) * kept;
        value += *cluster.map_shared_rank(&meeting.outs[0][g][d], m) * kept;
      }
      write(g, d, highest, total, value);
    }
    cluster.sync();  // nobody leaves while its memory is read
  }
#endif
}

// The plain kernel, which decode_attention_plain.cu has for every type and head.
template <typename T, int D>
void launch_plain_decode_attention(const DecodeAttention& a, cudaStream_t stream);

}  // namespace rooflight
