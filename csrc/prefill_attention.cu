// Attention over the paged cache for several new tokens a sequence, on Hopper's warpgroup products.
//
//   out_t = sum_j softmax_j(scale * q_t . k_j) v_j
//
// A block has a tile of queries, tokens times the query heads of one KV head, 64 rows for each of its warpgroups, and
// walks over blocks of 64 keys. The copy engine brings keys and values, 16 tokens at a time, into shared memory, where
// one copy serves all rows. Per block of keys a warpgroup multiplies (keys from shared memory), takes exponentials in
// registers, and multiplies again, with its weights still in registers and the values as they lie.
//
// Tensor cores and exponentials take about as long, so four warpgroups on a multiprocessor take turns, whichever blocks
// they belong to: 128 registers a thread, none of them for a warp that only asks. Every warp asks for 16 tokens of each
// block of keys or values: a warp that asked for all of them would be late for its own products (docs/lab).
//
// The grid knows no lengths: T tokens a tile make at most num_tokens / T + num_seqs tiles, and tile number
// query_starts[s] / T + s is the first of sequence s. One more "sequence", the tokens behind the last one, sees nothing
// and gives the zeros that a padded graph expects. Blocks of keys lie at multiples of 64 whatever the tile, and rows do
// not meet, so a row has the same bits whole, in chunks, and in tiles of any size.
#include "common/mma.cuh"
#include "common/wgmma.cuh"
#include "prefill_attention_tiles.cuh"

namespace rooflight {
namespace {

constexpr float kSlack = 8.0f;  // weights are at most two to this, but for scores beyond some 1e9

__device__ __forceinline__ float power_of_two(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// A lane's part of its warpgroup's softmax: two rows, and of the scores and results the columns that products give it.
template <typename T, int D>
struct Softmax {
  float out[D / 2], scores[kKeys / 2], peak[2] = {-INFINITY, -INFINITY}, sum[2] = {0.0f, 0.0f};
  unsigned weights[kKeys / 4];

  // Hides the keys behind `last` and up to `before`, which count from the lane's first column.
  __device__ __forceinline__ void hide(int h, int last, int before, bool windowed) {
#pragma unroll
    for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) {
      if (i / 4 * 8 + i % 2 > last) scores[i] = -INFINITY;
    }
    if (!windowed) return;
#pragma unroll
    for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) {
      if (i / 4 * 8 + i % 2 <= before) scores[i] = -INFINITY;
    }
  }

  // Scores become weights, and what was summed fades where a far higher score has come.
  __device__ __forceinline__ void weigh(float scale) {
    float fade[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      float high = scores[2 * h];
#pragma unroll
      for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) high = fmaxf(high, scores[i]);
      high = fmaxf(high, __shfl_xor_sync(kAll, high, 1));
      high = fmaxf(high, __shfl_xor_sync(kAll, high, 2)) * scale;
      // What weights are relative to stays until a score is so far above it that its weight would grow large.
      const float grown = high > peak[h] + kSlack ? high : peak[h];
      const float shift = grown == -INFINITY ? 0.0f : grown;  // a row that has seen nothing yet
      fade[h] = power_of_two(peak[h] - shift);
      peak[h] = grown;
      float added = 0.0f;
#pragma unroll
      for (int i = 2 * h; i < kKeys / 2; i += i % 2 ? 3 : 1) {
        scores[i] = power_of_two(fmaf(scores[i], scale, -shift));
        added += scores[i];
      }
      sum[h] = fmaf(sum[h], fade[h], added);
    }
#pragma unroll
    for (int i = 0; i < kKeys / 4; ++i) weights[i] = pack_pair(scores[2 * i], scores[2 * i + 1], T());
    if (__any_sync(kAll, fade[0] != 1.0f || fade[1] != 1.0f)) {
#pragma unroll
      for (int i = 0; i < D / 2; ++i) out[i] *= fade[i / 2 % 2];
    }
  }
};

