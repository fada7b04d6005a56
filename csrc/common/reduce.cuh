// Sums over the threads of a row, in an order that depends on the row's width and on the packs that its address and
// stride allow: the same row, laid out alike, gives the same bits whatever else is in the batch.
#pragma once

namespace rooflight {

constexpr unsigned kAllLanes = 0xffffffffu;

// Every one of `width` neighbouring lanes (a power of two) gets the sum of their values.
__device__ __forceinline__ float warp_sum(float value, int width = 32) {
  for (int offset = width / 2; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(kAllLanes, value, offset);
  }
  return value;
}

// Sums of K values over the threads of a row: less than a warp (a power of two of lanes) or whole warps, WARPS of them
// or as many as blockDim.x says. `thread` is within the row. `scratch` holds one slot for each of the row's warps and
// is free again once the next __syncthreads has passed. Every thread of the block must call it.
//
// HALVES adds the first half of the warps and the second apart. So a thread with two packs of a row sums in the same
// order as one of half as many threads that keeps two sums for its four: packs 0 and 2, packs 1 and 3.
template <int WARPS = 0, bool HALVES = false, int K>
__device__ __forceinline__ void row_sum(float (&values)[K], float (*scratch)[K], int thread = threadIdx.x,
                                        int row = 0) {
  if (WARPS == 0 && blockDim.x <= 32) {
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = warp_sum(values[k], blockDim.x);
    return;
  }
#pragma unroll
  for (int k = 0; k < K; ++k) values[k] = warp_sum(values[k]);
  if constexpr (WARPS != 1) {
    const int warps = WARPS > 0 ? WARPS : blockDim.x / 32;
    scratch += row * warps;
    if (thread % 32 == 0) {
#pragma unroll
      for (int k = 0; k < K; ++k) scratch[thread / 32][k] = values[k];
    }
    __syncthreads();
    constexpr int kAtOnce = WARPS > 0 ? WARPS : 4;
    // Every thread adds all slots: reads of one address by a whole warp are free, a second round of shuffles is not.
    const auto sum = [&](int first, int end, int k) {
      float total = 0.0f;
#pragma unroll kAtOnce
      for (int warp = first; warp < end; ++warp) total += scratch[warp][k];
      return total;
    };
#pragma unroll
    for (int k = 0; k < K; ++k) {
      values[k] = HALVES ? sum(0, warps / 2, k) + sum(warps / 2, warps, k) : sum(0, warps, k);
    }
  }
}

}  // namespace rooflight
