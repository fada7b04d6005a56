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
};

// Facts of the current device, asked once for each.
inline const Card& card() {
  static Card known[64] = {};
  int device = 0;
  check(cudaGetDevice(&device), "cudaGetDevice");
  Card& found = known[device % 64];
  if (found.multiprocessors == 0) {
    int major = 0, count = 0;
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device), "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device), "cudaDeviceGetAttribute");
    found.major = major;
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
};

// Where a stream that captures a graph has got to. node: none if the next one depends on none or on several.
struct CaptureEnd {
  bool capturing = false;
  cudaStream_t stream = nullptr;
  unsigned long long capture = 0;
  cudaGraphNode_t node = nullptr;
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
  return {true, stream, capture, count == 1 ? nodes[0] : nullptr};
}

// Behind the last kernel that this thread captured through `launch` and that lets the next one start.
inline thread_local CaptureEnd last_captured;

// Every kernel that may overlap calls wait_for_earlier_kernels() before it touches memory, so that overlapping is safe
// whatever comes before, and let_next_kernel_start(). shared: bytes of dynamic shared memory.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, Overlap overlap, int shared,
            Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.dynamicSmemBytes = shared;
  if (shared > 48 * 1024) {  // more has to be asked for; asking again costs a fraction of a microsecond
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  }
  const CaptureEnd before = capture_end(stream);
  const bool ours_before = before.node != nullptr && before.node == last_captured.node &&
                           before.capture == last_captured.capture && before.stream == last_captured.stream;
  const bool overlaps = overlap == Overlap::kAlways || (overlap == Overlap::kBehindOurs && ours_before);
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlaps && card().major >= 9 ? 1 : 0;  // Hopper and later
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "kernel launch");
  if (before.capturing) last_captured = overlap == Overlap::kNever ? CaptureEnd{} : capture_end(stream);
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
