// Ceilings of a card, for `rooflight bench card` and for flushing L2: what a launch costs, how fast memory is read.
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

// Loads without a hint for L2: what is marked as read once evicts little, and this kernel also empties the cache.
__global__ void __launch_bounds__(kReadThreads) read_all(const uint4* data, size_t packs, unsigned* out) {
  const size_t step = static_cast<size_t>(gridDim.x) * blockDim.x;
  unsigned folded = 0;
  size_t place = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; place + (kReadAtOnce - 1) * step < packs; place += kReadAtOnce * step) {
    uint4 read[kReadAtOnce];
#pragma unroll
    for (int i = 0; i < kReadAtOnce; ++i) read[i] = __ldcg(data + place + i * step);
#pragma unroll
    for (int i = 0; i < kReadAtOnce; ++i) folded ^= read[i].x ^ read[i].y ^ read[i].z ^ read[i].w;
  }
  for (; place < packs; place += step) {
    const uint4 read = __ldcg(data + place);
    folded ^= read.x ^ read.y ^ read.z ^ read.w;
  }
  if (folded == 0x9e3779b9u) *out = folded;  // never for the data that is read, which the compiler cannot know
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

// Reads `bytes` (rounded down to 16) once. `out` holds 4 bytes that are written in no case that happens.
ROOFLIGHT_EXPORT int rl_read(void* stream, const void* data, size_t bytes, void* out) {
  using namespace rooflight;
  try {
    const int grid = card().multiprocessors * (2048 / kReadThreads);
    launch(read_all, dim3(grid), dim3(kReadThreads), static_cast<cudaStream_t>(stream), Overlap::kNever, 0,
           static_cast<const uint4*>(data), bytes / 16, static_cast<unsigned*>(out));
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
