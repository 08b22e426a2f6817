// The only file that knows Python. Tensors arrive as addresses and sizes: laconic/kernels/cpu/ is the only caller and
// has checked them (a DLPack exchange per tensor would cost more than encoding a small one). All work runs without the
// GIL.

#include "core.hpp"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <limits>
#include <optional>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace nb = nanobind;
using namespace nb::literals;
using namespace laconic;

namespace {

using Address = uintptr_t;
constexpr size_t kCopiedBytes = 1 << 14;  // wire.COPIED_NBYTES
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}
HashKey hash_key(uint64_t key) { return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)}; }
// A NaN as weight means: store.
Sink sink_of(Address out, int64_t n, float weight) { return {at<float>(out), n, !std::isnan(weight), weight}; }

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

// Calls body with a value of the index type: int64_t if positions are wide, int32_t otherwise.
template <class F>
auto by_index(bool wide, F body) {
  return wide ? body(int64_t{}) : body(int32_t{});
}

// Any contiguous buffer as a uint8 tensor over the same memory, which it keeps alive. laconic only reads through it.
nb::ndarray<nb::pytorch, uint8_t, nb::ndim<1>> byte_view(
    nb::ndarray<nb::ro, nb::ndim<1>, nb::c_contig, nb::device::cpu> data) {
  if (data.itemsize() != 1) throw nb::type_error("expected a buffer of bytes");
  auto* bytes = const_cast<uint8_t*>(static_cast<const uint8_t*>(data.data()));
  return {bytes, {data.size()}, nb::cast(data)};
}

}  // namespace

