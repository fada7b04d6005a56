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
// they belong to: 128 registers a thread, none of them for a warp that only asks. Warp 0 asks, between its products,
// for as much as the ring has room for.
//
// The grid knows no lengths: T tokens a tile make at most num_tokens / T + num_seqs tiles, and tile number
// query_starts[s] / T + s is the first of sequence s. One more "sequence", the tokens behind the last one, sees nothing
// and gives the zeros that a padded graph expects. Blocks of keys lie at multiples of 64 whatever the tile, and rows do
// not meet, so a row has the same bits whole, in chunks, and in tiles of any size.
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
constexpr int kFar = 1 << 30;         // a window that hides nothing

template <int D, int GROUPS, int RING>
struct Tiles {
  static constexpr int kHalves = D / kBoxWidth;
  char q[GROUPS][kHalves][kHalfBytes];
  char ring[RING][kHalves][kHalfBytes];  // keys, values, keys, values, ...
  uint64_t full[RING], empty[RING];
};

struct Boxes {
  CUtensorMap k, v;
};

// What the kernel is told beyond the arguments.
struct Shape {
  int group = 1, tokens = 1;         // query heads of a KV head; tokens of a tile
  unsigned inverse = 0;              // row / group is row * inverse >> 16
  int page_boxes = 1;                // boxes of a page
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

__device__ __forceinline__ bool passed(uint64_t* barrier, uint32_t parity) {
  uint32_t done = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{ .reg .pred done; mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }"
      : "=r"(done)
      : "r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
  return done != 0;
}

__device__ __forceinline__ void meet_warpgroup(int warpgroup) {
  asm volatile("bar.sync %0, 128;" ::"r"(warpgroup + 1) : "memory");
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

// Asks for keys and values, a lane a box.
template <int D, int GROUPS, int RING>
struct Asking {
  Tiles<D, GROUPS, RING>& tiles;
  const Boxes& boxes;
  const int* table;
  int page_boxes, kv_head, low, end, first_block, total;
  int asked = 0, page = 0, next = 0;

  static constexpr int kHalves = D / kBoxWidth, kBoxes = kKeys / kBoxTokens, kLanes = kBoxes * kHalves;

  __device__ __forceinline__ bool wanted(int key) const { return key < end && key + kBoxTokens > low; }
  __device__ __forceinline__ int key_of(int block, int lane) const {
    return (first_block + block) * kKeys + lane % kBoxes * kBoxTokens;
  }
  __device__ __forceinline__ int page_of(int block, int lane) const {
    const int key = key_of(block, lane);
    return wanted(key) ? table[key / kBoxTokens / page_boxes] : 0;
  }
  __device__ __forceinline__ void begin(int lane) {
    page = page_of(0, lane);
    next = page_of(1, lane);
  }
  // As much as the ring has room for; that tile number `needed` is asked for is worth waiting for.
  __device__ __forceinline__ void ask(int needed, int lane) {
    while (asked < total) {
      const int slot = asked % RING;
      if (asked >= RING) {
        const uint32_t parity = (asked / RING - 1) & 1;
        if (asked <= needed) {
          wait_barrier(&tiles.empty[slot], parity);
        } else if (!__all_sync(0xffffffffu, passed(&tiles.empty[slot], parity))) {
          return;
        }
      }
      const int block = asked / 2, key = key_of(block, lane);
      const bool mine = lane < kLanes && wanted(key);
      const int count = __popc(__ballot_sync(0xffffffffu, mine));
      if (lane == 0) expect_bytes(&tiles.full[slot], count * kBoxTokens * 128);
      __syncwarp();
      if (mine) {
        const int half = lane / kBoxes;
        copy_box(&tiles.ring[slot][half][lane % kBoxes * kBoxTokens * 128], asked % 2 ? &boxes.v : &boxes.k,
                 half * kBoxWidth, key / kBoxTokens % page_boxes * kBoxTokens, kv_head, page, &tiles.full[slot]);
      }
      if (asked % 2) {
        page = next;
        next = page_of(block + 2, lane);
      }
      ++asked;
    }
  }
};

template <typename T, int D, int GROUPS, int RING, int BLOCKS>
__global__ void __launch_bounds__(GROUPS * 128, BLOCKS)
    prefill_attention(PrefillAttention a, Shape shape, const __grid_constant__ Boxes boxes) {
  constexpr int kHalves = D / kBoxWidth, kPieces = D / 8;
  extern __shared__ __align__(1024) char storage[];
  auto& tiles = *reinterpret_cast<Tiles<D, GROUPS, RING>*>(storage);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, group = warp / 4;
  if (threadIdx.x == 0) {
    for (int s = 0; s < RING; ++s) {
      init_barrier(&tiles.full[s]);
      init_counting_barrier(&tiles.empty[s], 4 * GROUPS);
    }
    fence_barriers();
    fetch_map(&boxes.k);
    fetch_map(&boxes.v);
  }
  let_next_kernel_start();
  wait_for_earlier_kernels();

  // The last sequence whose first tile is not behind this one; the last tiles of a prompt, which see most keys, go
  // first. Here the barriers are seen by all.
  const int program = gridDim.x - 1 - blockIdx.x, tile = program / a.num_kv_heads, kv_head = program % a.num_kv_heads;
  Place at;
  at.sequence = -1;
  for (int begin = 0; begin <= a.num_seqs; begin += GROUPS * 128) {
    const int index = begin + threadIdx.x;
    at.sequence += __syncthreads_count(
        index <= a.num_seqs && a.query_starts[index * a.starts_stride] / shape.tokens + index <= tile);
  }
  const bool real = at.sequence < a.num_seqs;
  at.start = a.query_starts[at.sequence * a.starts_stride];
  const int stop = real ? a.query_starts[(at.sequence + 1) * a.starts_stride] : a.num_tokens;
  const int length = real ? a.seq_lens[at.sequence * a.lens_stride] : 0;
  at.first = (tile - at.start / shape.tokens - at.sequence) * shape.tokens;
  if (at.first >= stop - at.start) return;
  at.count = min(shape.tokens, stop - at.start - at.first);
  at.offset = length - (stop - at.start) + at.first;
  at.low = max(at.offset - shape.reach + 1, 0);
  at.end = at.offset + at.count;
  const int first_block = at.low / kKeys, blocks = max(0, (at.end + kKeys - 1) / kKeys - first_block);

  Asking<D, GROUPS, RING> asking{tiles,  boxes,  a.block_table + at.sequence * a.table_stride, shape.page_boxes, kv_head,
                                 at.low, at.end, first_block,                                  2 * blocks};
  if (warp == 0) {
    asking.begin(lane);
    asking.ask(-1, lane);
  }

  // Queries, 16 bytes a lane.
  const int64_t q_first = at.start + at.first;
  {
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
#pragma unroll
    for (int i = 0; i < kRows * kPieces / 128; ++i) {
      const int index = i * 128 + threadIdx.x % 128, row = index / kPieces, piece = index % kPieces;
      if (shape.sign != 1.0f) pieces[i] = times<T>(pieces[i], shape.sign);
      *reinterpret_cast<uint4*>(&tiles.q[group][piece / 8][place_in_box(row, piece % 8)]) = pieces[i];
    }
    fence_for_copies();
    meet_warpgroup(group);
  }

  // Rows of this lane, and positions of the warpgroup's.
  const int row = group * kRows + warp % 4 * 16 + lane / 4, quad = lane % 4;
  const int first_token = group * kRows * shape.inverse >> 16;
  const int lowest = at.offset + first_token;
  const int highest =
      first_token < at.count
          ? min(at.offset + static_cast<int>((group * kRows + kRows - 1) * shape.inverse >> 16), at.end - 1)
          : -1;

  float out[D / 2], peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
#pragma unroll
  for (int i = 0; i < D / 2; ++i) out[i] = 0.0f;
  const uint64_t q_operand = operand_at(shared_address(tiles.q[group]));

  for (int block = 0; block < blocks; ++block) {
    const int key = (first_block + block) * kKeys;
    const bool nothing = key > highest || key + kKeys - 1 <= lowest - shape.reach;
    if (warp == 0) asking.ask(2 * block, lane);
    const int k_slot = 2 * block % RING, v_slot = (2 * block + 1) % RING;
    wait_barrier(&tiles.full[k_slot], (2 * block / RING) & 1);
    unsigned weights[kKeys / 4];
    if (!nothing) {
      float scores[kKeys / 2];
      const uint64_t k_operand = operand_at(shared_address(tiles.ring[k_slot]));
      begin_products();
#pragma unroll
      for (int k = 0; k < D / kGroupDepth; ++k) {  // 32 bytes further, and 64 elements; in units of 16
        const int step = k / 4 * (kHalfBytes / 16) + k % 4 * 2;
        if (k == 0) {
          multiply_group<T, false>(scores, q_operand + step, k_operand + step);
        } else {
          multiply_group<T, true>(scores, q_operand + step, k_operand + step);
        }
      }
      commit_products();
      wait_products<0>();
      settle(scores);
      if (lane == 0) arrive(&tiles.empty[k_slot]);
      if (key + kKeys - 1 > lowest || key <= highest - shape.reach) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {  // of the lane's first column, the position in relation to it
          const int position = min(at.offset + static_cast<int>((row + 8 * h) * shape.inverse >> 16), at.end - 1);
          const int last = position - key - 2 * quad, before = last - shape.reach;
#pragma unroll
          for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) {
            const int column = i / 4 * 8 + i % 2;
            if (column > last || column <= before) scores[i] = -INFINITY;
          }
        }
      }
      // The softmax goes on: what was summed fades where a higher score has come.
      float fade[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        float highest_score = scores[2 * h];
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          if (i / 2 % 2 == h) highest_score = fmaxf(highest_score, scores[i]);
        }
        highest_score = fmaxf(highest_score, __shfl_xor_sync(0xffffffffu, highest_score, 1));
        highest_score = fmaxf(highest_score, __shfl_xor_sync(0xffffffffu, highest_score, 2));
        const float grown = fmaxf(peak[h], highest_score * shape.scale);
        const float shift = grown == -INFINITY ? 0.0f : grown;  // a row that has seen nothing yet
        fade[h] = power_of_two(peak[h] - shift);
        peak[h] = grown;
        float added = 0.0f;
#pragma unroll
        for (int i = 0; i < kKeys / 2; ++i) {
          if (i / 2 % 2 == h) {
            scores[i] = power_of_two(fmaf(scores[i], shape.scale, -shift));
            added += scores[i];
          }
        }
        sum[h] = fmaf(sum[h], fade[h], added);
      }
#pragma unroll
      for (int i = 0; i < kKeys / 4; ++i) weights[i] = pack_pair(scores[2 * i], scores[2 * i + 1], T());
      if (__any_sync(0xffffffffu, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) out[i] *= fade[i / 2 % 2];
      }
    } else if (lane == 0) {
      arrive(&tiles.empty[k_slot]);
    }
    if (warp == 0) asking.ask(2 * block + 1, lane);
    wait_barrier(&tiles.full[v_slot], ((2 * block + 1) / RING) & 1);
    if (!nothing) {
      // Slots that nobody sees may hold NaN, which a weight of zero does not remove. Each warpgroup writes the same.
      if (key + kKeys > at.end || key < at.low) {
#pragma unroll 1
        for (int i = threadIdx.x % 128; i < kKeys * kHalves * 8; i += 128) {
          const int slot = key + i / 8 % kKeys;
          if (slot >= at.end || slot < at.low) {
            reinterpret_cast<uint4*>(tiles.ring[v_slot])[i] = make_uint4(0, 0, 0, 0);
          }
        }
        fence_for_copies();
        meet_warpgroup(group);
      }
      const uint64_t v_operand = upright_operand_at(shared_address(tiles.ring[v_slot]), kHalfBytes);
      settle(out);
      begin_products();
#pragma unroll
      for (int k = 0; k < kKeys / kGroupDepth; ++k) {  // 16 rows further
        multiply_group<T>(out, weights + 4 * k, v_operand + k * (kGroupDepth * 128 / 16));
      }
      commit_products();
      wait_products<0>();
      settle(out);
    }
    if (lane == 0) arrive(&tiles.empty[v_slot]);
  }

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

