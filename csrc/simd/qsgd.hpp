// qsgd: norms, stochastic rounding in fixed point, and packing, in one pass over memory.
#pragma once

#include "packing.hpp"
#include "sink.hpp"
#include "reductions.hpp"

namespace laconic {
namespace {

INLINE float bucket_norm(const float* x, int64_t bucket, uint32_t largest, bool l2) {
  float norm;
  std::memcpy(&norm, &largest, 4);
  if (l2) {
    const float root = static_cast<float>(__builtin_sqrt(sum_of_squares(x, bucket)));
    if (!(root <= kFloatMax)) return kFloatMax;
    if (root > norm) norm = root;
  }
  return norm;
}

// The factor that makes a value fixed point, and the exact power of two that a tiny bucket is scaled up by first.
struct Scale {
  float up, factor;
};
INLINE Scale scale_of(float norm, int levels, int fraction_bits) {
  const float up = norm < 0x1p-90f ? 0x1p64f : 1.0f;
  if (norm == 0.0f) return {up, 0.0f};
  const float unit = static_cast<float>(static_cast<int64_t>(levels) << fraction_bits);
  const float quotient = unit / (norm * up);
  return {up, quotient * (1.0f - 0x1p-22f)};
}

// The odd factor of each row, which derives 32 numbers from one hash per lane and group. See kernels/random.py.
constexpr uint32_t row_factor(uint64_t row) {
  uint64_t x = row + 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return static_cast<uint32_t>(x ^ x >> 31) | 1;
}

struct RowFactors {
  alignas(64) uint32_t at[32][8];  // AVX-512 loads two rows at once
  constexpr RowFactors() : at() {
    for (int row = 0; row < 32; ++row) {
      for (int lane = 0; lane < 8; ++lane) at[row][lane] = row_factor(static_cast<uint64_t>(row));
    }
  }
};
constexpr RowFactors kRowFactors;

// One group of 256 values in fixed point, row by row: put(row, v) gets levels * x / norm + levels + noise, with
// FractionBits fractional bits. The two halves may have different scales (buckets of 128).
template <int FractionBits, int Levels, bool Stochastic, class Put>
INLINE void quantize_group(const float* x, Scale first, Scale second, uint64_t group, HashKey key, const float* ahead,
                           int64_t line, Put put) {
  constexpr uint32_t offset = static_cast<uint32_t>(Levels) << FractionBits;
  const u8v hash = group_hash(key, group);
  const bool tiny = first.up != 1.0f || second.up != 1.0f;
  alignas(32) float scaled[kGroup];
  if (__builtin_expect(tiny, 0)) {
    for (int64_t i = 0; i < kGroup; ++i) scaled[i] = x[i] * (i < 128 ? first.up : second.up);
    x = scaled;
  }
  const f8 scales[2] = {splat(first.factor), splat(second.factor)};
  const auto* factors = kRowFactors.at;
  asm("" : "+r"(factors));  // keeps them in memory: constants would be rebuilt in registers for every row
  unroll<32>([&](auto row) {
    if constexpr (row % 2 == 0 && row / 2 % 4 != 3) fetch_ahead(ahead, line + row / 2);
    const u8v fixed = (u8v) __builtin_convertvector(load<f8>(x + 8 * row) * scales[row / 16], i8);
    if constexpr (Stochastic) {
      put(row, fixed + ((hash * load<u8v>(factors[row])) >> (32 - FractionBits)) + offset);
    } else {
      put(row, fixed + (offset + (1u << (FractionBits - 1))));
    }
  });
}

#if defined(__AVX512F__)
// The same for widths that divide 32, two rows per register. A rotation and a mask move the symbols of both rows to
// their bits at once.
template <int Bits>
struct Places {
  alignas(64) uint32_t rotate[16 / Bits][16], mask[16 / Bits][16];
  constexpr Places() : rotate(), mask() {
    for (int pair = 0; pair < 16 / Bits; ++pair) {
      for (int lane = 0; lane < 16; ++lane) {
        const int place = (2 * pair + lane / 8) * Bits % 32;
        rotate[pair][lane] = static_cast<uint32_t>(31 - Bits - place) & 31;
        mask[pair][lane] = ((1u << Bits) - 1) << place;
      }
    }
  }
};
template <int Bits>
constexpr Places<Bits> kPlaces;

template <int Bits, bool Stochastic>
INLINE void quantize_and_pack(const float* x, Scale first, Scale second, uint64_t group, HashKey key,
                              const float* ahead, int64_t line, uint8_t* out) {
  constexpr int F = 31 - Bits, pairs = 16 / Bits;
  constexpr uint32_t offset = ((1u << (Bits - 1)) - 1) << F;
  const u8v narrow = group_hash(key, group);
  const __m512i hash = _mm512_broadcast_i64x4((__m256i)narrow);
  const __m512i shift = _mm512_set1_epi32(static_cast<int>(Stochastic ? offset : offset + (1u << (F - 1))));
  const __m512 scales[2] = {_mm512_set1_ps(first.factor), _mm512_set1_ps(second.factor)};
  const auto* factors = kRowFactors.at;
  asm("" : "+r"(factors));
  __m512i word = _mm512_setzero_si512();
  unroll<16>([&](auto pair) {
    if constexpr (pair % 4 != 3) fetch_ahead(ahead, line + pair);
    __m512i v = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * pair), scales[pair / 8]));
    if constexpr (Stochastic) {
      v = _mm512_add_epi32(v,
                           _mm512_srli_epi32(_mm512_mullo_epi32(hash, _mm512_load_si512(factors[2 * pair])), 32 - F));
    }
    v = _mm512_rorv_epi32(_mm512_add_epi32(v, shift), _mm512_load_si512(kPlaces<Bits>.rotate[pair % pairs]));
    word = _mm512_or_si512(word, _mm512_and_si512(v, _mm512_load_si512(kPlaces<Bits>.mask[pair % pairs])));
    if constexpr (pair % pairs == pairs - 1) {
      store(out + pair / pairs * 32, _mm256_or_si256(_mm512_castsi512_si256(word), _mm512_extracti64x4_epi64(word, 1)));
      word = _mm512_setzero_si512();
    }
  });
}
#endif

