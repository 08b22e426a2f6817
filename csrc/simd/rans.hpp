// rANS coding: interleaved states take turns with the symbols and freq_start one stream of 16-bit words.
//
// States lie in [2^15, 2^31), so that a division by a frequency is exact as a multiplication by a 32-bit reciprocal.
// The writer goes from the last symbol to the first, so the reader meets words in the order of memory. With 32 states
// in vectors a step is a table look-up, a product and an expansion of the next words into the lanes that need one.
// Look-ups are scalar loads: gathers are several times slower on processors with mitigations against data leaks.
#pragma once

#include "huffman.hpp"

namespace laconic {
namespace {

constexpr int64_t kRansBlock = 512;  // symbols looked up together, apart from the chain of states

// Keeps the compiler from turning a loop of loads into a gather.
INLINE uint32_t scalar_index(uint32_t index) {
  asm("" : "+r"(index));
  return index;
}

INLINE uint32_t rans_push(uint32_t x, uint32_t freq_start, uint32_t reciprocal, int scale) {
  const uint32_t freq = freq_start & 0xFFFF, start = freq_start >> 16;
  const int shift = freq > 1 ? 32 - __builtin_clz(freq - 1) : 0;
  const uint32_t quotient = static_cast<uint32_t>(static_cast<uint64_t>(x) * reciprocal >> (31 + shift));
  return x + quotient * ((1u << scale) - freq) + start;
}

// Encodes symbols [from, to) one by one, the last first.
template <class Symbol>
INLINE uint8_t* rans_write_some(const RansWrite& w, const Symbol* symbols, int64_t from, int64_t to, uint32_t* state,
                                uint8_t* out) {
  for (int64_t i = to - 1; i >= from; --i) {
    uint32_t& x = state[i & (w.num_states - 1)];
    const uint64_t entry = w.table[symbols[i]];
    const uint32_t freq_start = static_cast<uint32_t>(entry);
    if (x >= (freq_start & 0xFFFF) << (31 - w.scale)) {
      const uint16_t word = static_cast<uint16_t>(x);
      out -= 2;
      std::memcpy(out, &word, 2);
      x >>= 16;
    }
    x = rans_push(x, freq_start, static_cast<uint32_t>(entry >> 32), w.scale);
  }
  return out;
}

#if defined(__AVX512F__)
typedef __m512i Lanes;
constexpr int kWidth = 16;
INLINE Lanes lanes_load(const uint32_t* p) { return _mm512_loadu_si512(p); }
INLINE void lanes_store(uint32_t* p, Lanes v) { _mm512_storeu_si512(p, v); }
INLINE void lanes_store16(uint16_t* p, Lanes v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(v));
}
INLINE Lanes rans_push_lanes(const RansWrite& w, Lanes x, const uint64_t* entries, uint8_t*& out) {
  const Lanes low = _mm512_loadu_si512(entries), high = _mm512_loadu_si512(entries + 8);
  const Lanes even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  const Lanes freq_start = _mm512_permutex2var_epi32(low, even, high);
  const Lanes reciprocal =
      _mm512_permutex2var_epi32(low, _mm512_add_epi32(even, _mm512_set1_epi32(1)), high);
  const Lanes freq = _mm512_and_si512(freq_start, _mm512_set1_epi32(0xFFFF)), start = _mm512_srli_epi32(freq_start, 16);
  const Lanes limit = _mm512_sll_epi32(freq, _mm_cvtsi32_si128(31 - w.scale));
  const __mmask16 full = _mm512_cmpge_epu32_mask(x, limit);
  const int words = __builtin_popcount(full);
  out -= 2 * words;
  _mm256_mask_storeu_epi16(out, static_cast<__mmask16>((1u << words) - 1),
                           _mm512_cvtepi32_epi16(_mm512_maskz_compress_epi32(full, x)));
  x = _mm512_mask_srli_epi32(x, full, x, 16);
  const Lanes below = _mm512_sub_epi32(freq, _mm512_set1_epi32(1));
  const Lanes shift = _mm512_sub_epi32(_mm512_set1_epi32(63), _mm512_lzcnt_epi32(below));  // 31 + bits of freq - 1
  const Lanes quotient_even = _mm512_srlv_epi64(_mm512_mul_epu32(x, reciprocal),
                                                _mm512_and_si512(shift, _mm512_set1_epi64(0xFFFFFFFF)));
  const Lanes quotient_odd = _mm512_srlv_epi64(
      _mm512_mul_epu32(_mm512_srli_epi64(x, 32), _mm512_srli_epi64(reciprocal, 32)), _mm512_srli_epi64(shift, 32));
  const Lanes quotient = _mm512_mask_blend_epi32(0xAAAA, quotient_even, _mm512_slli_epi64(quotient_odd, 32));
  const Lanes rest = _mm512_sub_epi32(_mm512_set1_epi32(1 << w.scale), freq);
  return _mm512_add_epi32(_mm512_add_epi32(x, start), _mm512_mullo_epi32(quotient, rest));
}
#elif defined(__AVX2__)
typedef __m256i Lanes;
constexpr int kWidth = 8;
INLINE Lanes lanes_load(const uint32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
INLINE void lanes_store(uint32_t* p, Lanes v) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), v); }
INLINE void lanes_store16(uint16_t* p, Lanes v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
// For each mask of eight lanes: the shuffles that move the words of its lanes to the end, and words to its lanes.
struct WordShuffles {
  alignas(16) uint8_t to_end[256][16];
  alignas(16) uint8_t to_lanes[256][16];
  constexpr WordShuffles() : to_end(), to_lanes() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0, last = 7;
      for (int i = 0; i < 16; ++i) to_end[mask][i] = to_lanes[mask][i] = 0x80;
      for (int lane = 0; lane < 8; ++lane) {
        if (!(mask >> lane & 1)) continue;
        to_lanes[mask][2 * lane] = static_cast<uint8_t>(2 * next);
        to_lanes[mask][2 * lane + 1] = static_cast<uint8_t>(2 * next + 1);
        ++next;
      }
      for (int lane = 7; lane >= 0; --lane) {
        if (!(mask >> lane & 1)) continue;
        to_end[mask][2 * last] = static_cast<uint8_t>(2 * lane);
        to_end[mask][2 * last + 1] = static_cast<uint8_t>(2 * lane + 1);
        --last;
      }
    }
  }
};
constexpr WordShuffles kWordShuffles;
INLINE Lanes rans_push_lanes(const RansWrite& w, Lanes x, const uint64_t* entries, uint8_t*& out) {
  const __m256 low = _mm256_loadu_ps(reinterpret_cast<const float*>(entries));
  const __m256 high = _mm256_loadu_ps(reinterpret_cast<const float*>(entries + 4));
  const Lanes freq_start = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0x88)), 0xD8);
  const Lanes reciprocal = _mm256_permute4x64_epi64(_mm256_castps_si256(_mm256_shuffle_ps(low, high, 0xDD)), 0xD8);
  const Lanes freq = _mm256_and_si256(freq_start, _mm256_set1_epi32(0xFFFF)), start = _mm256_srli_epi32(freq_start, 16);
  const Lanes limit = _mm256_sll_epi32(freq, _mm_cvtsi32_si128(31 - w.scale));
  // Both are below 2^31, so a signed comparison is correct.
  const Lanes full = _mm256_cmpgt_epi32(x, _mm256_sub_epi32(limit, _mm256_set1_epi32(1)));
  const unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(full)));
  const Lanes word = _mm256_and_si256(x, _mm256_set1_epi32(0xFFFF));
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(word), _mm256_extracti128_si256(word, 1));
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kWordShuffles.to_end[mask]));
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out - 16), _mm_shuffle_epi8(words, order));
  out -= 2 * __builtin_popcount(mask);
  x = _mm256_blendv_epi8(x, _mm256_srli_epi32(x, 16), full);
  // The number of bits of freq - 1, from the float exponent of 2 freq - 1.
  const Lanes twice = _mm256_sub_epi32(_mm256_add_epi32(freq, freq), _mm256_set1_epi32(1));
  const Lanes exponent = _mm256_srli_epi32(_mm256_castps_si256(_mm256_cvtepi32_ps(twice)), 23);
  const Lanes shift = _mm256_add_epi32(exponent, _mm256_set1_epi32(31 - 127));
  const Lanes even = _mm256_srlv_epi64(_mm256_mul_epu32(x, reciprocal),
                                       _mm256_and_si256(shift, _mm256_set1_epi64x(0xFFFFFFFF)));
  const Lanes odd = _mm256_srlv_epi64(
      _mm256_mul_epu32(_mm256_srli_epi64(x, 32), _mm256_srli_epi64(reciprocal, 32)), _mm256_srli_epi64(shift, 32));
  const Lanes quotient = _mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
  const Lanes rest = _mm256_sub_epi32(_mm256_set1_epi32(1 << w.scale), freq);
  return _mm256_add_epi32(_mm256_add_epi32(x, _mm256_mullo_epi32(quotient, rest)), start);
}
#endif

