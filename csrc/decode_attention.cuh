// What the kernels of decode attention share: which keys a block has, and how parts of a softmax meet.
#pragma once

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
};

// Of output d of head g, what the warps of a block have together.
template <int WARPS, int G, int D>
__device__ __forceinline__ void meet(const Meeting<WARPS, G, D>& meeting, int g, int d, float& peak, float& sum,
                                     float& value) {
  peak = -INFINITY;
  sum = value = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; ++w) peak = fmaxf(peak, meeting.peaks[w][g]);
#pragma unroll
  for (int w = 0; w < WARPS; ++w) {
    const float kept = share(meeting.peaks[w][g], peak);
    sum += meeting.sums[w][g] * kept;
    value += meeting.outs[w][g][d] * kept;
  }
}

// head: of all heads of all sequences.
template <typename T, int D>
__device__ __forceinline__ void write_result(const DecodeAttention& a, int64_t head, int d, float peak, float sum,
                                             float value) {
  static_cast<T*>(a.out)[head * D + d] = static_cast<T>(sum == 0.0f ? 0.0f : value / sum);  // NaN goes on
  if (a.lse != nullptr && d == 0) a.lse[head] = sum == 0.0f ? -INFINITY : peak * 0.693147180559945309f + logf(sum);
}

// The result of a block that has a sequence for itself. first: the heads' first one of all query heads. heads: of the G
// that exist.
template <typename T, int D, int G, int WARPS>
__device__ __forceinline__ void finish_alone(const DecodeAttention& a, const Meeting<WARPS, G, D>& meeting,
                                             int sequence, int first, int heads) {
  const int64_t head = static_cast<int64_t>(sequence) * a.num_heads + first;
  for (int place = threadIdx.x; place < heads * D; place += WARPS * 32) {
    float peak, sum, value;
    meet(meeting, place / D, place % D, peak, sum, value);
    write_result<T, D>(a, head + place / D, place % D, peak, sum, value);
  }
}

// The plain kernel, which decode_attention_plain.cu has for every type and head.
template <typename T, int D>
void launch_plain_decode_attention(const DecodeAttention& a, cudaStream_t stream);

}  // namespace rooflight
