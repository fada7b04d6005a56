// A matrix product with what stands before and after it, as plain C++: what its kernels take.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/types.h"

namespace rooflight {

enum class Prologue { kNone, kRmsNorm };
enum class Epilogue { kStore, kAdd, kSwiglu };

// y = f(x) @ weight^T + bias with x (rows, in_features), weight (out_features, in_features).
//
// kRmsNorm: f(x) = rms_norm(x) * norm_weight. kAdd: y is added to what out holds. kSwiglu: out = silu(first half of y)
// * second half. The weight, and nothing else, is read before earlier kernels of an overlapped launch have ended.
struct FusedLinear {
  const void* weight = nullptr;
  int in_features = 0, out_features = 0;  // of the weight
  const void* x = nullptr;
  int64_t x_stride = 0;
  const void* norm_weight = nullptr;  // of the data's dtype
  void* out = nullptr;
  int64_t out_stride = 0;
  const void* bias = nullptr;
  float eps = 0.0f, inverse_width = 0.0f;
  int64_t rows = 0;
  bool contiguous = true;  // weight and bias
  Dtype dtype = Dtype::kBFloat16;
  Prologue prologue = Prologue::kNone;
  Epilogue epilogue = Epilogue::kStore;
};

}  // namespace rooflight
