// Attention over the paged cache for several new tokens a sequence, on Hopper's warpgroup products.
//
//   out_t = sum_j softmax_j(scale * q_t . k_j) v_j
//
// A block has a tile of queries, tokens times the query heads of one KV head, 64 rows for each of its warpgroups, and
// walks over blocks of 64 keys. The copy engine brings keys and values page by page into a ring in shared memory, where
// one copy serves all rows. Per block of keys a warpgroup multiplies (keys from shared memory), takes exponentials in
// registers, and multiplies again, with its weights still in registers and the values as they lie.
//
// Tensor cores and exponentials take about as long, so four warpgroups on a multiprocessor take turns, whichever blocks
// they belong to: 128 registers a thread, none of them for a warp that only asks. Every warp asks for a page of keys or
// of values, one block of keys ahead: a warp that asked for all of them would be late for its own products.
//
// The grid knows no lengths: T tokens a tile make at most num_tokens / T + num_seqs tiles, and tile number
// query_starts[s] / T + s is the first of sequence s. One more "sequence", the tokens behind the last one, sees nothing
// and gives the zeros that a padded graph expects. Blocks of keys lie at multiples of 64 whatever the tile, and rows do
// not meet, so a row has the same bits whole, in chunks, and in tiles of any size.
#include <algorithm>

#include "common/cache_boxes.cuh"
#include "common/mma.cuh"
#include "common/pack.cuh"
#include "common/wgmma.cuh"
#include "prefill_attention.h"

namespace rooflight {
namespace {

constexpr int kRows = 64;  // of a warpgroup
constexpr int kKeys = 64;  // of a block
constexpr int kBoxTokens = 16;
constexpr int kHalfBytes = 64 * 128;  // 64 rows of kBoxWidth elements
constexpr float kSlack = 8.0f;        // weights are at most two to this
constexpr int kFar = 1 << 30;         // a window that hides nothing

template <int D, int GROUPS, int K_STAGES, int V_STAGES>
struct Tiles {
  static constexpr int kHalves = D / kBoxWidth;
  char q[GROUPS][kHalves][kHalfBytes];
  char k[K_STAGES][kHalves * kHalfBytes], v[V_STAGES][kHalves * kHalfBytes];
  uint64_t k_full[K_STAGES], k_empty[K_STAGES], v_full[V_STAGES], v_empty[V_STAGES];
};

struct Boxes {
  CUtensorMap k, v;
};

// What the kernel is told beyond the arguments.
struct Shape {
  int group = 1, tokens = 1;         // query heads of a KV head; tokens of a tile
  unsigned inverse = 0;              // row / group is row * inverse >> 16
  int page_shift = 0, page_mask = 0;  // boxes of a page are two to this; less one
  int k_heads = 1, v_heads = 1;      // heads from one page to the next
  int reach = kFar;                  // keys that a row sees at most
  float scale = 0.0f, sign = 1.0f;   // scale, positive, times sign is the scale times log2(e)
};

__device__ __forceinline__ void init_counting_barrier(uint64_t* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void arrive(uint64_t* barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

__device__ __forceinline__ void meet_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
}

// A number that is the same in all lanes, so that the compiler knows it.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(0xffffffffu, x, 0);
}

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Four half-width values, times a sign or zero.
template <typename T>
__device__ __forceinline__ uint4 times(uint4 piece, float sign) {
  auto* values = reinterpret_cast<T*>(&piece);
#pragma unroll
  for (int j = 0; j < 8; ++j) values[j] = static_cast<T>(static_cast<float>(values[j]) * sign);
  return piece;
}

// Where a tile is: the sequence's new tokens and its keys.
struct Place {
  int sequence, start, first, count;  // of the tile's tokens: the first one among the new ones, and how many there are
  int offset;                         // position of the first one
  int low, end;                       // keys that some row sees
};

// Asks for one box of each block of keys or values: that of 16 tokens which is this warp's. One lane does.
template <int BYTES, int STAGES>
struct Asking {
  char (&ring)[STAGES][BYTES];
  uint64_t (&full)[STAGES], (&empty)[STAGES];
  const CUtensorMap* map;
  const int* table;
  const Shape& shape;
  int row;              // of the table, its first place
  int first, low, end;  // boxes: the warp's one of block 0; those that hold a key that some row sees
  int heads, kv_head;
  int page = 0;  // of the next one

