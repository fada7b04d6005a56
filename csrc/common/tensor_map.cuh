// Boxes of a tensor in memory, and how the copy engine is asked for one. Hopper and later.
//
// One lane asks, and the engine lays a box into shared memory as rows of 128 bytes, whose 16-byte pieces it permutes
// among eight rows: neither loads of eight rows' same piece nor those of two rows' four meet in one bank.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include <stdexcept>
#include <string>

#include "common/bulk.cuh"
#include "common/launch.cuh"
#include "common/types.h"

namespace rooflight {

constexpr int kBoxWidth = 64;  // elements of 2 bytes: a row of 128 bytes

// Boxes of half types, the first size the one whose elements are neighbours; strides, in elements, of the others.
template <int N>
CUtensorMap tensor_map(Dtype dtype, const void* data, const int64_t (&sizes)[N], const int64_t (&strides)[N - 1],
                       const int (&box)[N]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status),
          "cudaGetDriverEntryPointByVersion");
    if (status != cudaDriverEntryPointSuccess) throw std::runtime_error("this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(found);
  }();
  cuuint64_t counts[N], bytes[N - 1];
  cuuint32_t boxes[N], steps[N];
  for (int i = 0; i < N; ++i) {
    counts[i] = static_cast<cuuint64_t>(sizes[i]);
    boxes[i] = static_cast<cuuint32_t>(box[i]);
    steps[i] = 1;
    if (i > 0) bytes[i - 1] = static_cast<cuuint64_t>(strides[i - 1]) * 2;
  }
  CUtensorMap map;
  const auto type = dtype == Dtype::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const CUresult result =
      encode(&map, type, N, const_cast<void*>(data), counts, bytes, boxes, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (result != CUDA_SUCCESS) {
    throw std::runtime_error("cuTensorMapEncodeTiled: error " + std::to_string(static_cast<int>(result)));
  }
  return map;
}

// Where a 16-byte piece of a row is in a box at an address that is a multiple of 1024.
__device__ __forceinline__ int place_in_box(int row, int piece) {
  return row * 128 + (piece ^ (row & 7)) * 16;
}

// The box whose first element has these coordinates; zeros where it reaches beyond what there is.
__device__ __forceinline__ void copy_box(void* to, const CUtensorMap* map, int first, int second, int third, int fourth,
                                         uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
      "[%6];" ::"r"(shared_address(to)),
      "l"(map), "r"(first), "r"(second), "r"(third), "r"(fourth), "r"(shared_address(barrier))
      : "memory");
#endif
}

// Before its first use, so that nobody waits for it then.
__device__ __forceinline__ void fetch_map(const CUtensorMap* map) {
#if __CUDA_ARCH__ >= 900
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}

}  // namespace rooflight
