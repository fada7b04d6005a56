// Matrix products of 9 to 256 rows with a large weight: what decoding with tens of sequences is made of.
#pragma once

#include "fused_linear.h"

namespace rooflight {

// Whether the kernel takes this product: half types on compute capability 9, a norm in front only in halves, rows of x
// and of the weight that begin at multiples of 16 bytes, a weight in one piece, out_features a multiple of 16 and
// 65,536 at most; with more than 64 rows a weight of 6 M elements at most. A row's bits do not depend on the others,
// nor, up to 64, on how many there are.
bool takes_skinny(const FusedLinear& product);
void launch_skinny_linear(const FusedLinear& product, cudaStream_t stream);

}  // namespace rooflight
