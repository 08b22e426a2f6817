// Top-k of each chunk of consecutive values, exact, in about one pass.
//
// A chunk's entries that reach a limit, a little more than k, are compacted, and the k-th magnitude is found among them.
// Both limit and k-th magnitude are found by counting, which is faster than moving values; the search begins where the
// chunk before ended. A first guess that is far off costs time and never changes the result.

#include "core.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace laconic {
namespace {

constexpr uint32_t kOctave = 1u << 23;  // magnitudes that differ by a factor of two differ by this in their bits
constexpr int64_t kPadding = 64;        // compacting and counting go past the end by less than this

struct Workspace {
  std::vector<uint32_t> offset, bits;
};
thread_local Workspace workspace;

struct Found {
  uint32_t magnitude;
  int64_t above;  // entries above the magnitude, if equal ones prevent a count within the limits; otherwise -1
};

// A magnitude that k to `most` entries reach; if there is none, the largest that at least k reach. count(m) tells how
// many reach m, which all entries do if m is 0.
template <class Count>
Found search(uint32_t guess, uint32_t step, int64_t k, int64_t most, Count count) {
  uint32_t low = 0, high = kMagnitude + 1, middle = std::min(std::max(guess, 1u), kMagnitude);
  int64_t above = 0;
  bool low_known = false, high_known = false;
  for (;;) {
    const int64_t reached = count(middle);
    if (k <= reached && reached <= most) return {middle, -1};
    if (reached > most) {
      low = middle;
      low_known = true;
    } else {
      high = middle;
      high_known = true;
      above = reached;
    }
    if (high - low <= 1) return {low, above};
    if (low_known && high_known) {
      middle = low + (high - low) / 2;
    } else if (low_known) {
      middle = high - low > step ? low + step : high - 1;
    } else {
      middle = high - low > step ? high - step : low + 1;
    }
    step = std::min(2 * step, kMagnitude / 4);
  }
}

class ChunkSelector {
 public:
  explicit ChunkSelector(int64_t chunk) : chunk_(chunk) {
    const size_t size = static_cast<size_t>(chunk + kPadding);
    if (workspace.offset.size() < size) {
      workspace.offset.resize(size);
      workspace.bits.resize(size);
    }
  }

  // Writes the k largest entries of x[begin, end) in order.
  template <class Index>
  void select(const float* x, int64_t begin, int64_t end, int64_t k, Index* positions, float* values) {
    const float wanted = static_cast<float>(k) + 4.5f * std::sqrt(static_cast<float>(k)) + 4.0f;
    compact(x, begin, end, k, static_cast<int64_t>(4.0f * wanted));
    const auto reaching = [&](uint32_t m) {
      const int64_t padded = (kept_.count + 15) & ~int64_t{15};
      return simd().count_reaching(reinterpret_cast<const float*>(kept_.bits), 0, padded, m);
    };
    const Found kth = kept_.count == k
                          ? Found{limit_, -1}
                          : search(limit_ + margin_, std::max(margin_ / 4, kOctave / 64), k, k, reaching);
    predict(kth.magnitude, k, wanted);
    // An entry that is left out is overwritten by the next one.
    int64_t count = 0;
    const auto put = [&](int64_t i, bool chosen) {
      positions[count] = static_cast<Index>(begin + kept_.offset[i]);
      std::memcpy(values + count, kept_.bits + i, 4);
      count += chosen;
    };
    if (kth.above < 0) {
      for (int64_t i = 0; i < kept_.count && count < k; ++i) put(i, (kept_.bits[i] & kMagnitude) >= kth.magnitude);
      return;
    }
    int64_t ties = k - kth.above;
    for (int64_t i = 0; i < kept_.count && count < k; ++i) {
      const uint32_t magnitude = kept_.bits[i] & kMagnitude;
      put(i, magnitude > kth.magnitude || (magnitude == kth.magnitude && ties-- > 0));
    }
  }

 private:
  int64_t chunk_;
  uint32_t limit_ = 0, margin_ = 0;  // of the next chunk: the expected k-th magnitude is their sum
  Kept kept_{};

  // Compacts the entries that reach a limit: k to `most`, or more if many are equal.
  void compact(const float* x, int64_t begin, int64_t end, int64_t k, int64_t most) {
    compact(x, begin, end);
    if (kept_.count < k || kept_.count > most) {
      const auto reaching = [&](uint32_t m) { return simd().count_reaching(x, begin, end, m); };
      limit_ = search(limit_, kOctave / 4, k, most, reaching).magnitude;
      compact(x, begin, end);
    }
    if (kept_.count < k) {  // another thread has changed x since its entries were counted
      limit_ = 0;
      compact(x, begin, end);
    }
    std::memset(kept_.bits + kept_.count, 0, 16 * sizeof(uint32_t));
  }

  void compact(const float* x, int64_t begin, int64_t end) {
    kept_ = {workspace.offset.data(), workspace.bits.data(), 0, chunk_};
    simd().compact(x, begin, end, limit_, &kept_);
  }

  // Sets the limit for the next chunk: the logarithm of how many entries reach a magnitude is taken to fall linearly.
  void predict(uint32_t kth, int64_t k, float wanted) {
    const float found = static_cast<float>(std::max(kept_.count, k + 1));
    const float ratio = std::log2(wanted / static_cast<float>(k)) / std::log2(found / static_cast<float>(k));
    const float distance = static_cast<float>(std::max(kth - std::min(limit_, kth), kOctave / 64)) * ratio;
    margin_ = std::min(kth, static_cast<uint32_t>(std::min(distance, static_cast<float>(kOctave / 2))));
    limit_ = kth - margin_;
  }
};

// Calls body(begin, end, k, first) for each chunk of a range; `first` is where its entries go.
template <class F>
void for_chunks(int64_t n, const ChunkCounts& counts, int64_t begin, int64_t end, F body) {
  for (int64_t at = begin; at < end; at += counts.chunk) {
    const bool whole = at + counts.chunk < n;
    body(at, whole ? at + counts.chunk : n, whole ? counts.each : counts.last, at / counts.chunk * counts.each);
  }
}

}  // namespace

template <class Index>
uint32_t topk_chunks(const float* x, int64_t n, const ChunkCounts& counts, Index* positions, float* values,
                     int threads) {
  for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
    ChunkSelector selector(counts.chunk);
    for_chunks(n, counts, begin, end, [&](int64_t from, int64_t to, int64_t k, int64_t first) {
      selector.select(x, from, to, k, positions + first, values + first);
    });
  });
  return value_range(values, (n - 1) / counts.chunk * counts.each + counts.last, threads).amax_bits;
}

template <class Index>
void topk_chunks_double(const double* x, int64_t n, const ChunkCounts& counts, Index* positions, double* values,
                        int threads) {
  for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
    for_chunks(n, counts, begin, end, [&](int64_t from, int64_t to, int64_t k, int64_t first) {
      topk_double(x + from, to - from, k, positions + first, values + first);
      for (int64_t i = first; i < first + k; ++i) positions[i] += static_cast<Index>(from);
    });
  });
}

#define LACONIC_FOR_INDEX(Index)                                                                               \
  template uint32_t topk_chunks<Index>(const float*, int64_t, const ChunkCounts&, Index*, float*, int);        \
  template void topk_chunks_double<Index>(const double*, int64_t, const ChunkCounts&, Index*, double*, int);
LACONIC_FOR_INDEX(int32_t)
LACONIC_FOR_INDEX(int64_t)

}  // namespace laconic