template <typename T, int D, int GROUPS, int RING, int BLOCKS>
void launch_tiles(const PrefillAttention& a, cudaStream_t stream) {
  constexpr float kLog2E = 1.44269504088896341f;
  Shape shape;
  shape.group = a.num_heads / a.num_kv_heads;
  shape.tokens = GROUPS * kRows / shape.group;
  shape.inverse = (65536 + shape.group - 1) / shape.group;
  shape.page_boxes = a.page_size / kBoxTokens;
  shape.reach = a.window > 0 && a.window < kFar ? a.window : kFar;
  shape.sign = static_cast<float>((a.scale > 0) - (a.scale < 0));
  shape.scale = (a.scale == 0.0f ? 1.0f : fabsf(a.scale)) * kLog2E;
  const Boxes boxes{cache_boxes(a, a.k_cache, a.k_strides, kBoxTokens), cache_boxes(a, a.v_cache, a.v_strides, kBoxTokens)};
  const dim3 grid((a.num_tokens / shape.tokens + a.num_seqs + 1) * a.num_kv_heads);
#ifdef ROOFLIGHT_VARIANT
  const Overlap overlap = chosen_overlap ? Overlap::kBehindOurs : Overlap::kNever;
#else
  constexpr Overlap overlap = Overlap::kBehindOurs;
#endif
  launch(prefill_attention<T, D, GROUPS, RING, BLOCKS>, grid, dim3(GROUPS * 128), stream, overlap,
         static_cast<int>(sizeof(Tiles<D, GROUPS, RING>)), a, shape, boxes);
}

