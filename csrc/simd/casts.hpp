// Copies that check for infinities and NaNs, and casts to 16 bits and back.
#pragma once

#include "sink.hpp"

namespace laconic {
namespace {

template <class Word>
INLINE bool copy_checked(const uint8_t* from, uint8_t* to, int64_t count, Word exponent) {
  Word bad = 0;
  auto plain = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Word v;
      std::memcpy(&v, from + i * sizeof v, sizeof v);
      bad |= static_cast<Word>((v & exponent) == exponent ? 1 : 0);
      std::memcpy(to + i * sizeof v, &v, sizeof v);
    }
  };
  int64_t i = 0;
#if defined(__AVX2__)
  if (sizeof(Word) == 4 && count * 4 >= kStreamBytes) {
    i = before_line(to, 4, count);
    plain(0, i);
    const u8v mask = splat_u(static_cast<uint32_t>(exponent));
    i8 not_finite = {};
    for (; i + 16 <= count; i += 16) {
      fetch_ahead(reinterpret_cast<const float*>(from) + (i / kBlock + 1) * kBlock, i % kBlock / 16);
      const u8v low = load<u8v>(from + 4 * i), high = load<u8v>(from + 4 * i + 32);
      not_finite |= (i8)((low & mask) == mask) | (i8)((high & mask) == mask);
      stream_line(to + 4 * i, (__m256i)low, (__m256i)high);
    }
    for (int lane = 0; lane < 8; ++lane) bad |= static_cast<Word>(not_finite[lane]);
    finish_stores();
  }
#endif
  plain(i, count);
  return bad == 0;
}
bool copy_finite(const uint8_t* from, uint8_t* to, int64_t nbytes, int itemsize, uint64_t exponent) {
  switch (itemsize) {
    case 2: return copy_checked<uint16_t>(from, to, nbytes / 2, static_cast<uint16_t>(exponent));
    case 4: return copy_checked<uint32_t>(from, to, nbytes / 4, static_cast<uint32_t>(exponent));
    default: return copy_checked<uint64_t>(from, to, nbytes / 8, exponent);
  }
}
bool add_raw(const uint8_t* from, Sink sink, int64_t begin, int64_t end) {
  uint32_t bad = 0;
  for (int64_t i = begin; i < end; ++i) {
    const float v = read_float(from, i);
    bad |= magnitude_bits(v) >= kNonFinite;
    const float product = v * sink.weight;
    sink.out[i] = sink.out[i] + product;
  }
  return !bad;
}