// scores = q @ k^T
template <typename T, int D>
__device__ __forceinline__ void begin_scores(float (&scores)[kKeys / 2], const char* queries, const char* keys) {
  const GroupOperand q = operand_at(shared_address(queries), 1024);
  const GroupOperand k = operand_at(shared_address(keys), D / kBoxWidth * 1024);
  begin_products();
  multiply_group<T, false>(scores, q, k);
#pragma unroll
  for (int i = 1; i < D / kGroupDepth; ++i) {
    multiply_group<T, true>(scores, q + (i / 4 * kHalfBytes + i % 4 * 32), k + (i / 4 * 1024 + i % 4 * 32));
  }
  commit_products();
}

// out += weights @ v
template <typename T, int D>
__device__ __forceinline__ void begin_values(Softmax<T, D>& softmax, const char* values) {
  constexpr int kEightTokens = D / kBoxWidth * 1024;
  const GroupOperand v = upright_operand_at(shared_address(values), kEightTokens, 1024);
  settle(softmax.out);
  begin_products();
#pragma unroll
  for (int i = 0; i < kKeys / kGroupDepth; ++i) {
    multiply_group<T>(softmax.out, softmax.weights + 4 * i, v + i * kGroupDepth / 8 * kEightTokens);
  }
  commit_products();
}

// Slots that nobody sees may hold NaN, which a weight of zero does not remove. Each warpgroup writes the same zeros.
template <int D>
__device__ __forceinline__ void clear_hidden(char* values, int key, const Place& at, int group) {
#pragma unroll 1
  for (int i = threadIdx.x % kThreads; i < kKeys * D / 8; i += kThreads) {
    const int slot = key + i / D * 8 + i / 8 % 8;  // D pieces of 16 bytes are eight tokens
    if (slot >= at.end || slot < at.low) reinterpret_cast<uint4*>(values)[i] = make_uint4(0, 0, 0, 0);
  }
  fence_shared();
  meet(group + 1, kThreads);
}

// Results go out by way of the queries' place, 16 bytes a lane.
template <typename T, int D>
__device__ __forceinline__ void write_results(const PrefillAttention& a, const Shape& shape, const Place& at,
                                              Softmax<T, D>& softmax, char* place, int group) {
  constexpr int kPieces = D / 8;
  const int warp_row = threadIdx.x / 32 % 4 * 16, lane = threadIdx.x % 32, quad = lane % 4;
  meet(group + 1, kThreads);  // all of its products have read the queries
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float sum = softmax.sum[h];
    sum += __shfl_xor_sync(kAll, sum, 1);
    sum += __shfl_xor_sync(kAll, sum, 2);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const int own = warp_row + lane / 4 + 8 * h;
#pragma unroll
    for (int j = 0; j < D / 8; ++j) {
      *reinterpret_cast<unsigned*>(place + j / 8 * kHalfBytes + place_in_box(own, j % 8) + 4 * quad) =
          pack_pair(softmax.out[4 * j + 2 * h] * inverse, softmax.out[4 * j + 2 * h + 1] * inverse, T());
    }
    const int row = group * kRows + own, token = shape.token_of(row);
    if (a.lse != nullptr && quad == 0 && token < at.count) {
      a.lse[int64_t{at.first + token} * a.num_heads + at.kv_head * shape.group + row - token * shape.group] =
          sum == 0.0f ? -INFINITY : (softmax.peak[h] + log2f(sum)) * 0.693147180559945309f;
    }
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 16 * kPieces / 32; ++i) {
    const int index = i * 32 + lane, own = warp_row + index / kPieces, piece = index % kPieces;
    const int row = group * kRows + own, token = shape.token_of(row);
    const int head = at.kv_head * shape.group + row - token * shape.group;
    if (token < at.count) {
      *reinterpret_cast<uint4*>(static_cast<T*>(a.out) + (int64_t{at.first + token} * a.num_heads + head) * D +
                                piece * 8) =
          *reinterpret_cast<const uint4*>(place + piece / 8 * kHalfBytes + place_in_box(own, piece % 8));
    }
  }
}

