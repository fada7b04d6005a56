// What the bindings of every operator family share: results, current stream.
#pragma once

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cuda_runtime.h>

#include "common/launch.cuh"
#include "operand.h"

namespace rooflight {

inline cudaStream_t current_stream(int device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cudaStream_t>(stream);
}

// A new contiguous tensor. Straight through the C interface: an empty_like by way of the boxed dispatcher takes longer
// than all checks and the launch together.
inline Tensor empty(const int64_t* sizes, int64_t dim, ScalarType dtype, int device) {
  int64_t strides[64];
  if (dim > 64) throw std::invalid_argument("x must have at most 64 dimensions, was " + std::to_string(dim));
  int64_t step = 1;
  for (int64_t i = dim - 1; i >= 0; --i) {
    strides[i] = step;
    step *= sizes[i] > 0 ? sizes[i] : 1;
  }
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(dim, sizes, strides, static_cast<int32_t>(dtype),
                                                  static_cast<int32_t>(DeviceType::CUDA), device, &handle));
  return Tensor(handle);
}

inline Tensor empty_like(const Operand& like) {
  return empty(like.sizes(), like.dim(), like.dtype(), like.device());
}

// The same leading dimensions with another last one.
inline Tensor empty_rows(const Operand& like, int64_t last) {
  int64_t sizes[64];
  if (like.dim() > 64) throw std::invalid_argument("x must have at most 64 dimensions");
  for (int64_t i = 0; i + 1 < like.dim(); ++i) sizes[i] = like.sizes()[i];
  sizes[like.dim() - 1] = last;
  return empty(sizes, like.dim(), like.dtype(), like.device());
}

inline void check_beside(const Operand& operand, const Operand& first) {
  operand.check_same_shape(first);
  operand.check_same_dtype(first);
  operand.check_same_device(first);
}

inline Rows contiguous_rows(const Tensor& tensor, int64_t width) {
  return {tensor.data_ptr(), width};
}

}  // namespace rooflight