  static constexpr int kBoxes = kKeys / kBoxTokens, kBoxBytes = BYTES / kBoxes;

  __device__ __forceinline__ bool wanted(int box) const { return box >= low && box < end; }
  __device__ __forceinline__ void look_up(int block) {
    const int box = first + block * kBoxes;
    if (wanted(box)) page = table[row + (box >> shape.page_shift)];
  }
  // Of a block that exists.
  __device__ __forceinline__ void ask(int block) {
    const int slot = block % STAGES, box = first + block * kBoxes;
    if (block >= STAGES) wait_barrier(&empty[slot], (block / STAGES - 1) & 1);
    if (wanted(box)) {
      expect_bytes(&full[slot], kBoxBytes);
      copy_whole_heads(&ring[slot][first % kBoxes * kBoxBytes], map, 2 * (box & shape.page_mask),
                       page * heads + kv_head, &full[slot]);
    } else {
      arrive(&full[slot]);
    }
    look_up(block + 1);
  }
};

template <typename T, int D, int GROUPS, int K_STAGES, int V_STAGES, int BLOCKS, bool AHEAD>
__global__ void __launch_bounds__(GROUPS * 128, BLOCKS)
    prefill_attention(PrefillAttention a, Shape shape, const __grid_constant__ Boxes boxes) {
  constexpr int kHalves = D / kBoxWidth, kPieces = D / 8, kTileBytes = kHalves * kHalfBytes;
  extern __shared__ __align__(1024) char storage[];
  auto& tiles = *reinterpret_cast<Tiles<D, GROUPS, K_STAGES, V_STAGES>*>(storage);
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, group = warp / 4;
  if (threadIdx.x == 0) {
    constexpr int kArrivals = kKeys / kBoxTokens;
    for (int s = 0; s < K_STAGES; ++s) {
      init_counting_barrier(&tiles.k_full[s], kArrivals);
      init_counting_barrier(&tiles.k_empty[s], 4 * GROUPS);
    }
    for (int s = 0; s < V_STAGES; ++s) {
      init_counting_barrier(&tiles.v_full[s], kArrivals);
      init_counting_barrier(&tiles.v_empty[s], 4 * GROUPS);
    }
    fence_barriers();
    fetch_map(&boxes.k);
    fetch_map(&boxes.v);
  }
  wait_for_earlier_kernels();

  // The last sequence whose first tile is not behind this one; the last tiles of a prompt, which see most keys, go
  // first. Here the barriers are seen by all.
  const int program = gridDim.x - 1 - blockIdx.x, tile = program / a.num_kv_heads, kv_head = program % a.num_kv_heads;
  Place at;
  at.sequence = -1;
  for (int begin = 0; begin <= a.num_seqs; begin += GROUPS * 128) {
    const int index = begin + threadIdx.x;
    if (index < a.num_seqs) asm volatile("prefetch.global.L1 [%0];" ::"l"(a.seq_lens + index * a.lens_stride));
    at.sequence += __syncthreads_count(
        index <= a.num_seqs && a.query_starts[index * a.starts_stride] / shape.tokens + index <= tile);
  }
  at.sequence = uniform(at.sequence);
  const bool real = at.sequence < a.num_seqs;
  at.start = uniform(a.query_starts[at.sequence * a.starts_stride]);
  const int stop = uniform(real ? a.query_starts[(at.sequence + 1) * a.starts_stride] : a.num_tokens);
  const int length = uniform(real ? a.seq_lens[at.sequence * a.lens_stride] : 0);
  at.first = (tile - at.start / shape.tokens - at.sequence) * shape.tokens;
  if (at.first >= stop - at.start) return;
  at.count = min(shape.tokens, stop - at.start - at.first);
  at.offset = length - (stop - at.start) + at.first;
  at.low = max(at.offset - shape.reach + 1, 0);
  at.end = at.offset + at.count;
  const int first_block = at.low / kKeys, blocks = max(0, (at.end + kKeys - 1) / kKeys - first_block);

  // Queries, 16 bytes a lane, on their way while pages are asked for.
  const int64_t q_first = at.start + at.first;
  uint4 pieces[kRows * kPieces / 128];
#pragma unroll
  for (int i = 0; i < kRows * kPieces / 128; ++i) {
    const int index = i * 128 + threadIdx.x % 128, row = group * kRows + index / kPieces, piece = index % kPieces;
    const int token = row * shape.inverse >> 16, head = kv_head * shape.group + row - token * shape.group;
    pieces[i] = make_uint4(0, 0, 0, 0);
    if (token < at.count) {
      pieces[i] = *reinterpret_cast<const uint4*>(static_cast<const T*>(a.q) + (q_first + token) * a.q_stride +
                                                  head * a.q_head_stride + piece * 8);
    }
  }
  // A warp's page of keys, of values, or both.
  const bool asks_k = lane == 0 && warp < 4, asks_v = lane == 0 && (GROUPS == 1 || (warp >= 4 && warp < 8));
  const int table_row = at.sequence * static_cast<int>(a.table_stride);
  const int own_box = first_block * (kKeys / kBoxTokens) + warp % 4;
  const int low_box = at.low / kBoxTokens, end_box = (at.end + kBoxTokens - 1) / kBoxTokens;
  Asking<kTileBytes, K_STAGES> k_asking{tiles.k, tiles.k_full, tiles.k_empty, &boxes.k, a.block_table,  shape,
                                        table_row, own_box, low_box, end_box, shape.k_heads, kv_head};
  Asking<kTileBytes, V_STAGES> v_asking{tiles.v, tiles.v_full, tiles.v_empty, &boxes.v, a.block_table,  shape,
                                        table_row, own_box, low_box, end_box, shape.v_heads, kv_head};
  const auto ask_k = [&](int block) {
    if (asks_k && block < blocks) k_asking.ask(block);
    __syncwarp();
  };
  const auto ask_v = [&](int block) {
    if (asks_v && block < blocks) v_asking.ask(block);
    __syncwarp();
  };
  // A warpgroup alone fills a place as soon as it is empty; several would wait for each other, and fill that which the
  // block before has left.
  constexpr bool kEager = GROUPS == 1;
  if (asks_k) k_asking.look_up(0);
  if (asks_v) v_asking.look_up(0);
  for (int block = 0; block < max(K_STAGES, V_STAGES); ++block) {
    if (block < (kEager ? K_STAGES : K_STAGES - 1)) ask_k(block);
    if (block < (kEager ? V_STAGES : V_STAGES - 1)) ask_v(block);
  }

#pragma unroll
  for (int i = 0; i < kRows * kPieces / 128; ++i) {
    const int index = i * 128 + threadIdx.x % 128, row = index / kPieces, piece = index % kPieces;
    if (shape.sign != 1.0f) pieces[i] = times<T>(pieces[i], shape.sign);
    *reinterpret_cast<uint4*>(&tiles.q[group][piece / 8][place_in_box(row, piece % 8)]) = pieces[i];
  }
  fence_for_products();
  meet_warpgroup(group);

  // Rows of this lane, and positions of the warpgroup's.
  const int row = group * kRows + warp % 4 * 16 + lane / 4, quad = lane % 4;
  const int first_token = group * kRows * shape.inverse >> 16;
  const int lowest = at.offset + first_token;
  const int highest =
      first_token < at.count
          ? min(at.offset + static_cast<int>((group * kRows + kRows - 1) * shape.inverse >> 16), at.end - 1)
          : -1;

  const int own_blocks = highest < 0 ? 0 : min(blocks, highest / kKeys - first_block + 1);

  float out[D / 2], scores[kKeys / 2], peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f}, fade[2];
  unsigned weights[kKeys / 4];
#pragma unroll
  for (int i = 0; i < D / 2; ++i) out[i] = 0.0f;