template <typename T, int D, int GROUPS, int STAGES, int BLOCKS>
__global__ void __launch_bounds__(GROUPS* kThreads, BLOCKS)
    prefill_attention(PrefillAttention a, Shape shape, const __grid_constant__ Boxes boxes) {
  extern __shared__ __align__(1024) char storage[];
  auto& tiles = *reinterpret_cast<Tiles<D, GROUPS, STAGES>*>(storage);
  constexpr int kBytes = Tiles<D, GROUPS, STAGES>::kBytes;
  const int warp = uniform(threadIdx.x / 32), lane = threadIdx.x % 32, group = warp / 4;
  if (threadIdx.x == 0) {
    for (int s = 0; s < STAGES; ++s) {
      init_barrier(&tiles.k_full[s], kBoxes);
      init_barrier(&tiles.v_full[s], kBoxes);
      init_barrier(&tiles.k_empty[s], 4 * GROUPS);
      init_barrier(&tiles.v_empty[s], 4 * GROUPS);
    }
    fence_barriers();
    fetch_map(&boxes.k);
    fetch_map(&boxes.v);
  }
  wait_for_earlier_kernels();

  // The last tiles of a prompt, which see most keys, go first. Once the place is found, barriers are seen by all.
  const int program = gridDim.x - 1 - blockIdx.x;
  Place at;
  at.kv_head = program % a.num_kv_heads;
  if (!find_place<GROUPS * kThreads>(a, shape, program / a.num_kv_heads, at)) return;
  const int blocks = at.blocks;

  Queries<T, D> queries;
  queries.load(a, shape, at, group);

  // A warp's tokens of keys, of values, or both.
  const bool asks_k = lane == 0 && warp < 4, asks_v = lane == 0 && (GROUPS == 1 || (warp >= 4 && warp < 8));
  const int row = at.sequence * static_cast<int>(a.table_stride), first_box = at.first_block * kBoxes + warp % 4;
  const int low_box = at.low / kBoxTokens, end_box = (at.end + kBoxTokens - 1) / kBoxTokens;
  Asking<kBytes, STAGES> keys{tiles.k, tiles.k_full, tiles.k_empty, &boxes.k, a.block_table, shape,
                              row,     first_box,    low_box,       end_box,  shape.k_heads, at.kv_head};
  Asking<kBytes, STAGES> values{tiles.v, tiles.v_full, tiles.v_empty, &boxes.v, a.block_table, shape,
                                row,     first_box,    low_box,       end_box,  shape.v_heads, at.kv_head};
  const auto ask_k = [&](int block) {
    if (asks_k && block < blocks) keys.ask(block);
    __syncwarp();
  };
  const auto ask_v = [&](int block) {
    if (asks_v && block < blocks) values.ask(block);
    __syncwarp();
  };
  // A warpgroup alone fills a place as soon as it is empty; several would wait for each other, and fill that which the
  // block before has left.
  constexpr bool kAlone = GROUPS == 1;
  constexpr int kEarly = kAlone ? STAGES : STAGES - 1;
  if (asks_k) keys.look_up(0);
  if (asks_v) values.look_up(0);
  for (int block = 0; block < kEarly; ++block) {
    ask_k(block);
    ask_v(block);
  }
  const auto release_k = [&](int block) {
    if (lane == 0) arrive(&tiles.k_empty[block % STAGES]);
    if constexpr (kAlone) ask_k(block + STAGES);
  };
  const auto release_v = [&](int block) {
    if (lane == 0) arrive(&tiles.v_empty[block % STAGES]);
    if constexpr (kAlone) ask_v(block + STAGES);
  };
  const auto ask_ahead = [&](int block) {
    if constexpr (!kAlone) {
      ask_k(block + STAGES - 1);
      ask_v(block + STAGES - 1);
    }
  };
  const auto await_k = [&](int block) { wait_barrier(&tiles.k_full[block % STAGES], (block / STAGES) & 1); };
  const auto await_v = [&](int block) { wait_barrier(&tiles.v_full[block % STAGES], (block / STAGES) & 1); };

  queries.store(tiles.q[group], shape.sign);
  fence_shared();
  meet(group + 1, kThreads);

  // Positions of the warpgroup's rows, and blocks up to the last key that they see.
  const int group_row = group * kRows, lane_row = group_row + warp % 4 * 16 + lane / 4, quad = lane % 4;
  const int lowest = at.offset + shape.token_of(group_row);
  const bool any = shape.token_of(group_row) < at.count;
  const int highest = any ? at.position_of(shape, group_row + kRows - 1) : -1;
  const int own_blocks = highest < 0 ? 0 : min(blocks, highest / kKeys - at.first_block + 1);

  Softmax<T, D> softmax;
#pragma unroll
  for (int i = 0; i < D / 2; ++i) softmax.out[i] = 0.0f;
  for (int block = 0; block < own_blocks; ++block) {
    const int key = (at.first_block + block) * kKeys;
    await_k(block);
    begin_scores<T, D>(softmax.scores, tiles.q[group], tiles.k[uniform(block % STAGES)]);
    ask_ahead(block);
    wait_products<0>();
    settle(softmax.scores);
    release_k(block);
    if (key + kKeys - 1 > lowest || key <= highest - shape.reach) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int last = at.position_of(shape, lane_row + 8 * h) - key - 2 * quad;
        softmax.hide(h, last, last - shape.reach, shape.reach != kFar);
      }
    }
    softmax.weigh(shape.scale);
    await_v(block);
    char* own_values = tiles.v[uniform(block % STAGES)];
    if (key + kKeys > at.end || key < at.low) clear_hidden<D>(own_values, key, at, group);
    begin_values(softmax, own_values);
    wait_products<0>();
    settle(softmax.out);
    release_v(block);
  }
  for (int block = own_blocks; block < blocks; ++block) {  // the other warpgroups' part
    ask_ahead(block);
    await_k(block);
    __syncwarp();
    release_k(block);
    await_v(block);
    __syncwarp();
    release_v(block);
  }
  let_next_kernel_start();  // not earlier: its blocks would take places that ours still wait for
  write_results(a, shape, at, softmax, tiles.q[group], group);
}

