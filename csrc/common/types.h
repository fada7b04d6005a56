// Types that every kernel's plain C++ interface shares. Nothing of PyTorch here.
#pragma once

#include <stdint.h>

namespace rooflight {

enum class Dtype { kFloat32, kFloat16, kBFloat16 };

inline int size_of(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 4 : 2;
}

// One matrix of rows; `stride` counts elements between rows.
struct Rows {
  void* data = nullptr;
  int64_t stride = 0;
};

}  // namespace rooflight
