// The RMSNorm family as plain C++: pointers and sizes in, a launch out. Nothing of PyTorch here.
#pragma once

#include <cuda_runtime.h>
#include <stdint.h>

#include "common/types.h"

namespace rooflight {

// out = rms_norm(x) * weight, or, with a residual, sum = round(x + residual) and out = rms_norm(sum) * weight.
// out may be x and sum may be residual. What a kernel needs first stands first: a constant that is not in its cache
// yet holds up a launch of few rows.
struct RmsNorm {
  Rows x;
  const void* weight = nullptr;
  Rows residual;                           // residual.data == nullptr: no addition
  float inverse_width = 0.0f, eps = 0.0f;  // a division in the kernel would stand on the critical path
  Rows out, sum;
  int64_t rows = 0;
  int width = 0;
  Dtype dtype = Dtype::kFloat32, weight_dtype = Dtype::kFloat32;
};

// grad_x and grad_weight of rms_norm. With grad_residual, that is added to grad_x before it is rounded.
struct RmsNormBackward {
  Rows grad_out, x, grad_residual, grad_x;  // grad_residual.data == nullptr: none
  const void* weight = nullptr;
  void* grad_weight = nullptr;
  float* partial = nullptr;  // (partial_rows, width): each block's share of the weight gradient
  int partial_rows = 0;
  Dtype dtype = Dtype::kFloat32, weight_dtype = Dtype::kFloat32;
  int64_t rows = 0;
  int width = 0;
  float inverse_width = 0.0f, eps = 0.0f;  // a division in the kernel would stand on the critical path
};

// How a row is spread over threads.
struct RowShape {
  int packs = 0;           // packs a thread holds: 1, 2, 4 or 8; wider rows take the next that holds them
  int rows_per_block = 1;  // as far as 1024 threads go; more where a row is less than a warp
};

// The shape that norm_shapes.inc holds for a row of so many packs (of 16 bytes, or less where alignment asks for it).
// The order of a row's sum follows from the width alone, whatever the batch: see row_sum.
RowShape forward_shape(int row_packs, bool full_packs, int64_t rows, bool add);
void launch_rms_norm(const RmsNorm& norm, cudaStream_t stream);
void launch_rms_norm(const RmsNorm& norm, RowShape shape, cudaStream_t stream);  // for the sweep; packs 0: looked up

// Rows of scratch that the backward needs, then the launch. Both on the current device.
int backward_partial_rows(int64_t rows, int width, Dtype dtype);
void launch_rms_norm_backward(const RmsNormBackward& norm, cudaStream_t stream);

}  // namespace rooflight
