// Sections of coded symbols.

#include "bindings.hpp"

namespace laconic {

void bind_coding(nb::module_& m) {
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
  m.def("huffman_nbytes", [](Address counts, int64_t batch, int alphabet, Address out, int threads) {
    parallel_for(batch, threads, [&](int64_t i) {
      at<int64_t>(out)[i] = huffman_nbytes(at<const uint32_t>(counts) + i * alphabet, alphabet);
    });
  }, Unlocked());
  m.def("chunk_modes", [](Address section, int64_t nbytes, int64_t n, Address modes) {
    return chunk_modes(at<const uint8_t>(section), nbytes, n, at<uint8_t>(modes));
  }, Unlocked());
}

}  // namespace laconic
