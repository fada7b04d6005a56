// RMSNorm and RoPE of single heads in registers, in the layout that the tensor cores want of queries.
//
// A warp's lane is (row, quad) = (lane / 4, lane % 4): four neighbouring lanes have a head, each eight neighbours of
// every 32 elements. What turns together (element i and i + D / 2) is then in one lane.
#pragma once

#include "common/pack.cuh"

namespace rooflight {

// Multiples of 16 bytes that are to be on their way before what stands below: a plain load would sink to its use.
template <typename P>
__device__ __forceinline__ P load_early(const P* from) {
  P pack;
#pragma unroll
  for (int i = 0; i < static_cast<int>(sizeof(P) / 16); ++i) {
    uint4& part = reinterpret_cast<uint4*>(&pack)[i];
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(part.x), "=r"(part.y), "=r"(part.z), "=r"(part.w)
                 : "l"(reinterpret_cast<const uint4*>(from) + i));
  }
  return pack;
}

// A number, likewise, and past the nearest cache: the kernel that wrote it may only just have ended.
__device__ __forceinline__ int load_early(const int* from) {
  int number;
  asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(number) : "l"(from));
  return number;
}

__device__ __forceinline__ int64_t load_early(const int64_t* from) {
  int64_t number;
  asm volatile("ld.global.cg.s64 %0, [%1];" : "=l"(number) : "l"(from));
  return number;
}

// Neighbours 8 * quad ... of each 32 of a head's row, zeros beyond what there is.
template <typename T, int STEPS>
__device__ __forceinline__ void load_head(uint4 (&x)[STEPS], const void* row, int quad, int width, bool there) {
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const int at = i * 32 + quad * 8;
    x[i] = uint4{0, 0, 0, 0};
    if (there && at < width) x[i] = load_early(reinterpret_cast<const uint4*>(static_cast<const T*>(row) + at));
  }
}

// Of lane (row, quad): what its part of a head is multiplied by.
template <typename T, int STEPS>
struct Factors {
  Pack<T, 8> values[STEPS];

  __device__ __forceinline__ void read(const void* weight, int quad) {
    if (weight == nullptr) return;
#pragma unroll
    for (int i = 0; i < STEPS; ++i) values[i] = load_early(static_cast<const Pack<T, 8>*>(weight) + i * 4 + quad);
  }
};

// And the angles that it turns by.
template <int STEPS>
struct Turn {
  Pack<float, 8> cosines[STEPS / 2], sines[STEPS / 2];

  __device__ __forceinline__ void read(const float* angles, int quad) {
    const auto* first = reinterpret_cast<const Pack<float, 8>*>(angles) + quad;
#pragma unroll
    for (int i = 0; i < STEPS / 2; ++i) {
      cosines[i] = load_early(first + i * 4);
      sines[i] = load_early(first + i * 4 + STEPS * 2);
    }
  }
};

// RMSNorm and RoPE by halves of a head whose quarters four neighbouring lanes hold, as `load_head` gives them: what
// turns together is in one lane.
template <typename T, int STEPS>
__device__ __forceinline__ void normalise_and_turn(uint4 (&x)[STEPS], bool norm, const Factors<T, STEPS>& by,
                                                   const Turn<STEPS>& turn, float eps) {
  constexpr int kHalf = STEPS / 2;
  float values[STEPS][8], square = 0.0f;
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    to_floats(*reinterpret_cast<const Pack<T, 8>*>(&x[i]), values[i]);
#pragma unroll
    for (int j = 0; j < 8; ++j) square = fmaf(values[i][j], values[i][j], square);
  }
  if (norm) {
    square += __shfl_xor_sync(0xffffffffu, square, 1);
    square += __shfl_xor_sync(0xffffffffu, square, 2);
    const float inverse = rsqrtf(square / static_cast<float>(STEPS * 32) + eps);
#pragma unroll
    for (int i = 0; i < STEPS; ++i) {
      float factors[8];
      to_floats(by.values[i], factors);
#pragma unroll
      for (int j = 0; j < 8; ++j) values[i][j] *= inverse * factors[j];
    }
  }
#pragma unroll
  for (int i = 0; i < kHalf; ++i) {
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float a = values[i][j], b = values[i + kHalf][j];
      const float cosine = turn.cosines[i].values[j], sine = turn.sines[i].values[j];
      values[i][j] = a * cosine - b * sine;
      values[i + kHalf][j] = b * cosine + a * sine;
    }
  }
#pragma unroll
  for (int i = 0; i < STEPS; ++i) {
    const Pack<T, 8> rounded = from_floats<T>(values[i]);
    x[i] = *reinterpret_cast<const uint4*>(&rounded);
  }
}

// One lane's part of a row.
template <typename T, int STEPS>
__device__ __forceinline__ void store_head(const uint4 (&x)[STEPS], void* row, int quad) {
#pragma unroll
  for (int i = 0; i < STEPS; ++i) *reinterpret_cast<uint4*>(static_cast<T*>(row) + i * 32 + quad * 8) = x[i];
}

}  // namespace rooflight
