// From one decode step to the next: a thread a sequence. A launch of its own only because it follows the sampler.
#include "advance_decode.h"
#include "common/launch.cuh"

namespace rooflight {
namespace {

constexpr int kThreads = 128;

__global__ void __launch_bounds__(kThreads) advance_decode(AdvanceDecode s) {
  const int row = blockIdx.x * kThreads + threadIdx.x;
  wait_for_earlier_kernels();  // attention reads lengths before it waits: nothing starts before they are written
  if (row >= s.num_seqs) return;
  const int64_t token = s.tokens[row], place = s.places[row], position = s.positions[row] + 1;
  s.history[row] = token;
  if (place >= 0) s.last_tokens[place] = token;
  if (token < 0 || position >= s.limits[row]) {  // stands still and writes nothing
    s.slots[row] = -1;
    return;
  }
  s.ids[row] = token;
  s.positions[row] = position;
  s.num_tokens[row] = position + 1;
  s.seq_lens[row] = static_cast<int>(position + 1);
  const int64_t page = s.block_table[row * s.table_stride + position / s.page_size];
  s.slots[row] = page * s.page_size + position % s.page_size;
}

}  // namespace

void launch_advance_decode(const AdvanceDecode& s, cudaStream_t stream) {
  if (s.num_seqs == 0) return;
  launch(advance_decode, dim3((s.num_seqs + kThreads - 1) / kThreads), dim3(kThreads), stream, Overlap::kBehindOurs, 0,
         s);
  last_captured = {};  // it lets nobody start
}

}  // namespace rooflight
