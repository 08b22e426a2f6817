// Symbols in memory, a byte or two each, from and to packed bits, or five symbols of three values per byte.

#include "coded_chunks.hpp"

#include <algorithm>
#include <cstring>

namespace laconic {
namespace {

// Five symbols per byte: every 64th of a full group of 320, neighbours in the tail.
template <class F>
void for_each_trit(int64_t n, F body) {
  constexpr int64_t span = 5 * kTritGroupBytes;
  const int64_t full = n / span * span;
  for (int64_t i = 0; i < full; ++i) {
    const int64_t within = i % span;
    body(i, i / span * kTritGroupBytes + within % kTritGroupBytes, static_cast<int>(within / kTritGroupBytes));
  }
  for (int64_t i = full; i < n; ++i) body(i, full / 5 + (i - full) / 5, static_cast<int>((i - full) % 5));
}
constexpr int kPowers[] = {1, 3, 9, 27, 81};

template <class Symbol>
void unpack_to(const uint8_t* packed, int64_t n, int bits, Symbol* out) {
  uint32_t group[kGroup];
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t count = std::min(kGroup, n - i);
    simd().unpack(packed + i / kGroup * 32 * bits, count, bits, group);
    for (int64_t k = 0; k < count; ++k) out[i + k] = static_cast<Symbol>(group[k]);
  }
}
template <class Symbol>
void pack_from(const Symbol* symbols, int64_t n, int bits, uint8_t* out) {
  uint32_t group[kGroup];
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t count = std::min(kGroup, n - i);
    for (int64_t k = 0; k < count; ++k) group[k] = symbols[i + k];
    simd().pack(group, count, bits, out + i / kGroup * 32 * bits);
  }
}

}  // namespace

void unpack_symbols(const uint8_t* packed, int64_t n, int alphabet, bool trits, void* symbols) {
  if (trits) {
    auto* out = static_cast<uint8_t*>(symbols);
    for_each_trit(n, [&](int64_t i, int64_t byte, int digit) {
      out[i] = static_cast<uint8_t>(packed[byte] / kPowers[digit] % 3);
    });
  } else if (alphabet <= 256) {
    unpack_to(packed, n, symbol_bits(alphabet), static_cast<uint8_t*>(symbols));
  } else {
    unpack_to(packed, n, symbol_bits(alphabet), static_cast<uint16_t*>(symbols));
  }
}
void pack_symbols(const void* symbols, int64_t n, int alphabet, bool trits, uint8_t* packed) {
  if (trits) {
    constexpr int64_t span = 5 * kTritGroupBytes;
    std::memset(packed, 0, static_cast<size_t>(n / span * kTritGroupBytes + (n % span + 4) / 5));
    const auto* in = static_cast<const uint8_t*>(symbols);
    for_each_trit(n, [&](int64_t i, int64_t byte, int digit) {
      packed[byte] = static_cast<uint8_t>(packed[byte] + in[i] * kPowers[digit]);
    });
  } else if (alphabet <= 256) {
    pack_from(static_cast<const uint8_t*>(symbols), n, symbol_bits(alphabet), packed);
  } else {
    pack_from(static_cast<const uint16_t*>(symbols), n, symbol_bits(alphabet), packed);
  }
}

}  // namespace laconic