  const auto ask = [&](int block) {
    if constexpr (!kEager) {
      ask_k(block + K_STAGES - 1);
      ask_v(block + V_STAGES - 1);
    }
  };
  const auto await_k = [&](int block) {
    wait_barrier(&tiles.k_full[block % K_STAGES], (block / K_STAGES) & 1);
  };
  const auto await_v = [&](int block) {
    wait_barrier(&tiles.v_full[block % V_STAGES], (block / V_STAGES) & 1);
  };
  const auto release_k = [&](int block) {
    if (lane == 0) arrive(&tiles.k_empty[block % K_STAGES]);
    if constexpr (kEager) ask_k(block + K_STAGES);
  };
  const auto release_v = [&](int block) {
    if (lane == 0) arrive(&tiles.v_empty[block % V_STAGES]);
    if constexpr (kEager) ask_v(block + V_STAGES);
  };

  const auto begin_scores = [&](int block) {
    const GroupOperand q = operand_at(shared_address(tiles.q[group]), 1024);
    const GroupOperand k = operand_at(shared_address(tiles.k[uniform(block % K_STAGES)]), kHalves * 1024);
    begin_products();
    multiply_group<T, false>(scores, q, k);
#pragma unroll
    for (int i = 1; i < D / kGroupDepth; ++i) {
      multiply_group<T, true>(scores, q + (i / 4 * kHalfBytes + i % 4 * 32), k + (i / 4 * 1024 + i % 4 * 32));
    }
    commit_products();
  };

