// Vertical bit packing: a group is 32 rows of 8 lanes, each lane its own bit stream; the tail is one plain bit stream.
#pragma once

#include "vector.hpp"

namespace laconic {
namespace {

// Collects rows of 8 symbols into words of their lanes' bit streams.
template <int Bits>
struct RowWriter {
  uint8_t* out;
  u8v word = {};

  template <int Row>
  INLINE void put(u8v symbols) {
    constexpr int shift = Row * Bits % 32;
    if constexpr (shift == 0) {
      word = symbols;
    } else {
      word |= symbols << shift;
    }
    if constexpr (shift + Bits >= 32) {
      store(out + Row * Bits / 32 * 32, word);
      if constexpr (shift + Bits > 32) word = symbols >> (32 - shift);
    }
  }
};

// The same for a symbol that is the integer part of a fixed-point number: if words hold whole symbols, one shift and a
// mask move it to its bits.
template <int Bits, int FractionBits, int Row>
INLINE void put_fixed(RowWriter<Bits>& writer, u8v fixed) {
  constexpr int place = Row * Bits % 32, shift = FractionBits - place;
  if constexpr (32 % Bits != 0 || place == 0) {
    writer.template put<Row>(fixed >> FractionBits);
  } else {
    const u8v moved = shift >= 0 ? fixed >> (shift & 31) : fixed << (-shift & 31);
    writer.word |= moved & (((1u << Bits) - 1) << place);
    if constexpr (place + Bits == 32) store(writer.out + Row * Bits / 32 * 32, writer.word);
  }
}

template <int Bits, int Row>
INLINE u8v row_of(const uint8_t* packed) {
  if constexpr (Bits == 0) return u8v{};
  constexpr int word = Row * Bits / 32, shift = Row * Bits % 32;
  u8v v = load<u8v>(packed + 32 * word) >> shift;
  if constexpr (shift + Bits > 32) v |= load<u8v>(packed + 32 * (word + 1)) << (32 - shift);
  if constexpr (shift + Bits != 32) v &= (1u << Bits) - 1;
  return v;
}

template <int Bits>
void pack_group(const uint32_t* symbols, uint8_t* out) {
  if constexpr (Bits > 0) {
    RowWriter<Bits> writer{out};
    unroll<32>([&](auto row) { writer.template put<row>(load<u8v>(symbols + 8 * row)); });
  }
}
template <int Bits>
void unpack_group(const uint8_t* packed, uint32_t* out) {
  unroll<32>([&](auto row) { store(out + 8 * row, row_of<Bits, row>(packed)); });
}

using PackGroup = void (*)(const uint32_t*, uint8_t*);
using UnpackGroup = void (*)(const uint8_t*, uint32_t*);
template <int... B>
PackGroup pack_group_of(int bits, std::integer_sequence<int, B...>) {
  static constexpr PackGroup table[] = {pack_group<B>...};
  return table[bits];
}
template <int... B>
UnpackGroup unpack_group_of(int bits, std::integer_sequence<int, B...>) {
  static constexpr UnpackGroup table[] = {unpack_group<B>...};
  return table[bits];
}
PackGroup pack_group_of(int bits) { return pack_group_of(bits, std::make_integer_sequence<int, 32>{}); }
UnpackGroup unpack_group_of(int bits) { return unpack_group_of(bits, std::make_integer_sequence<int, 32>{}); }

// The tail of fewer than 256 values: one plain bit stream.
void pack_tail(const uint32_t* symbols, int64_t n, int bits, uint8_t* out) {
  uint64_t word = 0;
  int filled = 0;
  for (int64_t i = 0; i < n; ++i) {
    word |= static_cast<uint64_t>(symbols[i]) << filled;
    for (filled += bits; filled >= 8; filled -= 8, word >>= 8) *out++ = static_cast<uint8_t>(word);
  }
  if (filled) *out = static_cast<uint8_t>(word);
}
void unpack_tail(const uint8_t* packed, int64_t n, int bits, uint32_t* out) {
  uint64_t word = 0;
  int filled = 0;
  const uint32_t mask = (1u << bits) - 1;
  for (int64_t i = 0; i < n; ++i) {
    for (; filled < bits; filled += 8) word |= static_cast<uint64_t>(*packed++) << filled;
    out[i] = static_cast<uint32_t>(word) & mask;
    word >>= bits;
    filled -= bits;
  }
}

void pack(const uint32_t* symbols, int64_t n, int bits, uint8_t* out) {
  const PackGroup group = pack_group_of(bits);
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup, out += 32 * bits) group(symbols + i, out);
  if (bits) pack_tail(symbols + i, n - i, bits, out);
}
void unpack(const uint8_t* packed, int64_t n, int bits, uint32_t* out) {
  const UnpackGroup group = unpack_group_of(bits);
  int64_t i = 0;
  for (; i + kGroup <= n; i += kGroup, packed += 32 * bits) group(packed, out + i);
  if (bits) {
    unpack_tail(packed, n - i, bits, out + i);
  } else {
    for (; i < n; ++i) out[i] = 0;
  }
}

}  // namespace
}  // namespace laconic
