// Quantizers of whole tensors, in ranges on several threads.

#include "core.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

namespace laconic {

uint32_t encode_buckets(EncodeLoop loop, BucketEncode args, int64_t step, int threads) {
  // Only the last bucket can be partial, so only the last range uses the scratch.
  const int64_t padded = args.bucket > kBatch ? args.bucket : kBatch;
  std::vector<float> scratch(args.n % padded ? padded : 0);
  args.scratch = scratch.data();
  return max_over_ranges(args.n, step, threads, [&](int64_t begin, int64_t end) { return loop(args, begin, end); });
}

namespace {
// The order of reference.pairwise_sum, of a power of two, at least 16, sums.
double pairwise(std::vector<double> sums) {
  for (; sums.size() > 16; sums.resize(sums.size() / 2)) {
    for (size_t i = 0; i < sums.size() / 2; ++i) sums[i] = sums[i / 16 * 32 + i % 16] + sums[i / 16 * 32 + i % 16 + 16];
  }
  for (size_t half = 8; half; half /= 2) {
    for (size_t i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
  }
  return sums[0];
}

double sum_of_squares(const float* x, int64_t n, int threads) {
  const int64_t pieces = (n + kSplit - 1) / kSplit;
  size_t padded = 16;
  while (padded < static_cast<size_t>(pieces)) padded *= 2;
  std::vector<double> sums(padded);
  parallel_for(pieces, threads, [&](int64_t i) {
    const int64_t here = std::min(kSplit, n - i * kSplit);
    const float* values = x + i * kSplit;
    std::vector<float> last;
    if (here < kSplit) {
      last.assign(values, values + here);
      last.resize(kSplit);
      values = last.data();
    }
    sums[static_cast<size_t>(i)] = simd().sum_of_squares(values, kSplit);
  });
  return pairwise(std::move(sums));
}
}  // namespace

uint32_t qsgd_encode_whole(BucketEncode args, int threads) {
  if (!args.n) return 0;
  const uint32_t amax_bits = value_range(args.x, args.n, threads).amax_bits;
  if (amax_bits >= kNonFinite) return amax_bits;
  float norm;
  std::memcpy(&norm, &amax_bits, 4);
  if (args.l2) {
    const float root = static_cast<float>(std::sqrt(sum_of_squares(args.x, args.n, threads)));
    norm = std::min(std::max(norm, root), std::numeric_limits<float>::max());
  }
  std::memcpy(args.floats, &norm, 4);
  args.norm = &norm;
  args.bucket = kSplit;
  encode_buckets(simd().qsgd_encode, args, kSplit, threads);
  return amax_bits;
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
    const int64_t count = std::min(kSplit, n - i * kSplit);
    std::vector<uint16_t> symbols(static_cast<size_t>(count));
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
