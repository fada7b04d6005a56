// Decode attention with the step before it: head norms, RoPE and the write of each sequence's newest token.
#pragma once

#include "decode_attention.h"
#include "qk_norm_rope_cache.h"

namespace rooflight {

// Whether one kernel does it all: half types, whole heads of 64, 128 or 256 that turn by halves, everything aligned.
// Else the two kernels have to do it one after the other.
bool takes_one_kernel(const DecodeAttention& attention, const QkNormRopeCache& step);
void launch_qk_norm_rope_attention(const DecodeAttention& attention, const QkNormRopeCache& step, cudaStream_t stream);

}  // namespace rooflight
