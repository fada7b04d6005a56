// Ceilings of a card, for `rooflight bench card` and for flushing L2: what a launch costs, how fast memory is read.
#include <stdint.h>

#include "common/launch.cuh"

namespace rooflight {
namespace {

__global__ void empty() {}

__global__ void empty_overlapped() {
  let_next_kernel_start();
  wait_for_earlier_kernels();
}

constexpr int kReadThreads = 512;
constexpr int kReadAtOnce = 4;  // packs of 16 bytes in flight in each thread

// What createpolicy.fractional.L2::evict_last 1.0 makes.
constexpr uint64_t kEvictLast = 0x14F0000000000000;

// Of a flush: marked to be evicted last, or else it would not evict what others have marked so (Triton's
// eviction_policy="evict_last", as Inductor writes it). Otherwise without a hint: what is marked as read once evicts
// little.
template <bool FLUSH>
__device__ __forceinline__ uint4 load_once(const uint4* from) {
  if constexpr (!FLUSH) {
    return __ldcg(from);
  } else {
    uint4 read;
    asm volatile("ld.global.cg.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(read.x), "=r"(read.y), "=r"(read.z), "=r"(read.w)
                 : "l"(from), "l"(kEvictLast));
    return read;
  }
}

template <bool FLUSH>
__global__ void __launch_bounds__(kReadThreads) read_all(const uint4* data, size_t packs, unsigned* out) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  unsigned folded = 0;
  size_t place = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; place + (kReadAtOnce - 1) * step < packs; place += kReadAtOnce * step) {
    uint4 read[kReadAtOnce];
#pragma unroll
    for (int i = 0; i < kReadAtOnce; ++i) read[i] = load_once<FLUSH>(data + place + i * step);
#pragma unroll
    for (int i = 0; i < kReadAtOnce; ++i) folded ^= read[i].x ^ read[i].y ^ read[i].z ^ read[i].w;
  }
  for (; place < packs; place += step) {
    const uint4 read = load_once<FLUSH>(data + place);
    folded ^= read.x ^ read.y ^ read.z ^ read.w;
  }
  if (folded == 0x9e3779b9u) *out = folded;  // never for the data that is read, which the compiler cannot know
}

constexpr int kLine = 128;

// Takes the mark of a flush off its lines, or they would take the place of what is measured next, with hot caches.
__global__ void __launch_bounds__(kReadThreads) unmark(const char* data, size_t lines) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t line = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; line < lines; line += step) {
    asm volatile("applypriority.global.L2::evict_normal [%0], 128;" ::"l"(data + line * kLine) : "memory");
  }
}

// One thread follows `hops` pointers (indices into data), each load waiting for the one before it.
__global__ void chase(const unsigned* data, int hops, unsigned* out) {
  unsigned place = 0;
  for (int hop = 0; hop < hops; ++hop) place = __ldcg(data + place);
  *out = place;
}

int error_of(cudaError_t error) {
  return static_cast<int>(error);
}

}  // namespace
}  // namespace rooflight

#define ROOFLIGHT_EXPORT extern "C" __attribute__((visibility("default")))

// `count` empty kernels, one after the other; with pdl each may begin while the one before it ends.
ROOFLIGHT_EXPORT int rl_empty(void* stream, int count, int grid, int block, int pdl) {
  using namespace rooflight;
  try {
    for (int i = 0; i < count; ++i) {
      launch(pdl ? empty_overlapped : empty, dim3(grid), dim3(block), static_cast<cudaStream_t>(stream),
             pdl ? Overlap::kAlways : Overlap::kNever, 0);
    }
  } catch (const std::exception&) {
    return error_of(cudaErrorLaunchFailure);
  }
  return error_of(cudaSuccess);
}

// Reads `bytes` (rounded down to 16) once; with flush in such a way that whatever is in L2 leaves it. `out` holds 4
// bytes that are written in no case that happens.
ROOFLIGHT_EXPORT int rl_read(void* stream, const void* data, size_t bytes, void* out, int flush) {
  using namespace rooflight;
  try {
    const int grid = card().multiprocessors * (2048 / kReadThreads);
    launch(flush ? read_all<true> : read_all<false>, dim3(grid), dim3(kReadThreads), static_cast<cudaStream_t>(stream),
           Overlap::kNever, 0, static_cast<const uint4*>(data), bytes / 16, static_cast<unsigned*>(out));
  } catch (const std::exception&) {
    return error_of(cudaErrorLaunchFailure);
  }
  return error_of(cudaSuccess);
}

// After flushes that read these `bytes` (aligned to 128): their lines are lines like others again.
ROOFLIGHT_EXPORT int rl_unmark(void* stream, const void* data, size_t bytes) {
  using namespace rooflight;
  try {
    const int grid = card().multiprocessors * (2048 / kReadThreads);
    launch(unmark, dim3(grid), dim3(kReadThreads), static_cast<cudaStream_t>(stream), Overlap::kNever, 0,
           static_cast<const char*>(data), bytes / kLine);
  } catch (const std::exception&) {
    return error_of(cudaErrorLaunchFailure);
  }
  return error_of(cudaSuccess);
}

// Follows `hops` indices through data: the time of a hop is the latency of whatever holds the data.
ROOFLIGHT_EXPORT int rl_chase(void* stream, const void* data, int hops, void* out) {
  using namespace rooflight;
  try {
    launch(chase, dim3(1), dim3(1), static_cast<cudaStream_t>(stream), Overlap::kNever, 0,
           static_cast<const unsigned*>(data), hops, static_cast<unsigned*>(out));
  } catch (const std::exception&) {
    return error_of(cudaErrorLaunchFailure);
  }
  return error_of(cudaSuccess);
}
