// A tensor argument as the operators see it: name, shape, place, and the checks that name it when it does not fit.
//
// The checks of the compiled kernels live here and in bindings/ alone. They throw std::invalid_argument, which
// arrives in Python as ValueError, with the words that the operators' Python checks use: "NAME must WISH, was FACT".
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/DeviceType.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <initializer_list>
#include <stdexcept>
#include <string>

#include "common/types.h"

namespace rooflight {

using torch::headeronly::DeviceType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

[[noreturn]] void fail(const char* name, const std::string& wish, const std::string& fact);
std::string dtype_name(ScalarType dtype);

// Borrowed from a tensor for the time of a call.
class Operand {
 public:
  Operand(const char* name, const Tensor& tensor);

  const char* name() const { return name_; }
  void* data() const { return data_; }
  ScalarType dtype() const { return dtype_; }
  int device() const { return device_index_; }
  int64_t dim() const { return dim_; }
  const int64_t* sizes() const { return sizes_; }
  const int64_t* strides() const { return strides_; }
  int64_t last_size() const { return sizes_[dim_ - 1]; }
  int64_t numel() const;
  std::string device_name() const;
  std::string shape_name() const;

  // float32, float16 or bfloat16 on a CUDA device, with at least one dimension.
  Dtype check_values() const;
  void check_same_device(const Operand& other) const;
  void check_same_shape(const Operand& other) const;
  void check_same_dtype(const Operand& other) const;
  void check_dtype(ScalarType dtype) const;
  // One size for each dimension; negative: any.
  void check_shape(std::initializer_list<int64_t> sizes) const;
  // Stride 1 in the last dimension.
  void check_rows() const;
  bool is_contiguous() const;
  bool aligned(int64_t bytes) const;  // address, and all strides but the last
  void check_not_expanded() const;
  void check_not_same_memory(const Operand& other) const;
  // A weight (width,) of the data's dtype or float32, beside `data`.
  Dtype check_weight(const Operand& data) const;
  // The operand as rows with one stride, without a copy.
  Rows as_rows() const;

 private:
  const char* name_;
  void* data_ = nullptr;
  ScalarType dtype_ = ScalarType::Undefined;
  int32_t device_type_ = 0, device_index_ = 0;
  int64_t dim_ = 0;
  const int64_t* sizes_ = nullptr;
  const int64_t* strides_ = nullptr;
};

}  // namespace rooflight
