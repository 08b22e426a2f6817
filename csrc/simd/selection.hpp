// Selection: collects the entries that reach a threshold, and scatters values to positions.
#pragma once

#include "sink.hpp"

namespace laconic {
namespace {

#if defined(__AVX2__)
// For each mask of eight lanes, the permutation that moves its set lanes to the front.
struct Compress {
  alignas(32) uint32_t order[256][8];
  constexpr Compress() : order() {
    for (int mask = 0; mask < 256; ++mask) {
      int at = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if (mask >> lane & 1) order[mask][at++] = static_cast<uint32_t>(lane);
      }
    }
  }
};
constexpr Compress kCompress;

// Writes bits and offsets of the lanes that are set, moved to the front, and returns their number. Writes all eight.
INLINE int64_t append8(i8 set, u8v bits, u8v offsets, uint32_t* bits_out, uint32_t* offsets_out) {
  const unsigned hit = static_cast<unsigned>(_mm256_movemask_ps((__m256)set));
  const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kCompress.order[hit]));
  store(bits_out, (u8v)_mm256_permutevar8x32_epi32((__m256i)bits, order));
  store(offsets_out, (u8v)_mm256_permutevar8x32_epi32((__m256i)offsets, order));
  return __builtin_popcount(hit);
}
#endif

// Appends offset + lane and raw bits of the lanes whose masked bits are at least the threshold. Writes up to 16 entries
// past the count, so the arrays must be that much larger.
INLINE int64_t append16(const uint32_t* raw, uint32_t mask, uint32_t threshold, uint32_t offset, uint32_t* offsets,
                        uint32_t* bits, int64_t count) {
#if defined(__AVX512F__)
  const __m512i v = _mm512_loadu_si512(raw);
  const __mmask16 hit = _mm512_cmpge_epu32_mask(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(mask))),
                                                _mm512_set1_epi32(static_cast<int>(threshold)));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(offset)));
  _mm512_storeu_si512(offsets + count, _mm512_maskz_compress_epi32(hit, index));
  _mm512_storeu_si512(bits + count, _mm512_maskz_compress_epi32(hit, v));
  return count + __builtin_popcount(hit);
#elif defined(__AVX2__)
  for (int half = 0; half < 16; half += 8) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(raw + half));
    const __m256i masked = _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(mask)));
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(threshold));
    const __m256i reached = _mm256_cmpeq_epi32(_mm256_max_epu32(masked, limit), masked);
    const unsigned hit = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(reached)));
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kCompress.order[hit]));
    const __m256i index = _mm256_add_epi32(order, _mm256_set1_epi32(static_cast<int>(offset) + half));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(offsets + count), index);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits + count), _mm256_permutevar8x32_epi32(v, order));
    count += __builtin_popcount(hit);
  }
  return count;
#else
  for (uint32_t i = 0; i < 16; ++i) {
    offsets[count] = offset + i;
    bits[count] = raw[i];
    count += (raw[i] & mask) >= threshold;
  }
  return count;
#endif
}
INLINE int64_t append_rest(const uint32_t* raw, int64_t n, uint32_t mask, uint32_t threshold, uint32_t offset,
                           Kept* kept, int64_t count) {
  for (int64_t i = 0; i < n; ++i) {
    kept->offset[count] = offset + static_cast<uint32_t>(i);
    kept->bits[count] = raw[i];
    count += (raw[i] & mask) >= threshold;
  }
  return count;
}

int64_t keep_reaching(const Kept& candidates, uint32_t threshold, uint32_t base, uint32_t* positions, float* values,
                      int64_t count, int64_t k, uint32_t* amax_bits) {
  uint32_t* raw = reinterpret_cast<uint32_t*>(values);
  u8v largest = splat_u(*amax_bits);
  int64_t i = 0;
#if defined(__AVX2__)
  // Eight entries are written whatever their number, so the last ones are left to the loop below.
  for (; i + 8 <= candidates.count && count + 8 <= k; i += 8) {
    const u8v bits = load<u8v>(candidates.bits + i), offsets = load<u8v>(candidates.offset + i) + base;
    const u8v magnitude = bits & kMagnitude;
    largest = larger(largest, magnitude);
    const i8 reached = (i8)magnitude >= (i8)splat_u(threshold);
    count += append8(reached, bits, offsets, raw + count, positions + count);
  }
#endif
  uint32_t most_bits = fold_max(largest);
  for (; i < candidates.count && count < k; ++i) {
    const uint32_t magnitude = candidates.bits[i] & kMagnitude;
    positions[count] = base + candidates.offset[i];
    raw[count] = candidates.bits[i];
    most_bits = most(most_bits, magnitude);
    count += magnitude >= threshold;
  }
  *amax_bits = most_bits;
  return count;
}