// Writes backwards from `end`; returns the first word. The 16 bytes before it may be overwritten.
template <class Symbol>
uint8_t* rans_write(const RansWrite& w, const Symbol* symbols, int64_t n, uint8_t* end, uint32_t* state) {
  for (int i = 0; i < w.num_states; ++i) state[i] = kRansLow;
  uint8_t* out = end;
  int64_t i = n;
#if defined(__AVX2__)
  if (w.num_states == kRansStates) {
    constexpr int kVectors = kRansStates / kWidth;
    out = rans_write_some(w, symbols, n & -kRansStates, n, state, out);
    i = n & -kRansStates;
    Lanes x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = lanes_load(state + v * kWidth);
    uint64_t entries[kRansBlock];
    while (i > 0) {
      const int64_t count = least(kRansBlock, i), begin = i - count;
      for (int64_t j = 0; j < count; ++j) entries[j] = w.table[scalar_index(symbols[begin + j])];
      for (; i > begin; i -= kRansStates) {
        unroll<kVectors>([&](auto k) {
          constexpr int v = kVectors - 1 - k;
          x[v] = rans_push_lanes(w, x[v], entries + (i - begin) - kRansStates + v * kWidth, out);
        });
      }
    }
    for (int v = 0; v < kVectors; ++v) lanes_store(state + v * kWidth, x[v]);
    return out;
  }
#endif
  return rans_write_some(w, symbols, 0, i, state, out);
}
uint8_t* rans_write8(const RansWrite& w, const uint8_t* symbols, int64_t n, uint8_t* end, uint32_t* state) {
  return rans_write(w, symbols, n, end, state);
}
uint8_t* rans_write16(const RansWrite& w, const uint16_t* symbols, int64_t n, uint8_t* end, uint32_t* state) {
  return rans_write(w, symbols, n, end, state);
}

