// Matrix products with what stands before and after them, and SwiGLU's element-wise half, as PyTorch operators.
//
// For few rows (decoding at small batch) one kernel of ours does all. For some more, a norm in front is a kernel of its
// own, or half a part of the product in front and half of the one behind. Otherwise the product is PyTorch's, which
// takes it to cuBLAS, with our kernels around it.
#include <torch/csrc/inductor/aoti_torch/generated/c_shim_cuda.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/stableivalue_conversions.h>

#include <array>
#include <optional>

#include "bindings/common.h"
#include "few_rows_linear.h"
#include "rms_norm.h"
#include "silu_and_mul.h"
#include "skinny_linear.h"

namespace rooflight {
namespace {

using torch::stable::detail::from;
using torch::stable::detail::to;

// One call of PyTorch's operator of that name. The stack holds the arguments before and the result after it.
template <typename... Arguments>
Tensor call(const char* name, const char* overload, const Arguments&... arguments) {
  std::array<StableIValue, sizeof...(Arguments)> stack{from(arguments)...};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher(name, overload, stack.data(), TORCH_ABI_VERSION));
  return to<Tensor>(stack[0]);
}

// Checks of x (..., in_features), weight (out_features, in_features) and bias (out_features,).
FusedLinear checked(const Operand& x, const Operand& weight, const std::optional<Tensor>& bias_tensor) {
  FusedLinear p;
  p.dtype = x.check_values();
  weight.check_shape({-1, x.last_size()});
  weight.check_same_dtype(x);
  weight.check_same_device(x);
  if (bias_tensor) {
    const Operand bias("bias", *bias_tensor);
    bias.check_shape({weight.sizes()[0]});
    bias.check_same_dtype(x);
    bias.check_same_device(x);
    p.bias = bias.data();
    p.contiguous = bias.is_contiguous();
  }
  const Rows rows = x.as_rows();
  p.x = rows.data;
  p.x_stride = rows.stride;
  p.weight = weight.data();
  p.contiguous = p.contiguous && weight.is_contiguous();
  p.in_features = static_cast<int>(x.last_size());
  p.out_features = static_cast<int>(weight.sizes()[0]);
  p.rows = p.in_features > 0 ? x.numel() / p.in_features : 0;
  return p;
}

void check_eps(FusedLinear& p, double eps) {
  if (!(eps >= 0)) fail("eps", "be zero or more", std::to_string(eps));
  p.eps = static_cast<float>(eps);
  p.inverse_width = p.in_features > 0 ? 1.0f / static_cast<float>(p.in_features) : 0.0f;
}

void check_norm(FusedLinear& p, const Operand& x, const Operand& norm_weight, double eps) {
  norm_weight.check_same_dtype(x);
  norm_weight.check_weight(x);
  check_eps(p, eps);
  p.prologue = Prologue::kRmsNorm;
  p.norm_weight = norm_weight.data();
}

void check_pairs(const FusedLinear& p) {
  if (p.out_features % 2 != 0) {
    fail("weight", "have an even number of rows (gate and up)", std::to_string(p.out_features));
  }
}

Tensor normed(const Operand& x, const FusedLinear& p) {
  Tensor out = empty_like(x);
  RmsNorm norm;
  norm.dtype = norm.weight_dtype = p.dtype;
  norm.x = x.as_rows();
  norm.weight = p.norm_weight;
  norm.out = contiguous_rows(out, p.in_features);
  norm.width = p.in_features;
  norm.rows = p.rows;
  norm.inverse_width = p.inverse_width;
  norm.eps = p.eps;
  launch_rms_norm(norm, current_stream(x.device()));
  return out;
}

// What is left of a product when `rows` is its x with the norm done.
FusedLinear behind_norm(FusedLinear p, const Tensor& rows) {
  p.prologue = Prologue::kNone;
  p.norm_weight = nullptr;
  p.x = rows.data_ptr();
  p.x_stride = p.in_features;
  return p;
}

// What a kernel of ours makes of it.
Tensor launched(FusedLinear p, const Operand& x, void (*launch)(const FusedLinear&, cudaStream_t)) {
  p.out_stride = p.epilogue == Epilogue::kSwiglu ? p.out_features / 2 : p.out_features;
  Tensor out = empty_rows(x, p.out_stride);
  p.out = out.data_ptr();
  launch(p, current_stream(x.device()));
  return out;
}

Tensor rms_norm_linear(const Tensor& x_tensor, const Tensor& norm_tensor, const Tensor& weight_tensor,
                       const std::optional<Tensor>& bias, double eps) {
  const Operand x("x", x_tensor), norm_weight("norm_weight", norm_tensor), weight("weight", weight_tensor);
  FusedLinear p = checked(x, weight, bias);
  check_norm(p, x, norm_weight, eps);
  const DeviceGuard guard(x.device());
  if (takes_few_rows(p)) return launched(p, x, launch_few_rows_linear);
  const Tensor rows = normed(x, p);
  const FusedLinear product = behind_norm(p, rows);
  if (takes_skinny(product)) return launched(product, x, launch_skinny_linear);
  return call("aten::linear", "", rows, weight_tensor, bias);
}

// The tensor's rows as a matrix on the same memory.
Tensor as_matrix(const Operand& operand, const Tensor& tensor) {
  const int64_t width = operand.last_size(), count = width > 0 ? operand.numel() / width : 0;
  const int64_t sizes[2] = {count, width}, strides[2] = {operand.as_rows().stride, 1};
  constexpr int64_t kOffset = 0;  // beyond the tensor's own
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch__reinterpret_tensor(tensor.get(), 2, sizes, strides, kOffset, &handle));
  return Tensor(handle);
}

