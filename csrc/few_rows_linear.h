// Matrix products of few rows with a large weight: what decoding at small batch is made of.
#pragma once

#include "fused_linear.h"

namespace rooflight {

constexpr int kFewRows = 8;  // columns of a tensor-core tile

// Whether the kernel takes this product: half types, aligned to 16 bytes, in_features a multiple of 32 that fits a
// block's registers.
bool takes_few_rows(const FusedLinear& product);
void launch_few_rows_linear(const FusedLinear& product, cudaStream_t stream);

}  // namespace rooflight
