// Rice-coded gaps between positions: low bits packed, high parts in unary.
#pragma once

#include "packing.hpp"

#include <type_traits>

namespace laconic {
namespace {

template <class Index>
using Gap = std::make_unsigned_t<Index>;  // positions are below 2^31 or 2^63

// How many positions are skipped before each of `count` positions from `at` on.
template <class Index>
INLINE void gaps_of(const Index* positions, int64_t at, int64_t count, Gap<Index>* gaps) {
  const Index* here = positions + at;
  gaps[0] = static_cast<Gap<Index>>(at == 0 ? here[0] : here[0] - here[-1] - 1);
  for (int64_t i = 1; i < count; ++i) gaps[i] = static_cast<Gap<Index>>(here[i] - here[i - 1] - 1);
}

// Adds up the gaps' high parts for three numbers of low bits, from `first` on.
template <class Index>
INLINE void sum_gaps(const Index* positions, int64_t k, int first, uint64_t* high) {
  alignas(64) Gap<Index> gaps[kGroup];
  for (int64_t at = 0; at < k; at += kGroup) {
    const int64_t count = least(kGroup, k - at);
    gaps_of(positions, at, count, gaps);
    Gap<Index> sum[3] = {};  // of gaps between positions that Index holds, so they do not overflow
    for (int64_t i = 0; i < count; ++i) {
      sum[0] += gaps[i] >> first;
      sum[1] += gaps[i] >> (first + 1);
      sum[2] += gaps[i] >> (first + 2);
    }
    for (int j = 0; j < 3; ++j) high[j] += sum[j];
  }
}
void sum_gaps32(const int32_t* p, int64_t k, int first, uint64_t* high) { sum_gaps(p, k, first, high); }
void sum_gaps64(const int64_t* p, int64_t k, int first, uint64_t* high) { sum_gaps(p, k, first, high); }

// Writes numbers in unary, each as zeros and a one, into bytes that are zero. Numbers include their one: from 1 on.
class UnaryWriter {
 public:
  UnaryWriter(uint8_t* out, int64_t nbytes) : at_(out), end_(out + nbytes) {}

  // A whole group. The bits of four small numbers are computed for all fours at once, then moved to their place.
  template <class Number>
  INLINE void put_group(const Number* numbers) {
    constexpr int64_t kSmall = 14;  // four of them and seven bits that wait fit a word
    Number largest = 0;
    for (int64_t i = 0; i < kGroup; ++i) largest = numbers[i] > largest ? numbers[i] : largest;
    if (largest > static_cast<Number>(kSmall) || end_ - at_ < kGroup * kSmall / 8 + 16) {
      for (int64_t i = 0; i < kGroup; i += 4) put4(numbers[i], numbers[i + 1], numbers[i + 2], numbers[i + 3]);
      return;
    }
    alignas(64) uint64_t words[kGroup / 4], sizes[kGroup / 4];
    fours(numbers, words, sizes);
    for (int64_t i = 0; i < kGroup / 4; ++i) {
      held_ |= words[i] << filled_;
      filled_ += sizes[i];
      std::memcpy(at_, &held_, 8);
      drop_whole_bytes();
    }
  }
  INLINE void put4(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    const uint64_t ab = a + b, abc = ab + c, all = abc + d;
    if (a > 63 || b > 63 || c > 63 || d > 63 || filled_ + all > 63) {
      put(a), put(b), put(c), put(d);
      return;
    }
    held_ |= (uint64_t{1} << (a - 1) | uint64_t{1} << (ab - 1) | uint64_t{1} << (abc - 1) | uint64_t{1} << (all - 1))
             << filled_;
    filled_ += all;
    store_held();
  }
  INLINE void put(uint64_t number) {
    const uint64_t place = filled_ + number - 1;
    if (place < 63) {
      held_ |= uint64_t{1} << place;
      filled_ = place + 1;
    } else {
      if (filled_) *at_ = static_cast<uint8_t>(held_);
      at_ += place >> 3;
      held_ = uint64_t{1} << (place & 7);
      filled_ = (place & 7) + 1;
    }
    store_held();
  }
  void finish() {
    if (filled_) *at_ = static_cast<uint8_t>(held_);
  }

