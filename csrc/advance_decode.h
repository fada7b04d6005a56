// The step from one decode step to the next, as plain C++. See rooflight.ops.advance for what is what.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

namespace rooflight {

struct AdvanceDecode {
  const int64_t* tokens = nullptr;
  int64_t* ids = nullptr;
  int64_t* positions = nullptr;
  int64_t* num_tokens = nullptr;
  int* seq_lens = nullptr;
  int64_t* slots = nullptr;
  int64_t* last_tokens = nullptr;
  int64_t* history = nullptr;  // of this step
  const int* block_table = nullptr;
  const int64_t* limits = nullptr;
  const int64_t* places = nullptr;
  int64_t table_stride = 0;
  int num_seqs = 0, page_size = 1;
};

void launch_advance_decode(const AdvanceDecode& step, cudaStream_t stream);

}  // namespace rooflight
