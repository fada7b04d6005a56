// The kernel of decode attention for half types: tensor cores, chunks of 16 tokens. decode_attention.cu says how it
// works.
//
// With a `Step` that is not `Nothing` the newest token of each sequence is not in the cache yet. Keys and values of the
// others are asked for before earlier kernels have ended; then the block normalises and turns its query heads in
// registers, and the warp with the newest token's chunk does the same with its key, puts it and its value into its ring
// and, once for each KV head, into the cache.
#pragma once

#include <type_traits>

#include "common/mma.cuh"
#include "common/rows.cuh"
#include "decode_attention_cluster.cuh"
#include "head_turn.cuh"
#include "qk_norm_rope_cache.h"

namespace rooflight {

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

// Key and value of the newest token on their way from registers to the ring.
template <int D>
struct Newest {
  uint4 pieces[2][D / 8];
};

struct Nothing {};

template <typename T, int D, int WARPS, bool CLUSTER, typename Step>
struct Memory {
  union {
    char ring[WARPS][kStages][2][Chunk<D>::kBytes];
    Meeting<WARPS, kHeads, D> meeting;
  };
  std::conditional_t<std::is_same_v<Step, Nothing>, Nothing, Newest<D>> newest;
  std::conditional_t<CLUSTER, Gathering<kHeads, D>, Nothing> gathering;
};

template <typename T, int D, int WARPS, bool CLUSTER, typename Step>
constexpr int blocks_at_once() {
  const int fitting = 226 * 1024 / (static_cast<int>(sizeof(Memory<T, D, WARPS, CLUSTER, Step>)) + 1024);
  return fitting < 1 ? 1 : fitting > 12 / WARPS ? 12 / WARPS : fitting;
}

template <typename T, int D, int WARPS, bool CLUSTER, typename Step>
__global__ void __launch_bounds__(WARPS * 32, blocks_at_once<T, D, WARPS, CLUSTER, Step>())
    decode_attention_chunks(DecodeAttention a, Step s) {
  using C = Chunk<D>;
  constexpr bool kFirst = !std::is_same_v<Step, Nothing>;  // norm, RoPE and cache write are still to be done
  constexpr int kSteps = C::kPieces / 4, kTiles = D / 16, kCopies = kChunk * C::kPieces / 32;
  extern __shared__ __align__(128) char storage[];
  auto& memory = *reinterpret_cast<Memory<T, D, WARPS, CLUSTER, Step>*>(storage);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int group = a.num_heads / a.num_kv_heads, tiles = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles, heads = min(kHeads, group - tile * kHeads);
  const int first = kv_head * group + tile * kHeads, sequence = blockIdx.z;
  if constexpr (!kFirst) {
    let_next_kernel_start();
    wait_for_earlier_kernels();
  }

  const int length = kFirst ? __ldcg(a.seq_lens + sequence) : a.seq_lens[sequence];
  const int newest = kFirst ? length - 1 : length;
  const int oldest = a.window > 0 ? max(0, length - a.window) : 0;  // key that is seen
  const Part part =
      part_of(oldest / kChunk * kChunk, length, WARPS * kChunk, CLUSTER ? blockIdx.x : 0, CLUSTER ? gridDim.x : 1);
  if constexpr (CLUSTER) begin_gathering(memory.gathering, heads, part.count);
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
        const bool seen = base + token < min(part.end, newest) && base + token >= oldest && piece * 8 < D;
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
  const T* queries = static_cast<const T*>(a.q) + sequence * a.q_stride + (first + row) * a.q_head_stride;
  const bool has_newest = kFirst && newest >= part.begin && newest < part.end &&  // and length is not 0
                          (newest - part.begin) / kChunk % WARPS == warp;
  if constexpr (kFirst) {
    // What follows was written by kernels that have ended, if only just: so it is read past the nearest cache.
    const int64_t position = s.wide_positions ? __ldcg(static_cast<const long long*>(s.positions) + sequence)
                                              : __ldcg(static_cast<const int*>(s.positions) + sequence);
    const int64_t slot = __ldcg(reinterpret_cast<const long long*>(s.slots) + sequence);
    const float* angles = s.cos_sin + position * s.table_stride;
    constexpr bool kEarly = D <= 128;  // while there are registers for what only waits
    Factors<T, kSteps> q_factors, k_factors;
    Turn<kSteps> turn;
    if constexpr (kEarly) {
      q_factors.read(s.q_weight, quad);
      if (has_newest) k_factors.read(s.k_weight, quad);
      turn.read(angles, quad);
    }

    // On what has been read so far: what is above must not sink below.
    wait_for_earlier_kernels_knowing(angles, table, static_cast<uintptr_t>(next_page) + slot);
    load_head<T>(q, queries, quad, D, row < heads);
    if constexpr (!kEarly) turn.read(angles, quad);
    if (has_newest) {
      uint4 k[kSteps], v[kSteps];
      load_head<T>(k, static_cast<const T*>(s.k.data) + sequence * s.k.token_stride + kv_head * s.k.head_stride, quad,
                   D, true);
      load_head<T>(v, static_cast<const T*>(s.v.data) + sequence * s.v.token_stride + kv_head * s.v.head_stride, quad,
                   D, true);
      if constexpr (!kEarly) k_factors.read(s.k_weight, quad);
      normalise_and_turn<T>(k, s.k_weight != nullptr, k_factors, turn, s.eps);
      if (row == 0) {
        store_head<T>(k, memory.newest.pieces[0], quad);
        store_head<T>(v, memory.newest.pieces[1], quad);
      }
      if (row == 1 && slot >= 0 && tile == 0) {
        const int64_t page = slot / s.page_size, offset = slot % s.page_size;
        store_head<T>(k,
                      static_cast<T*>(s.k_cache) + page * a.k_strides.page + kv_head * a.k_strides.head +
                          offset * a.k_strides.token,
                      quad);
        store_head<T>(v,
                      static_cast<T*>(s.v_cache) + page * a.v_strides.page + kv_head * a.v_strides.head +
                          offset * a.v_strides.token,
                      quad);
      }
      __syncwarp();
    }
    // The next launch may be this kernel again, which reads the cache before it waits: a block that writes there lets
    // it start when that has been done.
    if (newest < part.begin || newest >= part.end) let_next_kernel_start();
    if constexpr (!kEarly) q_factors.read(s.q_weight, quad);
    normalise_and_turn<T>(q, s.q_weight != nullptr, q_factors, turn, s.eps);
  } else {
    load_head<T>(q, queries, quad, D, row < heads);
  }
  // Of heads 2 * quad and 2 * quad + 1. Peaks are the warp's, sums those of the lane's tokens.
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {}, out[kTiles][4] = {};
  const float scale = a.scale * 1.44269504088896341f;

  for (int turn = 0; first_of(turn) < part.end; ++turn) {
    ask(turn + kStages - 1, next_page);
    next_page = page_of(turn + kStages);
    wait_copies<kStages - 1>();
    __syncwarp();
    char* keys = memory.ring[warp][turn % kStages][0];
    char* values = keys + C::kBytes;
    if constexpr (kFirst) {
      if (has_newest && newest - first_of(turn) < kChunk) {
        const int token = newest - first_of(turn);
        for (int i = lane; i < 2 * D / 8; i += 32) {
          const int piece = i % (D / 8), which = i / (D / 8);
          *reinterpret_cast<uint4*>(keys + which * C::kBytes + C::place(token, piece)) =
              memory.newest.pieces[which][piece];
        }
        __syncwarp();
      }
    }
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
  if (has_newest) {
    __threadfence();
    __syncwarp();  // one lane lets it start for all, whoever has written
    let_next_kernel_start();
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
  __syncthreads();
  if constexpr (CLUSTER) {
    finish_together<T, D>(a, memory.meeting, memory.gathering, sequence, first, heads, part.count);
  } else {
    finish_alone<T, D>(a, memory.meeting, sequence, first, heads);
  }
}

template <typename T, int D, int WARPS, bool CLUSTER, typename Step>
void launch_in_parts(const DecodeAttention& a, const Step& s, int splits, cudaStream_t stream) {
  constexpr int kShared = sizeof(Memory<T, D, WARPS, CLUSTER, Step>);
  const auto kernel = decode_attention_chunks<T, D, WARPS, CLUSTER, Step>;
  if constexpr (CLUSTER) {
    static int known[64] = {};
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    int& most = known[device % 64];
    if (most == 0) most = most_in_cluster(reinterpret_cast<const void*>(kernel), WARPS * 32, kShared);
    while (splits > 1 && splits > most) splits /= 2;
  }
  const int tiles = (a.num_heads / a.num_kv_heads + kHeads - 1) / kHeads;
  const dim3 grid(splits, a.num_kv_heads * tiles, a.num_seqs), block(WARPS * 32);
  const Overlap overlap = std::is_same_v<Step, Nothing> ? Overlap::kBehindOurs : Overlap::kBehindDone;
  launch_cluster(kernel, grid, block, splits, stream, overlap, kShared, a, s);
}

template <typename T, int D, int WARPS, typename Step>
void launch_chunks(const DecodeAttention& a, const Step& s, int splits, cudaStream_t stream) {
  if (splits == 1) return launch_in_parts<T, D, WARPS, false>(a, s, 1, stream);
  launch_in_parts<T, D, WARPS, true>(a, s, splits, stream);
}

// Whether the kernel takes it: half types in pieces of 16 bytes, chunks that lie in one page.
template <typename T, int D, typename Step>
bool chunks_take(const DecodeAttention& a) {
  const bool fits = static_cast<int>(sizeof(Memory<T, D, kWarps, true, Step>)) <= card().block_shared;
  return a.aligned && a.page_size % kChunk == 0 && card().major >= 9 && fits;
}

// In as many parts as are asked for, or by the rule.
template <typename T, int D, typename Step>
void launch_chunks_by_rule(const DecodeAttention& a, const Step& s, cudaStream_t stream) {
  const int64_t tiles = (a.num_heads / a.num_kv_heads + kHeads - 1) / kHeads;
  const int64_t blocks = int64_t{a.num_seqs} * a.num_kv_heads * tiles;
  const int splits = a.splits > 0 ? a.splits : decode_splits(blocks, blocks_at_once<T, D, kWarps, true, Step>() > 1);
  // Where blocks wait for their turn, smaller ones leave less of a multiprocessor idle at their beginnings and ends.
  if (splits == 1 && blocks > 2 * card().multiprocessors) return launch_chunks<T, D, kWarps / 2>(a, s, 1, stream);
  launch_chunks<T, D, kWarps>(a, s, splits, stream);
}

}  // namespace rooflight