bool compact(const float* x, int64_t begin, int64_t end, uint32_t threshold, Kept* kept) {
  const uint32_t* raw = reinterpret_cast<const uint32_t*>(x);
  int64_t count = kept->count;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t stop = least(at + kBlock, end);
    if (count + (stop - at) > kept->capacity) {
      // The worst case exceeds the capacity: count before writing.
      int64_t reached = 0;
      for (int64_t i = at; i < stop; ++i) reached += (raw[i] & kMagnitude) >= threshold;
      if (count + reached + 16 > kept->capacity) return false;
    }
    int64_t i = at;
    for (; i + 16 <= stop; i += 16) {
      fetch_ahead(x + at + kBlock, (i - at) / 16);
      count =
          append16(raw + i, kMagnitude, threshold, static_cast<uint32_t>(i - begin), kept->offset, kept->bits, count);
    }
    count = append_rest(raw + i, stop - i, kMagnitude, threshold, static_cast<uint32_t>(i - begin), kept, count);
  }
  kept->count = count;
  return true;
}

int64_t magnitudes_below(const uint32_t* bits, int64_t n, uint32_t limit, uint32_t* out) {
  int64_t count = 0, i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) {
    const __m512i v = _mm512_and_si512(_mm512_loadu_si512(bits + i), _mm512_set1_epi32(kMagnitude));
    const __mmask16 hit = _mm512_cmplt_epu32_mask(v, _mm512_set1_epi32(static_cast<int>(limit)));
    _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi32(hit, v));
    count += __builtin_popcount(hit);
  }
#endif
  for (; i < n; ++i) {
    out[count] = bits[i] & kMagnitude;
    count += out[count] < limit;
  }
  return count;
}

int64_t count_reaching(const float* x, int64_t begin, int64_t end, uint32_t threshold) {
  const u8v mask = splat_u(kMagnitude), limit = splat_u(threshold);
  int64_t count = 0, i = begin;
  while (i + 16 <= end) {
    const int64_t stop = least(i + kBlock, end);
    const float* ahead = x + i + kBlock;
    i8 reached = {};
    for (int64_t line = 0; i + 16 <= stop; i += 16, ++line) {
      fetch_ahead(ahead, line);
      reached -= (i8)((i8)(load<u8v>(x + i) & mask) >= (i8)limit);
      reached -= (i8)((i8)(load<u8v>(x + i + 8) & mask) >= (i8)limit);
    }
    for (int lane = 0; lane < 8; ++lane) count += reached[lane];
  }
  for (; i < end; ++i) count += magnitude_bits(x[i]) >= threshold;
  return count;
}

constexpr int64_t kHashed = 2048;  // indices that are hashed together

