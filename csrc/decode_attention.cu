// Decode attention over a paged cache: one new token a sequence, all query heads of a KV head in one block.
//
//   out = sum_j softmax_j(scale * q . k_j) v_j
//
// Bound by the cache's way from memory, so keys and values are read once for the group of query heads. Each warp has a
// ring of chunks of 16 tokens in shared memory, which asynchronous copies fill while it works. The products are done by
// the tensor cores with tokens and head_dim as their 16 rows and query heads as their 8 columns: on CUDA cores the same
// work is eight times the instructions and, for one warp, slower than memory (docs/lab).
//
//   scores (16 tokens, 8 heads) = K (16, D) @ Q^T (D, 8)        out^T (D, 8) += V^T (D, 16) @ weights (16, 8)
//
// Few sequences would leave most multiprocessors idle: then a cluster of blocks shares a sequence (the long path), each
// with a part of the keys, and merges through the shared memory of its members: exact, in a fixed order, without
// scratch memory and without a second launch. Parts follow from the length on the device, so one graph serves all
// lengths; short sequences keep blocks of a cluster idle.
//
// FP32, and pages that are no multiple of 16 tokens, go through a second, plain kernel.
#include "common/mma.cuh"
#include "decode_attention.cuh"

namespace rooflight {
namespace {

constexpr int kMostSplits = 16;
constexpr int kWarps = 4;
constexpr int kStages = 3;
constexpr int kHeads = 8;   // of a KV head that go together: columns of a product
constexpr int kChunk = 16;  // tokens: rows of a product

// Of a chunk in shared memory: 16-byte pieces, permuted within a row so that neither a load of eight rows' same piece
// nor one of two rows' four meets in one bank.
template <int D>
struct Chunk {
  static constexpr int kPieces = (D + 31) / 32 * 4;  // a row's, with zeros up to a multiple of 32 elements
  static constexpr int kPitch = kPieces <= 8 ? 128 : (kPieces + 15) / 16 * 256;
  static constexpr int kBytes = kChunk * kPitch;

  static __device__ __forceinline__ int place(int token, int piece) {
    return token * kPitch + ((piece ^ ((token & 1) << 2 | (token >> 1 & 3))) * 16);
  }
};

template <typename T, int D, int WARPS>
struct Memory {
  union {
    char ring[WARPS][kStages][2][Chunk<D>::kBytes];
    Meeting<WARPS, kHeads, D> meeting;
  };
};

template <typename T, int D, int WARPS>
constexpr int blocks_at_once() {
  const int fitting = 226 * 1024 / (static_cast<int>(sizeof(Memory<T, D, WARPS>)) + 1024);
  return fitting < 1 ? 1 : fitting > 12 / WARPS ? 12 / WARPS : fitting;
}

template <typename T, int D, int WARPS, bool CLUSTER>
__global__ void __launch_bounds__(WARPS * 32, blocks_at_once<T, D, WARPS>())
    decode_attention_chunks(DecodeAttention a) {
  using C = Chunk<D>;
  constexpr int kSteps = C::kPieces / 4, kTiles = D / 16, kCopies = kChunk * C::kPieces / 32;
  extern __shared__ __align__(128) char storage[];
  auto& memory = *reinterpret_cast<Memory<T, D, WARPS>*>(storage);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int group = a.num_heads / a.num_kv_heads, tiles = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles, heads = min(kHeads, group - tile * kHeads);
  const int first = kv_head * group + tile * kHeads, sequence = blockIdx.z;
  let_next_kernel_start();
  wait_for_earlier_kernels();

  const int length = a.seq_lens[sequence];
  const int oldest = a.window > 0 ? max(0, length - a.window) : 0;  // key that is seen
  const Part part =
      part_of(oldest / kChunk * kChunk, length, WARPS * kChunk, CLUSTER ? blockIdx.x : 0, CLUSTER ? gridDim.x : 1);
  const int* table = a.block_table + sequence * a.table_stride;
  const auto first_of = [&](int turn) { return part.begin + (turn * WARPS + warp) * kChunk; };
  const auto page_of = [&](int turn) { return first_of(turn) < part.end ? table[first_of(turn) / a.page_size] : 0; };
  // A chunk lies in one page. What is not seen is filled with zeros: a slot may hold anything, and 0 * NaN is NaN.
  const auto ask = [&](int turn, int64_t page) {
    const int base = first_of(turn), offset = base % a.page_size;
    if (base < part.end) {
      const T* k = static_cast<const T*>(a.k_cache) + page * a.k_strides.page + kv_head * a.k_strides.head;
      const T* v = static_cast<const T*>(a.v_cache) + page * a.v_strides.page + kv_head * a.v_strides.head;
      char* to = memory.ring[warp][turn % kStages][0];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int token = (i * 32 + lane) / C::kPieces, piece = (i * 32 + lane) % C::kPieces;
        const bool seen = base + token < part.end && base + token >= oldest && piece * 8 < D;
        const int place = C::place(token, piece), at = seen ? piece * 8 : 0, there = seen ? offset + token : 0;
        copy_async(to + place, k + there * a.k_strides.token + at, seen);
        copy_async(to + C::kBytes + place, v + there * a.v_strides.token + at, seen);
      }
    }
    commit_copies();  // also an empty one: they are counted
  };
  int pages[kStages];
#pragma unroll
  for (int turn = 0; turn < kStages; ++turn) pages[turn] = page_of(turn);
#pragma unroll
  for (int turn = 0; turn < kStages - 1; ++turn) ask(turn, pages[turn]);
  int next_page = pages[kStages - 1];  // read a turn before it is needed

