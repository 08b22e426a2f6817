// Candidates of a selection: the entries that reach a threshold, gathered range by range, and the k-th largest of them.

#pragma once

#include "core.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <vector>

namespace laconic {

constexpr int kHighShift = 15;  // a 31-bit magnitude: 16 high bits, 15 low bits
constexpr int64_t kRange = int64_t{1} << 30;

inline uint32_t magnitude_at(const float* x, int64_t i) {
  uint32_t b;
  std::memcpy(&b, x + i, 4);
  return b & kMagnitude;
}

// Memory that outlives a call, because fresh pages cost more than the work done in them.
struct SelectionWorkspace {
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
inline thread_local SelectionWorkspace workspace;

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
inline size_t bin_holding(const std::vector<uint32_t>& bins, int64_t wanted, int64_t* above) {
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

inline int64_t range_for(int64_t n, int threads) {
  if (threads <= 1 || n < 4 * kSplit) return std::min(std::max<int64_t>(n, 1), kRange);
  const int64_t even = (n + threads - 1) / threads;
  return std::min((even + kSplit - 1) / kSplit * kSplit, kRange);
}

}  // namespace laconic