template <typename T, int D, int GROUPS, int STAGES, int BLOCKS>
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
  launch(prefill_attention<T, D, GROUPS, STAGES, BLOCKS>, grid, dim3(GROUPS * kThreads), stream, Overlap::kBehindOurs,
         static_cast<int>(sizeof(Tiles<D, GROUPS, STAGES>)), a, shape, boxes);
}

template <typename T, int D>
void launch_typed(const PrefillAttention& a, cudaStream_t stream) {
  // Sequences of few new tokens would leave half of a tile of two warpgroups without rows. The same bits either way.
  constexpr int64_t kShort = 48;
  if (a.num_tokens < kShort * a.num_seqs) return launch_tiles<T, D, 1, 1, 4>(a, stream);
  launch_tiles<T, D, 2, 2, 2>(a, stream);
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
  const bool pages = a.num_pages > 0 && a.page_size >= kBoxTokens && (a.page_size & (a.page_size - 1)) == 0;
  const int64_t tiles = int64_t{a.num_tokens} + a.num_seqs + 1;
  return a.dtype != Dtype::kFloat32 && (a.head_dim == 64 || a.head_dim == 128) && pages && a.aligned &&
         countable(a.k_strides) && countable(a.v_strides) && a.num_seqs * a.table_stride < INT32_MAX &&
         a.num_heads / a.num_kv_heads <= kRows && tiles * a.num_kv_heads < INT32_MAX && card().major == 9;
}

void launch_prefill_attention(const PrefillAttention& a, cudaStream_t stream) {
  if (a.num_tokens == 0 || a.num_heads == 0) return;
  if (a.dtype == Dtype::kFloat16) return launch_for_head<__half>(a, stream);
  launch_for_head<__nv_bfloat16>(a, stream);
}

}  // namespace rooflight