  // Queries as right operands: head `row`, eight neighbours of each 32.
  uint4 q[kSteps];
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    const int at = i * 32 + quad * 8;
    const T* from = static_cast<const T*>(a.q) + sequence * a.q_stride + (first + row) * a.q_head_stride + at;
    q[i] = row < heads && at < D ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
  }
  // Of heads 2 * quad and 2 * quad + 1. Peaks are the warp's, sums those of the lane's tokens.
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {}, out[kTiles][4] = {};
  const float scale = a.scale * 1.44269504088896341f;

  for (int turn = 0; first_of(turn) < part.end; ++turn) {
    ask(turn + kStages - 1, next_page);
    next_page = page_of(turn + kStages);
    wait_copies<kStages - 1>();
    __syncwarp();
    const char* keys = memory.ring[warp][turn % kStages][0];
    const char* values = keys + C::kBytes;
    float even[4] = {}, odd[4] = {};
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      const uint4 low = *reinterpret_cast<const uint4*>(keys + C::place(row, i * 4 + quad));
      const uint4 high = *reinterpret_cast<const uint4*>(keys + C::place(row + 8, i * 4 + quad));
      multiply(even, {low.x, high.x, low.y, high.y}, {q[i].x, q[i].y}, T());
      multiply(odd, {low.z, high.z, low.w, high.w}, {q[i].z, q[i].w}, T());
    }
    // scores[2 * i + h]: token row + 8 * i, head 2 * quad + h
    float scores[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = first_of(turn) + row + j / 2 * 8;
      scores[j] = token < part.end && token >= oldest ? (even[j] + odd[j]) * scale : -INFINITY;
    }
    float kept[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float highest = fmaxf(peak[h], fmaxf(scores[h], scores[h + 2]));
#pragma unroll
      for (int far = 4; far < 32; far *= 2) highest = fmaxf(highest, __shfl_xor_sync(kAll, highest, far));
      kept[h] = share(peak[h], highest);
      peak[h] = highest;
      scores[h] = weight_of(scores[h], highest);
      scores[h + 2] = weight_of(scores[h + 2], highest);
      sum[h] = sum[h] * kept[h] + scores[h] + scores[h + 2];
    }
    if (__any_sync(kAll, kept[0] != 1.0f || kept[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int j = 0; j < 4; ++j) out[i][j] *= kept[j % 2];
      }
    }
    // Weights as right operands: tokens in pairs, head `row`.
    const unsigned weights[2] = {transpose(pack_pair(scores[0], scores[1], T())),
                                 transpose(pack_pair(scores[2], scores[3], T()))};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      unsigned v[4];
      load_transposed(v, values + C::place(lane / 16 * 8 + lane % 8, 2 * i + lane / 8 % 2));
      multiply(out[i], v, weights, T());
    }
    __syncwarp();  // all lanes have read the stage
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int far = 4; far < 32; far *= 2) sum[h] += __shfl_xor_sync(kAll, sum[h], far);
  }
  wait_copies<0>();
  __syncthreads();  // no ring is read or written any more: its memory is the meeting's
  if (row == 0) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      memory.meeting.peaks[warp][2 * quad + h] = peak[h];
      memory.meeting.sums[warp][2 * quad + h] = sum[h];
    }
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      memory.meeting.outs[warp][2 * quad + j % 2][i * 16 + row + j / 2 * 8] = out[i][j];
    }
  }
  finish<T, D, kHeads, WARPS, CLUSTER>(a, memory.meeting, sequence, first, heads, part.count);
}

