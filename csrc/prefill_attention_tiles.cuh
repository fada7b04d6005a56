// What a block of prefill_attention.cu works on: which tile it has, and how queries, keys and values come to it.
#pragma once

#include "common/cache_boxes.cuh"
#include "common/pack.cuh"
#include "prefill_attention.h"

namespace rooflight {

constexpr int kRows = 64, kThreads = 128;  // of a warpgroup
constexpr int kKeys = 64;                  // of a block
constexpr int kBoxTokens = 16, kBoxes = kKeys / kBoxTokens;
constexpr int kHalfBytes = 64 * 128;  // 64 rows of kBoxWidth elements
constexpr int kFar = 1 << 30;         // a window that hides nothing
constexpr unsigned kAll = 0xffffffffu;

template <int D, int GROUPS, int STAGES>
struct Tiles {
  static constexpr int kHalves = D / kBoxWidth, kBytes = kHalves * kHalfBytes;
  char q[GROUPS][kBytes];                     // by halves of a head, rows of 128 bytes
  char k[STAGES][kBytes], v[STAGES][kBytes];  // as whole_head_boxes lays them
  uint64_t k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

struct Boxes {
  CUtensorMap k, v;
};

// What follows from the arguments, reckoned once.
struct Shape {
  int group = 1, tokens = 1;          // query heads of a KV head; tokens of a tile
  unsigned inverse = 0;               // row / group is row * inverse >> 16
  int page_shift = 0, page_mask = 0;  // log2 of the boxes in a page; boxes in a page, less one
  int k_heads = 1, v_heads = 1;       // heads from one page to the next
  int reach = kFar;                   // keys that a row sees at most
  float scale = 0.0f, sign = 1.0f;    // scale, positive, times sign is the scale times log2(e)

  __device__ __forceinline__ int token_of(int row) const { return static_cast<int>(row * inverse >> 16); }
};

// A number that is the same in all lanes: told so, the compiler keeps it in uniform registers, of which there are more.
__device__ __forceinline__ int uniform(int x) {
  return __shfl_sync(kAll, x, 0);
}

// Where a tile is. Positions and keys count in the sequence, tokens among all new ones.
struct Place {
  int sequence, kv_head;
  int first, count;  // tokens of the tile
  int offset;        // position of the first one
  int low, end;      // keys that some row sees
  int first_block, blocks;

  // Rows, and positions, of a lane's or a warpgroup's. Rows behind the last token see what it sees; nobody looks.
  __device__ __forceinline__ int position_of(const Shape& shape, int row) const {
    return min(offset + shape.token_of(row), end - 1);
  }
};

// Whether there is a tile of this number. All threads of the block look for its sequence: the last one whose first tile
// is not behind it. Counted, since in a search by halves loads would wait for each other.
template <int THREADS>
__device__ __forceinline__ bool find_place(const PrefillAttention& a, const Shape& shape, int tile, Place& at) {
  int sequence = -1;
  for (int begin = 0; begin <= a.num_seqs; begin += THREADS) {
    const int index = begin + threadIdx.x;
    if (index < a.num_seqs) asm volatile("prefetch.global.L1 [%0];" ::"l"(a.seq_lens + index * a.lens_stride));
    sequence += __syncthreads_count(index <= a.num_seqs &&
                                    a.query_starts[index * a.starts_stride] / shape.tokens + index <= tile);
  }
  at.sequence = uniform(sequence);
  const bool real = at.sequence < a.num_seqs;
  const int start = uniform(a.query_starts[at.sequence * a.starts_stride]);
  const int stop = uniform(real ? a.query_starts[(at.sequence + 1) * a.starts_stride] : a.num_tokens);
  const int length = uniform(real ? a.seq_lens[at.sequence * a.lens_stride] : 0);
  at.first = start + (tile - start / shape.tokens - at.sequence) * shape.tokens;
  if (at.first >= stop) return false;
  at.count = min(shape.tokens, stop - at.first);
  at.offset = length - (stop - at.first);  // the last new token is the last of all; below 0 nothing is seen
  at.low = max(at.offset - shape.reach + 1, 0);
  at.end = at.offset + at.count;
  at.first_block = at.low / kKeys;
  at.blocks = max(0, (at.end + kKeys - 1) / kKeys - at.first_block);
  return true;
}

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

  static constexpr int kBytes = BYTES / kBoxes;

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
      expect_bytes(&full[slot], kBytes);
      copy_whole_heads(&ring[slot][first % kBoxes * kBytes], map, 2 * (box & shape.page_mask), page * heads + kv_head,
                       &full[slot]);
    } else {
      arrive(&full[slot]);
    }
    look_up(block + 1);
  }
};

// Queries of a warpgroup, 16 bytes a lane.
template <typename T, int D>
struct Queries {
  static constexpr int kPieces = D / 8, kOwn = kRows * kPieces / kThreads;
  uint4 pieces[kOwn];

  __device__ __forceinline__ void load(const PrefillAttention& a, const Shape& shape, const Place& at, int group) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int index = i * kThreads + threadIdx.x % kThreads, row = group * kRows + index / kPieces;
      const int token = shape.token_of(row), head = at.kv_head * shape.group + row - token * shape.group;
      const T* from = static_cast<const T*>(a.q) + int64_t{at.first + token} * a.q_stride + head * a.q_head_stride;
      pieces[i] = token < at.count ? reinterpret_cast<const uint4*>(from)[index % kPieces] : make_uint4(0, 0, 0, 0);
    }
  }

  __device__ __forceinline__ void store(char* to, float sign) {
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int index = i * kThreads + threadIdx.x % kThreads, row = index / kPieces, piece = index % kPieces;
      if (sign != 1.0f) {
        auto* values = reinterpret_cast<T*>(&pieces[i]);
#pragma unroll
        for (int j = 0; j < 8; ++j) values[j] = static_cast<T>(static_cast<float>(values[j]) * sign);
      }
      *reinterpret_cast<uint4*>(to + piece / 8 * kHalfBytes + place_in_box(row, piece % 8)) = pieces[i];
    }
  }
};

}  // namespace rooflight