  // Scores become weights, and `fade` what is kept of those before.
  const auto weigh = [&](int block) {
    const int key = (first_block + block) * kKeys;
    if (key + kKeys - 1 > lowest || key <= highest - shape.reach) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {  // of the lane's first column, the position in relation to it
        const int position = min(at.offset + static_cast<int>((row + 8 * h) * shape.inverse >> 16), at.end - 1);
        const int last = position - key - 2 * quad, before = last - shape.reach;
#pragma unroll
        for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) {
          if (i / 4 * 8 + i % 2 > last) scores[i] = -INFINITY;
        }
        if (shape.reach == kFar) continue;
#pragma unroll
        for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) {
          if (i / 4 * 8 + i % 2 <= before) scores[i] = -INFINITY;
        }
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float high = scores[2 * h];
#pragma unroll
      for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) high = fmaxf(high, scores[i]);
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 1));
      high = fmaxf(high, __shfl_xor_sync(0xffffffffu, high, 2));
      // The peak stays until a score is so far above it that its weight would grow large: 2^8.
      const float highest_score = high * shape.scale;
      const float grown = highest_score > peak[h] + kSlack ? highest_score : peak[h];
      const float shift = grown == -INFINITY ? 0.0f : grown;  // a row that has seen nothing yet
      fade[h] = power_of_two(peak[h] - shift);
      peak[h] = grown;
      float added = 0.0f;
