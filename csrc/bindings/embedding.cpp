// The embedding gather as a PyTorch operator.
#include "embedding.h"
#include "bindings/common.h"

namespace rooflight {
namespace {

// Elements between one id and the next, whatever the dimensions.
int64_t stride_of(const Operand& ids) {
  int64_t stride = 1, count = 1;  // of the dimensions looked at so far, from the last on
  for (int64_t i = ids.dim() - 1; i >= 0; --i) {
    if (ids.sizes()[i] == 1) continue;
    if (count == 1) stride = ids.strides()[i];
    if (ids.strides()[i] != stride * count && ids.numel() > 0) {
      fail("ids", "have dimensions that fold into one", "shape " + ids.shape_name() + " with other strides");
    }
    count *= ids.sizes()[i];
  }
  return stride;
}

Tensor embedding(const Tensor& ids_tensor, const Tensor& weight_tensor) {
  const Operand ids("ids", ids_tensor), weight("weight", weight_tensor);
  Embedding e;
  e.wide_ids = ids.dtype() == ScalarType::Long;
  if (!e.wide_ids && ids.dtype() != ScalarType::Int) fail("ids", "be int32 or int64", dtype_name(ids.dtype()));
  e.dtype = weight.check_values();
  weight.check_shape({-1, -1});
  weight.check_same_device(ids);
  weight.check_rows();
  e.ids = ids.data();
  e.ids_stride = stride_of(ids);
  e.num_tokens = ids.numel();
  e.vocab_size = weight.sizes()[0];
  e.hidden_size = static_cast<int>(weight.last_size());
  e.weight = weight.as_rows();
  int64_t sizes[64];
  if (ids.dim() > 63) fail("ids", "have at most 63 dimensions", std::to_string(ids.dim()));
  for (int64_t i = 0; i < ids.dim(); ++i) sizes[i] = ids.sizes()[i];
  sizes[ids.dim()] = weight.last_size();
  Tensor out = empty(sizes, ids.dim() + 1, weight.dtype(), ids.device());
  e.out = contiguous_rows(out, weight.last_size());
  const DeviceGuard guard(ids.device());
  launch_embedding(e, current_stream(ids.device()));
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(rooflight, CUDA, library) {
  library.impl("embedding.cuda", TORCH_BOX(&embedding));
}

}  // namespace
}  // namespace rooflight
