// The kernel of decode attention for half types: tensor cores, chunks of 16 tokens. decode_attention.cu says how it
// works.
//
// With a `Step` that is not `Nothing` the newest token of each sequence is not in the cache yet. Keys and values of the
// others are asked for, where there are few blocks, before earlier kernels have ended; then the block normalises and
// turns its query heads in registers, and the warp with the newest token's chunk does the same with its key, puts it
// and its value into its ring and, once for each KV head, into the cache.
#pragma once

#include <type_traits>

#include "common/cache_boxes.cuh"
#include "common/mma.cuh"
#include "common/rows.cuh"
#include "decode_attention_cluster.cuh"
#include "head_turn.cuh"
#include "qk_norm_rope_cache.h"

namespace rooflight {

constexpr int kWarps = 4;
// Of a ring: fewer leave room for more blocks where those wait for their turn.
template <bool CLUSTER>
constexpr int kStagesOf = CLUSTER ? 3 : 2;
constexpr int kHeads = 8;   // of a KV head that go together: columns of a product
constexpr int kChunk = 16;  // tokens: rows of a product

// Of a chunk in shared memory: boxes side by side, with zeros up to a multiple of 64 elements.
template <int D>
struct Chunk {
  static constexpr int kSteps = (D + 31) / 32;  // of 32 elements that there are
  static constexpr int kBoxes = (D + kBoxWidth - 1) / kBoxWidth, kBoxBytes = kChunk * kBoxWidth * 2;
  static constexpr int kBytes = kBoxes * kBoxBytes;

  static __device__ __forceinline__ int place(int token, int piece) {
    return piece / 8 * kBoxBytes + place_in_box(token, piece % 8);
  }
};

// The token at a row of the products. Two neighbours have different places for the same pieces of theirs.
__device__ __forceinline__ int token_of(int row) {
  return (row & 1) << 2 | (row & 7) >> 1 | (row & 8);
}

// Key and value of the newest token on their way from registers to the ring.
template <int D>
struct Newest {
  uint4 pieces[2][D / 8];
};

struct Nothing {};

template <typename T, int D, int WARPS, bool CLUSTER, typename Step>
struct Memory {
  union {
    alignas(1024) char ring[WARPS][kStagesOf<CLUSTER>][2][Chunk<D>::kBytes];
    Meeting<WARPS, kHeads, D> meeting;
  };
  uint64_t filled[WARPS][kStagesOf<CLUSTER>];
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
    decode_attention_chunks(DecodeAttention a, Step s, const __grid_constant__ CacheBoxes boxes) {
  using C = Chunk<D>;
  constexpr bool kFirst = !std::is_same_v<Step, Nothing>;  // norm, RoPE and cache write are still to be done
  constexpr int kStages = kStagesOf<CLUSTER>, kSteps = C::kSteps, kTiles = D / 16;
  extern __shared__ __align__(1024) char storage[];
  auto& memory = *reinterpret_cast<Memory<T, D, WARPS, CLUSTER, Step>*>(storage);

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = lane / 4, quad = lane % 4;
  const int group = a.num_heads / a.num_kv_heads, tiles = (group + kHeads - 1) / kHeads;
  const int kv_head = blockIdx.y / tiles, tile = blockIdx.y % tiles, heads = min(kHeads, group - tile * kHeads);
  const int first = kv_head * group + tile * kHeads, sequence = blockIdx.z;
  // Many blocks wait for all that comes before them; few read the cache meanwhile.
  constexpr bool kWaitsFirst = !kFirst || WARPS < kWarps;
  constexpr bool kEarly = D <= 128;  // while there are registers for what only waits
  if constexpr (!kFirst) let_next_kernel_start();
  if constexpr (kWaitsFirst) wait_for_earlier_kernels();

  // All that follows from the sequence alone is asked for at once, and then all that follows from these numbers, as far
  // as there are registers. Blocks that settle together would all wait for one way to memory behind the other.
  const int length = load_early(a.seq_lens + sequence);
  int64_t position = 0, slot = 0;
  Factors<T, kSteps> q_factors, k_factors;
  Turn<kSteps> turn_by;
  if constexpr (kFirst) {
    position = s.wide_positions ? load_early(static_cast<const int64_t*>(s.positions) + sequence)
                                : load_early(static_cast<const int*>(s.positions) + sequence);
    slot = load_early(s.slots + sequence);
    if constexpr (kEarly) q_factors.read(s.q_weight, quad);
  }
  uint4 q[kSteps], k[kSteps], v[kSteps];  // queries as right operands: head `row`, eight neighbours of each 32
  const void* queries = static_cast<const T*>(a.q) + sequence * a.q_stride + (first + row) * a.q_head_stride;
  if constexpr (kWaitsFirst) load_head<T>(q, queries, quad, D, row < heads);
  if (lane == 0) {
    fetch_map(&boxes.k);
    fetch_map(&boxes.v);
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) init_barrier(&memory.filled[warp][stage]);
    fence_barriers();
  }
  __syncwarp();

