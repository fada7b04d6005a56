// How a kernel gets onto a device: on the tensors' device, on the caller's stream, with its error reported.
#pragma once

#include <cuda_runtime.h>

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

// A launch that may begin while the kernel before it on the stream ends (programmatic dependent launch). Every kernel
// launched this way calls wait_for_earlier_kernels() before it touches memory. shared: bytes of dynamic shared memory.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, cudaStream_t stream, bool overlap, int shared,
            Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = stream;
  config.dynamicSmemBytes = shared;
  if (shared > 48 * 1024) {  // more has to be asked for; asking again costs a fraction of a microsecond
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared), "cudaFuncSetAttribute");
  }
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  config.attrs = &attribute;
  config.numAttrs = overlap && card().major >= 9 ? 1 : 0;  // Hopper and later
  check(cudaLaunchKernelEx(&config, kernel, Parameters(arguments)...), "kernel launch");
}

__device__ __forceinline__ void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel's blocks take their places as soon as all of ours have theirs; it waits for us by itself.
__device__ __forceinline__ void let_next_kernel_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

}  // namespace rooflight
