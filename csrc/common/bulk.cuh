// Bulk copies from global to shared memory: one lane asks for kilobytes, a barrier in shared memory tells when they
// came.
//
// For Hopper and later; elsewhere the functions do nothing, and the host launches none of their kernels.
// They need no registers for what is on its way, so a few warps keep as many bytes in flight as memory can serve.
#pragma once

#include <stdint.h>

namespace rooflight {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// For so many arrivals: one is that of a lane that asks.
__device__ __forceinline__ void init_barrier(uint64_t* barrier, int arrivals = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#endif
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Barriers that were initialised are seen by the copy engine.
__device__ __forceinline__ void fence_barriers() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

// What threads have written to shared memory comes before what copies and products of a warpgroup do there later.
__device__ __forceinline__ void fence_shared() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void expect_bytes(uint64_t* barrier, uint32_t bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

// 16 bytes' multiples at addresses of 16 bytes' multiples.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, uint32_t bytes, uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#endif
}

__device__ __forceinline__ void wait_barrier(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

// The same for bytes that other blocks of the cluster have stored.
__device__ __forceinline__ void wait_barrier_of_cluster(uint64_t* barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n"
      "}\n" ::"r"(shared_address(barrier)),
      "r"(parity)
      : "memory");
#endif
}

}  // namespace rooflight