  const int newest = kFirst ? length - 1 : length;
  const int oldest = a.window > 0 ? max(0, length - a.window) : 0;  // key that is seen
  const Part part =
      part_of(oldest / kChunk * kChunk, length, WARPS * kChunk, CLUSTER ? blockIdx.x : 0, CLUSTER ? gridDim.x : 1);
  if constexpr (CLUSTER) begin_gathering(memory.gathering, heads, part.count);
  const bool writes_newest = kFirst && newest >= part.begin && newest < part.end;  // and length is not 0
  const bool has_newest = writes_newest && (newest - part.begin) / kChunk % WARPS == warp;
  const auto load_newest = [&](const auto& step) {
    const auto row_of = [&](const Heads& h) {
      return static_cast<const T*>(h.data) + sequence * h.token_stride + kv_head * h.head_stride;
    };
    load_head<T>(k, row_of(step.k), quad, D, true);
    load_head<T>(v, row_of(step.v), quad, D, true);
  };
  const float* angles = nullptr;
  if constexpr (kFirst) {
    angles = s.cos_sin + position * s.table_stride;
    if constexpr (kEarly) turn_by.read(angles, quad);
    if (has_newest) {
      if constexpr (kEarly) k_factors.read(s.k_weight, quad);
      if constexpr (kWaitsFirst) load_newest(s);
    }
  }
  const int* table = a.block_table + sequence * a.table_stride;
  const auto first_of = [&](int turn) { return part.begin + (turn * WARPS + warp) * kChunk; };
  const auto page_of = [&](int turn) { return first_of(turn) < part.end ? table[first_of(turn) / a.page_size] : 0; };
  // A chunk lies in one page.
  const auto ask = [&](int turn, int page) {
    const int base = first_of(turn), stage = turn % kStages;
    if (lane == 0 && base < part.end) {
      uint64_t* filled = &memory.filled[warp][stage];
      expect_bytes(filled, 2 * C::kBytes);
#pragma unroll
      for (int i = 0; i < C::kBoxes; ++i) {
        char* to = memory.ring[warp][stage][0] + i * C::kBoxBytes;
        copy_box(to, &boxes.k, i * kBoxWidth, base % a.page_size, kv_head, page, filled);
        copy_box(to + C::kBytes, &boxes.v, i * kBoxWidth, base % a.page_size, kv_head, page, filled);
      }
    }
  };
  int pages[kStages];
#pragma unroll
  for (int turn = 0; turn < kStages; ++turn) pages[turn] = page_of(turn);
#pragma unroll
  for (int turn = 0; turn < kStages - 1; ++turn) ask(turn, pages[turn]);
  int next_page = pages[kStages - 1];  // read a turn before it is needed