template <typename T, int D>
void launch_typed(const PrefillAttention& a, cudaStream_t stream) {
#ifdef ROOFLIGHT_VARIANT
  using rooflight::chosen_variant;
  switch (chosen_variant) {
    case 1: return launch_tiles<T, D, 1, 2, 4>(a, stream);
    case 2: return launch_tiles<T, D, 1, 3, 3>(a, stream);
    case 3: return launch_tiles<T, D, 2, 4, 2>(a, stream);
    case 4: return launch_tiles<T, D, 4, 8, 1>(a, stream);
  }
#endif
  launch_tiles<T, D, 2, 4, 2>(a, stream);
}

template <typename T>
void launch_for_head(const PrefillAttention& a, cudaStream_t stream) {
  if (a.head_dim == 64) return launch_typed<T, 64>(a, stream);
  launch_typed<T, 128>(a, stream);
}

}  // namespace

bool takes_prefill_attention(const PrefillAttention& a) {
  return a.dtype != Dtype::kFloat32 && (a.head_dim == 64 || a.head_dim == 128) && a.page_size > 0 &&
         a.page_size % kBoxTokens == 0 && a.aligned && boxes_take(a.k_strides) && boxes_take(a.v_strides) &&
         a.num_heads / a.num_kv_heads <= kRows && card().major == 9;
}

void launch_prefill_attention(const PrefillAttention& a, cudaStream_t stream) {
  if (a.num_tokens == 0 || a.num_heads == 0) return;
  if (a.dtype == Dtype::kFloat16) return launch_for_head<__half>(a, stream);
  launch_for_head<__nv_bfloat16>(a, stream);
}

}  // namespace rooflight
