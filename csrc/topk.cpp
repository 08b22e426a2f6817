// Exact top-k in about one pass, and thresholds.
//
// A sample gives a threshold that is slightly too low, one pass keeps the entries that reach it (about k), and the exact
// k-th magnitude is selected among those. If the sample misleads (too few entries, or far too many, as in a constant
// tensor), counting magnitudes by their high and low bits gives the exact threshold without memory beyond the result.

#include "candidates.hpp"

#include <cmath>
#include <numeric>

namespace laconic {
namespace {

// Magnitudes around the k-th: slightly more than k of the n entries reach `low`, slightly fewer reach `high`.
struct Band {
  uint32_t low, high;
};

Band sampled_band(const float* x, int64_t n, int64_t k) {
  // Whole cache lines, evenly spaced with a jitter, so that no period of the data aligns with them.
  constexpr int64_t lines = 8192, line = 16, samples = lines * line;
  auto& high = workspace.high;
  high.assign(size_t{1} << 16, 0);
  const int64_t stride = (n - line) / lines;
  const auto place = [&](int64_t i) {
    return i * stride + static_cast<int64_t>(hash32(i, {0x2545F491u, 0x4F6CDD1Du}) % stride);
  };
  for (int64_t i = 0; i < lines; ++i) {
    if (i + 16 < lines) __builtin_prefetch(x + place(i + 16));
    const int64_t at = place(i);
    for (int64_t j = 0; j < line; ++j) ++high[magnitude_at(x, at + j) >> kHighShift];
  }
  const double share = static_cast<double>(k) / static_cast<double>(n), expected = share * samples;
  const double chance = 5.0 * std::sqrt(expected * (1.0 - share)) + 8.0;
  int64_t above;
  const size_t low = bin_holding(high, static_cast<int64_t>(expected + chance), &above);
  if (expected <= chance) return {static_cast<uint32_t>(low) << kHighShift, kMagnitude};
  const size_t top = bin_holding(high, static_cast<int64_t>(expected - chance), &above);
  return {static_cast<uint32_t>(low) << kHighShift, static_cast<uint32_t>(top + 1) << kHighShift};
}

// The k-th largest of m candidates, which lies in the band unless the sample misleads, how many are larger, and how many
// equal it.
struct Kth {
  uint32_t magnitude;
  int64_t larger, equal;
};

Kth kth_candidate(const Kept& kept, int64_t k, const Band& band) {
  const auto magnitude = [&](int64_t i) { return kept.bits[i] & kMagnitude; };
  auto& inside = workspace.inside;
  if (inside.size() < static_cast<size_t>(kept.count) + 16) inside.resize(static_cast<size_t>(kept.count) + 16);
  const int64_t count = simd().magnitudes_below(kept.bits, kept.count, band.high, inside.data());
  const int64_t above = kept.count - count;
  Kth kth{};
  if (above < k) {
    kth.magnitude = kth_largest(count, k - above, band.high, [&](int64_t i) { return inside[i]; }, &kth.larger);
    kth.larger += above;
    kth.equal = std::count(inside.begin(), inside.begin() + count, kth.magnitude);
  } else {
    kth.magnitude = kth_largest(kept.count, k, kMagnitude, magnitude, &kth.larger);
    for (int64_t i = 0; i < kept.count; ++i) kth.equal += magnitude(i) == kth.magnitude;
  }
  return kth;
}

// Keeps the entries above the k-th magnitude, and the first of those equal to it, in their order. Returns the amax
// bits.
template <class Index, class At>
uint32_t keep_top(int64_t m, int64_t k, uint32_t kth, int64_t larger, At at, Index* positions, float* values) {
  int64_t ties = k - larger, count = 0;
  uint32_t amax_bits = 0;
  for (int64_t i = 0; i < m && count < k; ++i) {
    const auto [position, raw] = at(i);
    const uint32_t magnitude = raw & kMagnitude;
    // Written in any case and counted if it is kept, because candidates that are not kept cannot be predicted.
    positions[count] = static_cast<Index>(position);
    std::memcpy(values + count, &raw, 4);
    amax_bits = std::max(amax_bits, magnitude);
    count += magnitude > kth || (magnitude == kth && ties-- > 0);
  }
  return amax_bits;
}

struct Entry {
  int64_t position;
  uint32_t raw;
};

template <class Index>
uint32_t topk_by_counting(const float* x, int64_t n, int64_t k, Index* positions, float* values) {
  int64_t larger;
  const uint32_t kth = kth_largest(n, k, kMagnitude, [&](int64_t i) { return magnitude_at(x, i); }, &larger);
  return keep_top(n, k, kth, larger, [&](int64_t i) {
    uint32_t raw;
    std::memcpy(&raw, x + i, 4);
    return Entry{i, raw};
  }, positions, values);
}

auto reaching(const float* x, uint32_t threshold) {
  return [=](int64_t begin, int64_t end, Kept* kept) { return simd().compact(x, begin, end, threshold, kept); };
}

}  // namespace

template <class Index>
uint32_t topk(const float* x, int64_t n, int64_t k, Index* positions, float* values, int threads) {
  if (n < 2 * kSplit || k > n / 2) return topk_by_counting(x, n, k, positions, values);
  const Trimmed after;
  const Band band = sampled_band(x, n, k);
  const int64_t range = range_for(n, threads);
  Kept kept;
  std::vector<int64_t> starts;
  const int64_t capacity = k + k / 2 + 65536;
  if (band.low == 0 || !collect_candidates(n, reaching(x, band.low), capacity, threads, &kept, &starts, range) ||
      kept.count < k) {
    return topk_by_counting(x, n, k, positions, values);
  }
  const Kth kth = kth_candidate(kept, k, band);
  if constexpr (sizeof(Index) == 4) {
    if (kth.larger + kth.equal == k) {  // no tie to break
      uint32_t amax_bits = 0;
      int64_t count = 0;
      for (size_t r = 0; r + 1 < starts.size(); ++r) {
        const Kept part{kept.offset + starts[r], kept.bits + starts[r], starts[r + 1] - starts[r], 0};
        count = simd().keep_reaching(part, kth.magnitude, static_cast<uint32_t>(static_cast<int64_t>(r) * range),
                                     reinterpret_cast<uint32_t*>(positions), values, count, k, &amax_bits);
      }
      return amax_bits;
    }
  }
  size_t r = 0;
  return keep_top(kept.count, k, kth.magnitude, kth.larger, [&](int64_t i) {
    while (i >= starts[r + 1]) ++r;
    return Entry{static_cast<int64_t>(r) * range + kept.offset[i], kept.bits[i]};
  }, positions, values);
}

template <class Index>
void topk_double(const double* x, int64_t n, int64_t k, Index* positions, double* values) {
  std::vector<uint64_t> keys(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) {
    uint64_t b;
    std::memcpy(&b, x + i, 8);
    keys[static_cast<size_t>(i)] = b & 0x7FFFFFFFFFFFFFFFull;
  }
  std::vector<uint64_t> sorted = keys;
  std::nth_element(sorted.begin(), sorted.begin() + (k - 1), sorted.end(), std::greater<uint64_t>());
  const uint64_t kth = sorted[static_cast<size_t>(k - 1)];
  int64_t ties = k - std::count_if(keys.begin(), keys.end(), [&](uint64_t v) { return v > kth; }), count = 0;
  for (int64_t i = 0; i < n && count < k; ++i) {
    const uint64_t v = keys[static_cast<size_t>(i)];
    if (v < kth || (v == kth && ties-- <= 0)) continue;
    positions[count] = static_cast<Index>(i);
    values[count++] = x[i];
  }
}

template <class Index>
int64_t topk_sampled(const float* x, int64_t n, int64_t k, HashKey key, Index* positions, float* values, int threads) {
  if (n <= kSamples) return -1;
  std::vector<uint32_t> sampled(static_cast<size_t>(kSamples));
  for (int64_t i = 0; i < kSamples; ++i) {
    const int64_t start = i * n / kSamples, span = (i + 1) * n / kSamples - start;
    const uint64_t step =
        static_cast<uint64_t>(hash32(static_cast<uint64_t>(i), key)) * static_cast<uint64_t>(span) >> 32;
    sampled[static_cast<size_t>(i)] = magnitude_at(x, start + static_cast<int64_t>(step));
  }
  const int64_t rank = std::max<int64_t>(1, std::min(kSamples, (k * kSamples + n / 2) / n));
  std::nth_element(sampled.begin(), sampled.begin() + (rank - 1), sampled.end(), std::greater<uint32_t>());
  const uint32_t threshold = sampled[static_cast<size_t>(rank - 1)];
  const Trimmed after;
  const int64_t range = range_for(n, threads);
  Kept kept;
  std::vector<int64_t> starts;
  const int64_t most = 2 * k + 16;
  if (threshold == 0 ||
      !collect_candidates(n, reaching(x, threshold), most + 2 * 65536, threads, &kept, &starts, range) ||
      kept.count > most) {
    return -1;
  }
  size_t r = 0;
  for (int64_t i = 0; i < kept.count; ++i) {
    while (i >= starts[r + 1]) ++r;
    positions[i] = static_cast<Index>(static_cast<int64_t>(r) * range + kept.offset[i]);
  }
  std::memcpy(values, kept.bits, static_cast<size_t>(kept.count) * 4);
  return kept.count;
}

int64_t count_threshold(const float* x, int64_t n, uint32_t threshold, int threads) {
  const int64_t range = range_for(n, threads), ranges = (n + range - 1) / range;
  std::vector<int64_t> counts(static_cast<size_t>(ranges));
  parallel_for(ranges, threads, [&](int64_t r) {
    counts[static_cast<size_t>(r)] = simd().count_reaching(x, r * range, std::min(n, (r + 1) * range), threshold);
  });
  return std::accumulate(counts.begin(), counts.end(), int64_t{0});
}

template <class Index>
int64_t threshold_select(const float* x, int64_t n, uint32_t threshold, Index* positions, float* values,
                         int64_t capacity, uint32_t* amax_bits) {
  int64_t at = 0;
  *amax_bits = 0;
  for (int64_t begin = 0; begin < n; begin += kSplit) {  // range by range, so that the workspace stays in the cache
    const int64_t end = std::min(n, begin + kSplit), left = capacity - at;
    const bool fits = sizeof(Index) == 4 && left >= end - begin + 64;  // whatever their number
    Kept kept = workspace.kept(kSplit + 64);
    if (fits) kept = {reinterpret_cast<uint32_t*>(positions + at), reinterpret_cast<uint32_t*>(values + at), 0, left};
    simd().compact(x, begin, end, threshold, &kept);
    // Another thread may have changed x since its entries were counted: never write past the capacity.
    const int64_t count = std::min(kept.count, left);
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i) positions[at + i] = static_cast<Index>(begin + kept.offset[i]);
    if (!fits) std::memcpy(values + at, kept.bits, static_cast<size_t>(count) * 4);
    *amax_bits = std::max(*amax_bits, value_range(values + at, count, 1).amax_bits);
    at += count;
  }
  return at;
}

#define LACONIC_FOR_INDEX(Index)                                                                                 \
  template uint32_t topk<Index>(const float*, int64_t, int64_t, Index*, float*, int);                            \
  template void topk_double<Index>(const double*, int64_t, int64_t, Index*, double*);                            \
  template int64_t topk_sampled<Index>(const float*, int64_t, int64_t, HashKey, Index*, float*, int);            \
  template int64_t threshold_select<Index>(const float*, int64_t, uint32_t, Index*, float*, int64_t, uint32_t*);
LACONIC_FOR_INDEX(int32_t)
LACONIC_FOR_INDEX(int64_t)

}  // namespace laconic