template <class To>
INLINE const uint8_t* rans_read_some(const RansRead& r, const uint8_t* in, int64_t from, int64_t to, uint32_t* state,
                                     const To& sink) {
  const uint32_t mask = (1u << r.scale) - 1;
  for (int64_t i = from; i < to; ++i) {
    uint32_t& x = state[i & (r.num_states - 1)];
    const uint32_t slot = x & mask, step = r.step[slot];
    sink.put(sink.out + i, r.value[slot]);
    x = (step & 0xFFFF) * (x >> r.scale) + (step >> 16);
    if (x < kRansLow) {
      if (r.end - in < 2) return nullptr;
      uint16_t word;
      std::memcpy(&word, in, 2);
      in += 2;
      x = x << 16 | word;
    }
  }
  return in;
}

#if defined(__AVX2__)
// Looks up the steps of the slots, and stores each slot's value. Scalar loads instead of a gather: see above.
template <class To>
INLINE Lanes rans_look_up(const RansRead& r, Lanes slot, const To& sink, int64_t i) {
  alignas(64) uint16_t slots[kWidth];
  lanes_store16(slots, slot);
  __m128i quarter[kWidth / 4];
  unroll<kWidth / 4>([&](auto q) {
    uint32_t at[4];
    unroll<4>([&](auto k) {
      at[k] = scalar_index(slots[4 * q + k]);
      sink.put(sink.out + i + 4 * q + k, r.value[at[k]]);
    });
    quarter[q] = _mm_setr_epi32(static_cast<int>(r.step[at[0]]), static_cast<int>(r.step[at[1]]),
                                static_cast<int>(r.step[at[2]]), static_cast<int>(r.step[at[3]]));
  });
  const __m256i low = _mm256_inserti128_si256(_mm256_castsi128_si256(quarter[0]), quarter[1], 1);
#if defined(__AVX512F__)
  const __m256i high = _mm256_inserti128_si256(_mm256_castsi128_si256(quarter[2]), quarter[3], 1);
  return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1);
