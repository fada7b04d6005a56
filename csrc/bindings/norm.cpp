// The RMSNorm family as PyTorch operators: argument checks, results, current stream.
//
// Schemas, fakes and gradients are defined in Python (rooflight.ops); the files here implement their `.cuda` overloads
// through the LibTorch stable ABI, so one built library serves every PyTorch from 2.10 on and knows no Python.
#include <cstdio>
#include <optional>
#include <tuple>

#include "bindings/common.h"
#include "rms_norm.h"

namespace rooflight {
namespace {

// What all norms have in common: dtypes, sizes, weight, eps.
template <typename Norm>
Norm checked(const Operand& x, const Operand& weight, double eps) {
  Norm norm;
  norm.dtype = x.check_values();
  norm.weight_dtype = weight.check_weight(x);
  if (!(eps >= 0)) {
    char text[32];
    std::snprintf(text, sizeof(text), "%g", eps);
    fail("eps", "be zero or more", text);
  }
  norm.x = x.as_rows();
  norm.weight = weight.data();
  norm.width = static_cast<int>(x.last_size());
  norm.rows = norm.width > 0 ? x.numel() / norm.width : 0;
  norm.inverse_width = norm.width > 0 ? 1.0f / static_cast<float>(norm.width) : 0.0f;
  norm.eps = static_cast<float>(eps);
  return norm;
}

void run(const RmsNorm& norm, int device) {
  const DeviceGuard guard(device);
  launch_rms_norm(norm, current_stream(device));
}

Tensor rms_norm(const Tensor& x_tensor, const Tensor& weight_tensor, double eps) {
  const Operand x("x", x_tensor), weight("weight", weight_tensor);
  auto norm = checked<RmsNorm>(x, weight, eps);
  Tensor out = empty_like(x);
  norm.out = contiguous_rows(out, norm.width);
  run(norm, x.device());
  return out;
}

std::tuple<Tensor, Tensor> fused_add_rms_norm(const Tensor& x_tensor, const Tensor& residual_tensor,
                                              const Tensor& weight_tensor, double eps) {
  const Operand x("x", x_tensor), residual("residual", residual_tensor), weight("weight", weight_tensor);
  auto norm = checked<RmsNorm>(x, weight, eps);
  check_beside(residual, x);
  norm.residual = residual.as_rows();
  Tensor out = empty_like(x), sum = empty_like(x);
  norm.out = contiguous_rows(out, norm.width);
  norm.sum = contiguous_rows(sum, norm.width);
  run(norm, x.device());
  return {out, sum};
}

void fused_add_rms_norm_in_place(Tensor x_tensor, Tensor residual_tensor, const Tensor& weight_tensor, double eps) {
  const Operand x("x", x_tensor), residual("residual", residual_tensor), weight("weight", weight_tensor);
  auto norm = checked<RmsNorm>(x, weight, eps);
  check_beside(residual, x);
  x.check_not_expanded();
  residual.check_not_expanded();
  residual.check_not_same_memory(x);
  norm.residual = residual.as_rows();
  norm.out = norm.x;
  norm.sum = norm.residual;
  run(norm, x.device());
}

std::tuple<Tensor, Tensor> rms_norm_backward(const Tensor& grad_tensor, const Tensor& x_tensor,
                                             const Tensor& weight_tensor, double eps,
                                             const std::optional<Tensor>& grad_residual_tensor) {
  const Operand grad_out("grad_out", grad_tensor), x("x", x_tensor), weight("weight", weight_tensor);
  grad_out.check_values();
  check_beside(x, grad_out);
  auto norm = checked<RmsNormBackward>(x, weight, eps);
  norm.grad_out = grad_out.as_rows();
  if (grad_residual_tensor) {
    const Operand grad_residual("grad_residual", *grad_residual_tensor);
    check_beside(grad_residual, grad_out);
    norm.grad_residual = grad_residual.as_rows();
  }
  Tensor grad_x = empty_like(x), grad_weight = empty_like(weight);
  norm.grad_x = contiguous_rows(grad_x, norm.width);
  norm.grad_weight = grad_weight.data_ptr();
  const DeviceGuard guard(x.device());
  const cudaStream_t stream = current_stream(x.device());
  if (norm.rows == 0) {
    const size_t bytes = static_cast<size_t>(norm.width) * size_of(norm.weight_dtype);
    if (bytes > 0) check(cudaMemsetAsync(norm.grad_weight, 0, bytes, stream), "cudaMemsetAsync");
    return {grad_x, grad_weight};
  }
  norm.partial_rows = backward_partial_rows(norm.rows, norm.width, norm.dtype);
  const int64_t scratch_sizes[2] = {norm.partial_rows, norm.width};
  Tensor scratch = empty(scratch_sizes, 2, ScalarType::Float, x.device());
  norm.partial = static_cast<float*>(scratch.data_ptr());
  launch_rms_norm_backward(norm, stream);
  return {grad_x, grad_weight};
}

STABLE_TORCH_LIBRARY_IMPL(rooflight, CUDA, library) {
  library.impl("rms_norm.cuda", TORCH_BOX(&rms_norm));
  library.impl("fused_add_rms_norm.cuda", TORCH_BOX(&fused_add_rms_norm));
  library.impl("fused_add_rms_norm_.cuda", TORCH_BOX(&fused_add_rms_norm_in_place));
  library.impl("rms_norm_backward.cuda", TORCH_BOX(&rms_norm_backward));
}

}  // namespace
}  // namespace rooflight

// For the sweep that fills norm_shapes.inc: the forward kernel on contiguous rows, with the shape given. residual and
// sum may be null. Returns a cudaError_t.
extern "C" __attribute__((visibility("default"))) int rooflight_rms_norm_shaped(void* stream, int dtype, void* x,
                                                                                void* residual, const void* weight,
                                                                                void* out, void* sum, int64_t rows,
                                                                                int width, float eps, int packs,
                                                                                int rows_per_block) {
  rooflight::RmsNorm norm;
  norm.x = {x, width};
  norm.residual = {residual, width};
  norm.out = {out, width};
  norm.sum = {sum, width};
  norm.weight = weight;
  norm.dtype = norm.weight_dtype = static_cast<rooflight::Dtype>(dtype);
  norm.rows = rows;
  norm.width = width;
  norm.inverse_width = 1.0f / static_cast<float>(width);
  norm.eps = eps;
  try {
    rooflight::launch_rms_norm(norm, {packs, rows_per_block}, static_cast<cudaStream_t>(stream));
  } catch (const std::exception&) {
    return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}
