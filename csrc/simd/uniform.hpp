// uniform: the range of a tensor, and bins of equal width over it, in double precision.
#pragma once

#include "packing.hpp"
#include "sink.hpp"

namespace laconic {
namespace {

uint32_t value_range(const float* x, int64_t begin, int64_t end, float* low, float* high) {
  constexpr int kChains = 4;  // a minimum has a latency of four cycles, so four run at once
  f8 least_of[kChains], most_of[kChains];
  for (int c = 0; c < kChains; ++c) least_of[c] = most_of[c] = splat(x[begin]);
  u8v largest = {};
  const u8v mask = splat_u(kMagnitude);
  int64_t i = begin;
  for (; i + 32 <= end; i += 32) {
    const float* ahead = x + (i / kBlock + 1) * kBlock;
    const int64_t line = i % kBlock / 16;
    fetch_ahead(ahead, line);
    fetch_ahead(ahead, line + 1);
    unroll<kChains>([&](auto c) {
      const f8 v = load<f8>(x + i + 8 * c);
      least_of[c] = v < least_of[c] ? v : least_of[c];
      most_of[c] = v > most_of[c] ? v : most_of[c];
      largest = larger(largest, bits_of(v) & mask);
    });
  }
  uint32_t amax_bits = fold_max(largest);
  float smallest = x[begin], greatest = x[begin];
  auto take = [&](float below, float above) {
    if (below < smallest) smallest = below;
    if (above > greatest) greatest = above;
  };
  for (int c = 0; c < kChains; ++c) {
    for (int lane = 0; lane < 8; ++lane) take(least_of[c][lane], most_of[c][lane]);
  }
  for (; i < end; ++i) {
    take(x[i], x[i]);
    amax_bits = most(amax_bits, magnitude_bits(x[i]));
  }
  *low = smallest;
  *high = greatest;
  return amax_bits;
}

// Bins are defined in double precision. Single precision gives the same bin unless a value is near the edge of one, where
// it is asked for again: its error is three roundings, of less than 2^-24 each, of a number up to `levels`.
struct UniformBins {
  d4 low, scale, top;
  bool quick = false;
  f8 quick_low, quick_scale, quick_top, margin;

  explicit UniformBins(const UniformCoding& c) {
    const double inverse = static_cast<double>(c.levels) / (c.high - c.low), last = c.levels - 1;
    top = d4{last, last, last, last};
    low = d4{c.low, c.low, c.low, c.low};
    scale = d4{inverse, inverse, inverse, inverse};
    const float first = static_cast<float>(c.low), span = static_cast<float>(c.high) - first;
    constexpr float kLeastNormal = 1.17549435e-38f;
    if (static_cast<double>(first) != c.low || !(span <= kFloatMax) || c.levels > 1 << 14) return;
    if (!(inverse >= kLeastNormal && inverse <= kFloatMax)) return;
    quick = true;
    quick_low = splat(first);
    quick_scale = splat(static_cast<float>(inverse));
    quick_top = splat(static_cast<float>(c.levels) - 0.5f);
    margin = splat(static_cast<float>(c.levels) * 0x1p-22f);
  }
  // Clamped at both ends (a NaN to 0), because another thread may have changed the tensor since its range was computed,
  // and symbols are indices.
  INLINE i4 of(const float* v) const {
    d4 t = (__builtin_convertvector(load<f4>(v), d4) - low) * scale;
    t = t > d4{} ? t : d4{};
    t = t < top ? t : top;
    return __builtin_convertvector(t, i4);
  }
  INLINE i8 of8(const float* v) const { return __builtin_shufflevector(of(v), of(v + 4), 0, 1, 2, 3, 4, 5, 6, 7); }
  // The bins of the first and the last half of 16 values.
  INLINE void of16(const float* v, i8* first, i8* second) const {
    if (quick && quickly(v, first, second)) return;
    exactly(v, first, second);
  }

