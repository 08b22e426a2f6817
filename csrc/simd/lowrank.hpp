// Products of a matrix with its low-rank factors, in a fixed order of additions.
#pragma once

#include "sink.hpp"
#include "vector.hpp"

namespace laconic {
namespace {

// out[i, k] = sum over j of x[i, j] q[k, j]: eight partial sums by j modulo 8, folded in half three times.
void project_rows(const LowRank& a, const float* q, float* out, int64_t begin, int64_t end) {
  const int64_t whole = a.columns / 8 * 8;
  for (int64_t i = begin; i < end; ++i) {
    const float* x = a.x + i * a.columns;
    for (int k = 0; k < a.rank; k += 4) {
      const int here = a.rank - k < 4 ? a.rank - k : 4;
      const float* at[4];
      for (int r = 0; r < 4; ++r) at[r] = q + (k + (r < here ? r : 0)) * a.columns;
      f8 sum[4] = {};
      for (int64_t j = 0; j < whole; j += 8) {
        const f8 v = load<f8>(x + j);
        unroll<4>([&](auto r) { sum[r] = sum[r] + v * load<f8>(at[r] + j); });
      }
      for (int64_t j = whole; j < a.columns; ++j) {
        for (int r = 0; r < here; ++r) {
          const float product = x[j] * at[r][j];
          sum[r][j - whole] = sum[r][j - whole] + product;
        }
      }
      for (int r = 0; r < here; ++r) {
        const f8 s = sum[r];
        out[i * a.rank + k + r] = ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
      }
    }
  }
}

// out[k, j] = sum over i of x[i, j] p[i, k], from the first row to the last.
void project_columns(const LowRank& a, const float* p, float* out, int64_t begin, int64_t end) {
  constexpr int64_t kWide = 256;
  for (int64_t first = begin; first < end; first += kWide) {
    const int64_t wide = least(kWide, end - first), whole = wide / 8 * 8;
    for (int k = 0; k < a.rank; ++k) std::memset(out + k * a.columns + first, 0, static_cast<size_t>(wide) * 4);
    for (int64_t i = 0; i < a.rows; ++i) {
      const float* x = a.x + i * a.columns + first;
      for (int k = 0; k < a.rank; ++k) {
        const float weight = p[i * a.rank + k];
        float* to = out + k * a.columns + first;
        for (int64_t j = 0; j < whole; j += 8) store(to + j, load<f8>(to + j) + load<f8>(x + j) * weight);
        for (int64_t j = whole; j < wide; ++j) {
          const float product = x[j] * weight;
          to[j] = to[j] + product;
        }
      }
    }
  }
}

// The product of both, row by row, ranks in order.
void lowrank_decode(const LowRank& a, const uint8_t* p, const uint8_t* q, Sink sink, int64_t begin, int64_t end) {
  for (int64_t i = begin; i < end; ++i) {
    int64_t j = 0;
    float* out = sink.out + i * a.columns;
    for (; j + 8 <= a.columns; j += 8) {
      f8 sum = load<f8>(q + 4 * j) * read_float(p, i * a.rank);
      for (int k = 1; k < a.rank; ++k) {
        sum = sum + load<f8>(q + 4 * (k * a.columns + j)) * read_float(p, i * a.rank + k);
      }
      if (sink.accumulate) {
        store(out + j, load<f8>(out + j) + sum * sink.weight);
      } else {
        store(out + j, sum);
      }
    }
    for (; j < a.columns; ++j) {
      float sum = read_float(q, j) * read_float(p, i * a.rank);
      for (int k = 1; k < a.rank; ++k) {
        const float product = read_float(q, k * a.columns + j) * read_float(p, i * a.rank + k);
        sum = sum + product;
      }
      emit_one(sink, i * a.columns + j, sum);
    }
  }
}

}  // namespace
}  // namespace laconic
