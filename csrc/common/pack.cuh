// Vector packs: N elements of T that one thread moves with one instruction of 2, 4, 8 or 16 bytes.
//
// A load as wide as the address allows is what decides whether a memory-bound kernel reaches memory's speed: the same
// bytes in 2-byte pieces need eight times the instructions and eight times the requests in flight.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace rooflight {

template <typename T, int N>
struct alignas(sizeof(T) * N <= 16 ? sizeof(T) * N : 16) Pack {
  T values[N];
};

// Elements of T in a pack of 16 bytes.
template <typename T>
constexpr int kFullPack = 16 / sizeof(T);

// Between a pack and FP32. Half types go in pairs: the hardware rounds two values in one fast instruction, while single
// conversions run at a sixteenth of the rate of an addition and would be slower than memory.
template <int N>
__device__ __forceinline__ void to_floats(const Pack<float, N>& pack, float (&out)[N]) {
#pragma unroll
  for (int j = 0; j < N; ++j) out[j] = pack.values[j];
}

template <int N>
__device__ __forceinline__ void to_floats(const Pack<__half, N>& pack, float (&out)[N]) {
  if constexpr (N == 1) {
    out[0] = __half2float(pack.values[0]);
  } else {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const float2 pair = __half22float2(*reinterpret_cast<const __half2*>(&pack.values[j]));
      out[j] = pair.x;
      out[j + 1] = pair.y;
    }
  }
}

template <int N>
__device__ __forceinline__ void to_floats(const Pack<__nv_bfloat16, N>& pack, float (&out)[N]) {
  if constexpr (N == 1) {
    out[0] = __bfloat162float(pack.values[0]);
  } else {  // bf16 is the upper half of FP32: a shift and a mask
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      const unsigned bits = *reinterpret_cast<const unsigned*>(&pack.values[j]);
      out[j] = __uint_as_float(bits << 16);
      out[j + 1] = __uint_as_float(bits & 0xffff0000u);
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> from_floats(const float (&values)[N]) {
  Pack<T, N> pack;
  if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int j = 0; j < N; ++j) pack.values[j] = values[j];
  } else if constexpr (N == 1) {
    pack.values[0] = static_cast<T>(values[0]);
  } else {
#pragma unroll
    for (int j = 0; j < N; j += 2) {
      if constexpr (std::is_same_v<T, __half>) {
        *reinterpret_cast<__half2*>(&pack.values[j]) = __floats2half2_rn(values[j], values[j + 1]);
      } else {
        *reinterpret_cast<__nv_bfloat162*>(&pack.values[j]) = __floats2bfloat162_rn(values[j], values[j + 1]);
      }
    }
  }
  return pack;
}

// Loads and stores of one pack. `load` is a plain one: in-place kernels write where they have read; it stays in front
// of a barrier, where a non-coherent load may be moved behind it; and a hint costs: with L1::no_allocate on rows, and
// plain stores, an H200 lost 5 % at large shapes (docs/lab). `load_shared` is the non-coherent load, for what every
// block reads and none writes.
template <typename P>
__device__ __forceinline__ P load(const P* from) {
  P pack;
  if constexpr (sizeof(P) == 16) {
    *reinterpret_cast<uint4*>(&pack) = *reinterpret_cast<const uint4*>(from);
  } else if constexpr (sizeof(P) == 8) {
    *reinterpret_cast<uint2*>(&pack) = *reinterpret_cast<const uint2*>(from);
  } else if constexpr (sizeof(P) == 4) {
    *reinterpret_cast<unsigned*>(&pack) = *reinterpret_cast<const unsigned*>(from);
  } else {
    pack = *from;
  }
  return pack;
}

template <typename P>
__device__ __forceinline__ P load_shared(const P* from) {
  P pack;
  if constexpr (sizeof(P) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < static_cast<int>(sizeof(P) / 16); ++i) {
      reinterpret_cast<uint4*>(&pack)[i] = __ldg(reinterpret_cast<const uint4*>(from) + i);
    }
  } else if constexpr (sizeof(P) == 8) {
    *reinterpret_cast<uint2*>(&pack) = __ldg(reinterpret_cast<const uint2*>(from));
  } else if constexpr (sizeof(P) == 4) {
    *reinterpret_cast<unsigned*>(&pack) = __ldg(reinterpret_cast<const unsigned*>(from));
  } else {
    *reinterpret_cast<unsigned short*>(&pack) = __ldg(reinterpret_cast<const unsigned short*>(from));
  }
  return pack;
}

template <typename P>
__device__ __forceinline__ void store(P* to, const P& pack) {
  if constexpr (sizeof(P) == 16) {
    *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(&pack);
  } else if constexpr (sizeof(P) == 8) {
    *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(&pack);
  } else if constexpr (sizeof(P) == 4) {
    *reinterpret_cast<unsigned*>(to) = *reinterpret_cast<const unsigned*>(&pack);
  } else {
    *to = pack;
  }
}

}  // namespace rooflight
