// The rotation of blocks of 1,024 values by random signs and a Hadamard matrix.
#pragma once

#include "vector.hpp"

namespace laconic {
namespace {

// Sums and differences of neighbours at a distance of 1, 2 and 4 lanes.
INLINE f8 across_lanes(f8 v) {
  const u8v odd = {0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31};
  const u8v upper = {0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31};
  const u8v last = {0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31};
  v = __builtin_shuffle(v, i8{1, 0, 3, 2, 5, 4, 7, 6}) + (f8)(bits_of(v) ^ odd);
  v = __builtin_shuffle(v, i8{2, 3, 0, 1, 6, 7, 4, 5}) + (f8)(bits_of(v) ^ upper);
  return __builtin_shuffle(v, i8{4, 5, 6, 7, 0, 1, 2, 3}) + (f8)(bits_of(v) ^ last);
}

// The same at distances of 1, 2, … N / 2 vectors.
template <int N>
INLINE void across_vectors(f8* v) {
  unroll<N == 16 ? 4 : 3>([&](auto stage) {
    constexpr int distance = 1 << stage;
    unroll<N / 2>([&](auto pair) {
      constexpr int low = pair / distance * 2 * distance + pair % distance;
      const f8 a = v[low], b = v[low + distance];
      v[low] = a + b;
      v[low + distance] = a - b;
    });
  });
}

// Ten stages of butterflies, from neighbours to halves, over values that `get` returns row by row and `put` receives.
template <class Load, class Store>
INLINE void hadamard(float* scratch, Load get, Store put) {
  for (int part = 0; part < 16; ++part) {
    f8 v[8];
    unroll<8>([&](auto i) { v[i] = across_lanes(get(part * 8 + i)); });
    across_vectors<8>(v);
    unroll<8>([&](auto i) { store(scratch + part * 64 + 8 * i, v[i]); });
  }
  for (int column = 0; column < 8; ++column) {
    f8 v[16];
    unroll<16>([&](auto i) { v[i] = load<f8>(scratch + i * 64 + 8 * column); });
    across_vectors<16>(v);
    unroll<16>([&](auto i) { put(static_cast<int>(i) * 8 + column, v[i]); });
  }
}

// One sign bit per value: bit `row` of a lane's word, for each group of 256.
struct Signs {
  u8v word[kSumBlock / kGroup];
  INLINE f8 flip(int row, f8 v) const {
    return (f8)(bits_of(v) ^ ((word[row / 32] << (31 - row % 32)) & (1u << 31)));
  }
};
INLINE Signs signs_of(HashKey key, int64_t at) {
  Signs signs;
  for (int64_t g = 0; g < kSumBlock / kGroup; ++g) {
    signs.word[g] = group_hash(key, static_cast<uint64_t>(at / kGroup + g));
  }
  return signs;
}

// A block, padded with zeros.
INLINE const float* padded_block(const float* x, int64_t at, int64_t n, float* buffer) {
  if (n - at >= kSumBlock) return x + at;
  std::memcpy(buffer, x + at, (n - at) * 4);
  std::memset(buffer + (n - at), 0, (kSumBlock - (n - at)) * 4);
  return buffer;
}

INLINE void rotate_block(const float* x, float factor, HashKey key, int64_t at, float* scratch, float* out) {
  const Signs signs = signs_of(key, at);
  hadamard(scratch, [&](int row) { return signs.flip(row, load<f8>(x + 8 * row) * factor); },
           [&](int row, f8 v) { store(out + 8 * row, v); });
}

// out = H (s x) / 32, plus `addend` if it is not null.
void rotate_blocks(const float* x, int64_t n, HashKey key, const float* addend, float* out, int64_t begin,
                   int64_t end) {
  alignas(64) float padded[kSumBlock], scratch[kSumBlock];
  for (int64_t at = begin; at < end; at += kSumBlock) {
    const float* block = padded_block(x, at, n, padded);
    const Signs signs = signs_of(key, at);
    hadamard(scratch, [&](int row) { return signs.flip(row, load<f8>(block + 8 * row) * 0x1p-5f); },
             [&](int row, f8 v) {
      if (addend) v = load<f8>(addend + at + 8 * row) + v;
      store(out + at + 8 * row, v);
    });
  }
}

}  // namespace
}  // namespace laconic
