// Selection: exact top-k in about one pass, thresholds, random positions.
//
// Top-k: a sample gives a threshold that is slightly too low, one pass keeps the entries that reach it (about k), and
// the exact k-th magnitude is selected among those. If the sample misleads (too few entries, or far too many, as in a
// constant tensor), counting magnitudes by their high and low bits gives the exact threshold without memory beyond the
// result.

#include "core.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>
#include <type_traits>
#include <vector>

namespace laconic {
namespace {

constexpr int kHighShift = 15;  // a 31-bit magnitude: 16 high bits, 15 low bits
constexpr int64_t kRange = int64_t{1} << 30;

uint32_t magnitude_at(const float* x, int64_t i) {
  uint32_t b;
  std::memcpy(&b, x + i, 4);
  return b & kMagnitude;
}

// Memory that outlives a call, because fresh pages cost more than the work done in them.
struct Workspace {
  std::vector<uint32_t> offset, bits, high, low, inside;

  Kept kept(int64_t capacity) {
    const size_t size = static_cast<size_t>(capacity) + 64;
    if (offset.size() < size) {
      offset.resize(size);
      bits.resize(size);
    }
    return {offset.data(), bits.data(), 0, capacity};
  }
};
thread_local Workspace workspace;

template <class Index>
Index* position_workspace(int64_t count) {
  static thread_local std::vector<Index> positions;
  // Grows with the calls and shrinks after a large one, like the workspace.
  const size_t size = static_cast<size_t>(count), most = size_t{1} << 24;
  if (positions.size() < size || (positions.size() > most && size <= most)) {
    positions = {};
    positions.resize(size);
  }
  return positions.data();
}

// Calls body with a null pointer of the index type for positions below n.
template <class F>
auto by_index(int64_t n, F body) {
  return n > int64_t{1} << 31 ? body(static_cast<int64_t*>(nullptr)) : body(static_cast<int32_t*>(nullptr));
}

// Frees a large workspace at the end of a call: each thread would keep hundreds of megabytes.
struct Trimmed {
  static constexpr size_t kMost = size_t{1} << 24;
  ~Trimmed() {
    if (workspace.offset.size() <= kMost) return;
    workspace.offset = {};
    workspace.bits = {};
    workspace.inside = {};
  }
};

// The largest bin that, with all bins above it, holds at least `wanted` entries; `above` receives the number above it.
size_t bin_holding(const std::vector<uint32_t>& bins, int64_t wanted, int64_t* above) {
  int64_t seen = 0;
  for (size_t bin = bins.size(); bin-- > 0;) {
    if (seen + bins[bin] >= wanted) {
      *above = seen;
      return bin;
    }
    seen += bins[bin];
  }
  *above = seen;
  return 0;
}

// The k-th largest of m values, none above `most`, and how many are larger.
template <class ValueAt>
uint32_t kth_largest(int64_t m, int64_t k, uint32_t most, ValueAt value_at, int64_t* larger) {
  if (m <= 4096) {
    // Counted by their high bits (of a magnitude: exponent and three more); only the bin of the k-th is looked into.
    constexpr int shift = 20;
    uint32_t values[4096];
    uint16_t bins[1 << (32 - shift)] = {};
    for (int64_t i = 0; i < m; ++i) {
      values[i] = value_at(i);
      ++bins[values[i] >> shift];
    }
    uint32_t bin = most >> shift;
    int64_t above = 0;
    for (; above + bins[bin] < k; --bin) above += bins[bin];
    int64_t count = 0;
    for (int64_t i = 0; i < m; ++i) {
      const uint32_t value = values[i];
      values[count] = value;
      count += value >> shift == bin;
    }
    const int64_t rank = k - above;
    std::nth_element(values, values + (rank - 1), values + count, std::greater<uint32_t>());
    const uint32_t kth = values[rank - 1];
    *larger = above + std::count_if(values, values + count, [&](uint32_t v) { return v > kth; });
    return kth;
  }
  auto& high = workspace.high;
  high.assign(size_t{most >> kHighShift} + 1, 0);
  for (int64_t i = 0; i < m; ++i) ++high[value_at(i) >> kHighShift];
  int64_t above_bin;
  const uint32_t bin = static_cast<uint32_t>(bin_holding(high, k, &above_bin));
  auto& low = workspace.low;
  low.assign(size_t{1} << kHighShift, 0);
  for (int64_t i = 0; i < m; ++i) {
    const uint32_t v = value_at(i);
    if (v >> kHighShift == bin) ++low[v & ((1u << kHighShift) - 1)];
  }
  int64_t above_low;
  const uint32_t rest = static_cast<uint32_t>(bin_holding(low, k - above_bin, &above_low));
  *larger = above_bin + above_low;
  return bin << kHighShift | rest;
}

// The same for uniformly distributed values: those to drop lie in a low band whose width is known up to chance.
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
  for (int64_t i = 0; i < lines; ++i) {
    const int64_t at = i * stride + static_cast<int64_t>(hash32(i, {0x2545F491u, 0x4F6CDD1Du}) % stride);
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
  if (inside.size() < static_cast<size_t>(kept.count)) inside.resize(static_cast<size_t>(kept.count));
  size_t count = 0;
  for (int64_t i = 0; i < kept.count; ++i) {
    inside[count] = magnitude(i);
    count += magnitude(i) < band.high;
  }
  const int64_t above = kept.count - static_cast<int64_t>(count);
  Kth kth{};
  if (above < k) {
    const auto at = inside.begin() + (k - above - 1), end = inside.begin() + static_cast<int64_t>(count);
    std::nth_element(inside.begin(), at, end, std::greater<uint32_t>());
    kth.magnitude = *at;
    kth.larger = above + std::count_if(inside.begin(), at, [&](uint32_t v) { return v > kth.magnitude; });
    kth.equal = std::count(inside.begin(), end, kth.magnitude);
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

// Collects the candidates of all ranges in order, in the caller's workspace; compact(begin, end, kept) appends those of
// a range. Returns false if they exceed the capacity.
template <class Compact>
bool collect_candidates(int64_t n, Compact compact, int64_t capacity, int threads, Kept* kept,
                       std::vector<int64_t>* starts, int64_t range) {
  const int64_t ranges = (n + range - 1) / range;
  starts->assign(static_cast<size_t>(ranges) + 1, 0);
  auto sequentially = [&] {
    *kept = workspace.kept(capacity);
    for (int64_t r = 0; r < ranges; ++r) {
      if (!compact(r * range, std::min(n, (r + 1) * range), kept)) return false;
      (*starts)[static_cast<size_t>(r) + 1] = kept->count;
    }
    return true;
  };
  if (ranges == 1) return sequentially();
  // Each range fills its own share of the workspace; the shares are then joined.
  const int64_t share = capacity / ranges + 8192;
  *kept = workspace.kept((share + 64) * ranges);
  std::vector<int64_t> counts(static_cast<size_t>(ranges));
  std::vector<char> fits(static_cast<size_t>(ranges));
  const Kept all = *kept;
  parallel_for(ranges, threads, [&](int64_t r) {
    Kept part{all.offset + r * (share + 64), all.bits + r * (share + 64), 0, share};
    fits[static_cast<size_t>(r)] = compact(r * range, std::min(n, (r + 1) * range), &part);
    counts[static_cast<size_t>(r)] = part.count;
  });
  int64_t total = 0;
  for (int64_t r = 0; r < ranges; ++r) {
    // One range exceeds its share: whether all exceed the capacity must not depend on the number of threads.
    if (!fits[static_cast<size_t>(r)]) return sequentially();
    const int64_t count = counts[static_cast<size_t>(r)], from = r * (share + 64);
    std::memmove(all.offset + total, all.offset + from, static_cast<size_t>(count) * 4);
    std::memmove(all.bits + total, all.bits + from, static_cast<size_t>(count) * 4);
    total += count;
    (*starts)[static_cast<size_t>(r) + 1] = total;
  }
  kept->count = total;
  return true;
}

auto reaching(const float* x, uint32_t threshold) {
  return [=](int64_t begin, int64_t end, Kept* kept) { return simd().compact(x, begin, end, threshold, kept); };
}

int64_t range_for(int64_t n, int threads) {
  if (threads <= 1 || n < 4 * kSplit) return std::min(std::max<int64_t>(n, 1), kRange);
  const int64_t even = (n + threads - 1) / threads;
  return std::min((even + kSplit - 1) / kSplit * kSplit, kRange);
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
                         int64_t capacity) {
  int64_t at = 0;
  for (int64_t begin = 0; begin < n; begin += kSplit) {  // range by range, so that the workspace stays in the cache
    const int64_t end = std::min(n, begin + kSplit), left = capacity - at;
    if constexpr (sizeof(Index) == 4) {
      if (left >= end - begin + 64) {  // all of them would fit
        Kept kept{reinterpret_cast<uint32_t*>(positions + at), reinterpret_cast<uint32_t*>(values + at), 0, left};
        simd().compact(x, begin, end, threshold, &kept);
        for (int64_t i = 0; i < kept.count; ++i) kept.offset[i] += static_cast<uint32_t>(begin);
        at += kept.count;
        continue;
      }
    }
    Kept kept = workspace.kept(kSplit + 64);
    simd().compact(x, begin, end, threshold, &kept);
    // Another thread may have changed x since its entries were counted: never write past the capacity.
    const int64_t count = std::min(kept.count, left);
    if (count == 0) continue;
    for (int64_t i = 0; i < count; ++i) positions[at + i] = static_cast<Index>(begin + kept.offset[i]);
    std::memcpy(values + at, kept.bits, static_cast<size_t>(count) * 4);
    at += count;
  }
  return at;
}

namespace {
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
    const bool all = wanted >= static_cast<double>(n);
    const uint32_t at_most = all ? ~0u : static_cast<uint32_t>(wanted / static_cast<double>(n) * 4294967295.0);
    const int64_t capacity = static_cast<int64_t>(std::min(wanted * 1.1, static_cast<double>(n))) + 8192;
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

int64_t topk_encode(const float* x, int64_t n, int64_t k, float* values, uint8_t* section, uint32_t* amax_bits,
                    int threads) {
  return by_index(n, [&](auto* null) {
    using Index = std::remove_pointer_t<decltype(null)>;
    Index* positions = position_workspace<Index>(k);
    *amax_bits = topk(x, n, k, positions, values, threads);
    const PositionPlan plan = plan_positions(positions, k, n);
    write_positions(positions, k, plan, section);
    return plan.nbytes;
  });
}

bool sparse_decode(const uint8_t* section, int64_t nbytes, const float* values, int64_t k, const Sink& sink,
                   int threads) {
  const int64_t n = sink.n;
  PositionHeader header;
  if (!read_positions_header(section, nbytes, n, &header) || header.k != k) return false;
  if (value_range(values, k, threads).amax_bits >= kNonFinite) return false;
  const uint8_t* body = section + kPositionsHeader;
  nbytes -= kPositionsHeader;
  // Positions that follow each other closely are scattered as they are read; a list of few costs less than a window.
  const bool streams = n * 4 >= kStreamBytes && reinterpret_cast<uintptr_t>(sink.out) % 32 == 0;
  if (!sink.accumulate && threads <= 1 && streams && k > n / 32 && header.mode != PositionMode::all) {
    return scatter_positions(body, nbytes, header, values, sink);
  }
  return by_index(n, [&](auto* null) {
    using Index = std::remove_pointer_t<decltype(null)>;
    Index* positions = position_workspace<Index>(k);
    if (header.mode == PositionMode::all) {
      std::iota(positions, positions + k, Index{0});
    } else if (!read_positions(body, nbytes, header.mode, header.low_bits, k, n, positions)) {
      return false;
    }
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      if constexpr (sizeof(Index) == 8) {
        simd().scatter64(positions, values, k, sink, begin, end);
      } else {
        simd().scatter32(positions, values, k, sink, begin, end);
      }
    });
    return true;
  });
}

template <class Index, class Word>
void gather(const Word* x, const Index* positions, int64_t k, Word* out, int threads) {
  for_ranges(k, int64_t{1} << 14, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = x[positions[i]];
  });
}

bool scale_saturating(const float* values, int64_t k, float gain, float* out) {
  constexpr float most = std::numeric_limits<float>::max();
  uint32_t amax_bits = 0;
  for (int64_t i = 0; i < k; ++i) {
    amax_bits = std::max(amax_bits, magnitude_at(values, i));
    out[i] = std::min(std::max(values[i] * gain, -most), most);
  }
  return amax_bits < kNonFinite;
}

#define LACONIC_FOR_INDEX(Index)                                                                  \
  template uint32_t topk<Index>(const float*, int64_t, int64_t, Index*, float*, int);             \
  template void topk_double<Index>(const double*, int64_t, int64_t, Index*, double*);             \
  template int64_t topk_sampled<Index>(const float*, int64_t, int64_t, HashKey, Index*, float*, int); \
  template int64_t threshold_select<Index>(const float*, int64_t, uint32_t, Index*, float*, int64_t); \
  template void random_positions<Index>(int64_t, int64_t, HashKey, Index*, int);                      \
  template uint32_t random_entries<Index>(const float*, int64_t, int64_t, HashKey, Index*, float*, int); \
  template void gather<Index>(const uint16_t*, const Index*, int64_t, uint16_t*, int);            \
  template void gather<Index>(const uint32_t*, const Index*, int64_t, uint32_t*, int);            \
  template void gather<Index>(const uint64_t*, const Index*, int64_t, uint64_t*, int);
LACONIC_FOR_INDEX(int32_t)
LACONIC_FOR_INDEX(int64_t)

}  // namespace laconic