#pragma unroll
      for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) {
        scores[i] = power_of_two(fmaf(scores[i], shape.scale, -shift));
        added += scores[i];
      }
      sum[h] = fmaf(sum[h], fade[h], added);
    }
  };
  const auto fade_out = [&] {
    if (__any_sync(0xffffffffu, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) out[i] *= fade[i / 2 % 2];
    }
  };
  const auto pack_weights = [&] {
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i] = pack_pair(scores[2 * i], scores[2 * i + 1], T());
  };

  const auto begin_values = [&](int block) {
    const int key = (first_block + block) * kKeys;
    char* values = tiles.v[uniform(block % V_STAGES)];
    // Slots that nobody sees may hold NaN, which a weight of zero does not remove. Each warpgroup writes the same.
    if (key + kKeys > at.end || key < at.low) {
#pragma unroll 1
      for (int i = threadIdx.x % 128; i < kKeys * kHalves * 8; i += 128) {
        const int slot = key + i / (kHalves * 64) * 8 + i / 8 % 8;
        if (slot >= at.end || slot < at.low) reinterpret_cast<uint4*>(values)[i] = make_uint4(0, 0, 0, 0);
      }
      fence_for_products();
      meet_warpgroup(group);
    }
    const GroupOperand v = upright_operand_at(shared_address(values), kHalves * 1024, 1024);
    settle(out);
    begin_products();
#pragma unroll
    for (int i = 0; i < kKeys / kGroupDepth; ++i) {
      multiply_group<T>(out, weights + 4 * i, v + i * kGroupDepth / 8 * kHalves * 1024);
    }
    commit_products();
  };

  if constexpr (AHEAD) {  // the next scores are under way while these weights meet the values
    if (own_blocks > 0) {
      await_k(0);
      begin_scores(0);
      wait_products<0>();
      settle(scores);
      release_k(0);
      weigh(0);
      pack_weights();
      for (int block = 0; block + 1 < own_blocks; ++block) {
        await_k(block + 1);
        begin_scores(block + 1);
        await_v(block);
        begin_values(block);
        ask(block);
        wait_products<1>();
        settle(scores);
        release_k(block + 1);
        weigh(block + 1);
        wait_products<0>();
        settle(out);
        release_v(block);
        fade_out();
        pack_weights();
      }
      await_v(own_blocks - 1);
      begin_values(own_blocks - 1);
      ask(own_blocks - 1);
      wait_products<0>();
      settle(out);
      release_v(own_blocks - 1);
    }
  } else {
    for (int block = 0; block < own_blocks; ++block) {
      await_k(block);
      begin_scores(block);
      ask(block);
      wait_products<0>();
      settle(scores);
      release_k(block);
      weigh(block);
      pack_weights();
      fade_out();
      await_v(block);
      begin_values(block);
      wait_products<0>();
      settle(out);
      release_v(block);
    }
  }
  for (int block = own_blocks; block < blocks; ++block) {  // the other warpgroups' part
    ask(block);
    await_k(block);
    release_k(block);
    await_v(block);
    release_v(block);
  }

  // Not earlier: blocks of the next kernel would take places that our own wait for.
  let_next_kernel_start();
  // Results go out by way of the queries' place, 16 bytes a lane.
  meet_warpgroup(group);
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 1);
    sum[h] += __shfl_xor_sync(0xffffffffu, sum[h], 2);
    const float inverse = sum[h] == 0.0f ? 0.0f : 1.0f / sum[h];
    const int own = row % kRows + 8 * h;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      *reinterpret_cast<unsigned*>(&tiles.q[group][j / 8][place_in_box(own, j % 8) + 4 * quad]) =
          pack_pair(out[4 * j + 2 * h] * inverse, out[4 * j + 2 * h + 1] * inverse, T());
    }
    if (a.lse != nullptr && quad == 0) {
      const int token = (row + 8 * h) * shape.inverse >> 16, head = kv_head * shape.group + row + 8 * h - token * shape.group;
      if (token < at.count) {
        a.lse[(q_first + token) * a.num_heads + head] =
            sum[h] == 0.0f ? -INFINITY : (peak[h] + log2f(sum[h])) * 0.693147180559945309f;
      }
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * kPieces / 32; ++i) {
    const int index = i * 32 + lane, own = warp % 4 * 16 + index / kPieces, piece = index % kPieces;
    const int token = (group * kRows + own) * shape.inverse >> 16;
    const int head = kv_head * shape.group + group * kRows + own - token * shape.group;
    if (token < at.count) {
      *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + ((q_first + token) * a.num_heads + head) * D + piece * 8) =
          *reinterpret_cast<const uint4*>(&tiles.q[group][piece / 8][place_in_box(own, piece % 8)]);
    }
  }
}

