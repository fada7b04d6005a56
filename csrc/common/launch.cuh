// How a kernel gets onto a device: on the tensors' device, on the caller's stream, with its error reported.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include <stdexcept>
#include <string>

namespace rooflight {

inline void check(cudaError_t error, const char* what) {
  if (error != cudaSuccess) {
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorString(error));
  }
}

// Makes `device` current and restores what was current before. Asking costs nothing; switching is rare.
class DeviceGuard {
 public:
  explicit DeviceGuard(int device) {
    check(cudaGetDevice(&before_), "cudaGetDevice");
    if (device != before_) {
      check(cudaSetDevice(device), "cudaSetDevice");
      switched_ = true;
    }
  }
  ~DeviceGuard() {
    if (switched_) cudaSetDevice(before_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int before_ = 0;
  bool switched_ = false;
};

struct Card {
  int multiprocessors = 0, major = 0;
  int shared = 0, block_shared = 0;  // bytes of each multiprocessor, and of a block at most
};

// Facts of the current device, asked once for each.
inline const Card& card() {
  static Card known[64] = {};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  Card& found = known[device % 64];
  if (found.multiprocessors == 0) {
    int major = 0, count = 0, shared = 0;
    check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerMultiprocessor, device),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&found.block_shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    found.major = major;
    found.shared = shared;
    found.multiprocessors = count;
  }
  return found;
}

// Whether a launch may begin while the kernel before it ends (programmatic dependent launch).
//
// Behind a kernel that lets it start, that saves up to half a microsecond. Behind one that does not, it takes 0.2
// longer than an ordinary launch (docs/lab). Only a stream that captures a graph tells what comes before.
enum class Overlap {
  kNever,
  kAlways,      // the caller knows that a kernel of ours comes before
  kBehindOurs,  // in a graph whose node before this thread captured through `launch`
  kBehindDone,  // the same, unless that one or one it overlaps may still write to a cache: this one reads it at once
};

// Where a stream that captures a graph has got to. node: none if the next one depends on none or on several.
struct CaptureEnd {
  bool capturing = false;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;
  cudaGraphNode_t node = nullptr;
  bool writing = false;  // a kernel may start behind it while it, or one that it overlaps, still writes to a cache
};

inline CaptureEnd capture_end(cudaStream_t stream) {
  if (stream == nullptr || stream == cudaStreamLegacy) return {};  // cannot capture, and asking takes time
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long capture = 0;
  const cudaGraphNode_t* nodes = nullptr;
  const cudaGraphEdgeData* edges = nullptr;
  size_t count = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, &nodes, &edges, &count) != cudaSuccess) {
    cudaGetLastError();  // the launch reports what is wrong
    return {};
  }
  if (status != cudaStreamCaptureStatusActive) return {};
  return {true, stream, capture, count == 1 ? nodes[0] : nullptr, false};
}

// Behind the last kernel that this thread captured through `launch` and that lets the next one start.
inline thread_local CaptureEnd last_captured;

// Bytes of dynamic shared memory, used for nothing, with which no multiprocessor takes more than its share of `blocks`;
// 0 where that would not help.
//
// Blocks of an overlapped launch settle while the kernel before it still runs, wherever there is room. Where there is
// room for three and the share is two, some multiprocessors get three and others one, and the launch takes as long as
// three (docs/lab). It helps where the last block of each share exists nearly everywhere.
inline int even_share(const void* kernel, int64_t blocks, int threads) {
  constexpr int64_t kMostShare = 4;
  // Bytes of shared memory: kept by the driver in each block; the unit in which it is given.
  constexpr int kReservedShared = 1024, kGranule = 128;
  const int64_t places = card().multiprocessors, share = (blocks + places - 1) / places;
  if (share < 2 || share > kMostShare || 4 * blocks < 3 * share * places) return 0;
  cudaFuncAttributes own = {};
  int fitting = 0;
  check(cudaFuncGetAttributes(&own, kernel), "cudaFuncGetAttributes");
  check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fitting, kernel, threads, 0), "occupancy");
  if (fitting <= share) return 0;
  const int one_more = card().shared / static_cast<int>(share + 1) - kReservedShared;
  return ((one_more - static_cast<int>(own.sharedSizeBytes)) / kGranule + 1) * kGranule;
}

