// Bulk copies from global to shared memory (Hopper and later): one thread asks for whole rows, a barrier in shared
// memory counts the bytes as they arrive. What is in flight then depends on shared memory and no longer on registers.
#pragma once

#include <stdint.h>

namespace rooflight {

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
  return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// By one thread, before a __syncthreads.
__device__ __forceinline__ void init_barrier(uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

// By one thread: the barrier's phase ends when so many bytes have arrived.
__device__ __forceinline__ void expect_bytes(uint64_t* barrier, unsigned bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

// Both addresses and the size are multiples of 16.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, unsigned bytes, uint64_t* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// Until the phase of this parity (0 for the first) has ended.
__device__ __forceinline__ void wait_for_bytes(uint64_t* barrier, unsigned parity) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again_%=:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again_%=;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
}

#endif

}  // namespace rooflight