#else
  return low;
#endif
}
template <class To>
INLINE Lanes rans_pop_lanes(const RansRead& r, Lanes x, const uint8_t*& in, const To& sink, int64_t i) {
#if defined(__AVX512F__)
  const Lanes step = rans_look_up(r, _mm512_and_si512(x, _mm512_set1_epi32((1 << r.scale) - 1)), sink, i);
  const Lanes freq = _mm512_and_si512(step, _mm512_set1_epi32(0xFFFF));
  const Lanes upper = _mm512_srl_epi32(x, _mm_cvtsi32_si128(r.scale));
  x = _mm512_add_epi32(_mm512_mullo_epi32(freq, upper), _mm512_srli_epi32(step, 16));
  const __mmask16 low = _mm512_cmplt_epu32_mask(x, _mm512_set1_epi32(static_cast<int>(kRansLow)));
  const Lanes words = _mm512_maskz_expand_epi32(
      low, _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(in))));
  in += 2 * __builtin_popcount(low);
  return _mm512_mask_or_epi32(x, low, _mm512_slli_epi32(x, 16), words);
#else
  const Lanes step = rans_look_up(r, _mm256_and_si256(x, _mm256_set1_epi32((1 << r.scale) - 1)), sink, i);
  const Lanes freq = _mm256_and_si256(step, _mm256_set1_epi32(0xFFFF));
  const Lanes upper = _mm256_srl_epi32(x, _mm_cvtsi32_si128(r.scale));
  x = _mm256_add_epi32(_mm256_mullo_epi32(freq, upper), _mm256_srli_epi32(step, 16));
  const Lanes low = _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(kRansLow)), x);
  const unsigned mask = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(low)));
  const __m128i order = _mm_load_si128(reinterpret_cast<const __m128i*>(kWordShuffles.to_lanes[mask]));
  const __m128i moved = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(in)), order);
  in += 2 * __builtin_popcount(mask);
  const Lanes refilled = _mm256_or_si256(_mm256_slli_epi32(x, 16), _mm256_cvtepu16_epi32(moved));
  return _mm256_blendv_epi8(x, refilled, low);
#endif
}
#endif

template <class To>
bool rans_read_to(const RansRead& r, int64_t n, const To& sink) {
  uint32_t state[kRansStates];
  std::memcpy(state, r.states, static_cast<size_t>(r.num_states) * 4);
  const uint8_t* in = r.words;
  int64_t i = 0;
#if defined(__AVX2__)
  if (r.num_states == kRansStates) {
    constexpr int kVectors = kRansStates / kWidth;
    Lanes x[kVectors];
    for (int v = 0; v < kVectors; ++v) x[v] = lanes_load(state + v * kWidth);
    for (; i + kRansStates <= n && r.end - in >= 2 * kRansStates + 32; i += kRansStates) {
      unroll<kVectors>([&](auto v) { x[v] = rans_pop_lanes(r, x[v], in, sink, i + v * kWidth); });
    }
    for (int v = 0; v < kVectors; ++v) lanes_store(state + v * kWidth, x[v]);
  }
#endif
  in = rans_read_some(r, in, i, n, state, sink);
  bool ends_well = in == r.end;
  for (int k = 0; k < r.num_states; ++k) ends_well &= state[k] == kRansLow;
  return ends_well;
}
bool rans_read_floats(const RansRead& r, const Sink& sink, int64_t begin, int64_t n) {
  if (sink.accumulate) return rans_read_to(r, n, ToSum{sink.out + begin, sink.weight});
  return rans_read_to(r, n, ToFloat{sink.out + begin});
}
bool rans_read8(const RansRead& r, int64_t n, uint8_t* out) { return rans_read_to(r, n, ToSymbol<uint8_t>{out}); }
bool rans_read16(const RansRead& r, int64_t n, uint16_t* out) { return rans_read_to(r, n, ToSymbol<uint16_t>{out}); }

}  // namespace
}  // namespace laconic
