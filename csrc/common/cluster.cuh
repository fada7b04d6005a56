// How the blocks of a cluster store into each other's shared memory. Hopper and later.
//
// A store tells a barrier beside it how many bytes came: who waits for them needs no fence that covers all of memory,
// as a barrier of the whole cluster would have it.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/bulk.cuh"

namespace rooflight {

// Barriers for what is sent are there when all threads of all blocks have arrived: `arrive_in_cluster` behind
// fence_barriers(), `wait_for_cluster` before the first `send`. A block that waits for all that is sent to it may then
// end; nobody sends to it any more.
__device__ __forceinline__ void arrive_in_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait_for_cluster() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Of another block's memory, what this block has at `own`.
__device__ __forceinline__ uint32_t address_at(const void* own, int member) {
  uint32_t there = 0;
#if __CUDA_ARCH__ >= 900
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(shared_address(own)), "r"(member));
#endif
  return there;
}

// To addresses of `address_at`; wait_barrier_of_cluster waits for it.
__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, const float4& values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::"r"(to),
               "f"(values.x), "f"(values.y), "f"(values.z), "f"(values.w), "r"(barrier)
               : "memory");
#endif
}

__device__ __forceinline__ void send(uint32_t to, uint32_t barrier, const float2& values) {
#if __CUDA_ARCH__ >= 900
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(to),
               "f"(values.x), "f"(values.y), "r"(barrier)
               : "memory");
#endif
}

}  // namespace rooflight
