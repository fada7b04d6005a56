#include "operand.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

namespace rooflight {
namespace {

std::string tuple_of(const int64_t* values, int64_t count) {
  std::string text = "(";
  for (int64_t i = 0; i < count; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + (count == 1 ? ",)" : ")");
}

}  // namespace

void fail(const char* name, const std::string& wish, const std::string& fact) {
  throw std::invalid_argument(std::string(name) + " must " + wish + ", was " + fact);
}

std::string dtype_name(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return "torch.float32";
    case ScalarType::Half:
      return "torch.float16";
    case ScalarType::BFloat16:
      return "torch.bfloat16";
    case ScalarType::Double:
      return "torch.float64";
    case ScalarType::Char:
      return "torch.int8";
    case ScalarType::Byte:
      return "torch.uint8";
    case ScalarType::Short:
      return "torch.int16";
    case ScalarType::Int:
      return "torch.int32";
    case ScalarType::Long:
      return "torch.int64";
    case ScalarType::Bool:
      return "torch.bool";
    case ScalarType::ComplexFloat:
      return "torch.complex64";
    case ScalarType::ComplexDouble:
      return "torch.complex128";
    default:
      return "dtype number " + std::to_string(static_cast<int>(dtype));
  }
}

Operand::Operand(const char* name, const Tensor& tensor) : name_(name), dtype_(tensor.scalar_type()) {
  const AtenTensorHandle handle = tensor.get();
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device_type_));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &device_index_));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &dim_));
  int64_t* pointer = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &pointer));
  sizes_ = pointer;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &pointer));
  strides_ = pointer;
  // A tensor on another kind of device may have no data; it is refused by its device, not by its pointer.
  if (device_type_ == static_cast<int32_t>(DeviceType::CUDA)) {
    TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &data_));
  }
}

int64_t Operand::numel() const {
  int64_t count = 1;
  for (int64_t i = 0; i < dim_; ++i) count *= sizes_[i];
  return count;
}

std::string Operand::device_name() const {
  if (device_type_ == static_cast<int32_t>(DeviceType::CPU)) return "cpu";
  if (device_type_ == static_cast<int32_t>(DeviceType::Meta)) return "meta";
  const bool cuda = device_type_ == static_cast<int32_t>(DeviceType::CUDA);
  return (cuda ? "cuda:" : "another device:") + std::to_string(device_index_);
}

std::string Operand::shape_name() const {
  return tuple_of(sizes_, dim_);
}

Dtype Operand::check_values() const {
  if (device_type_ != static_cast<int32_t>(DeviceType::CUDA)) fail(name_, "be on a CUDA device", device_name());
  if (dim_ < 1) fail(name_, "have at least one dimension", "a scalar");
  // Kernels count the elements of a row in 32 bits, and step by a block beyond its end.
  if (last_size() > INT32_MAX - 1024) fail(name_, "have rows of 2^31 - 1025 elements at most", shape_name());
  switch (dtype_) {
    case ScalarType::Float:
      return Dtype::kFloat32;
    case ScalarType::Half:
      return Dtype::kFloat16;
    case ScalarType::BFloat16:
      return Dtype::kBFloat16;
    default:
      fail(name_, "be float32, float16 or bfloat16 for the cuda provider", dtype_name(dtype_));
  }
}

void Operand::check_same_device(const Operand& other) const {
  if (device_type_ != other.device_type_ || device_index_ != other.device_index_) {
    fail(name_, "be on " + other.device_name(), device_name());
  }
}

void Operand::check_same_shape(const Operand& other) const {
  bool same = dim_ == other.dim_;
  for (int64_t i = 0; same && i < dim_; ++i) same = sizes_[i] == other.sizes_[i];
  if (!same) fail(name_, "have shape " + other.shape_name(), shape_name());
}

void Operand::check_same_dtype(const Operand& other) const {
  if (dtype_ != other.dtype_) fail(name_, "be " + dtype_name(other.dtype_), dtype_name(dtype_));
}

