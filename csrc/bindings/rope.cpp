// Rotary position embedding as PyTorch operators.
#include <tuple>

#include "bindings/common.h"
#include "bindings/heads.h"
#include "rope.h"

namespace rooflight {
namespace {

// Checks of everything but what is written.
Rope checked(const Operand& q, const Operand& k, const Tensor& cos_sin, const Tensor& positions, bool interleaved) {
  Rope s;
  s.dtype = q.check_values();
  q.check_shape({-1, -1, -1});
  k.check_shape({q.sizes()[0], -1, q.sizes()[2]});
  k.check_same_dtype(q);
  k.check_same_device(q);
  s.angles = angles_of(Operand("cos_sin", cos_sin), Operand("positions", positions), q);
  s.q = heads_of(q);
  s.k = heads_of(k);
  s.num_tokens = static_cast<int>(q.sizes()[0]);
  s.head_dim = static_cast<int>(q.sizes()[2]);
  s.interleaved = interleaved;
  constexpr int64_t kMostElements = 1 << 22;  // of a token, which the second dimension of a grid has room for
  for (const Operand* operand : {&q, &k}) {
    if (operand->sizes()[0] > INT32_MAX || operand->sizes()[1] * operand->sizes()[2] > kMostElements) {
      fail(operand->name(), "have 2^31 - 1 tokens of 2^22 elements at most for the cuda provider",
           operand->shape_name());
    }
  }
  return s;
}

void run(const Rope& step, int device) {
  const DeviceGuard guard(device);
  launch_rope(step, current_stream(device));
}

Heads contiguous_heads(const Tensor& tensor, const Operand& like) {
  const int64_t heads = like.sizes()[1], head_dim = like.sizes()[2];
  return {tensor.data_ptr(), heads * head_dim, head_dim, static_cast<int>(heads)};
}

std::tuple<Tensor, Tensor> rope(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& cos_sin,
                                const Tensor& positions, bool interleaved) {
  const Operand q("q", q_tensor), k("k", k_tensor);
  Rope step = checked(q, k, cos_sin, positions, interleaved);
  Tensor q_out = empty_like(q), k_out = empty_like(k);
  step.q_out = contiguous_heads(q_out, q);
  step.k_out = contiguous_heads(k_out, k);
  run(step, q.device());
  return {q_out, k_out};
}

void rope_in_place(Tensor q_tensor, Tensor k_tensor, const Tensor& cos_sin, const Tensor& positions, bool interleaved) {
  const Operand q("q", q_tensor), k("k", k_tensor);
  Rope step = checked(q, k, cos_sin, positions, interleaved);
  for (const Operand* operand : {&q, &k}) operand->check_not_expanded();
  const bool same = step.q.data == step.k.data && step.q.heads == step.k.heads &&
                    step.q.token_stride == step.k.token_stride && step.q.head_stride == step.k.head_stride;
  if (same) {
    step.k.heads = 0;  // the very same heads, to be turned once
  } else if (q.numel() > 0) {
    k.check_not_same_memory(q);
  }
  step.q_out = step.q;
  step.k_out = step.k;
  run(step, q.device());
}

STABLE_TORCH_LIBRARY_IMPL(rooflight, CUDA, library) {
  library.impl("rope.cuda", TORCH_BOX(&rope));
  library.impl("rope_.cuda", TORCH_BOX(&rope_in_place));
}

}  // namespace
}  // namespace rooflight
