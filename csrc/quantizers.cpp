// Quantizers of whole tensors, in ranges on several threads.

#include "core.hpp"

#include <algorithm>
#include <vector>

namespace laconic {

uint32_t encode_buckets(EncodeLoop loop, BucketEncode args, int64_t step, int threads) {
  // Only the last bucket can be partial, so only the last range uses the scratch.
  const int64_t padded = args.bucket > kBatch ? args.bucket : kBatch;
  std::vector<float> scratch(args.n % padded ? padded : 0);
  args.scratch = scratch.data();
  return max_over_ranges(args.n, step, threads, [&](int64_t begin, int64_t end) { return loop(args, begin, end); });
}

bool decode_buckets(DecodeLoop loop, const BucketDecode& args, int64_t step, int threads) {
  return all_ranges(args.sink.n, step, threads, [&](int64_t begin, int64_t end) { return loop(args, begin, end); });
}

ValueRange value_range(const float* x, int64_t n, int threads) {
  ValueRange all{};
  const int64_t ranges = (n + kSplit - 1) / kSplit;
  if (threads <= 1 || ranges == 1) {
    all.amax_bits = simd().value_range(x, 0, n, &all.low, &all.high);
    return all;
  }
  std::vector<ValueRange> parts(static_cast<size_t>(ranges));
  parallel_for(ranges, threads, [&](int64_t i) {
    ValueRange& part = parts[static_cast<size_t>(i)];
    part.amax_bits = simd().value_range(x, i * kSplit, std::min(n, (i + 1) * kSplit), &part.low, &part.high);
  });
  all = parts[0];
  for (const ValueRange& part : parts) {
    all.low = part.low < all.low ? part.low : all.low;
    all.high = part.high > all.high ? part.high : all.high;
    all.amax_bits = std::max(all.amax_bits, part.amax_bits);
  }
  return all;
}

void sample(const float* x, int64_t n, int64_t count, HashKey key, float* out, int threads) {
  const int64_t whole = n / count, part = n % count;
  parallel_for((count + kSplit - 1) / kSplit, threads, [&](int64_t range) {
    // The edge floor(j n / count) advances from part to part without a division.
    const int64_t first = range * kSplit, last = std::min(count, first + kSplit);
    const __int128 product = static_cast<__int128>(first) * n;
    int64_t begin = static_cast<int64_t>(product / count), rest = static_cast<int64_t>(product % count);
    constexpr int64_t kAhead = 64;  // cache lines prefetched before the first of them is read
    const float* places[kAhead];
    for (int64_t at = first; at < last; at += kAhead) {
      const int64_t stop = std::min(last, at + kAhead);
      for (int64_t j = at; j < stop; ++j) {
        rest += part;
        const bool carry = rest >= count;
        rest -= carry ? count : 0;
        const int64_t length = whole + carry;
        const uint64_t within =
            static_cast<uint64_t>(hash32(static_cast<uint64_t>(j), key)) * static_cast<uint64_t>(length) >> 32;
        places[j - at] = x + begin + static_cast<int64_t>(within);
        __builtin_prefetch(places[j - at]);
        begin += length;
      }
      for (int64_t j = at; j < stop; ++j) out[j] = *places[j - at];
    }
  });
}

void histogram(const float* x, int64_t n, const LinearGrid& grid, int64_t* counts, int threads) {
  const int64_t ranges = (n + kSplit - 1) / kSplit;
  std::vector<uint32_t> parts(static_cast<size_t>(ranges) * static_cast<size_t>(grid.levels));
  parallel_for(ranges, threads, [&](int64_t i) {
    std::vector<uint16_t> symbols(kSplit);
    const int64_t count = std::min(kSplit, n - i * kSplit);
    simd().linear_symbols16(x + i * kSplit, count, grid, symbols.data());
    simd().count_symbols16(symbols.data(), count, grid.levels,
                           parts.data() + static_cast<size_t>(i) * static_cast<size_t>(grid.levels));
  });
  for (int level = 0; level < grid.levels; ++level) {
    counts[level] = 0;
    for (int64_t i = 0; i < ranges; ++i) counts[level] += parts[static_cast<size_t>(i * grid.levels + level)];
  }
}

}  // namespace laconic
