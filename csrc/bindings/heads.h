// Checks that the bindings of operators on heads share.
#pragma once

#include "bindings/common.h"
#include "common/heads.h"

namespace rooflight {

inline Heads heads_of(const Operand& operand) {
  operand.check_rows();
  return {operand.data(), operand.strides()[0], operand.strides()[1], static_cast<int>(operand.sizes()[1])};
}

// cos_sin (positions, rotary_dim) and positions (num_tokens,) that fit q (num_tokens, num_heads, head_dim).
inline Angles angles_of(const Operand& cos_sin, const Operand& positions, const Operand& q) {
  const int64_t head_dim = q.sizes()[2];
  cos_sin.check_dtype(ScalarType::Float);
  cos_sin.check_shape({-1, -1});
  const int64_t rotary = cos_sin.sizes()[1];
  if (rotary % 2 != 0 || rotary > head_dim) {
    fail("cos_sin", "have an even width of at most head_dim = " + std::to_string(head_dim), std::to_string(rotary));
  }
  cos_sin.check_same_device(q);
  cos_sin.check_rows();
  const bool wide = positions.dtype() == ScalarType::Long;
  if (!wide && positions.dtype() != ScalarType::Int) {
    fail("positions", "be torch.int32 or torch.int64", dtype_name(positions.dtype()));
  }
  positions.check_shape({q.sizes()[0]});
  positions.check_same_device(q);
  return {static_cast<const float*>(cos_sin.data()),
          positions.data(),
          cos_sin.strides()[0],
          positions.strides()[0],
          static_cast<int>(rotary),
          wide};
}

}  // namespace rooflight