  if constexpr (kFirst) {
    if constexpr (!kWaitsFirst) {
      // On what has been read so far: what is above must not sink below.
      wait_for_earlier_kernels_knowing(angles, table, static_cast<uintptr_t>(next_page) + slot);
      load_head<T>(q, queries, quad, D, row < heads);
      if (has_newest) load_newest(s);
    }
    if constexpr (!kEarly) turn_by.read(angles, quad);
    if (has_newest) {
      if constexpr (!kEarly) k_factors.read(s.k_weight, quad);
      normalise_and_turn<T>(k, s.k_weight != nullptr, k_factors, turn_by, s.eps);
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
    if (!kWaitsFirst && !writes_newest) let_next_kernel_start();
    if constexpr (!kEarly) q_factors.read(s.q_weight, quad);
    normalise_and_turn<T>(q, s.q_weight != nullptr, q_factors, turn_by, s.eps);
  }
  // Of heads 2 * quad and 2 * quad + 1. Peaks are the warp's, sums those of the lane's tokens.
  float peak[2] = {-INFINITY, -INFINITY}, sum[2] = {}, out[kTiles][4] = {};
  const float scale = a.scale * 1.44269504088896341f;

  for (int turn = 0; first_of(turn) < part.end; ++turn) {
    ask(turn + kStages - 1, next_page);
    next_page = page_of(turn + kStages);
    wait_barrier(&memory.filled[warp][turn % kStages], turn / kStages % 2);
    char* keys = memory.ring[warp][turn % kStages][0];
    char* values = keys + C::kBytes;
    // A slot that is not seen may hold anything, and 0 * NaN is NaN.
    if (first_of(turn) < oldest || first_of(turn) + kChunk > part.end) {
      for (int i = lane; i < kChunk * C::kSteps * 4; i += 32) {
        const int place = i / (C::kSteps * 4), token = first_of(turn) + place;
        if (token < oldest || token >= part.end) {
          *reinterpret_cast<uint4*>(values + C::place(place, i % (C::kSteps * 4))) = uint4{0, 0, 0, 0};
        }
      }
      if (first_of(turn + kStages) < part.end) fence_shared();  // of the next chunk in this stage
      __syncwarp();
    }
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
      const uint4 low = *reinterpret_cast<const uint4*>(keys + C::place(token_of(row), i * 4 + quad));
      const uint4 high = *reinterpret_cast<const uint4*>(keys + C::place(token_of(row + 8), i * 4 + quad));
      multiply(even, {low.x, high.x, low.y, high.y}, {q[i].x, q[i].y}, T());
      multiply(odd, {low.z, high.z, low.w, high.w}, {q[i].z, q[i].w}, T());
    }
    // scores[2 * i + h]: row + 8 * i, head 2 * quad + h
    float scores[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int token = first_of(turn) + token_of(row + j / 2 * 8);
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
    // Weights as right operands: rows in pairs, head `row`.
    const unsigned weights[2] = {transpose(pack_pair(scores[0], scores[1], T())),
                                 transpose(pack_pair(scores[2], scores[3], T()))};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      unsigned v[4];
      load_transposed(v, values + C::place(token_of(lane / 16 * 8 + lane % 8), 2 * i + lane / 8 % 2));
      multiply(out[i], v, weights, T());
    }
    __syncwarp();  // all lanes have read the stage
  }
  if constexpr (kFirst && kWaitsFirst) {
    let_next_kernel_start();  // not earlier: its blocks would take places that ours still wait for
  } else if (has_newest) {
    __threadfence();
    fence_cache_for_copies();
    __syncwarp();  // one lane lets it start for all, whoever has written
    let_next_kernel_start();
  }

#pragma unroll
  for (int h = 0; h < 2; ++h) {
#pragma unroll
    for (int far = 4; far < 32; far *= 2) sum[h] += __shfl_xor_sync(kAll, sum[h], far);
  }
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
      if (2 * quad + j % 2 < heads) memory.meeting.outs[warp][2 * quad + j % 2][i * 16 + row + j / 2 * 8] = out[i][j];
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
void launch_in_parts(const DecodeAttention& a, const Step& s, int splits, const CacheBoxes& boxes,
                     cudaStream_t stream) {
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
  constexpr bool kFirst = !std::is_same_v<Step, Nothing>, kReadsEarly = kFirst && WARPS == kWarps;
  const Overlap overlap = kReadsEarly ? Overlap::kBehindDone : Overlap::kBehindOurs;
  launch_cluster(kernel, grid, block, splits, stream, overlap, kShared, a, s, boxes);
  if (kFirst && !kReadsEarly) last_captured.writing = true;  // the next may start while keys are on their way
}

template <typename T, int D, int WARPS, typename Step>
void launch_chunks(const DecodeAttention& a, const Step& s, int splits, cudaStream_t stream) {
  const CacheBoxes boxes{cache_boxes(a, a.k_cache, a.k_strides, kChunk),
                         cache_boxes(a, a.v_cache, a.v_strides, kChunk)};
  if constexpr (WARPS == kWarps) {  // few blocks
    if (splits > 1) return launch_in_parts<T, D, WARPS, true>(a, s, splits, boxes, stream);
  }
  launch_in_parts<T, D, WARPS, false>(a, s, 1, boxes, stream);
}

// Whether the kernel takes it: half types in pieces of 16 bytes, chunks that lie in one page.
template <typename T, int D, typename Step>
bool chunks_take(const DecodeAttention& a) {
  const bool fits = static_cast<int>(sizeof(Memory<T, D, kWarps, true, Step>)) <= card().block_shared;
  return a.aligned && a.num_pages > 0 && a.page_size > 0 && a.page_size % kChunk == 0 && boxes_take(a.k_strides) &&
         boxes_take(a.v_strides) && card().major >= 9 && fits;
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
