// Random positions: the k entries with the smallest hashes.

#include "candidates.hpp"

#include <cmath>

namespace laconic {
namespace {

// kth_largest of uniformly distributed values: those to drop lie in a low band whose width is known up to chance.
template <class ValueAt>
uint32_t kth_largest_uniform(int64_t m, int64_t k, uint32_t most, ValueAt value_at, int64_t* larger) {
  const double left_out = static_cast<double>(m - k) + 1.0;
  const double band = (left_out + 6.0 * std::sqrt(left_out) + 16.0) / static_cast<double>(m);
  if (band > 0.5) return kth_largest(m, k, most, value_at, larger);
  const uint32_t limit = static_cast<uint32_t>(band * most);
  std::vector<uint32_t> low;
  for (int64_t i = 0; i < m; ++i) {
    if (value_at(i) <= limit) low.push_back(value_at(i));
  }
  const int64_t above = m - static_cast<int64_t>(low.size());
  if (above >= k) return kth_largest(m, k, most, value_at, larger);
  const auto at = low.begin() + (k - above - 1);
  std::nth_element(low.begin(), at, low.end(), std::greater<uint32_t>());
  const uint32_t kth = *at;
  *larger = above + std::count_if(low.begin(), low.end(), [&](uint32_t v) { return v > kth; });
  return kth;
}

// The entries with the k smallest hashes in order; collect(at_most, capacity, kept, starts) gathers those up to a limit.
// take(count, index, position) receives each of them.
template <class Collect, class Take>
void smallest_hashes(int64_t n, int64_t k, int64_t range, Collect collect, Take take) {
  // Hashes are uniform, so the threshold is known up to chance: take a little more than k.
  const double share = static_cast<double>(k) / static_cast<double>(n);
  double wanted = static_cast<double>(k) + 6.0 * std::sqrt(static_cast<double>(k) * (1.0 - share)) + 16.0;
  const Trimmed after;
  Kept kept;
  std::vector<int64_t> starts;
  for (;; wanted = wanted * 2 + 64) {
    // The loops want a limit whose lower 16 bits are set.
    const bool all = wanted >= static_cast<double>(n);
    const uint32_t at_most =
        all ? ~0u : static_cast<uint32_t>(wanted / static_cast<double>(n) * 4294967295.0) | 0xFFFFu;
    const double expected = (at_most + 1.0) / 4294967296.0 * static_cast<double>(n);
    const int64_t capacity = static_cast<int64_t>(std::min(expected * 1.1, static_cast<double>(n))) + 8192;
    if (!collect(at_most, capacity, &kept, &starts) || kept.count < k) continue;
    // The kept bits are complements of hashes; their distances from the smallest one have the same order.
    const auto distance = [&](int64_t i) { return kept.bits[i] - ~at_most; };
    int64_t larger;
    const uint32_t kth = kth_largest_uniform(kept.count, k, at_most, distance, &larger);
    int64_t ties = k - larger, count = 0;
    size_t r = 0;
    for (int64_t i = 0; i < kept.count && count < k; ++i) {
      while (i >= starts[r + 1]) ++r;
      const uint32_t v = distance(i);
      if (v < kth || (v == kth && ties-- <= 0)) continue;
      take(count++, i, static_cast<int64_t>(r) * range + kept.offset[i]);
    }
    return;
  }
}

}  // namespace

template <class Index>
void random_positions(int64_t n, int64_t k, HashKey key, Index* positions, int threads) {
  const int64_t range = range_for(n, threads);
  smallest_hashes(n, k, range, [&](uint32_t at_most, int64_t capacity, Kept* kept, std::vector<int64_t>* starts) {
    const auto small = [&](int64_t begin, int64_t end, Kept* part) {
      return simd().compact_hashes(key, begin, end, at_most, part);
    };
    return collect_candidates(n, small, capacity, threads, kept, starts, range);
  }, [&](int64_t count, int64_t, int64_t position) { positions[count] = static_cast<Index>(position); });
}

template <class Index>
uint32_t random_entries(const float* x, int64_t n, int64_t k, HashKey key, Index* positions, float* values,
                        int threads) {
  const int64_t range = range_for(n, threads);
  if (range < n) {
    random_positions(n, k, key, positions, threads);
    gather(x, positions, k, values, threads);
    return value_range(x, n, threads).amax_bits;
  }
  uint32_t amax_bits = 0;
  smallest_hashes(n, k, range, [&](uint32_t at_most, int64_t capacity, Kept* kept, std::vector<int64_t>* starts) {
    auto& held = workspace.inside;  // the values of the candidates
    if (held.size() < static_cast<size_t>(capacity)) held.resize(static_cast<size_t>(capacity));
    const auto small = [&](int64_t begin, int64_t end, Kept* part) {
      return simd().compact_hashed_values(key, x, begin, end, at_most, part, reinterpret_cast<float*>(held.data()),
                                          &amax_bits);
    };
    return collect_candidates(n, small, capacity, threads, kept, starts, range);
  }, [&](int64_t count, int64_t i, int64_t position) {
    positions[count] = static_cast<Index>(position);
    std::memcpy(values + count, &workspace.inside[static_cast<size_t>(i)], 4);
  });
  return amax_bits;
}

#define LACONIC_FOR_INDEX(Index)                                                                         \
  template void random_positions<Index>(int64_t, int64_t, HashKey, Index*, int);                         \
  template uint32_t random_entries<Index>(const float*, int64_t, int64_t, HashKey, Index*, float*, int);
LACONIC_FOR_INDEX(int32_t)
LACONIC_FOR_INDEX(int64_t)

}  // namespace laconic