// What compact_hashes does for a block of up to kHashed indices from `at` on. Returns the new count. As the lower 16 bits
// of at_most are set, a hash is compared before its last step. Few are kept: only those are completed.
// visit(i) is called for every 16th index i of the block, to work on 16 values while the hashes of others are computed.
template <class Visit>
INLINE int64_t append_hashes(HashKey key, int64_t at, int64_t n, uint32_t offset, uint32_t at_most, Kept* kept,
                             int64_t count, Visit visit) {
  const uint32_t first = static_cast<uint32_t>(at);
  const u8v low = low_key_word(key, static_cast<uint64_t>(at)), high = splat_u(key.high);
  const int64_t before = count;
#if defined(__AVX512F__)
  typedef uint32_t u16v __attribute__((vector_size(64)));
  constexpr u16v lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  u16v offsets = lanes + offset;
  for (int64_t i = 0; i < n; i += 16, offsets += 16) {
    visit(i);
    const u16v hash = unfinished_hash(offsets + (first - offset), u16v{} + low[0], u16v{} + key.high);
    __mmask16 hit = _mm512_cmple_epu32_mask((__m512i)hash, _mm512_set1_epi32(static_cast<int>(at_most)));
    if (n - i < 16) hit &= static_cast<__mmask16>((1 << (n - i)) - 1);
    _mm512_storeu_si512(kept->offset + count, _mm512_maskz_compress_epi32(hit, (__m512i)offsets));
    count += __builtin_popcount(hit);
  }
#else
  for (int64_t i = 0; i < n; i += 8) {
    if (i % 16 == 0) visit(i);
    const u8v hash = unfinished_hash(splat_u(first + static_cast<uint32_t>(i)) + kLanes, low, high);
    const uint32_t from = offset + static_cast<uint32_t>(i), lanes = static_cast<uint32_t>(least(n - i, 8));
#if defined(__AVX2__)
    const i8 hit = (i8)(hash <= splat_u(at_most)) & (i8)(kLanes < splat_u(lanes));
    count += append8(hit, hash, splat_u(from) + kLanes, kept->bits + count, kept->offset + count);
#else
    uint32_t hashes[8];
    store(hashes, hash);
    for (uint32_t lane = 0; lane < lanes; ++lane) {
      kept->offset[count] = from + lane;
      count += hashes[lane] <= at_most;
    }
#endif
  }
#endif
  for (int64_t j = before; j < count; j += 8) {
    const u8v counter = load<u8v>(kept->offset + j) + (first - offset);
    store(kept->bits + j, ~hash8(counter, low, high));  // the complement turns "at most" into "at least"
  }
  return count;
}

bool compact_hashes(HashKey key, int64_t begin, int64_t end, uint32_t at_most, Kept* kept) {
  for (int64_t at = begin; at < end; at += kHashed) {
    const int64_t n = least(kHashed, end - at);
    if (kept->count + n + 16 > kept->capacity) return false;
    const uint32_t offset = static_cast<uint32_t>(at - begin);
    kept->count = append_hashes(key, at, n, offset, at_most, kept, kept->count, [](int64_t) {});
  }
  return true;
}

bool compact_hashed_values(HashKey key, const float* x, int64_t begin, int64_t end, uint32_t at_most, Kept* kept,
                           float* values, uint32_t* amax_bits) {
  u8v largest = splat_u(*amax_bits);
  for (int64_t at = begin; at < end; at += kHashed) {
    const int64_t n = least(kHashed, end - at), before = kept->count;
    if (before + n + 16 > kept->capacity) return false;
    const float *here = x + at, *ahead = x + (at / kBlock + 1) * kBlock;
    const auto magnitudes = [&](int64_t i) {
      fetch_ahead(ahead, (at % kBlock + i) / 16);
      if (i + 16 > n) return;
      largest = larger(largest, larger(load<u8v>(here + i) & kMagnitude, load<u8v>(here + i + 8) & kMagnitude));
    };
    const uint32_t offset = static_cast<uint32_t>(at - begin);
    kept->count = append_hashes(key, at, n, offset, at_most, kept, before, magnitudes);
    for (int64_t i = n / 16 * 16; i < n; ++i) largest[0] = most(largest[0], magnitude_bits(here[i]));
    for (int64_t j = before; j < kept->count; ++j) values[j] = x[begin + kept->offset[j]];
  }
  *amax_bits = fold_max(largest);
  return true;
}

