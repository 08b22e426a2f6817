// Packed integers of ``shared`` and ``thc``, which add while packed.

#include "bindings.hpp"

namespace laconic {

void bind_packed_ints(nb::module_& m) {
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
}

}  // namespace laconic
