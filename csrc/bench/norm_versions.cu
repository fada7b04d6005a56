// The history of fused add + RMSNorm in five kernels, in place, for the benchmark: what each step is worth.
//
//   1 scalar              one element a load; x + residual read, summed, and read again from the written sum
//   2 narrow packs        two elements a load, and the second read from x and residual again
//   3 shared memory       the sum staged in shared memory (more than 48 KiB by opting in), 16-byte packs
//   4 second read         16-byte packs, the second read from the residual just written, which is in L2
//   5 registers           16-byte packs held in registers, one read; the idea of the operator itself
//
// All compute in FP32, round the sum first, and give the same values. Versions 2 to 5 need a width that their packs
// divide; 5 needs at most 4 packs for each of 1024 threads. A version that cannot take a width says so.
#include "common/launch.cuh"
#include "common/pack.cuh"
#include "common/reduce.cuh"
#include "common/rows.cuh"

namespace rooflight {
namespace {

struct Problem {
  void *x, *residual;
  const void* weight;
  int64_t rows;
  int width;
  float eps;
};

template <typename T, int N>
struct Row {
  using Data = Pack<T, N>;
  Data *x, *residual;
  const Data* weight;
  int packs;

  __device__ explicit Row(const Problem& problem)
      : x(static_cast<Data*>(problem.x) + blockIdx.x * static_cast<int64_t>(problem.width / N)),
        residual(static_cast<Data*>(problem.residual) + blockIdx.x * static_cast<int64_t>(problem.width / N)),
        weight(static_cast<const Data*>(problem.weight)),
        packs(problem.width / N) {}
};

// The rounded sum of two packs; its squares are added to `total`.
template <typename T, int N>
__device__ __forceinline__ Pack<T, N> summed(const Pack<T, N>& a, const Pack<T, N>& b, float& total) {
  float left[N], right[N];
  to_floats(a, left);
  to_floats(b, right);
#pragma unroll
  for (int j = 0; j < N; ++j) left[j] += right[j];
  const Pack<T, N> sum = from_floats<T>(left);
  to_floats(sum, left);
#pragma unroll
  for (int j = 0; j < N; ++j) total += left[j] * left[j];
  return sum;
}

template <typename T, int N>
__device__ __forceinline__ Pack<T, N> scaled(const Pack<T, N>& sum, float inverse, const Pack<T, N>& weight) {
  float values[N], factors[N];
  to_floats(sum, values);
  to_floats(weight, factors);
#pragma unroll
  for (int j = 0; j < N; ++j) values[j] = values[j] * inverse * factors[j];
  return from_floats<T>(values);
}

__device__ __forceinline__ float inverse_rms(float total, const Problem& problem) {
  __shared__ float scratch[32][1];
  float sums[1] = {total};
  row_sum(sums, scratch);
  return rsqrtf(sums[0] / problem.width + problem.eps);
}

enum class Second { kResidual, kInputs, kShared };

// Versions 1 to 4: they differ in the width of a pack and in where the second read comes from.
template <typename T, int N, Second SECOND>
__global__ void __launch_bounds__(256) read_twice(Problem problem) {
  extern __shared__ uint4 staged_bytes[];
  auto* staged = reinterpret_cast<Pack<T, N>*>(staged_bytes);
  const Row<T, N> row(problem);
  float total = 0.0f;
  for (int place = threadIdx.x; place < row.packs; place += blockDim.x) {
    const Pack<T, N> sum = summed(row.x[place], row.residual[place], total);
    if constexpr (SECOND != Second::kInputs) row.residual[place] = sum;
    if constexpr (SECOND == Second::kShared) staged[place] = sum;
  }
  const float inverse = inverse_rms(total, problem);
  float ignored = 0.0f;
  for (int place = threadIdx.x; place < row.packs; place += blockDim.x) {
    Pack<T, N> sum;
    if constexpr (SECOND == Second::kShared) {
      sum = staged[place];
    } else if constexpr (SECOND == Second::kInputs) {
      sum = summed(row.x[place], row.residual[place], ignored);
      row.residual[place] = sum;
    } else {
      sum = row.residual[place];
    }
    row.x[place] = scaled(sum, inverse, row.weight[place]);
  }
}

template <typename T, int N, int PACKS>
__global__ void __launch_bounds__(1024) in_registers(Problem problem) {
  const Row<T, N> row(problem);
  Pack<T, N> held[PACKS];
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int place = threadIdx.x + i * blockDim.x;
    if (place < row.packs) {
      held[i] = summed(row.x[place], row.residual[place], total);
      row.residual[place] = held[i];
    }
  }
  const float inverse = inverse_rms(total, problem);
#pragma unroll
  for (int i = 0; i < PACKS; ++i) {
    const int place = threadIdx.x + i * blockDim.x;
    if (place < row.packs) row.x[place] = scaled(held[i], inverse, row.weight[place]);
  }
}

template <typename T>
cudaError_t launch_version(int version, const Problem& problem, cudaStream_t stream) {
  constexpr int N = kFullPack<T>;
  const dim3 grid(static_cast<unsigned>(problem.rows));
  const int pack = version == 1 ? 1 : (version == 2 ? 2 : N);
  if (problem.width % pack != 0 || problem.rows == 0) return cudaErrorInvalidValue;
  if (version == 1) read_twice<T, 1, Second::kResidual><<<grid, 256, 0, stream>>>(problem);
  if (version == 2) read_twice<T, 2, Second::kInputs><<<grid, 256, 0, stream>>>(problem);
  if (version == 3) {
    const int bytes = problem.width * static_cast<int>(sizeof(T));
    auto* kernel = read_twice<T, N, Second::kShared>;
    const cudaError_t error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    if (error != cudaSuccess) return error;
    kernel<<<grid, 256, bytes, stream>>>(problem);
  }
  if (version == 4) read_twice<T, N, Second::kResidual><<<grid, 256, 0, stream>>>(problem);
  if (version == 5) {
    const int packs = problem.width / N;
    if (packs > 4 * 1024) return cudaErrorInvalidValue;
    const int threads = packs <= 4 * 256 ? 256 : 1024;
    in_registers<T, N, 4><<<grid, threads, 0, stream>>>(problem);
  }
  return cudaGetLastError();
}

}  // namespace
}  // namespace rooflight

// dtype: 0 float32, 1 float16, 2 bfloat16. x and residual (rows, width) contiguous, both written; weight (width,).
extern "C" __attribute__((visibility("default"))) int rl_version(void* stream, int version, int dtype, void* x,
                                                                 void* residual, const void* weight, long rows,
                                                                 int width, float eps) {
  using namespace rooflight;
  const Problem problem = {x, residual, weight, rows, width, eps};
  if (version < 1 || version > 5) return cudaErrorInvalidValue;
  const auto to = static_cast<cudaStream_t>(stream);
  switch (dtype) {
    case 0:
      return launch_version<float>(version, problem, to);
    case 1:
      return launch_version<__half>(version, problem, to);
    case 2:
      return launch_version<__nv_bfloat16>(version, problem, to);
    default:
      return cudaErrorInvalidValue;
  }
}
