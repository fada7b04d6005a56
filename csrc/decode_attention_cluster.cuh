// How the blocks of a cluster put their parts of a softmax together.
//
// Each block that has keys writes a share of the results, and the others send it what they have of them: stores into
// its shared memory that tell a barrier there how many bytes came. So nobody waits for a fence that covers all of
// memory, as a barrier of the whole cluster would have it, and blocks end when their own share is written.
#pragma once

#include "common/cluster.cuh"
#include "decode_attention.cuh"

namespace rooflight {

constexpr int kMostSplits = 16;

// Memory of a block for what is sent to it. A unit is four neighbouring outputs.
template <int G, int D>
struct Gathering {
  float4 units[G * D / 4 + kMostSplits];  // [member][unit of this block's share]
  float2 states[kMostSplits][G];          // [member]: peak and sum of each head
  uint64_t barrier;
};

// Which units a block writes.
struct Share {
  int size, begin, count;
};

__device__ __forceinline__ Share share_of(int units, int parts, int rank) {
  const int size = (units + parts - 1) / parts, begin = rank * size;
  return {size, begin, max(0, min(size, units - begin))};
}

// At the start of a kernel, by all threads of all blocks. parts: blocks with keys, the first ones.
template <int G, int D>
__device__ __forceinline__ void begin_gathering(Gathering<G, D>& gathering, int heads, int parts) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x == 0) {
    const Share mine = share_of(heads * D / 4, parts, blockIdx.x);
    init_barrier(&gathering.barrier);
    fence_barriers();
    expect_bytes(&gathering.barrier, parts * (mine.count * sizeof(float4) + heads * sizeof(float2)));
  }
  arrive_in_cluster();
#endif
}

// The result of a cluster, whose blocks stand along x. parts, first, heads: as above and in finish_alone.
template <typename T, int D, int G, int WARPS>
__device__ __forceinline__ void finish_together(const DecodeAttention& a, const Meeting<WARPS, G, D>& meeting,
                                                Gathering<G, D>& gathering, int sequence, int first, int heads,
                                                int parts) {
#if __CUDA_ARCH__ >= 900
  wait_for_cluster();  // all barriers are there: long ago
  const int rank = blockIdx.x;
  if (rank >= parts) return;
  if (parts == 1) return finish_alone<T, D>(a, meeting, sequence, first, heads);
  const int units = heads * D / 4;
  const Share mine = share_of(units, parts, rank);
  for (int unit = threadIdx.x; unit < units; unit += WARPS * 32) {
    float peak, sum, values[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) meet(meeting, unit * 4 / D, unit * 4 % D + j, peak, sum, values[j]);
    const int to = unit / mine.size;
    send(address_at(&gathering.units[rank * mine.size + unit % mine.size], to), address_at(&gathering.barrier, to),
         float4{values[0], values[1], values[2], values[3]});
  }
  for (int i = threadIdx.x; i < heads * parts; i += WARPS * 32) {
    const int g = i % heads, to = i / heads;
    float peak, sum, value;
    meet(meeting, g, 0, peak, sum, value);
    send(address_at(&gathering.states[rank][g], to), address_at(&gathering.barrier, to), float2{peak, sum});
  }
  wait_barrier_of_cluster(&gathering.barrier, 0);
  const int64_t head = static_cast<int64_t>(sequence) * a.num_heads + first;
  for (int i = threadIdx.x; i < mine.count * 4; i += WARPS * 32) {
    const int place = mine.begin * 4 + i, g = place / D;
    float peak = -INFINITY, sum = 0.0f, value = 0.0f;
#pragma unroll 8
    for (int m = 0; m < parts; ++m) peak = fmaxf(peak, gathering.states[m][g].x);
#pragma unroll 8
    for (int m = 0; m < parts; ++m) {
      const float kept = share(gathering.states[m][g].x, peak);
      sum += gathering.states[m][g].y * kept;
      value += reinterpret_cast<const float*>(&gathering.units[m * mine.size])[i] * kept;
    }
    write_result<T, D>(a, head + g, place % D, peak, sum, value);
  }
#endif
}

}  // namespace rooflight
