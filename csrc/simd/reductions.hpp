// Largest magnitudes, and sums in the order that every backend keeps.
#pragma once

#include "vector.hpp"

namespace laconic {
namespace {

INLINE uint32_t largest_magnitude(const float* x, int64_t n, const float* ahead, int64_t line) {  // n a multiple of 128
#if defined(__AVX512F__)
  const __m512i wide_mask = _mm512_set1_epi32(static_cast<int>(kMagnitude));
  __m512i wide[2] = {};
  for (int64_t i = 0; i < n; i += 128) {
    unroll<8>([&](auto row) {
      if constexpr (row % 4 == 3) fetch_ahead(ahead, line + i / 16 + row);
      wide[row % 2] =
          _mm512_max_epi32(wide[row % 2], _mm512_and_si512(_mm512_loadu_si512(x + i + 16 * row), wide_mask));
    });
  }
  const __m512i both = _mm512_max_epi32(wide[0], wide[1]);
  return fold_max(larger((u8v)_mm512_castsi512_si256(both), (u8v)_mm512_extracti64x4_epi64(both, 1)));
#else
  const u8v mask = splat_u(kMagnitude);
  u8v most_of[4] = {};
  for (int64_t i = 0; i < n; i += 128) {
    unroll<16>([&](auto row) {
      if constexpr (row % 8 == 7) fetch_ahead(ahead, line + i / 16 + row / 2);
      most_of[row % 4] = larger(most_of[row % 4], load<u8v>(x + i + 8 * row) & mask);
    });
  }
  return fold_max(larger(larger(most_of[0], most_of[1]), larger(most_of[2], most_of[3])));
#endif
}

// The order of reference.pairwise_sum: vectors of 16 are added pairwise, neighbours first, then folded in half.
struct Lanes16 {
  f8 low, high;
};
template <class Map>
INLINE Lanes16 sum_rows(const float* x, int64_t rows, const float* ahead, int64_t line, Map map) {
  if (rows < 8) __builtin_unreachable();
  // A stack of partial sums, one per level: merge as long as the number of finished sums has trailing ones.
  Lanes16 stack[16];
  int depth = 0;
  for (int64_t done = 0; done < rows / 8; ++done) {
    Lanes16 r[8];
    unroll<8>([&](auto i) {
      fetch_ahead(ahead, line + done * 8 + i);
      const float* row = x + done * 128 + 16 * i;
      r[i] = {map(load<f8>(row)), map(load<f8>(row + 8))};
    });
    Lanes16 sum = {
        ((r[0].low + r[1].low) + (r[2].low + r[3].low)) + ((r[4].low + r[5].low) + (r[6].low + r[7].low)),
        ((r[0].high + r[1].high) + (r[2].high + r[3].high)) + ((r[4].high + r[5].high) + (r[6].high + r[7].high))};
    for (int64_t bit = done; bit & 1; bit >>= 1) {
      --depth;
      sum = {stack[depth].low + sum.low, stack[depth].high + sum.high};
    }
    stack[depth++] = sum;
  }
  return stack[0];
}
INLINE float fold_sum(Lanes16 s) {
  const f8 e = s.low + s.high;
  const float a = e[0] + e[4], b = e[1] + e[5], c = e[2] + e[6], d = e[3] + e[7];
  return (a + c) + (b + d);
}

double sum_of_squares(const float* x, int64_t bucket) {
  d4 stack[16][4];
  int depth = 0;
  for (int64_t row = 0; row < bucket / 16; ++row) {
    d4 sum[4];
    for (int q = 0; q < 4; ++q) {
      const d4 v = __builtin_convertvector(load<f4>(x + row * 16 + 4 * q), d4);
      sum[q] = v * v;
    }
    for (int64_t bit = row; bit & 1; bit >>= 1) {
      --depth;
      for (int q = 0; q < 4; ++q) sum[q] = stack[depth][q] + sum[q];
    }
    for (int q = 0; q < 4; ++q) stack[depth][q] = sum[q];
    ++depth;
  }
  const d4* s = stack[0];
  const d4 a = s[0] + s[2], b = s[1] + s[3], c = a + b;
  return (c[0] + c[2]) + (c[1] + c[3]);
}

}  // namespace
}  // namespace laconic