 private:
  // Not inlined: it is rare, and would be the largest part of every loop.
  __attribute__((noinline)) void exactly(const float* v, i8* first, i8* second) const {
    *first = of8(v);
    *second = of8(v + 8);
  }
  // In single precision, clamped within the first and the last bin, away from their edges; false if a value is near one.
#if defined(__AVX512DQ__)
  INLINE bool quickly(const float* v, i8* first, i8* second) const {
    const auto all = [](f8 lanes) { return _mm512_broadcast_f32x8((__m256)lanes); };
    __m512 t = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(v), all(quick_low)), all(quick_scale));
    t = _mm512_min_ps(_mm512_max_ps(t, _mm512_set1_ps(0.25f)), all(quick_top));
    const __m512 distance = _mm512_abs_ps(_mm512_reduce_ps(t, 0));  // from the nearest integer
    if (__builtin_expect(_mm512_cmp_ps_mask(distance, all(margin), _CMP_LT_OQ) != 0, 0)) return false;
    const __m512i bins = _mm512_cvttps_epi32(t);
    *first = (i8)_mm512_castsi512_si256(bins);
    *second = (i8)_mm512_extracti64x4_epi64(bins, 1);
    return true;
  }
#else
  INLINE bool quickly(const float* v, i8* first, i8* second) const {
    const f8 a = quick_place(load<f8>(v)), b = quick_place(load<f8>(v + 8));
    const f8 near_a = distance_from_edge(a), near_b = distance_from_edge(b);
    if (__builtin_expect(any((near_a < near_b ? near_a : near_b) < margin), 0)) return false;
    *first = __builtin_convertvector(a, i8);
    *second = __builtin_convertvector(b, i8);
    return true;
  }
  INLINE f8 quick_place(f8 v) const { return clamped((v - quick_low) * quick_scale, splat(0.25f), quick_top); }
  INLINE static f8 distance_from_edge(f8 t) {
    const f8 rounder = splat(0x1.8p23f), nearest = (t + rounder) - rounder, signed_distance = t - nearest;
    return (f8)(bits_of(signed_distance) & kMagnitude);
  }
  INLINE static bool any(i8 mask) {
#if defined(__AVX2__)
    return _mm256_movemask_ps((__m256)mask) != 0;
#else
    int32_t bits = 0;
    for (int lane = 0; lane < 8; ++lane) bits |= mask[lane];
    return bits != 0;
#endif
  }
#endif
};

template <class Symbol>
INLINE void uniform_symbols(const float* x, int64_t n, const UniformCoding& c, Symbol* out) {
  typedef Symbol Narrow __attribute__((vector_size(8 * sizeof(Symbol))));
  const UniformBins bins(c);
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) {
    fetch_ahead(x + (i / kBlock + 1) * kBlock, i % kBlock / 16);
    i8 first, second;
    bins.of16(x + i, &first, &second);
    store(out + i, __builtin_convertvector(first, Narrow));
    store(out + i + 8, __builtin_convertvector(second, Narrow));
  }
  for (; i < n; ++i) {
    const float rest[4] = {x[i], x[i], x[i], x[i]};
    out[i] = static_cast<Symbol>(bins.of(rest)[0]);
  }
}
void uniform_symbols8(const float* x, int64_t n, UniformCoding c, uint8_t* out) { uniform_symbols(x, n, c, out); }
void uniform_symbols16(const float* x, int64_t n, UniformCoding c, uint16_t* out) { uniform_symbols(x, n, c, out); }

// A whole group, packed in registers: Bits divides 32.
template <int Bits>
INLINE void uniform_encode_group(const float* v, const UniformBins& bins, const float* ahead, int64_t line,
                                 uint8_t* out) {
  constexpr int rows = 32 / Bits;  // of a word
  for (int64_t word = 0; word < Bits; ++word) {
    u8v packed = {};
    unroll<rows / 2>([&](auto pair) {
      const int64_t at = word * rows / 2 + pair;
      fetch_ahead(ahead, line + at);
      i8 first, second;
      bins.of16(v + 16 * at, &first, &second);
      packed |= (u8v)first << (2 * pair * Bits) | (u8v)second << ((2 * pair + 1) * Bits);
    });
    store(out + 32 * word, packed);
  }
}