uint16_t to_half(float value) {  // to nearest even; the caller has clamped to ±65504
  uint32_t x;
  std::memcpy(&x, &value, 4);
  const uint32_t sign = x >> 16 & 0x8000, magnitude = x & kMagnitude;
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal half, rounded by the adder
    float v;
    std::memcpy(&v, &magnitude, 4);
    v += 0.5f;
    uint32_t r;
    std::memcpy(&r, &v, 4);
    return static_cast<uint16_t>(sign | (r - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}
float from_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7FFF;
  uint32_t x;
  if (rest >= 0x7C00) {
    x = 0x7F800000u | (rest & 0x3FF) << 13;
  } else if (rest >= 0x400) {
    x = (rest << 13) + 0x38000000u;
  } else {
    const float v = static_cast<float>(rest) * 0x1p-24f;
    std::memcpy(&x, &v, 4);
  }
  x |= sign;
  float v;
  std::memcpy(&v, &x, 4);
  return v;
}
INLINE uint16_t to_bf16(float value) {
  uint32_t x;
  std::memcpy(&x, &value, 4);
  return static_cast<uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}

#if defined(__AVX2__)
INLINE __m128i to_half8(f8 v) { return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
INLINE __m128i to_bf16_8(f8 v) {
  const u8v x = bits_of(v), rounded = (x + (0x7FFFu + (x >> 16 & 1u))) >> 16;
  const __m256i halves = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
}
#endif

template <bool Half>
uint32_t cast_encode_as(const float* x, uint8_t* out, int64_t begin, int64_t end, int64_t* saturated) {
  constexpr float limit = Half ? 65504.0f : 0x1.FEp127f;
  const uint32_t limit_bits = magnitude_bits(limit);
  uint32_t amax_bits = 0;
  int64_t beyond = 0, i = begin;
  auto plain = [&](int64_t stop) {
    for (; i < stop; ++i) {
      const uint32_t magnitude = magnitude_bits(x[i]);
      amax_bits = most(amax_bits, magnitude);
      beyond += magnitude > limit_bits;
      const float v = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
      const uint16_t r = Half ? to_half(v) : to_bf16(v);
      std::memcpy(out + 2 * i, &r, 2);
    }
  };
#if defined(__AVX2__)
  plain(begin + before_line(out + 2 * begin, 2, end - begin));
  const bool stream = (end - begin) * 2 >= kStreamBytes;
  const u8v mask = splat_u(kMagnitude), top = splat_u(limit_bits);
  const f8 most_v = splat(limit), least_v = splat(-limit);
  u8v largest = {};
  i8 over = {};
  for (; i + 32 <= end; i += 32) {
    const float* ahead = x + (i / kBlock + 1) * kBlock;
    fetch_ahead(ahead, i % kBlock / 16);
    fetch_ahead(ahead, i % kBlock / 16 + 1);
    __m128i narrow[4];
    unroll<4>([&](auto part) {
      f8 v = load<f8>(x + i + 8 * part);
      const u8v magnitude = bits_of(v) & mask;
      largest = larger(largest, magnitude);
      over -= (i8)((i8)magnitude > (i8)top);
      v = v > most_v ? most_v : v;
      v = v < least_v ? least_v : v;
      narrow[part] = Half ? to_half8(v) : to_bf16_8(v);
    });
    const __m256i low = _mm256_set_m128i(narrow[1], narrow[0]), high = _mm256_set_m128i(narrow[3], narrow[2]);
    if (stream) {
      stream_line(out + 2 * i, low, high);
    } else {
      store(out + 2 * i, low);
      store(out + 2 * i + 32, high);
    }
  }
  amax_bits = most(amax_bits, fold_max(largest));
  for (int lane = 0; lane < 8; ++lane) beyond += over[lane];
  finish_stores();
#endif
  plain(end);
  *saturated = beyond;
  return amax_bits;
}
uint32_t cast_encode(const float* x, bool half, uint8_t* out, int64_t begin, int64_t end, int64_t* saturated) {
  return half ? cast_encode_as<true>(x, out, begin, end, saturated)
              : cast_encode_as<false>(x, out, begin, end, saturated);
}
bool cast_decode(const uint8_t* from, bool half, Sink sink, int64_t begin, int64_t end) {
  const uint16_t exponent = half ? 0x7C00 : 0x7F80;
  bool finite = true;
  int64_t i = begin;
#if defined(__AVX2__)
  const Store how = how_to_store(sink);
  const f8 weight = splat(sink.weight);
  for (; i + 8 <= end; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
    const __m128i mask = _mm_set1_epi16(static_cast<short>(exponent));
    finite &= _mm_movemask_epi8(_mm_cmpeq_epi16(_mm_and_si128(h, mask), mask)) == 0;
    const f8 v = half ? (f8)_mm256_cvtph_ps(h) : (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
    if (how == Store::add) {
      emit<Store::add>(sink.out + i, v, weight);
    } else if (how == Store::stream) {
      emit<Store::stream>(sink.out + i, v, weight);
    } else {
      emit<Store::plain>(sink.out + i, v, weight);
    }
  }
  finish_stores();
#endif
  for (; i < end; ++i) {
    uint16_t h;
    std::memcpy(&h, from + 2 * i, 2);
    finite &= (h & exponent) != exponent;
    float v;
    const uint32_t wide = static_cast<uint32_t>(h) << 16;
    if (half) {
      v = from_half(h);
    } else {
      std::memcpy(&v, &wide, 4);
    }
    emit_one(sink, i, v);
  }
  return finite;
}


// Adds random bits below the last one that bfloat16 keeps, and cuts. What would become infinite is cut alone.
void stochastic_bf16(const float* x, HashKey key, uint8_t* out, int64_t begin, int64_t end) {
  constexpr uint32_t exponent = kNonFinite;
  int64_t i = begin;
  auto plain = [&](int64_t stop) {
    for (; i < stop; ++i) {
      uint32_t bits;
      std::memcpy(&bits, x + i, 4);
      const uint32_t sum = bits + (hash32(static_cast<uint64_t>(i), key) >> 16);
      const bool infinite = (bits & exponent) == exponent || (sum & exponent) == exponent;
      const uint16_t r = static_cast<uint16_t>((infinite ? bits : sum) >> 16);
      std::memcpy(out + 2 * i, &r, 2);
    }
  };
#if defined(__AVX2__)
  plain(least(end, (begin + 7) / 8 * 8));
  const u8v mask = splat_u(exponent), high = splat_u(key.high);
  for (; i + 8 <= end; i += 8) {  // 8 counters from a multiple of 8 on share their upper word
    const u8v counter = splat_u(static_cast<uint32_t>(i)) + kLanes;
    const u8v bits = load<u8v>(x + i), low = low_key_word(key, static_cast<uint64_t>(i));
    const u8v sum = bits + (hash8(counter, low, high) >> 16);
    const u8v infinite = (u8v)((bits & mask) == mask) | (u8v)((sum & mask) == mask);
    const u8v short_bits = ((bits & infinite) | (sum & ~infinite)) >> 16;
    const __m256i halves = _mm256_packus_epi32((__m256i)short_bits, (__m256i)short_bits);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + 2 * i),
                     _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08)));
  }
#endif
  plain(end);
}

}  // namespace
}  // namespace laconic