int64_t set_bits(const uint8_t* bits, int64_t nbytes, int64_t* byte, int64_t wanted, int64_t* out, int64_t count) {
  int64_t at = *byte;
  for (; count < wanted && at < nbytes; at += 8) {
    uint64_t word = 0;
    if (nbytes - at >= 8) {
      std::memcpy(&word, bits + at, 8);
    } else {
      std::memcpy(&word, bits + at, static_cast<size_t>(nbytes - at));
    }
#if defined(__AVX512F__)
    __m512i indices = _mm512_add_epi64(_mm512_set1_epi64(8 * at), _mm512_setr_epi64(0, 1, 2, 3, 4, 5, 6, 7));
    unroll<8>([&](auto j) {
      const __mmask8 hit = static_cast<__mmask8>(word >> (8 * j));
      _mm512_storeu_si512(out + count, _mm512_maskz_compress_epi64(hit, indices));
      indices = _mm512_add_epi64(indices, _mm512_set1_epi64(8));
      count += __builtin_popcount(hit);
    });
#else
    // Eight at a time: a loop that ended with the last bit would be mispredicted for nearly every word.
    const int64_t end = count + __builtin_popcountll(word);
    for (; count < end; count += 8) {
      for (int j = 0; j < 8; ++j) {
        out[count + j] = 8 * at + __builtin_ctzll(word | uint64_t{1} << 63);
        word &= word - 1;
      }
    }
    count = end;
#endif
  }
  *byte = at;
  return count;
}

template <class Index>
int64_t first_at_least(const Index* positions, int64_t k, int64_t value) {
  int64_t low = 0, high = k;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (positions[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class Index>
void scatter(const Index* positions, const float* values, int64_t k, Sink sink, int64_t begin, int64_t end) {
  int64_t i = first_at_least(positions, k, begin);
  if (sink.accumulate) {
    for (; i < k && positions[i] < end; ++i) emit_one(sink, positions[i], values[i]);
    return;
  }
  if (how_to_store(sink) != Store::stream) {
    std::memset(sink.out + begin, 0, (end - begin) * 4);
    for (; i < k && positions[i] < end; ++i) sink.out[positions[i]] = values[i];
    return;
  }
  // A buffer in L1 is filled, streamed out and cleared, so each cache line of the output is written once and never
  // read.
  constexpr int64_t window = 2048;
  alignas(64) float buffer[window] = {};
  const f8 unused = {};
  for (int64_t at = begin; at < end; at += window) {
    const int64_t stop = least(at + window, end), first = i;
    for (; i < k && positions[i] < stop; ++i) buffer[positions[i] - at] = values[i];
    int64_t j = 0;
    for (; j + 8 <= stop - at; j += 8) emit<Store::stream>(sink.out + at + j, load<f8>(buffer + j), unused);
    for (; j < stop - at; ++j) sink.out[at + j] = buffer[j];
    for (int64_t filled = first; filled < i; ++filled) buffer[positions[filled] - at] = 0.0f;
  }
  finish_stores();
}
INLINE void advance_window(WindowedOutput& to) {
  float* out = to.out + to.at;
  const f8 zero = {};
  for (int64_t j = 0; j < kWindow; j += 16) {  // whole cache lines
    const f8 low = load<f8>(to.window + j), high = load<f8>(to.window + j + 8);
    store(to.window + j, zero);
    store(to.window + j + 8, zero);
    emit<Store::stream>(out + j, low, zero);
    emit<Store::stream>(out + j + 8, high, zero);
  }
  to.at += kWindow;
}
void scatter_on(WindowedOutput& to, const int64_t* positions, const float* values, int64_t count) {
  int64_t i = 0;
  const int64_t last = positions[count - 1];
  while (last >= to.at + kWindow) {
    for (; positions[i] < to.at + kWindow; ++i) to.window[positions[i] - to.at] = values[i];
    advance_window(to);
  }
  for (; i < count; ++i) to.window[positions[i] - to.at] = values[i];
}
void scatter_end(WindowedOutput& to) {
  while (to.at + kWindow <= to.n) advance_window(to);
  if (to.at < to.n) std::memcpy(to.out + to.at, to.window, static_cast<size_t>(to.n - to.at) * sizeof(float));
  finish_stores();
}

void scatter32(const int32_t* p, const float* v, int64_t k, Sink s, int64_t b, int64_t e) { scatter(p, v, k, s, b, e); }
void scatter64(const int64_t* p, const float* v, int64_t k, Sink s, int64_t b, int64_t e) { scatter(p, v, k, s, b, e); }

}  // namespace
}  // namespace laconic
