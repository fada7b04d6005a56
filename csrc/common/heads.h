// Heads and what turns them, as plain C++. Nothing of PyTorch here.
#pragma once

#include <stdint.h>

namespace rooflight {

// (num_tokens, heads, head_dim) with any stride between tokens and between heads, in elements.
struct Heads {
  void* data = nullptr;
  int64_t token_stride = 0, head_stride = 0;
  int heads = 0;
};

// The angles of each token: row positions[token] of a table (max_positions, rotary_dim), cosines before sines.
struct Angles {
  const float* cos_sin = nullptr;
  const void* positions = nullptr;
  int64_t table_stride = 0, positions_stride = 0;
  int rotary_dim = 0;
  bool wide_positions = true;  // int64 or int32
};

}  // namespace rooflight