template <typename T, int D, int GROUPS, int K_STAGES, int V_STAGES, int BLOCKS, bool AHEAD>
void launch_tiles(const PrefillAttention& a, cudaStream_t stream) {
  constexpr float kLog2E = 1.44269504088896341f;
  Shape shape;
  shape.group = a.num_heads / a.num_kv_heads;
  shape.tokens = GROUPS * kRows / shape.group;
  shape.inverse = (65536 + shape.group - 1) / shape.group;
  while (kBoxTokens << shape.page_shift < a.page_size) ++shape.page_shift;
  shape.page_mask = (1 << shape.page_shift) - 1;
  shape.k_heads = static_cast<int>(heads_a_page(a, a.k_strides));
  shape.v_heads = static_cast<int>(heads_a_page(a, a.v_strides));
  shape.reach = a.window > 0 && a.window < kFar ? a.window : kFar;
  shape.sign = static_cast<float>((a.scale > 0) - (a.scale < 0));
  shape.scale = (a.scale == 0.0f ? 1.0f : fabsf(a.scale)) * kLog2E;
  const Boxes boxes{whole_head_boxes(a, a.k_cache, a.k_strides), whole_head_boxes(a, a.v_cache, a.v_strides)};
  const dim3 grid((a.num_tokens / shape.tokens + a.num_seqs + 1) * a.num_kv_heads);
#ifdef ROOFLIGHT_VARIANT
  const Overlap overlap = chosen_overlap ? Overlap::kBehindOurs : Overlap::kNever;
#else
  constexpr Overlap overlap = Overlap::kBehindOurs;
#endif
  launch(prefill_attention<T, D, GROUPS, K_STAGES, V_STAGES, BLOCKS, AHEAD>, grid, dim3(GROUPS * 128), stream, overlap,
         static_cast<int>(sizeof(Tiles<D, GROUPS, K_STAGES, V_STAGES>)), a, shape, boxes);
}

template <typename T, int D>
void launch_typed(const PrefillAttention& a, cudaStream_t stream) {
#ifdef ROOFLIGHT_VARIANT
  using rooflight::chosen_variant;
  switch (chosen_variant) {
    case 1: return launch_tiles<T, D, 1, 1, 1, 4, false>(a, stream);
    case 2: return launch_tiles<T, D, 2, 2, 2, 2, false>(a, stream);
    case 3: return launch_tiles<T, D, 1, 2, 1, 3, false>(a, stream);
    case 4: return launch_tiles<T, D, 4, 4, 4, 1, false>(a, stream);
    case 5: return launch_tiles<T, D, 1, 2, 2, 2, true>(a, stream);
    case 6: return launch_tiles<T, D, 2, 4, 3, 1, true>(a, stream);
    case 8: return launch_tiles<T, D, 2, 3, 2, 2, true>(a, stream);
    case 9: return launch_tiles<T, D, 4, 4, 4, 1, true>(a, stream);
    case 7: return launch_tiles<T, D, 3, 4, 4, 1, true>(a, stream);
  }
#endif
  const int64_t places = card().multiprocessors, groups = int64_t{a.num_tokens} * a.num_heads / kRows;
  const int64_t each = a.num_tokens / std::max(1, a.num_seqs);
  if (groups <= 4 * places) return launch_tiles<T, D, 2, 4, 3, 1, true>(a, stream);
  if (each >= 768) return launch_tiles<T, D, 3, 4, 4, 1, true>(a, stream);
  if (each < 48) return launch_tiles<T, D, 1, 2, 1, 3, false>(a, stream);
  launch_tiles<T, D, 2, 2, 2, 2, false>(a, stream);
}

template <typename T>
void launch_for_head(const PrefillAttention& a, cudaStream_t stream) {
  if (a.head_dim == 64) return launch_typed<T, 64>(a, stream);
  launch_typed<T, 128>(a, stream);
}

}  // namespace

bool takes_prefill_attention(const PrefillAttention& a) {
  const auto countable = [&](const CacheStrides& strides) {
    const int64_t heads = boxes_take(strides) ? heads_a_page(a, strides) : 0;
    return heads > 0 && heads * a.num_pages < INT32_MAX;
  };
  const int64_t table = a.num_seqs * a.table_stride;
  return a.dtype != Dtype::kFloat32 && (a.head_dim == 64 || a.head_dim == 128) && a.page_size > 0 &&
         a.page_size % kBoxTokens == 0 && (a.page_size & (a.page_size - 1)) == 0 && countable(a.k_strides) &&
         countable(a.v_strides) && a.aligned && table < INT32_MAX &&
         a.num_heads / a.num_kv_heads <= kRows && card().major == 9;
}

void launch_prefill_attention(const PrefillAttention& a, cudaStream_t stream) {
  if (a.num_tokens == 0 || a.num_heads == 0) return;
  if (a.dtype == Dtype::kFloat16) return launch_for_head<__half>(a, stream);
  launch_for_head<__nv_bfloat16>(a, stream);
}

}  // namespace rooflight
