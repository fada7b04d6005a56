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

// Sums of K values over the threads of a row, that is over threadIdx.x; the rows of a block are threadIdx.y. A row is
// less than a warp (a power of two of lanes) or whole warps: WARPS of them, or as many as blockDim.x says. `scratch`
// holds one slot a warp and is free again once the next __syncthreads has passed. Every thread of the block that has
// not exited must call it.
template <int WARPS = 0, int K>
__device__ __forceinline__ void row_sum(float (&values)[K], float (*scratch)[K]) {
  if (WARPS == 0 && blockDim.x <= 32) {
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] = warp_sum(values[k], blockDim.x);
    return;
  }
#pragma unroll
  for (int k = 0; k < K; ++k) values[k] = warp_sum(values[k]);
  if (WARPS == 1) return;
  const int warps = WARPS > 0 ? WARPS : blockDim.x / 32;
  float (*mine)[K] = scratch + threadIdx.y * warps;
  if (threadIdx.x % 32 == 0) {
#pragma unroll
    for (int k = 0; k < K; ++k) mine[threadIdx.x / 32][k] = values[k];
  }
  __syncthreads();
#pragma unroll
  for (int k = 0; k < K; ++k) values[k] = 0.0f;
  // Every thread adds all slots: reads of one address by a whole warp are free, a second round of shuffles is not.
  constexpr int kAtOnce = WARPS > 0 ? WARPS : 8;
#pragma unroll kAtOnce
  for (int warp = 0; warp < warps; ++warp) {
#pragma unroll
    for (int k = 0; k < K; ++k) values[k] += mine[warp][k];
  }
}

}  // namespace rooflight