// residual += x @ weight^T + bias; the sum in cuBLAS's epilogue where that takes the tensors as they are.
void add_product(const Operand& residual, const Tensor& residual_tensor, const Operand& x, const Tensor& x_tensor,
                 const Tensor& weight, const std::optional<Tensor>& bias) {
  if (residual.numel() == 0) return;
  const Tensor out = as_matrix(residual, residual_tensor);
  if (bias || !residual.is_contiguous() || !residual.aligned(16) || !x.aligned(16) || out.size(0) <= kFewRows) {
    const Tensor whole = call("aten::linear", "", x_tensor, weight, bias),
                 product = as_matrix(Operand("x", whole), whole);
    AtenTensorHandle sum = nullptr;
    TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_add_Tensor(out.get(), product.get(), 1.0, &sum));
    TORCH_ERROR_CODE_CHECK(aoti_torch_copy_(out.get(), Tensor(sum).get(), 0));
    return;
  }
  const Tensor rows = as_matrix(x, x_tensor), columns = torch::stable::transpose(weight, 0, 1);
  TORCH_ERROR_CODE_CHECK(aoti_torch_cuda_addmm_out(out.get(), out.get(), rows.get(), columns.get(), 1.0, 1.0));
}

// Of residual += x @ weight^T + bias.
FusedLinear checked_sum(const Operand& residual, const Operand& x, const Operand& weight,
                        const std::optional<Tensor>& bias) {
  residual.check_values();
  x.check_same_dtype(residual);
  x.check_same_device(residual);
  bool same = residual.dim() == x.dim();
  for (int64_t i = 0; same && i + 1 < x.dim(); ++i) same = residual.sizes()[i] == x.sizes()[i];
  if (!same) fail("x", "have the leading dimensions of residual, " + residual.shape_name(), x.shape_name());
  weight.check_shape({residual.last_size(), x.last_size()});
  FusedLinear p = checked(x, weight, bias);
  residual.check_not_expanded();
  if (residual.data() == x.data() && x.numel() > 0)
    fail("residual", "not be x, which is read meanwhile", "the same memory");
  const Rows rows = residual.as_rows();
  p.epilogue = Epilogue::kAdd;
  p.out = rows.data;
  p.out_stride = rows.stride;
  return p;
}

