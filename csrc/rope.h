// Rotary position embedding of q and k, as plain C++.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/heads.h"
#include "common/types.h"

namespace rooflight {

// q_out and k_out may be q and k; what of a head does not turn is then left alone.
struct Rope {
  Heads q, k, q_out, k_out;
  Angles angles;
  int num_tokens = 0, head_dim = 0;
  bool interleaved = false;
  Dtype dtype = Dtype::kBFloat16;
};

void launch_rope(const Rope& step, cudaStream_t stream);

}  // namespace rooflight
