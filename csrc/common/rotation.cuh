// What the kernels that rotate heads share: which elements turn together, and the turn itself.
#pragma once

namespace rooflight {

// Where pair p of a head lies: neighbours, or half of the rotated part apart; beyond that part, two neighbours that do
// not turn. In elements, or in packs of them where all of these are counted in packs.
__device__ __forceinline__ void places_of_pair(int p, int half, int rotary_dim, bool interleaved, int& a, int& b) {
  a = p < half ? (interleaved ? 2 * p : p) : rotary_dim + 2 * (p - half);
  b = p < half ? (interleaved ? 2 * p + 1 : p + half) : a + 1;
}

// Written out which product is rounded by itself: a pair gets the same bits in every kernel that calls this.
__device__ __forceinline__ void turn(float& x, float& y, float cosine, float sine) {
  const float turned = fmaf(x, cosine, -(y * sine));
  y = fmaf(y, cosine, x * sine);
  x = turned;
}

}  // namespace rooflight