void linear_add(Tensor residual_tensor, const Tensor& x_tensor, const Tensor& weight_tensor,
                const std::optional<Tensor>& bias) {
  const Operand residual("residual", residual_tensor), x("x", x_tensor), weight("weight", weight_tensor);
  const FusedLinear p = checked_sum(residual, x, weight, bias);
  const DeviceGuard guard(x.device());
  if (takes_few_rows(p)) return launch_few_rows_linear(p, current_stream(x.device()));
  if (takes_skinny(p)) return launch_skinny_linear(p, current_stream(x.device()));
  add_product(residual, residual_tensor, x, x_tensor, weight_tensor, bias);
}

// Sums of squares of parts of the rows of `data`, which are `width` wide.
void check_squares(const Operand& squares, const Operand& data, int64_t width) {
  squares.check_dtype(ScalarType::Float);
  squares.check_same_device(data);
  const int64_t parts = squares_parts(static_cast<int>(width));
  bool same = squares.dim() == data.dim() && squares.last_size() == parts;
  std::string wish = "(";
  for (int64_t i = 0; i + 1 < data.dim(); ++i) {
    same = same && squares.sizes()[i] == data.sizes()[i];
    wish += std::to_string(data.sizes()[i]) + ", ";
  }
  if (!same) fail("squares", "have shape " + wish + std::to_string(parts) + ")", squares.shape_name());
}

// From one part to the next, where the sums of each lie together, as the kernel writes and reads them; else 0.
int64_t stride_of_parts(const Operand& squares) {
  int64_t rows = 1;
  for (int64_t i = squares.dim() - 2; i >= 0; --i) {
    if (squares.sizes()[i] > 1 && squares.strides()[i] != rows) return 0;
    rows *= squares.sizes()[i];
  }
  const int64_t stride = squares.strides()[squares.dim() - 1];
  return squares.last_size() <= 1 || stride >= rows ? stride : 0;
}

void linear_add_scale(Tensor residual_tensor, Tensor scaled_tensor, Tensor squares_tensor, const Tensor& x_tensor,
                      const Tensor& weight_tensor, const Tensor& norm_tensor, const std::optional<Tensor>& bias) {
  const Operand residual("residual", residual_tensor), scaled("scaled", scaled_tensor);
  const Operand squares("squares", squares_tensor), x("x", x_tensor), weight("weight", weight_tensor);
  const Operand norm_weight("norm_weight", norm_tensor);
  FusedLinear p = checked_sum(residual, x, weight, bias);
  scaled.check_same_shape(residual);
  scaled.check_same_dtype(residual);
  scaled.check_same_device(residual);
  scaled.check_not_expanded();
  scaled.check_not_same_memory(residual);
  if (scaled.data() == x.data() && x.numel() > 0)
    fail("scaled", "not be x, which is read meanwhile", "the same memory");
  check_squares(squares, residual, residual.last_size());
  squares.check_not_expanded();
  for (const Operand* written : {&residual, &scaled}) squares.check_not_same_memory(*written);
  if (squares.data() == x.data() && x.numel() > 0)
    fail("squares", "not be x, which is read meanwhile", "the same memory");
  norm_weight.check_same_dtype(residual);
  norm_weight.check_weight(residual);
  const DeviceGuard guard(x.device());
  p.epilogue = Epilogue::kAddScale;
  p.norm_weight = norm_weight.data();
  p.scaled = scaled.data();
  p.squares_out = static_cast<float*>(squares.data());
  p.squares_stride = stride_of_parts(squares);
  if (scaled.is_contiguous() && p.squares_stride > 0 && takes_skinny(p)) {
    return launch_skinny_linear(p, current_stream(x.device()));
  }
  std::array<StableIValue, 7> stack{
      from(residual_tensor), from(scaled_tensor), from(squares_tensor), from(x_tensor), from(weight_tensor),
      from(norm_tensor),     from(bias)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("rooflight::linear_add_scale_", "ref", stack.data(), TORCH_ABI_VERSION));
}