template <typename T, int D, int WARPS>
void launch_chunks(const DecodeAttention& a, int splits, cudaStream_t stream) {
  const int tiles = (a.num_heads / a.num_kv_heads + kHeads - 1) / kHeads;
  const dim3 grid(splits, a.num_kv_heads * tiles, a.num_seqs), block(WARPS * 32);
  const auto kernel =
      splits == 1 ? decode_attention_chunks<T, D, WARPS, false> : decode_attention_chunks<T, D, WARPS, true>;
  launch_cluster(kernel, grid, block, splits, stream, Overlap::kBehindOurs, sizeof(Memory<T, D, WARPS>), a);
}

template <typename T, int D>
void launch_for_layout(const DecodeAttention& a, cudaStream_t stream) {
  const int group = a.num_heads / a.num_kv_heads;
  if constexpr (sizeof(T) == 2) {
    const bool fits = static_cast<int>(sizeof(Memory<T, D, kWarps>)) <= card().block_shared;
    if (a.aligned && a.page_size % kChunk == 0 && card().major >= 9 && fits) {
      const int64_t blocks = int64_t{a.num_seqs} * a.num_kv_heads * ((group + kHeads - 1) / kHeads);
      return launch_chunks<T, D, kWarps>(a, a.splits > 0 ? a.splits : decode_splits(blocks), stream);
    }
  }
  launch_plain_decode_attention<T, D>(a, stream);
}

template <typename T>
void launch_typed(const DecodeAttention& a, cudaStream_t stream) {
  switch (a.head_dim) {
    case 64:
      return launch_for_layout<T, 64>(a, stream);
    case 80:
      return launch_for_layout<T, 80>(a, stream);
    case 128:
      return launch_for_layout<T, 128>(a, stream);
    case 256:
      return launch_for_layout<T, 256>(a, stream);
  }
}

}  // namespace

bool takes_head_dim(int head_dim) {
  return head_dim == 64 || head_dim == 80 || head_dim == 128 || head_dim == 256;
}

int decode_splits(int64_t blocks) {
  const int64_t places = card().multiprocessors;
  int splits = 1;
  while (splits < kMostSplits && blocks * splits * 2 <= places) splits *= 2;
  return splits;
}

void launch_decode_attention(const DecodeAttention& a, cudaStream_t stream) {
  if (a.num_seqs == 0 || a.num_heads == 0) return;
  switch (a.dtype) {
    case Dtype::kFloat32:
      return launch_typed<float>(a, stream);
    case Dtype::kFloat16:
      return launch_typed<__half>(a, stream);
    case Dtype::kBFloat16:
      return launch_typed<__nv_bfloat16>(a, stream);
  }
}

}  // namespace rooflight
