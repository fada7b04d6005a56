// Products by a warpgroup, four warps, from shared memory: 64 rows by N columns by 16, FP32 sums in registers.
//
// Both operands lie as rows of 64 elements (128 bytes), whose 16-byte pieces are permuted among eight rows as the
// copies of tensor_map.cuh put them. A lane has, of the sum's columns 8 j + 2 * (lane % 4) and the next one, d[4
// j] and d[4 j + 1] for row lane / 4 of its warp's 16, d[4 j + 2] and d[4 j + 3] for the row 8 further.
//
// For sm_90a alone; elsewhere the functions do nothing, and the host launches none of their kernels.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

namespace rooflight {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900 && !defined(__CUDA_ARCH_FEAT_SM90_ALL)
#error Build for 90a: 90 has no products of a warpgroup, and the host would launch kernels without them.
#endif

constexpr int kGroupDepth = 16;  // of one product

// So many threads of a block, whole warps, wait for each other at one of its barriers 1 to 15.
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// An operand in shared memory, for the products: its place, in units of 16 bytes, and where the rest of it is. Steps
// add to `place`, which 32 bits hold, so that few instructions go between products.
struct GroupOperand {
  uint32_t place, shape;
};

// Rows at a multiple of 1024 bytes. stride: bytes from eight rows to the next.
__device__ __forceinline__ GroupOperand operand_at(uint32_t address, uint32_t stride) {
  constexpr uint32_t kPermuted128 = 1u << 30;
  return {(address & 0x3FFFF) / 16 | 1 << 16, stride / 16 | kPermuted128};
}

// The same with the depth along the rows and 64 columns in each; further columns `chunk` bytes behind those.
__device__ __forceinline__ GroupOperand upright_operand_at(uint32_t address, uint32_t stride, uint32_t chunk) {
  constexpr uint32_t kPermuted128 = 1u << 30;
  return {(address & 0x3FFFF) / 16 | chunk / 16 << 16, stride / 16 | kPermuted128};
}

__device__ __forceinline__ GroupOperand operator+(GroupOperand operand, uint32_t bytes) {
  return {operand.place + bytes / 16, operand.shape};
}

__device__ __forceinline__ void begin_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void commit_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}

template <int LEFT>
__device__ __forceinline__ void wait_products() {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
#endif
}

// What products left in registers is read, and what they will read is written, on this side of here: the compiler does
// not see that they run on while it goes ahead.
template <int N>
__device__ __forceinline__ void settle(float (&values)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// The sums among the instructions' operands, from number i on, and their places in the instructions.
#define ROOFLIGHT_SUMS_8(i)                                                                                   \
  "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
      "+f"(d[i + 7])
#define ROOFLIGHT_SUMS_32(i) \
  ROOFLIGHT_SUMS_8(i), ROOFLIGHT_SUMS_8(i + 8), ROOFLIGHT_SUMS_8(i + 16), ROOFLIGHT_SUMS_8(i + 24)

#define ROOFLIGHT_PLACES_32                                                \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ROOFLIGHT_PLACES_64                                                            \
  ROOFLIGHT_PLACES_32                                                                  \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// An instruction for operands of type T.
#define ROOFLIGHT_OF_TYPE(MULTIPLY)          \
  if constexpr (std::is_same_v<T, __half>) { \
    MULTIPLY("f16");                         \
  } else {                                   \
    MULTIPLY("bf16");                        \
  }

// d = a @ b^T, or d += a @ b^T; a: 64 rows, b: as many rows as d has columns, each 16 deep.
template <typename T, bool ADD>
__device__ __forceinline__ void multiply_group(float (&d)[32], GroupOperand a, GroupOperand b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROOFLIGHT_MULTIPLY(TYPE, ADD)                                                                      \
  asm volatile(                                                                                            \
      "{ .reg .b64 a, b; mov.b64 a, {%32, %33}; mov.b64 b, {%34, %35};\n"                                  \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" ROOFLIGHT_PLACES_32 "}, a, b, " ADD \
      ", 1, 1, 0, 0; }"                                                                                    \
      : ROOFLIGHT_SUMS_32(0)                                                                               \
      : "r"(a.place), "r"(a.shape), "r"(b.place), "r"(b.shape))
#define ROOFLIGHT_ADD(TYPE) ROOFLIGHT_MULTIPLY(TYPE, "1")
#define ROOFLIGHT_SET(TYPE) ROOFLIGHT_MULTIPLY(TYPE, "0")
  if constexpr (ADD) {
    ROOFLIGHT_OF_TYPE(ROOFLIGHT_ADD);
  } else {
    ROOFLIGHT_OF_TYPE(ROOFLIGHT_SET);
  }
#undef ROOFLIGHT_SET
#undef ROOFLIGHT_ADD
#undef ROOFLIGHT_MULTIPLY
#endif
}