// Processes a range in batches: first the norms of its buckets, then `group(values, scales of both halves, index,
// count)` for each group; the last one may be partial. Returns the amax bits; stops at a value that is not finite.
template <int FractionBits, int Levels, class Group>
INLINE uint32_t each_group(const BucketEncode& a, int64_t begin, int64_t end, Group group) {
  // All norms of a batch first: one bucket at a time would wait for each division.
  const int64_t unit = a.bucket < kBatch ? kBatch : a.bucket;
  Scale scales[kBatch / 128];
  uint32_t amax_bits = 0;
  for (int64_t at = begin; at < end; at += unit) {
    const int64_t here = least(unit, end - at);
    const float* x = a.x + at;
    if (here < unit) {  // the end, padded with zeros, which change neither norm nor sum
      std::memcpy(a.scratch, x, here * 4);
      std::memset(a.scratch + here, 0, (unit - here) * 4);
      x = a.scratch;
    }
    const int64_t buckets = (here + a.bucket - 1) / a.bucket;
    for (int64_t b = 0; b < buckets; ++b) {
      const float* values = x + b * a.bucket;
      const uint32_t largest =
          largest_magnitude(values, a.bucket, a.x + (at / kBlock + 1) * kBlock, (at % kBlock + b * a.bucket) / 16);
      amax_bits = most(amax_bits, largest);
      if (__builtin_expect(largest >= kNonFinite, 0)) return amax_bits;
      const float norm = a.norm ? *a.norm : bucket_norm(values, a.bucket, largest, a.l2);
      if (!a.norm) write_float(a.floats, at / a.bucket + b, norm);
      scales[b] = scale_of(norm, Levels, FractionBits);
    }
    for (int64_t g = 0; g < here; g += kGroup) {
      const int64_t b = g / a.bucket, second = a.bucket < kGroup ? b + 1 : b;
      group(x + g, scales[b], scales[second < buckets ? second : b], at + g, least(kGroup, here - g));
    }
  }
  return amax_bits;
}

template <int Bits, bool Stochastic>
uint32_t qsgd_encode_as(const BucketEncode& a, int64_t begin, int64_t end) {
  constexpr int F = 31 - Bits, levels = (1 << (Bits - 1)) - 1;
  return each_group<F, levels>(a, begin, end,
                               [&](const float* x, Scale first, Scale second, int64_t at, int64_t count) {
    uint8_t* out = a.packed + at / kGroup * 32 * Bits;
    const float* ahead = a.x + (at / kBlock + 1) * kBlock;
    const int64_t line = at % kBlock / 16;
#if defined(__AVX512F__)
    if constexpr (16 % Bits == 0) {
      if (count == kGroup && first.up == 1.0f && second.up == 1.0f) {
        return quantize_and_pack<Bits, Stochastic>(x, first, second, at / kGroup, a.key, ahead, line, out);
      }
    }
#endif
    if (count == kGroup) {
      RowWriter<Bits> writer{out};
      quantize_group<F, levels, Stochastic>(
          x, first, second, at / kGroup, a.key, ahead, line,
          [&](auto row, u8v fixed) { put_fixed<Bits, F, decltype(row)::value>(writer, fixed); });
    } else {
      uint32_t symbols[kGroup];
      quantize_group<F, levels, Stochastic>(x, first, second, at / kGroup, a.key, x, 0,
                                            [&](auto row, u8v v) { store(symbols + 8 * row, v >> F); });
      pack_tail(symbols, count, Bits, out);
    }
  });
}

