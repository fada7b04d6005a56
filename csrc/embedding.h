// Rows of a table by their numbers, as plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/types.h"

namespace rooflight {

// out[t] = weight[ids[t]]; a row of NaN where there is no such row.
struct Embedding {
  const void* ids = nullptr;
  int64_t ids_stride = 0, num_tokens = 0;
  bool wide_ids = true;  // int64 or int32
  int64_t vocab_size = 0;
  Rows weight, out;
  int hidden_size = 0;
  Dtype dtype = Dtype::kBFloat16;
};

void launch_embedding(const Embedding& gather, cudaStream_t stream);

}  // namespace rooflight
