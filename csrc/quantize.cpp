// Whole tensors through the bucketed quantizers: ranges on several threads.

#include "core.hpp"

#include <atomic>
#include <vector>

namespace laconic {

uint32_t encode_buckets(EncodeLoop loop, BucketEncode args, int64_t unit, int threads) {
  const int64_t ranges = (args.n + unit - 1) / unit;
  // Only the last bucket can be partial, so only the last range touches the scratch.
  const int64_t padded = args.bucket > kBatch ? args.bucket : kBatch;
  std::vector<float> scratch(args.n % padded ? padded : 0);
  args.scratch = scratch.data();
  if (threads <= 1 || ranges == 1) return loop(args, 0, args.n);
  std::atomic<uint32_t> key{0};
  parallel_for(ranges, threads, [&](int64_t i) {
    const int64_t begin = i * unit, end = begin + unit < args.n ? begin + unit : args.n;
    const uint32_t found = loop(args, begin, end);
    for (uint32_t seen = key.load(); seen < found && !key.compare_exchange_weak(seen, found);) {
    }
  });
  return key.load();
}

bool decode_buckets(DecodeLoop loop, const BucketDecode& args, int64_t unit, int threads) {
  const int64_t n = args.sink.n, ranges = (n + unit - 1) / unit;
  if (threads <= 1 || ranges == 1) return loop(args, 0, n);
  std::atomic<bool> valid{true};
  parallel_for(ranges, threads, [&](int64_t i) {
    const int64_t begin = i * unit, end = begin + unit < n ? begin + unit : n;
    if (!loop(args, begin, end)) valid = false;
  });
  return valid;
}

}  // namespace laconic