// y = (x @ weight^T) / root mean square + bias, and what is behind it; `name`: of the operator.
Tensor scaled_product(const char* name, Epilogue epilogue, const Tensor& x_tensor, const Tensor& squares_tensor,
                      const Tensor& weight_tensor, const std::optional<Tensor>& bias, double eps) {
  const Operand x("x", x_tensor), squares("squares", squares_tensor), weight("weight", weight_tensor);
  FusedLinear p = checked(x, weight, bias);
  check_squares(squares, x, x.last_size());
  check_eps(p, eps);
  if (epilogue == Epilogue::kSwiglu) check_pairs(p);
  const DeviceGuard guard(x.device());
  p.prologue = Prologue::kScaled;
  p.epilogue = epilogue;
  p.squares = static_cast<const float*>(squares.data());
  p.squares_stride = stride_of_parts(squares);
  if (p.squares_stride > 0 && takes_skinny(p)) return launched(p, x, launch_skinny_linear);
  return call(name, "ref", x_tensor, squares_tensor, weight_tensor, bias, eps);
}

Tensor scaled_linear(const Tensor& x, const Tensor& squares, const Tensor& weight, const std::optional<Tensor>& bias,
                     double eps) {
  return scaled_product("rooflight::scaled_linear", Epilogue::kStore, x, squares, weight, bias, eps);
}

Tensor scaled_swiglu(const Tensor& x, const Tensor& squares, const Tensor& weight, const std::optional<Tensor>& bias,
                     double eps) {
  return scaled_product("rooflight::scaled_swiglu", Epilogue::kSwiglu, x, squares, weight, bias, eps);
}

Tensor silu_and_mul_of(const Operand& x) {
  const int64_t size = x.last_size() / 2;
  Tensor out = empty_rows(x, size);
  SiluAndMul step;
  step.dtype = x.check_values();
  if (x.last_size() % 2 != 0) fail("x", "have an even last dimension (gate and up)", std::to_string(x.last_size()));
  step.x = x.as_rows();
  step.out = contiguous_rows(out, size);
  step.size = static_cast<int>(size);
  step.rows = size > 0 ? x.numel() / (2 * size) : 0;
  launch_silu_and_mul(step, current_stream(x.device()));
  return out;
}

Tensor silu_and_mul(const Tensor& x_tensor) {
  const Operand x("x", x_tensor);
  x.check_values();
  const DeviceGuard guard(x.device());
  return silu_and_mul_of(x);
}

Tensor rms_norm_swiglu(const Tensor& x_tensor, const Tensor& norm_tensor, const Tensor& weight_tensor,
                       const std::optional<Tensor>& bias, double eps) {
  const Operand x("x", x_tensor), norm_weight("norm_weight", norm_tensor), weight("weight", weight_tensor);
  FusedLinear p = checked(x, weight, bias);
  check_norm(p, x, norm_weight, eps);
  check_pairs(p);
  const DeviceGuard guard(x.device());
  p.epilogue = Epilogue::kSwiglu;
  if (takes_few_rows(p)) return launched(p, x, launch_few_rows_linear);
  const Tensor rows = normed(x, p);
  const FusedLinear product = behind_norm(p, rows);
  if (takes_skinny(product)) return launched(product, x, launch_skinny_linear);
  const Tensor both = call("aten::linear", "", rows, weight_tensor, bias);
  return silu_and_mul_of(Operand("x", both));
}

STABLE_TORCH_LIBRARY_IMPL(rooflight, CUDA, library) {
  library.impl("rms_norm_linear.cuda", TORCH_BOX(&rms_norm_linear));
  library.impl("linear_add_.cuda", TORCH_BOX(&linear_add));
  library.impl("linear_add_scale_.cuda", TORCH_BOX(&linear_add_scale));
  library.impl("scaled_linear.cuda", TORCH_BOX(&scaled_linear));
  library.impl("scaled_swiglu.cuda", TORCH_BOX(&scaled_swiglu));
  library.impl("rms_norm_swiglu.cuda", TORCH_BOX(&rms_norm_swiglu));
  library.impl("silu_and_mul.cuda", TORCH_BOX(&silu_and_mul));
}

}  // namespace
}  // namespace rooflight
