// Bins of equal width in single precision: packed symbols, plain symbols for coders, and counts of symbols.
#pragma once

#include "packing.hpp"
#include "sink.hpp"

namespace laconic {
namespace {

typedef uint8_t b8 __attribute__((vector_size(8)));
typedef uint16_t h8 __attribute__((vector_size(16)));

INLINE i8 bins_of(f8 v, const LinearGrid& grid) {
  const f8 top = splat(static_cast<float>(grid.levels - 1)), zero = {};
  f8 t = (v * grid.pre - grid.base) * grid.inverse;
  t = t > zero ? t : zero;  // also for a NaN: symbols are indices
  t = t < top ? t : top;
  return __builtin_convertvector(t, i8);
}
INLINE int32_t bin_of(float v, const LinearGrid& grid) {
  const float top = static_cast<float>(grid.levels - 1);
  const float scaled = v * grid.pre, above = scaled - grid.base;
  float t = above * grid.inverse;
  t = t > 0.0f ? t : 0.0f;
  t = t < top ? t : top;
  return static_cast<int32_t>(t);
}

template <class Symbol, class Narrow>
INLINE void linear_symbols(const float* x, int64_t n, const LinearGrid& grid, Symbol* out) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const float* ahead = x + (i / kBlock + 1) * kBlock;
    fetch_ahead(ahead, i % kBlock / 16);
    store(out + i, __builtin_convertvector(bins_of(load<f8>(x + i), grid), Narrow));
    store(out + i + 8, __builtin_convertvector(bins_of(load<f8>(x + i + 8), grid), Narrow));
  }
  for (; i < n; ++i) out[i] = static_cast<Symbol>(bin_of(x[i], grid));
}
void linear_symbols8(const float* x, int64_t n, const LinearGrid& grid, uint8_t* out) {
  linear_symbols<uint8_t, b8>(x, n, grid, out);
}
void linear_symbols16(const float* x, int64_t n, const LinearGrid& grid, uint16_t* out) {
  linear_symbols<uint16_t, h8>(x, n, grid, out);
}

void linear_encode(const float* x, const LinearGrid& grid, int bits, uint8_t* packed, int64_t begin, int64_t end) {
  const PackGroup group = pack_group_of(bits);
  for (int64_t at = begin; at < end; at += kGroup) {
    const int64_t count = least(kGroup, end - at);
    alignas(32) int32_t symbols[kGroup];
    uint8_t* out = packed + at / kGroup * 32 * bits;
    if (count == kGroup) {
      const float* ahead = x + (at / kBlock + 1) * kBlock;
      for (int64_t i = 0; i < kGroup; i += 8) {
        if (i % 16 == 0) fetch_ahead(ahead, (at % kBlock + i) / 16);
        store(symbols + i, bins_of(load<f8>(x + at + i), grid));
      }
      group(reinterpret_cast<uint32_t*>(symbols), out);
    } else {
      for (int64_t i = 0; i < count; ++i) symbols[i] = bin_of(x[at + i], grid);
      pack_tail(reinterpret_cast<uint32_t*>(symbols), count, bits, out);
    }
  }
}

// Symbols to values by a table of 2^bits entries.
void table_decode(const uint8_t* packed, int bits, const float* table, Sink sink, int64_t begin, int64_t end) {
  const UnpackGroup group = unpack_group_of(bits);
  alignas(32) uint32_t symbols[kGroup];
  for (int64_t at = begin; at < end; at += kGroup) {
    const int64_t count = least(kGroup, end - at);
    const uint8_t* in = packed + at / kGroup * 32 * bits;
    if (count == kGroup) {
      group(in, symbols);
    } else {
      unpack_tail(in, count, bits, symbols);
    }
    for (int64_t i = 0; i < count; ++i) emit_one(sink, at + i, table[symbols[i]]);
  }
}

// Several tables, so that repeated symbols do not wait for the store of their count.
void count_symbols8(const uint8_t* symbols, int64_t n, int alphabet, uint32_t* counts) {
  constexpr int kTables = 8;
  uint32_t table[kTables][256] = {};
  int64_t i = 0;
  for (; i + kTables <= n; i += kTables) {
    uint64_t word;
    std::memcpy(&word, symbols + i, 8);
    unroll<kTables>([&](auto k) { ++table[k][word >> (8 * k) & 0xFF]; });
  }
  for (; i < n; ++i) ++table[0][symbols[i]];
  for (int s = 0; s < alphabet; ++s) {
    counts[s] = 0;
    for (int k = 0; k < kTables; ++k) counts[s] += table[k][s];
  }
}
void count_symbols16(const uint16_t* symbols, int64_t n, int alphabet, uint32_t* counts) {
  constexpr int kTables = 4;
  static thread_local uint32_t table[kTables][kMaxAlphabet];
  for (int k = 0; k < kTables; ++k) std::memset(table[k], 0, static_cast<size_t>(alphabet) * sizeof(uint32_t));
  int64_t i = 0;
  for (; i + kTables <= n; i += kTables) {
    uint64_t word;
    std::memcpy(&word, symbols + i, 8);
    unroll<kTables>([&](auto k) { ++table[k][word >> (16 * k) & 0xFFFF]; });
  }
  for (; i < n; ++i) ++table[0][symbols[i]];
  for (int s = 0; s < alphabet; ++s) counts[s] = table[0][s] + table[1][s] + table[2][s] + table[3][s];
}

}  // namespace
}  // namespace laconic