// Blocks of the largest cluster that the current device gives a kernel room for: 16 where it has groups of so many
// multiprocessors, else 8 or fewer.
inline int most_in_cluster(const void* kernel, int threads, int shared) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(16);
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared;
  int most = 0;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
  check(cudaOccupancyMaxPotentialClusterSize(&most, kernel, &config), "cudaOccupancyMaxPotentialClusterSize");
  return most;
}

// Every kernel that may overlap calls wait_for_earlier_kernels() before it touches memory that kernels of ours write,
// so that overlapping is safe whatever comes before, and let_next_kernel_start(). Attention reads lengths and caches
// earlier: what writes the first lets nobody start, and see `writing` for the second. shared: bytes of dynamic shared
// memory; 0 may be raised by even_share. cluster: blocks along x that share their shared memory; 1 for none.
template <typename... Parameters, typename... Arguments>
void launch_cluster(void (*kernel)(Parameters...), dim3 grid, dim3 block, int cluster, cudaStream_t stream,
                    Overlap overlap, int shared, Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  const CaptureEnd before = capture_end(stream);
  const bool ours_before = before.node != nullptr && before.node == last_captured.node &&
                           before.capture == last_captured.capture && before.stream == last_captured.stream;
  const bool behind =
      ours_before && (overlap == Overlap::kBehindOurs || (overlap == Overlap::kBehindDone && !last_captured.writing));
  const bool overlaps = (overlap == Overlap::kAlways || behind) && card().major >= 9;  // Hopper and later
  if (overlaps && overlap == Overlap::kBehindOurs && shared == 0 && cluster == 1) {
    shared = even_share(reinterpret_cast<const void*>(kernel), int64_t{grid.x} * grid.y * grid.z,
                        static_cast<int>(block.x * block.y * block.z));
  }
  config.dynamicSmemBytes = shared;
  // More than 48 KiB, those that the kernel has by itself included, have to be asked for; asking again costs a fraction
  // of a microsecond.
  constexpr int kMostOwn = 16 * 1024;
  if (shared > 48 * 1024 - kMostOwn) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute attributes[2] = {};
  if (cluster > 1) {
    constexpr int kPortable = 8;
    if (cluster > kPortable) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1), "cudaFuncSetAttribute");
    }
    cudaLaunchAttribute& shape = attributes[config.numAttrs++];
    shape.id = cudaLaunchAttributeClusterDimension;
    shape.val.clusterDim.x = cluster;
    shape.val.clusterDim.y = shape.val.clusterDim.z = 1;
  }
  if (overlaps) {
    cudaLaunchAttribute& early = attributes[config.numAttrs++];
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
  }
  config.attrs = attributes;
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "kernel launch");
  if (before.capturing) {
    const bool writing = overlaps && last_captured.writing;
    last_captured = overlap == Overlap::kNever ? CaptureEnd{} : capture_end(stream);
    last_captured.writing = writing;
  }
}

template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, Overlap overlap, int shared,
            Arguments... arguments) {
  launch_cluster(kernel, grid, block, 1, stream, overlap, shared, arguments...);
}

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The same, once the addresses are known. The assembler would put a plain wait first, and what could be done while
// waiting behind it; so the wait depends on what no address is. (These are never null together.)
template <typename... Pointers>
__device__ __forceinline__ void wait_for_earlier_kernels_knowing(Pointers... addresses) {
#if __CUDA_ARCH__ >= 900
  const auto bits = (reinterpret_cast<uintptr_t>(addresses) | ...);
  asm volatile("{ .reg .pred known; setp.ne.u64 known, %0, 0; @known griddepcontrol.wait; }" ::"l"(bits) : "memory");
#endif
}

// Lets the next kernel's blocks take their places as soon as all of ours have theirs; it waits for us by itself.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace rooflight
