// What a captured decode step needs beside the model, as PyTorch operators.
#include "advance_decode.h"
#include "bindings/common.h"

namespace rooflight {
namespace {

int64_t* column(const Operand& operand, int64_t rows, const Operand& first) {
  operand.check_dtype(ScalarType::Long);
  operand.check_shape({rows});
  operand.check_same_device(first);
  if (rows > 1 && operand.strides()[0] != 1)
    fail(operand.name(), "have stride 1", std::to_string(operand.strides()[0]));
  return static_cast<int64_t*>(operand.data());
}

void advance_decode(const Tensor& tokens_tensor, Tensor ids_tensor, Tensor positions_tensor, Tensor num_tokens_tensor,
                    Tensor seq_lens_tensor, Tensor slots_tensor, Tensor last_tokens_tensor, Tensor history_tensor,
                    const Tensor& table_tensor, const Tensor& limits_tensor, const Tensor& places_tensor,
                    int64_t page_size, int64_t step) {
  const Operand tokens("tokens", tokens_tensor), seq_lens("seq_lens", seq_lens_tensor);
  const Operand last("last_tokens", last_tokens_tensor), history("history", history_tensor);
  const Operand table("block_table", table_tensor);
  if (std::string(tokens.device_name()).rfind("cuda:", 0) != 0)
    fail("tokens", "be on a CUDA device", tokens.device_name());
  tokens.check_shape({-1});
  const int64_t rows = tokens.sizes()[0];
  AdvanceDecode s;
  s.tokens = column(tokens, rows, tokens);
  s.ids = column(Operand("ids", ids_tensor), rows, tokens);
  s.positions = column(Operand("positions", positions_tensor), rows, tokens);
  s.num_tokens = column(Operand("num_tokens", num_tokens_tensor), rows, tokens);
  seq_lens.check_dtype(ScalarType::Int);
  seq_lens.check_shape({rows});
  seq_lens.check_same_device(tokens);
  if (rows > 1 && seq_lens.strides()[0] != 1) fail("seq_lens", "have stride 1", std::to_string(seq_lens.strides()[0]));
  s.seq_lens = static_cast<int*>(seq_lens.data());
  s.slots = column(Operand("slots", slots_tensor), rows, tokens);
  last.check_shape({-1});
  s.last_tokens = column(last, last.sizes()[0], tokens);
  history.check_dtype(ScalarType::Long);
  history.check_shape({-1, rows});
  history.check_same_device(tokens);
  history.check_rows();
  table.check_dtype(ScalarType::Int);
  table.check_shape({rows, -1});
  table.check_same_device(tokens);
  table.check_rows();
  s.limits = column(Operand("limits", limits_tensor), rows, tokens);
  s.places = column(Operand("places", places_tensor), rows, tokens);
  if (page_size < 1) fail("page_size", "be 1 or more", std::to_string(page_size));
  if (step < 0 || step >= history.sizes()[0]) {
    fail("step", "be a row of history, 0 to " + std::to_string(history.sizes()[0] - 1), std::to_string(step));
  }
  for (const Operand* operand : {&seq_lens, &last, &history}) operand->check_not_expanded();
  s.history = static_cast<int64_t*>(history.data()) + step * history.strides()[0];
  s.block_table = static_cast<const int*>(table.data());
  s.table_stride = table.strides()[0];
  s.num_seqs = static_cast<int>(rows);
  s.page_size = static_cast<int>(page_size);
  const DeviceGuard guard(tokens.device());
  launch_advance_decode(s, current_stream(tokens.device()));
}

STABLE_TORCH_LIBRARY_IMPL(rooflight, CUDA, library) {
  library.impl("advance_decode_.cuda", TORCH_BOX(&advance_decode));
}

}  // namespace
}  // namespace rooflight
