// SwiGLU's element-wise half on a packed projection, as plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/types.h"

namespace rooflight {

struct SiluAndMul {
  Rows x, out;  // (rows, 2 * size) and (rows, size)
  int64_t rows = 0;
  int size = 0;
  Dtype dtype = Dtype::kBFloat16;
};

void launch_silu_and_mul(const SiluAndMul& step, cudaStream_t stream);

}  // namespace rooflight
