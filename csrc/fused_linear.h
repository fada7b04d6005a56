// A matrix product with what stands before and after it, as plain C++: what its kernels take.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/types.h"

namespace rooflight {

enum class Prologue { kNone, kRmsNorm, kScaled };
enum class Epilogue { kStore, kAdd, kSwiglu, kAddScale };

// Elements of a row whose squares have one sum.
constexpr int kSquaresPart = 64;

// y = f(x) @ weight^T + bias with x (rows, in_features), weight (out_features, in_features).
//
// kRmsNorm: f(x) = rms_norm(x) * norm_weight. kAdd: y is added to what out holds. kSwiglu: out = silu(first half of y)
// * second half. kAddScale does half of the norm behind the sum, and kScaled, in front of the next product, the rest:
// the first one also writes out * norm_weight to `scaled` and sums of squares of out to `squares_out`, the second one
// takes these as x and `squares`, and f(x) = x / root mean square.
// The weight, and nothing else, is read before earlier kernels of an overlapped launch have ended.
struct FusedLinear {
  const void* weight = nullptr;
  int in_features = 0, out_features = 0;  // of the weight
  const void* x = nullptr;
  int64_t x_stride = 0;
  const void* norm_weight = nullptr;  // of the data's dtype
  const float* squares = nullptr;     // (parts of in_features, rows)
  void* out = nullptr;
  int64_t out_stride = 0;
  void* scaled = nullptr;        // (rows, out_features)
  float* squares_out = nullptr;  // (parts of out_features, rows)
  int64_t squares_stride = 0;    // of either: from one part to the next
  const void* bias = nullptr;
  float eps = 0.0f, inverse_width = 0.0f;
  int64_t rows = 0;
  bool contiguous = true;  // weight and bias
  Dtype dtype = Dtype::kBFloat16;
  Prologue prologue = Prologue::kNone;
  Epilogue epilogue = Epilogue::kStore;
};

inline int squares_parts(int width) {
  return (width + kSquaresPart - 1) / kSquaresPart;
}

}  // namespace rooflight