template <int... B>
uint32_t qsgd_encode_with(const BucketEncode& a, int64_t begin, int64_t end, std::integer_sequence<int, B...>) {
  static constexpr uint32_t (*table[2][sizeof...(B)])(const BucketEncode&, int64_t, int64_t) = {
      {qsgd_encode_as<B + 2, false>...}, {qsgd_encode_as<B + 2, true>...}};
  return table[a.stochastic][a.bits - 2](a, begin, end);
}
uint32_t qsgd_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  return qsgd_encode_with(a, begin, end, std::make_integer_sequence<int, 11>{});
}

INLINE float step_of(float norm, int levels) {
  const float step = norm / static_cast<float>(levels);
  return step * static_cast<float>(levels) <= kFloatMax ? step : step * (1.0f - 0x1p-22f);
}

// Steps of a group's two halves; false when a norm is no norm.
template <int Levels>
INLINE bool steps_at(const BucketDecode& a, int64_t at, float steps[2]) {
  for (int half = 0; half < 2; ++half) {
    const int64_t value = at + 128 * half;
    if (half && (a.bucket > 128 || value >= a.sink.n)) {
      steps[1] = steps[0];
      break;
    }
    const float norm = read_float(a.floats, value / a.bucket);
    if (!finite_and_positive(norm)) return false;
    steps[half] = step_of(norm, Levels);
  }
  return true;
}

template <int Levels>
INLINE f8 level_values(u8v symbols, f8 step) {
  i8 q = (i8)symbols - Levels;
  q = q > Levels ? (i8{} + Levels) : q;  // the only pattern that no encoder writes
  return __builtin_convertvector(q, f8) * step;
}

template <int Bits, Store How>
bool qsgd_decode_as(const BucketDecode& a, int64_t begin, int64_t end) {
  constexpr int levels = (1 << (Bits - 1)) - 1;
  const f8 weight = splat(a.sink.weight);
  for (int64_t at = begin; at < end; at += kGroup) {
    float steps[2];
    if (!steps_at<levels>(a, at, steps)) return false;
    const uint8_t* packed = a.packed + at / kGroup * 32 * Bits;
    float* out = a.sink.out + at;
    const int64_t count = least(kGroup, end - at);
    if (count == kGroup) {
      const f8 step[2] = {splat(steps[0]), splat(steps[1])};
      unroll<32>([&](auto row) {
        emit<How>(out + 8 * row, level_values<levels>(row_of<Bits, row>(packed), step[row / 16]), weight);
      });
    } else {
      uint32_t symbols[kGroup];
      unpack_tail(packed, count, Bits, symbols);
      for (int64_t i = 0; i < count; ++i) {
        int32_t q = static_cast<int32_t>(symbols[i]) - levels;
        if (q > levels) q = levels;
        emit_one(a.sink, at + i, static_cast<float>(q) * steps[i / 128]);
      }
    }
  }
  finish_stores();
  return true;
}

template <Store How, int... B>
bool qsgd_decode_with(const BucketDecode& a, int64_t begin, int64_t end, std::integer_sequence<int, B...>) {
  static constexpr bool (*table[])(const BucketDecode&, int64_t, int64_t) = {qsgd_decode_as<B + 2, How>...};
  return table[a.bits - 2](a, begin, end);
}
bool qsgd_decode(const BucketDecode& a, int64_t begin, int64_t end) {
  constexpr auto bits = std::make_integer_sequence<int, 11>{};
  switch (how_to_store(a.sink)) {
    case Store::add: return qsgd_decode_with<Store::add>(a, begin, end, bits);
    case Store::stream: return qsgd_decode_with<Store::stream>(a, begin, end, bits);
    default: return qsgd_decode_with<Store::plain>(a, begin, end, bits);
  }
}

}  // namespace
}  // namespace laconic