void uniform_encode(const float* x, UniformCoding c, uint8_t* packed, int64_t begin, int64_t end) {
  const PackGroup group = pack_group_of(c.bits);
  const UniformBins bins(c);
  for (int64_t at = begin; at < end; at += kGroup) {
    const int64_t count = least(kGroup, end - at);
    float padded[kGroup];
    const float* v = x + at;
    const float* ahead = x + (at / kBlock + 1) * kBlock;
    uint8_t* out = packed + at / kGroup * 32 * c.bits;
    if (count == kGroup && (c.bits == 8 || c.bits == 4)) {
      const int64_t line = at % kBlock / 16;
      c.bits == 8 ? uniform_encode_group<8>(v, bins, ahead, line, out)
                  : uniform_encode_group<4>(v, bins, ahead, line, out);
      continue;
    }
    if (count < kGroup) {
      for (int64_t i = 0; i < kGroup; ++i) padded[i] = i < count ? v[i] : static_cast<float>(c.low);
      v = padded;
    }
    alignas(32) int32_t symbols[kGroup];
    for (int64_t i = 0; i < kGroup; i += 16) {
      fetch_ahead(ahead, (at % kBlock + i) / 16);
      i8 first, second;
      bins.of16(v + i, &first, &second);
      store(symbols + i, first);  // as wide as the loads of the packing: narrower stores would delay those
      store(symbols + i + 8, second);
    }
    if (count == kGroup) {
      group(reinterpret_cast<uint32_t*>(symbols), out);
    } else {
      pack_tail(reinterpret_cast<uint32_t*>(symbols), count, c.bits, out);
    }
  }
}

// The centres of bins.
struct UniformCentres {
  d4 low, width;
  i4 top;

  explicit UniformCentres(const UniformCoding& c) {
    const double w = (c.high - c.low) / static_cast<double>(c.levels);
    low = d4{c.low, c.low, c.low, c.low};
    width = d4{w, w, w, w};
    top = i4{} + (c.levels - 1);
  }
  INLINE f4 of(i4 q) const {
    const d4 half = {.5, .5, .5, .5};
    q = q > top ? top : q;
    return __builtin_convertvector(low + (__builtin_convertvector(q, d4) + half) * width, f4);
  }
  INLINE f8 of8(u8v symbols) const {
#if defined(__AVX512F__)
    const __m256i q = _mm256_min_epi32((__m256i)symbols, _mm256_broadcastsi128_si256((__m128i)top));
    const __m512d middle = _mm512_add_pd(_mm512_cvtepi32_pd(q), _mm512_set1_pd(.5));
    const __m512d offset = _mm512_mul_pd(middle, _mm512_broadcast_f64x4((__m256d)width));
    return (f8)_mm512_cvtpd_ps(_mm512_add_pd(_mm512_broadcast_f64x4((__m256d)low), offset));
#else
    const i8 q = (i8)symbols;
    return __builtin_shufflevector(of(__builtin_shufflevector(q, q, 0, 1, 2, 3)),
                                   of(__builtin_shufflevector(q, q, 4, 5, 6, 7)), 0, 1, 2, 3, 4, 5, 6, 7);
#endif
  }
};

template <Store How>
void uniform_decode_as(const uint8_t* packed, UniformCoding c, const Sink& sink, int64_t begin, int64_t end) {
  const UnpackGroup group = unpack_group_of(c.bits);
  const UniformCentres centres(c);
  const f8 weight = splat(sink.weight);
  alignas(32) uint32_t symbols[kGroup];
  for (int64_t at = begin; at < end; at += kGroup) {
    const int64_t count = least(kGroup, end - at);
    const uint8_t* in = packed + at / kGroup * 32 * c.bits;
    if (count == kGroup && c.bits == 8) {
      for (int64_t word = 0; word < 8; ++word) {
        const u8v four = load<u8v>(in + 32 * word);
        float* out = sink.out + at + 32 * word;
        unroll<4>([&](auto row) { emit<How>(out + 8 * row, centres.of8(four >> (8 * row) & 0xFF), weight); });
      }
    } else if (count == kGroup) {
      group(in, symbols);
      for (int64_t i = 0; i < kGroup; i += 8) {
        emit<How>(sink.out + at + i, centres.of8(load<u8v>(symbols + i)), weight);
      }
    } else {
      std::memset(symbols, 0, sizeof symbols);
      unpack_tail(in, count, c.bits, symbols);
      for (int64_t i = 0; i < count; ++i) emit_one(sink, at + i, centres.of(load<i4>(symbols + i / 4 * 4))[i % 4]);
    }
  }
  finish_stores();
}
void uniform_decode(const uint8_t* packed, UniformCoding c, Sink sink, int64_t begin, int64_t end) {
  switch (how_to_store(sink)) {
    case Store::add: return uniform_decode_as<Store::add>(packed, c, sink, begin, end);
    case Store::stream: return uniform_decode_as<Store::stream>(packed, c, sink, begin, end);
    default: return uniform_decode_as<Store::plain>(packed, c, sink, begin, end);
  }
}

}  // namespace
}  // namespace laconic
