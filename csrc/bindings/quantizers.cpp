// Packing, quantizers, casts and low-rank products.

#include "bindings.hpp"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>

namespace laconic {
namespace {

// How many rows (or columns) of `each` values make a range of about kSplit values.
int64_t rows_per_range(int64_t each) { return each < kSplit ? (kSplit + each - 1) / each : 1; }

uint32_t bucket_encode(EncodeLoop loop, int64_t step, Address x, int64_t n, int bits, int64_t bucket, bool l2,
                       bool stochastic, uint64_t key, Address floats, Address packed, int threads) {
  const BucketEncode args{at<const float>(x), n, bits, bucket, l2, stochastic, hash_key(key), at<uint8_t>(floats),
                          at<uint8_t>(packed), nullptr};
  return encode_buckets(loop, args, step, threads);
}
bool bucket_decode(DecodeLoop loop, int64_t step, Address floats, Address packed, int bits, int64_t bucket, Address out,
                   int64_t n, float weight, int threads) {
  const BucketDecode args{at<const uint8_t>(floats), at<const uint8_t>(packed), bits, bucket, sink_of(out, n, weight)};
  return decode_buckets(loop, args, step, threads);
}

}  // namespace

void bind_quantizers(nb::module_& m) {
  m.def("pack", [](Address symbols, int64_t n, int bits, Address out) {
    simd().pack(at<const uint32_t>(symbols), n, bits, at<uint8_t>(out));
  }, Unlocked());
  m.def("unpack", [](Address packed, int64_t n, int bits, Address out) {
    simd().unpack(at<const uint8_t>(packed), n, bits, at<uint32_t>(out));
  }, Unlocked());

  m.def("qsgd_encode",
        [](Address x, int64_t n, int bits, int64_t bucket, bool l2, bool stochastic, uint64_t key, Address norms,
           Address packed, int threads) {
    if (!bucket) {
      return qsgd_encode_whole({at<const float>(x), n, bits, kSplit, l2, stochastic, hash_key(key), at<uint8_t>(norms),
                                at<uint8_t>(packed), nullptr}, threads);
    }
    return bucket_encode(simd().qsgd_encode, kSplit, x, n, bits, bucket, l2, stochastic, key, norms, packed, threads);
  },
        Unlocked());
  m.def("ternary_encode",
        [](Address x, int64_t n, int64_t bucket, uint64_t key, Address norms, Address packed, int threads) {
    return bucket_encode(simd().ternary_encode, 5 * kSplit, x, n, 2, bucket, false, true, key, norms, packed, threads);
  }, Unlocked());
  m.def("sign_encode", [](Address x, int64_t n, int64_t bucket, Address scales, Address packed, int threads) {
    return bucket_encode(simd().sign_encode, kSplit, x, n, 1, bucket, false, false, 0, scales, packed, threads);
  }, Unlocked());
  m.def("onebit_encode", [](Address x, int64_t n, int64_t bucket, Address means, Address packed, int threads) {
    return bucket_encode(simd().onebit_encode, kSplit, x, n, 1, bucket, false, false, 0, means, packed, threads);
  }, Unlocked());

  m.def("bins_encode",
        [](Address x, int64_t n, int bits, int64_t bucket, float slope, float offset, Address means, Address packed,
           int threads) {
    const BucketEncode args{at<const float>(x), n,       bits,  bucket, false, false, {}, at<uint8_t>(means),
                            at<uint8_t>(packed), nullptr, slope, offset};
    return encode_buckets(simd().bins_encode, args, kSplit, threads);
  }, Unlocked());

  m.def("qsgd_decode",
        [](Address norms, Address packed, int bits, int64_t bucket, Address out, int64_t n, float weight, int threads) {
    const int64_t values = bucket ? bucket : std::numeric_limits<int64_t>::max();  // bucket 0 holds all values
    return bucket_decode(simd().qsgd_decode, kSplit, norms, packed, bits, values, out, n, weight, threads);
  }, Unlocked());
  m.def("ternary_decode",
        [](Address norms, Address packed, int64_t bucket, Address out, int64_t n, float weight, int threads) {
    return bucket_decode(simd().ternary_decode, 5 * kSplit, norms, packed, 2, bucket, out, n, weight, threads);
  }, Unlocked());
  m.def("sign_decode",
        [](Address scales, Address packed, int64_t bucket, Address out, int64_t n, float weight, int threads) {
    return bucket_decode(simd().sign_decode, kSplit, scales, packed, 1, bucket, out, n, weight, threads);
  }, Unlocked());
  m.def("onebit_decode",
        [](Address means, Address packed, int64_t bucket, Address out, int64_t n, float weight, int threads) {
    return bucket_decode(simd().onebit_decode, kSplit, means, packed, 1, bucket, out, n, weight, threads);
  }, Unlocked());

  m.def("bins_decode",
        [](Address means, Address packed, int bits, int64_t bucket, Address out, int64_t n, float weight, int threads) {
    return bucket_decode(simd().bins_decode, kSplit, means, packed, bits, bucket, out, n, weight, threads);
  }, Unlocked());

  m.def("amax_bits", [](Address x, int64_t n, int threads) {
    return value_range(at<const float>(x), n, threads).amax_bits;
  }, Unlocked());
  m.def("value_range", [](Address x, int64_t n, int threads) {
    const ValueRange range = value_range(at<const float>(x), n, threads);
    return std::tuple<double, double, uint32_t>(range.low, range.high, range.amax_bits);
  }, Unlocked());
  m.def("uniform_encode",
        [](Address x, int64_t n, double low, double high, int levels, int bits, Address packed, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().uniform_encode(at<const float>(x), {low, high, levels, bits}, at<uint8_t>(packed), begin, end);
    });
  }, Unlocked());
  m.def("uniform_decode",
        [](Address packed, double low, double high, int levels, int bits, Address out, int64_t n, float weight,
           int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().uniform_decode(at<const uint8_t>(packed), {low, high, levels, bits}, sink_of(out, n, weight), begin, end);
    });
  },
        Unlocked());

  m.def("copy_finite", [](Address from, Address to, int64_t nbytes, int itemsize, uint64_t exponent) {
    return simd().copy_finite(at<const uint8_t>(from), at<uint8_t>(to), nbytes, itemsize, exponent);
  }, Unlocked());
  m.def("add_raw", [](Address from, Address out, int64_t n, float weight, int threads) {
    return all_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      return simd().add_raw(at<const uint8_t>(from), sink_of(out, n, weight), begin, end);
    });
  }, Unlocked());
  m.def("cast_encode", [](Address x, int64_t n, bool half, Address out, int threads) {
    std::atomic<int64_t> saturated{0};
    const uint32_t amax_bits = max_over_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      int64_t count;
      const uint32_t result = simd().cast_encode(at<const float>(x), half, at<uint8_t>(out), begin, end, &count);
      saturated += count;
      return result;
    });
    return std::pair<uint32_t, int64_t>(amax_bits, saturated.load());
  }, Unlocked());
  m.def("cast_decode", [](Address from, bool half, Address out, int64_t n, float weight, int threads) {
    return all_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      return simd().cast_decode(at<const uint8_t>(from), half, sink_of(out, n, weight), begin, end);
    });
  }, Unlocked());

  m.def("stochastic_bf16", [](Address x, int64_t n, uint64_t key, Address out, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().stochastic_bf16(at<const float>(x), hash_key(key), at<uint8_t>(out), begin, end);
    });
  }, Unlocked());
  m.def("add_momentum", [](Address x, int64_t n, float momentum, Address velocity, Address residual, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().add_momentum(at<const float>(x), momentum, at<float>(velocity), at<float>(residual), begin, end);
    });
  }, Unlocked());

  m.def("linear_encode",
        [](Address x, int64_t n, float pre, float base, float inverse, int levels, int bits, Address packed,
           int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().linear_encode(at<const float>(x), {pre, base, inverse, levels}, bits, at<uint8_t>(packed), begin, end);
    });
  },
        Unlocked());
  m.def("table_decode",
        [](Address packed, int bits, Address table, Address out, int64_t n, float weight, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().table_decode(at<const uint8_t>(packed), bits, at<const float>(table), sink_of(out, n, weight), begin, end);
    });
  }, Unlocked());
  // The levels of a quantizer, (i + shift) * step, or origin + that; in float32, clamped to its range.
  m.def("level_table", [](int count, std::optional<double> origin, double shift, double step, Address out) {
    const double most = std::numeric_limits<float>::max();
    for (int i = 0; i < count; ++i) {
      double level = (i + shift) * step;
      if (origin) level = *origin + level;  // a sum with 0 would take the sign from -0
      at<float>(out)[i] = static_cast<float>(std::min(std::max(level, -most), most));
    }
  });
  m.def("sample", [](Address x, int64_t n, int64_t count, uint64_t key, Address out, int threads) {
    sample(at<const float>(x), n, count, hash_key(key), at<float>(out), threads);
  }, Unlocked());
  m.def("histogram",
        [](Address x, int64_t n, float pre, float base, float inverse, int levels, Address counts, int threads) {
    histogram(at<const float>(x), n, {pre, base, inverse, levels}, at<int64_t>(counts), threads);
  }, Unlocked());

  m.def("project_rows", [](Address x, int64_t rows, int64_t columns, int rank, Address q, Address out, int threads) {
    for_ranges(rows, rows_per_range(columns), threads, [&](int64_t begin, int64_t end) {
      simd().project_rows({at<const float>(x), rows, columns, rank}, at<const float>(q), at<float>(out), begin, end);
    });
  }, Unlocked());
  m.def("project_columns",
        [](Address x, int64_t rows, int64_t columns, int rank, Address p, Address out, int threads) {
    for_ranges(columns, rows_per_range(rows), threads, [&](int64_t begin, int64_t end) {
      simd().project_columns({at<const float>(x), rows, columns, rank}, at<const float>(p), at<float>(out), begin, end);
    });
  }, Unlocked());
  m.def("lowrank_decode",
        [](Address p, Address q, int64_t rows, int64_t columns, int rank, Address out, float weight, int threads) {
    const Sink sink = sink_of(out, rows * columns, weight);
    for_ranges(rows, rows_per_range(columns), threads, [&](int64_t begin, int64_t end) {
      simd().lowrank_decode({nullptr, rows, columns, rank}, at<const uint8_t>(p), at<const uint8_t>(q), sink, begin,
                            end);
    });
  }, Unlocked());
}

}  // namespace laconic