template <typename T, bool ADD>
__device__ __forceinline__ void multiply_group(float (&d)[64], GroupOperand a, GroupOperand b) {
  static_assert(ADD, "sums of 128 columns are added to");
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROOFLIGHT_MULTIPLY(TYPE)                                                            \
  asm volatile(                                                                             \
      "{ .reg .b64 a, b; mov.b64 a, {%64, %65}; mov.b64 b, {%66, %67};\n"                   \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" ROOFLIGHT_PLACES_64 \
      "}, a, b, 1, 1, 1, 0, 0; }"                                                           \
      : ROOFLIGHT_SUMS_32(0), ROOFLIGHT_SUMS_32(32)                                         \
      : "r"(a.place), "r"(a.shape), "r"(b.place), "r"(b.shape))
  ROOFLIGHT_OF_TYPE(ROOFLIGHT_MULTIPLY);
#undef ROOFLIGHT_MULTIPLY
#endif
}

// d += a @ b; a: 64 rows by 16, a lane's four pairs as it has them of a sum's 16 columns; b: 16 rows of as many columns
// as d has, `upright_operand_at`.
template <typename T>
__device__ __forceinline__ void multiply_group(float (&d)[32], const unsigned* a, GroupOperand b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROOFLIGHT_MULTIPLY(TYPE)                                                           \
  asm volatile(                                                                            \
      "{ .reg .b64 b; mov.b64 b, {%36, %37};\n"                                            \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE " {" ROOFLIGHT_PLACES_32 \
      "}, {%32, %33, %34, %35}, b, 1, 1, 1, 1; }"                                          \
      : ROOFLIGHT_SUMS_32(0)                                                               \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.place), "r"(b.shape))
  ROOFLIGHT_OF_TYPE(ROOFLIGHT_MULTIPLY);
#undef ROOFLIGHT_MULTIPLY
#endif
}

template <typename T>
__device__ __forceinline__ void multiply_group(float (&d)[64], const unsigned* a, GroupOperand b) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define ROOFLIGHT_MULTIPLY(TYPE)                                                            \
  asm volatile(                                                                             \
      "{ .reg .b64 b; mov.b64 b, {%68, %69};\n"                                             \
      "wgmma.mma_async.sync.aligned.m64n128k16.f32." TYPE "." TYPE " {" ROOFLIGHT_PLACES_64 \
      "}, {%64, %65, %66, %67}, b, 1, 1, 1, 1; }"                                           \
      : ROOFLIGHT_SUMS_32(0), ROOFLIGHT_SUMS_32(32)                                         \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b.place), "r"(b.shape))
  ROOFLIGHT_OF_TYPE(ROOFLIGHT_MULTIPLY);
#undef ROOFLIGHT_MULTIPLY
#endif
}

#undef ROOFLIGHT_OF_TYPE
#undef ROOFLIGHT_PLACES_64
#undef ROOFLIGHT_PLACES_32
#undef ROOFLIGHT_SUMS_32
#undef ROOFLIGHT_SUMS_8

}  // namespace rooflight