void Operand::check_dtype(ScalarType dtype) const {
  if (dtype_ != dtype) fail(name_, "be " + dtype_name(dtype), dtype_name(dtype_));
}

void Operand::check_shape(std::initializer_list<int64_t> sizes) const {
  bool fits = dim_ == static_cast<int64_t>(sizes.size());
  std::string wish = "(";
  int64_t i = 0;
  for (const int64_t size : sizes) {
    fits = fits && (size < 0 || sizes_[i] == size);
    wish += (i++ ? ", " : "") + (size < 0 ? std::string("any") : std::to_string(size));
  }
  if (!fits) fail(name_, "have shape " + wish + ")", shape_name());
}

void Operand::check_rows() const {
  if (numel() > 0 && last_size() > 1 && strides_[dim_ - 1] != 1) {
    fail(name_, "have stride 1 in its last dimension", std::to_string(strides_[dim_ - 1]));
  }
}

bool Operand::is_contiguous() const {
  int64_t step = 1;
  for (int64_t i = dim_ - 1; i >= 0; --i) {
    if (sizes_[i] > 1 && strides_[i] != step) return false;
    step *= sizes_[i];
  }
  return true;
}

bool Operand::aligned(int64_t bytes) const {
  bool fits = reinterpret_cast<uintptr_t>(data_) % bytes == 0;
  const int64_t size = dtype_ == ScalarType::Float ? 4 : 2;
  for (int64_t i = 0; i + 1 < dim_; ++i) fits = fits && (sizes_[i] <= 1 || strides_[i] * size % bytes == 0);
  return fits;
}

void Operand::check_not_expanded() const {
  for (int64_t i = 0; i < dim_; ++i) {
    if (strides_[i] == 0 && sizes_[i] > 1) {
      fail(name_, "not be expanded (stride 0), since it is written", "strides " + tuple_of(strides_, dim_));
    }
  }
}

void Operand::check_not_same_memory(const Operand& other) const {
  if (data_ == other.data_ && numel() > 0) {
    fail(name_, std::string("not share ") + other.name_ + "'s memory, since both are written", "the same memory");
  }
}

Dtype Operand::check_weight(const Operand& data) const {
  const int64_t width = data.last_size();
  if (dtype_ != data.dtype_ && dtype_ != ScalarType::Float) {
    const std::string alone = data.dtype_ == ScalarType::Float ? "" : " or torch.float32";
    fail(name_, "be " + dtype_name(data.dtype_) + alone, dtype_name(dtype_));
  }
  if (dim_ != 1 || sizes_[0] != width) fail(name_, "have shape (" + std::to_string(width) + ")", shape_name());
  check_same_device(data);
  if (width > 1 && strides_[0] != 1) fail(name_, "have stride 1", std::to_string(strides_[0]));
  return dtype_ == ScalarType::Float ? Dtype::kFloat32
                                     : (dtype_ == ScalarType::Half ? Dtype::kFloat16 : Dtype::kBFloat16);
}

Rows Operand::as_rows() const {
  if (last_size() > 1 && strides_[dim_ - 1] != 1 && numel() > 0) {
    fail(name_, "have stride 1 in its last dimension", std::to_string(strides_[dim_ - 1]));
  }
  int64_t stride = 0, rows = 1;  // of the leading dimensions looked at so far, from the last of them on
  bool folds = true, any = false;
  for (int64_t i = dim_ - 2; i >= 0; --i) {
    if (sizes_[i] == 1) continue;
    if (!any) {
      stride = strides_[i];
      any = true;
    } else if (strides_[i] != stride * rows) {
      folds = false;
    }
    rows *= sizes_[i];
  }
  if (!folds && numel() > 0) {
    fail(name_, "have leading dimensions that fold into rows",
         "shape " + shape_name() + " with strides " + tuple_of(strides_, dim_));
  }
  return {data_, stride};
}

}  // namespace rooflight