NB_MODULE(_core, m) {
  m.doc() = "The C++ core of laconic. Private: laconic.kernels.cpu checks the arguments.";
  m.attr("isa") = simd().name;

  m.def("crc32c", [](Address data, size_t n) { return crc32c(at<const uint8_t>(data), n); }, Unlocked());
  m.def("crc32c_of",
        [](nb::bytes data) { return crc32c(reinterpret_cast<const uint8_t*>(data.c_str()), data.size()); });
  m.def("byte_view", &byte_view);
  m.def("bytes_at", [](Address data, size_t n) { return nb::bytes(at<const char>(data), n); });
  // The codec, shape, dtype code, and the bytes of header, padding and sections in turn, of a frame in order; else None.
  m.def("read_frame", [](Address data, int64_t size) -> nb::object {
    const uint8_t* bytes = at<const uint8_t>(data);
    FrameHeader header;
    if (!read_frame_header(bytes, size, &header)) return nb::none();
    const size_t payload = static_cast<size_t>(size - header.start);
    uint32_t crc;
    if (payload < kCopiedBytes) {  // waiting for the interpreter's lock would cost more
      crc = crc32c(bytes + header.start, payload);
    } else {
      nb::gil_scoped_release released;
      crc = crc32c(bytes + header.start, payload);
    }
    if (crc != header.payload_crc) return nb::none();
    nb::list shape, sizes;
    for (int i = 0; i < header.ndim; ++i) shape.append(header.numbers[i]);
    sizes.append(header.start);
    for (int i = 0; i < header.num_sections; ++i) {
      sizes.append(header.gaps[i]);
      sizes.append(header.numbers[header.ndim + i]);
    }
    return nb::make_tuple(nb::str(header.spec, static_cast<size_t>(header.spec_nbytes)), nb::tuple(shape),
                          header.dtype, sizes);
  });
  m.def("zero_bytes", [](Address to, size_t n) { std::memset(at<char>(to), 0, n); });
  m.def("set_bytes", [](Address to, nb::bytes from) { std::memcpy(at<char>(to), from.c_str(), from.size()); });

  // The page faults of fresh memory cost more than decoding into it; large pages make them a few hundred times fewer.
  m.def("advise_large_pages", [](Address data, size_t n) {
#if defined(__linux__)
    constexpr size_t page = 4096;
    const Address begin = (data + page - 1) / page * page, end = (data + n) / page * page;
    if (begin < end) madvise(at<void>(begin), end - begin, MADV_HUGEPAGE);  // only advice: a refusal is harmless
#else
    (void)data, (void)n;
#endif
  });

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

  m.def("topk", [](Address x, int64_t n, int64_t k, bool wide, Address positions, Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return topk(at<const float>(x), n, k, at<Index>(positions), at<float>(values), threads);
    });
  }, Unlocked());
  m.def("topk_encode", [](Address x, int64_t n, int64_t k, Address values, Address section, int threads) {
    uint32_t amax_bits;
    const int64_t nbytes = topk_encode(at<const float>(x), n, k, at<float>(values), at<uint8_t>(section), &amax_bits,
                                       threads);
    return std::pair<int64_t, uint32_t>(nbytes, amax_bits);
  }, Unlocked());
  m.def("encode_positions", [](Address positions, int64_t k, bool wide, int64_t n, Address out) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      const PositionPlan plan = plan_positions(at<const Index>(positions), k, n);
      write_positions(at<const Index>(positions), k, plan, at<uint8_t>(out));
      return plan.nbytes;
    });
  }, Unlocked());
  m.def("sparse_decode",
        [](Address section, int64_t nbytes, Address values, int64_t k, Address out, int64_t n, float weight,
           int threads) {
    return sparse_decode(at<const uint8_t>(section), nbytes, at<const float>(values), k, sink_of(out, n, weight),
                         threads);
  },
        Unlocked());
  m.def("topk_double", [](Address x, int64_t n, int64_t k, bool wide, Address positions, Address values) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      topk_double(at<const double>(x), n, k, at<Index>(positions), at<double>(values));
    });
  }, Unlocked());
  m.def("topk_chunks",
        [](Address x, int64_t n, int64_t chunk, int64_t each, int64_t last, bool wide, Address positions,
           Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return topk_chunks(at<const float>(x), n, {chunk, each, last}, at<Index>(positions), at<float>(values), threads);
    });
  },
        Unlocked());
  m.def("topk_chunks_double",
        [](Address x, int64_t n, int64_t chunk, int64_t each, int64_t last, bool wide, Address positions,
           Address values, int threads) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      topk_chunks_double(at<const double>(x), n, {chunk, each, last}, at<Index>(positions), at<double>(values),
                         threads);
    });
  },
        Unlocked());
  m.def("topk_sampled",
        [](Address x, int64_t n, int64_t k, uint64_t key, bool wide, Address positions, Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return topk_sampled(at<const float>(x), n, k, hash_key(key), at<Index>(positions), at<float>(values), threads);
    });
  }, Unlocked());
  m.def("count_threshold", [](Address x, int64_t n, uint32_t threshold, int threads) {
    return count_threshold(at<const float>(x), n, threshold, threads);
  }, Unlocked());
  m.def("threshold_select",
        [](Address x, int64_t n, uint32_t threshold, bool wide, Address positions, Address values, int64_t capacity) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return threshold_select(at<const float>(x), n, threshold, at<Index>(positions), at<float>(values), capacity);
    });
  }, Unlocked());
  m.def("random_positions", [](int64_t n, int64_t k, uint64_t key, bool wide, Address positions, int threads) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      random_positions(n, k, hash_key(key), at<Index>(positions), threads);
    });
  }, Unlocked());
  m.def("random_entries",
        [](Address x, int64_t n, int64_t k, uint64_t key, bool wide, Address positions, Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return random_entries(at<const float>(x), n, k, hash_key(key), at<Index>(positions), at<float>(values), threads);
    });
  }, Unlocked());
  m.def("gather", [](Address x, int itemsize, Address positions, int64_t k, bool wide, Address out, int threads) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      const Index* from = at<const Index>(positions);
      if (itemsize == 2) return gather(at<const uint16_t>(x), from, k, at<uint16_t>(out), threads);
      if (itemsize == 4) return gather(at<const uint32_t>(x), from, k, at<uint32_t>(out), threads);
      return gather(at<const uint64_t>(x), from, k, at<uint64_t>(out), threads);
    });
  }, Unlocked());
  m.def("scale_saturating", [](Address values, int64_t k, float gain, Address out) {
    return scale_saturating(at<const float>(values), k, gain, at<float>(out));
  }, Unlocked());

  m.def("plan_positions", [](Address positions, int64_t k, bool wide, int64_t n) {
    const PositionPlan plan = by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return plan_positions(at<const Index>(positions), k, n);
    });
    return std::tuple<int, int, int64_t>(static_cast<int>(plan.mode), plan.low_bits, plan.nbytes);
  }, Unlocked());
  m.def("write_positions",
        [](Address positions, int64_t k, bool wide, int mode, int low_bits, int64_t nbytes, Address out) {
    const PositionPlan plan{static_cast<PositionMode>(mode), low_bits, nbytes};
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      write_positions(at<const Index>(positions), k, plan, at<uint8_t>(out));
    });
  }, Unlocked());
  m.def("read_positions",
        [](Address body, int64_t nbytes, int mode, int low_bits, int64_t k, int64_t n, bool wide, Address positions) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return read_positions(at<const uint8_t>(body), nbytes, static_cast<PositionMode>(mode), low_bits, k, n,
                            at<Index>(positions));
    });
  }, Unlocked());
  m.def("split_gaps", [](Address positions, int64_t k, bool wide, Address classes, Address low) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return split_gaps(at<const Index>(positions), k, at<uint8_t>(classes), at<uint8_t>(low));
    });
  }, Unlocked());
  m.def("join_gaps",
        [](Address classes, int64_t k, int64_t n, Address low, int64_t nbytes, bool wide, Address positions) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return join_gaps(at<const uint8_t>(classes), k, n, at<const uint8_t>(low), nbytes, at<Index>(positions));
    });
  }, Unlocked());
  m.def("scatter",
        [](Address positions, Address values, int64_t k, bool wide, Address out, int64_t n, float weight, int threads) {
    const Sink sink = sink_of(out, n, weight);
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      if (wide) {
        simd().scatter64(at<const int64_t>(positions), at<const float>(values), k, sink, begin, end);
      } else {
        simd().scatter32(at<const int32_t>(positions), at<const float>(values), k, sink, begin, end);
      }
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
  m.def("unpack_symbols", [](Address packed, int64_t n, int alphabet, bool trits, Address out) {
    unpack_symbols(at<const uint8_t>(packed), n, alphabet, trits, at<void>(out));
  }, Unlocked());
  m.def("pack_symbols", [](Address symbols, int64_t n, int alphabet, bool trits, Address out) {
    pack_symbols(at<const void>(symbols), n, alphabet, trits, at<uint8_t>(out));
  }, Unlocked());
  m.def("coded_max_nbytes", [](int64_t n, int alphabet) { return coded_max_nbytes(n, alphabet); });
  m.def("encode_symbols", [](Address symbols, int64_t n, int alphabet, int coding, Address out, int threads) {
    return encode_symbols({at<const void>(symbols), nullptr, nullptr, nullptr}, n, alphabet,
                        static_cast<Coding>(coding), at<uint8_t>(out), threads);
  }, Unlocked());
  m.def("encode_linear",
        [](Address x, int64_t n, float pre, float base, float inverse, int levels, int coding, Address out,
           int threads) {
    const LinearGrid grid{pre, base, inverse, levels};
    return encode_symbols({nullptr, at<const float>(x), &grid, nullptr}, n, levels, static_cast<Coding>(coding),
                        at<uint8_t>(out), threads);
  },
        Unlocked());
  m.def("encode_uniform",
        [](Address x, int64_t n, double low, double high, int levels, int coding, Address out, int threads) {
    const UniformCoding grid{low, high, levels, 0};
    return encode_symbols({nullptr, at<const float>(x), nullptr, &grid}, n, levels, static_cast<Coding>(coding),
                        at<uint8_t>(out), threads);
  }, Unlocked());
  m.def("linear_symbols",
        [](Address x, int64_t n, float pre, float base, float inverse, int levels, Address out, int threads) {
    const LinearGrid grid{pre, base, inverse, levels};
    grid_symbols({nullptr, at<const float>(x), &grid, nullptr}, n, levels, at<void>(out), threads);
  }, Unlocked());
  m.def("uniform_symbols", [](Address x, int64_t n, double low, double high, int levels, Address out, int threads) {
    const UniformCoding grid{low, high, levels, 0};
    grid_symbols({nullptr, at<const float>(x), nullptr, &grid}, n, levels, at<void>(out), threads);
  }, Unlocked());
  m.def("decode_symbols",
        [](Address section, int64_t nbytes, int64_t n, int alphabet, Address symbols, int threads) {
    return decode_symbols(at<const uint8_t>(section), nbytes, n, alphabet, at<void>(symbols), threads);
  }, Unlocked());
  m.def("decode_values",
        [](Address section, int64_t nbytes, int alphabet, Address table, Address out, int64_t n, float weight,
           int threads) {
    return decode_values(at<const uint8_t>(section), nbytes, n, alphabet, at<const float>(table),
                         sink_of(out, n, weight), threads);
  },
        Unlocked());
  m.def("block_scales", [](Address x, int64_t n, bool rms, Address out, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().block_scales(at<const float>(x), n, rms, at<float>(out), begin, end);
    });
  }, Unlocked());
  m.def("rotate_blocks", [](Address x, int64_t n, uint64_t key, Address addend, Address out, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().rotate_blocks(at<const float>(x), n, hash_key(key), at<const float>(addend), at<float>(out), begin, end);
    });
  }, Unlocked());
  // A NaN as factor means: the clips are given.
  m.def("packed_int_encode",
        [](Address x, int64_t n, int levels, int width, bool packed, float factor, bool rotate, uint64_t signs,
           bool stochastic, uint64_t noise, Address clips, Address out, bool feedback, int threads) {
    const PackedIntEncode args{at<const float>(x), n,
                          {levels, width, packed}, !std::isnan(factor),
                          factor, rotate,
                          hash_key(signs), stochastic,
                          hash_key(noise), at<uint8_t>(clips),
                          at<uint8_t>(out), feedback ? at<float>(x) : nullptr};
    return max_over_ranges(n, kSplit, threads,
                           [&](int64_t begin, int64_t end) { return simd().packed_int_encode(args, begin, end); });
  },
        Unlocked());
  m.def("packed_int_decode",
        [](Address integers, Address clips, int levels, int width, bool packed, int32_t total, bool rotate,
           uint64_t signs, Address out, int64_t n, float weight, int threads) {
    const PackedIntDecode args{at<const uint8_t>(integers), at<const uint8_t>(clips), {levels, width, packed}, total,
                          rotate, hash_key(signs), sink_of(out, n, weight)};
    return all_ranges(n, kSplit, threads,
                      [&](int64_t begin, int64_t end) { return simd().packed_int_decode(args, begin, end); });
  },
        Unlocked());
  m.def("packed_int_add", [](Address from, Address to, int64_t nbytes, int threads) {
    for_ranges(nbytes, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().packed_int_add(at<const uint8_t>(from), at<uint8_t>(to), begin, end);
    });
  }, Unlocked());
  m.def("packed_int_accumulate", [](Address packed, int64_t n, int width, int sum_width, Address sum, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().packed_int_accumulate(at<const uint8_t>(packed), width, sum_width, at<uint8_t>(sum), begin, end);
    });
  }, Unlocked());
  m.def("packed_int_repack", [](Address sum, int64_t n, int sum_width, int width, Address packed, int threads) {
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      simd().packed_int_repack(at<const uint8_t>(sum), sum_width, width, at<uint8_t>(packed), begin, end);
    });
  }, Unlocked());
  m.def("packed_int_max", [](Address integers, int64_t n, int width, bool packed, int threads) {
    return max_over_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      return simd().packed_int_max(at<const uint8_t>(integers), {0, width, packed}, n, begin, end);
    });
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

  m.def("huffman_nbytes", [](Address counts, int64_t batch, int alphabet, Address out, int threads) {
    parallel_for(batch, threads, [&](int64_t i) {
      at<int64_t>(out)[i] = huffman_nbytes(at<const uint32_t>(counts) + i * alphabet, alphabet);
    });
  }, Unlocked());
  m.def("chunk_modes", [](Address section, int64_t nbytes, int64_t n, Address modes) {
    return chunk_modes(at<const uint8_t>(section), nbytes, n, at<uint8_t>(modes));
  }, Unlocked());
}
