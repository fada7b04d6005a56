// Matrices of rows as kernels see them: how a row is addressed, how wide its packs may be, which types there are.
#pragma once

#include <stdint.h>

#include <algorithm>
#include <initializer_list>

#include "common/pack.cuh"
#include "common/types.h"

namespace rooflight {

// 64 bits throughout: rows times stride passes 2^31.
template <typename P>
__device__ __forceinline__ P* row_of(const Rows& rows, int64_t row, int element_size) {
  return reinterpret_cast<P*>(static_cast<char*>(rows.data) + row * rows.stride * element_size);
}

// Ids and positions come as int64 (`wide`) or int32.
__device__ __forceinline__ int64_t integer_at(const void* values, bool wide, int64_t place) {
  return wide ? static_cast<const int64_t*>(values)[place] : static_cast<const int32_t*>(values)[place];
}

// The widest pack, in elements of T, that the width and every address allow; rows without data are no obstacle.
template <typename T, typename W>
int pack_elements(int width, const void* weight, std::initializer_list<Rows> operands) {
  int elements = kFullPack<T>;
  for (; elements > 1; elements /= 2) {
    const int64_t bytes = elements * sizeof(T);
    const auto fits = [&](const Rows& rows) {
      return reinterpret_cast<uintptr_t>(rows.data) % bytes == 0 &&
             rows.stride * static_cast<int64_t>(sizeof(T)) % bytes == 0;
    };
    const int weight_bytes = std::min<int>(16, elements * sizeof(W));
    if (width % elements == 0 && reinterpret_cast<uintptr_t>(weight) % weight_bytes == 0 &&
        std::all_of(operands.begin(), operands.end(), fits)) {
      break;
    }
  }
  return elements;
}

template <typename T>
struct Type {
  using type = T;
};

// Calls run(Type<T>, Type<W>) with the types that the dtypes name. Weights are of the data's dtype or FP32.
template <typename Run>
void with_types(Dtype dtype, Dtype weight_dtype, Run run) {
  const bool wide_weight = weight_dtype == Dtype::kFloat32;
  switch (dtype) {
    case Dtype::kFloat32:
      return run(Type<float>(), Type<float>());
    case Dtype::kFloat16:
      return wide_weight ? run(Type<__half>(), Type<float>()) : run(Type<__half>(), Type<__half>());
    case Dtype::kBFloat16:
      return wide_weight ? run(Type<__nv_bfloat16>(), Type<float>())
                         : run(Type<__nv_bfloat16>(), Type<__nv_bfloat16>());
  }
}

}  // namespace rooflight