 private:
  // The unary bits of each four numbers of a group, and how many bits they are.
  template <class Number>
  INLINE static void fours(const Number* numbers, uint64_t* words, uint64_t* sizes) {
    int64_t i = 0;
#if defined(__AVX2__)
    if constexpr (sizeof(Number) == 4) {
      typedef uint64_t q4 __attribute__((vector_size(32)));
      const q4 one = {1, 1, 1, 1}, odd = {0, ~uint64_t{0}, 0, ~uint64_t{0}};
      for (; i < kGroup / 4; i += 4) {
        const auto two_fours = [&](int64_t at, q4* size) {
          const q4 pair = load<q4>(numbers + at), a = pair & 0xFFFFFFFFu, ab = a + (pair >> 32);
          const q4 other = __builtin_shuffle(ab, q4{1, 0, 3, 2}), before = other & odd;  // bits before the second pair
          const q4 bits = (one << a | one << ab) << before;
          *size = ab + other;
          return (bits | __builtin_shuffle(bits, q4{1, 0, 3, 2})) >> 1;
        };
        q4 low_size, high_size;
        const q4 low = two_fours(4 * i, &low_size), high = two_fours(4 * i + 8, &high_size);
        store(words + i, __builtin_shuffle(low, high, q4{0, 2, 4, 6}));
        store(sizes + i, __builtin_shuffle(low_size, high_size, q4{0, 2, 4, 6}));
      }
    }
#endif
    for (; i < kGroup / 4; ++i) {
      const uint64_t a = numbers[4 * i], ab = a + numbers[4 * i + 1], abc = ab + numbers[4 * i + 2];
      sizes[i] = abc + numbers[4 * i + 3];
      words[i] = (uint64_t{1} << a | uint64_t{1} << ab | uint64_t{1} << abc | uint64_t{1} << sizes[i]) >> 1;
    }
  }
  INLINE void store_held() {
    if (end_ - at_ >= 8) {
      std::memcpy(at_, &held_, 8);
    } else {
      std::memcpy(at_, &held_, static_cast<size_t>(end_ - at_));
    }
    drop_whole_bytes();
  }
  INLINE void drop_whole_bytes() {
    at_ += filled_ >> 3;
    held_ >>= filled_ & 56;
    filled_ &= 7;
  }

  uint8_t *at_, *end_;
  uint64_t held_ = 0, filled_ = 0;  // between two calls fewer than eight bits wait
};

template <class Index>
INLINE void rice_write(const Index* positions, int64_t k, int low_bits, uint8_t* low, uint8_t* unary,
                       int64_t unary_nbytes) {
  const uint32_t mask = (1u << low_bits) - 1;
  const PackGroup pack_low = pack_group_of(low_bits);
  alignas(64) Gap<Index> gaps[kGroup];
  alignas(64) uint32_t symbols[kGroup];
  std::memset(unary, 0, static_cast<size_t>(unary_nbytes));
  UnaryWriter writer(unary, unary_nbytes);
  for (int64_t at = 0; at < k; at += kGroup) {
    const int64_t count = least(kGroup, k - at);
    gaps_of(positions, at, count, gaps);
    for (int64_t i = 0; i < count; ++i) {
      symbols[i] = static_cast<uint32_t>(gaps[i]) & mask;
      gaps[i] = (gaps[i] >> low_bits) + 1;
    }
    uint8_t* out = low + at / kGroup * 32 * low_bits;
    if (count == kGroup) {
      writer.put_group(gaps);
      pack_low(symbols, out);
      continue;
    }
    for (int64_t i = 0; i < count; ++i) writer.put(gaps[i]);
    if (low_bits) pack_tail(symbols, count, low_bits, out);
  }
  writer.finish();
}
void rice_write32(const int32_t* p, int64_t k, int low_bits, uint8_t* low, uint8_t* unary, int64_t nbytes) {
  rice_write(p, k, low_bits, low, unary, nbytes);
}
void rice_write64(const int64_t* p, int64_t k, int low_bits, uint8_t* low, uint8_t* unary, int64_t nbytes) {
  rice_write(p, k, low_bits, low, unary, nbytes);
}

// Turns the indices of unary bits into positions: `first` positions, whose low bits add up to `low_sum`, precede them.
// Returns the new sum.
int64_t rice_positions(const uint32_t* low, int64_t count, int low_bits, int64_t first, int64_t low_sum, int64_t* ends) {
  int64_t i = 0;
#if defined(__AVX512F__)
  const __m512i none = _mm512_setzero_si512(), last = _mm512_set1_epi64(7), eight = _mm512_set1_epi64(8);
  const __m128i shift = _mm_cvtsi32_si128(low_bits);
  __m512i before = _mm512_set1_epi64(low_sum);
  __m512i rank = _mm512_add_epi64(_mm512_set1_epi64(first), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
  for (; i + 8 <= count; i += 8) {
    __m512i sum = _mm512_cvtepu32_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(low + i)));
    sum = _mm512_add_epi64(sum, _mm512_alignr_epi64(sum, none, 7));  // of neighbours, of four, of all lanes up to one
    sum = _mm512_add_epi64(sum, _mm512_alignr_epi64(sum, none, 6));
    sum = _mm512_add_epi64(sum, _mm512_alignr_epi64(sum, none, 4));
    sum = _mm512_add_epi64(sum, before);
    before = _mm512_permutexvar_epi64(last, sum);
    const __m512i high = _mm512_sll_epi64(_mm512_sub_epi64(_mm512_loadu_si512(ends + i), rank), shift);
    _mm512_storeu_si512(ends + i, _mm512_add_epi64(high, _mm512_add_epi64(sum, rank)));
    rank = _mm512_add_epi64(rank, eight);
  }
  low_sum = _mm_cvtsi128_si64(_mm512_castsi512_si128(before));
#endif
  for (; i < count; ++i) {
    low_sum += low[i];
    ends[i] = ((ends[i] - (first + i)) << low_bits) + low_sum + first + i;
  }
  return low_sum;
}

}  // namespace
}  // namespace laconic
