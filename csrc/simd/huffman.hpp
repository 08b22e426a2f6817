// Huffman coding: symbols to one bit stream, and several streams back to values at once.
//
// The writer keeps its bits at the top of a word: a table entry has the code, first bit lowest, at the top of 64 bits
// and its length in the lowest byte, so appending is a shift and an or. The reader keeps a marker bit above its bits,
// whose leading zeros count the bits that were read; this saves a register per stream. Six streams are decoded at once:
// fewer would wait for the table, more would not fit the registers.
#pragma once

#include "sink.hpp"

namespace laconic {
namespace {

template <int PerFlush, class Symbol>
INLINE void huffman_write_as(const Symbol* symbols, int64_t n, const uint64_t* table, BitSink& sink) {
  uint8_t* out = sink.at;
  uint64_t held = sink.held, count = static_cast<uint64_t>(sink.count);
  auto append = [&](uint64_t entry, uint64_t length) {
    held = held >> (length & 63) | entry;
    count += length;
  };
  auto flush = [&] {
    count &= 0xFF;
    const uint64_t word = held >> (-count & 63);
    std::memcpy(out, &word, 8);
    out += count >> 3;
    count &= 7;
  };
  int64_t i = 0;
  for (; i + PerFlush <= n; i += PerFlush) {
    // Joining two codes first shortens the dependency chain.
    const uint64_t a = table[symbols[i]], b = table[symbols[i + 1]];
    append(a >> (b & 63) | b, a + b);
    if constexpr (PerFlush == 4) {
      const uint64_t c = table[symbols[i + 2]], d = table[symbols[i + 3]];
      append(c >> (d & 63) | d, c + d);
    } else {
      const uint64_t c = table[symbols[i + 2]];
      append(c, c);
    }
    flush();
  }
  for (; i < n; ++i) {
    const uint64_t a = table[symbols[i]];
    append(a, a);
    flush();
  }
  sink.at = out;
  sink.held = held;
  sink.count = static_cast<int>(count & 7);
}
// Up to seven bits are pending and eight hold a length, so 49 are free: four codes of up to twelve bits, or three
// longer ones.
template <class Symbol>
void huffman_write(const Symbol* symbols, int64_t n, const uint64_t* table, int longest, BitSink& sink) {
  if (longest <= 12) {
    huffman_write_as<4>(symbols, n, table, sink);
  } else {
    huffman_write_as<3>(symbols, n, table, sink);
  }
}
void huffman_write8(const uint8_t* symbols, int64_t n, const uint64_t* table, int longest, BitSink& sink) {
  huffman_write(symbols, n, table, longest, sink);
}
void huffman_write16(const uint16_t* symbols, int64_t n, const uint64_t* table, int longest, BitSink& sink) {
  huffman_write(symbols, n, table, longest, sink);
}

constexpr int kFlight = 6;
constexpr uint64_t kMark = uint64_t{1} << 63;

// Destinations of the upper half of a decoded entry.
struct ToFloat {
  float* out;
  INLINE void put(float* to, uint32_t value) const { std::memcpy(to, &value, 4); }
};
struct ToSum {
  float* out;
  float weight;
  INLINE void put(float* to, uint32_t value) const {
    float v;
    std::memcpy(&v, &value, 4);
    const float product = v * weight;
    *to = *to + product;
  }
};
template <class Symbol>
struct ToSymbol {
  Symbol* out;
  INLINE void put(Symbol* to, uint32_t value) const { *to = static_cast<Symbol>(value); }
};

// Decodes symbol by symbol without reading past the end. Returns the bit after the last symbol, or -1.
template <class To>
int64_t huffman_read_on(const HuffmanRead& r, int64_t bit, int64_t from, int64_t to, const To& sink) {
  for (int64_t i = from; i < to; ++i) {
    const int64_t byte = bit >> 3, left = r.nbytes - byte;
    if (left <= 0) return -1;
    uint64_t word = 0;
    std::memcpy(&word, r.bits + byte, static_cast<size_t>(least(left, 8)));
    const uint64_t entry = r.table[word >> (bit & 7) & ((uint64_t{1} << r.longest) - 1)];
    sink.put(sink.out + i, static_cast<uint32_t>(entry >> 32));
    bit += static_cast<int64_t>(entry & 0xFF);
    if (bit > 8 * r.nbytes) return -1;
  }
  return bit;
}

// Decodes `Flight` streams side by side as long as no load can reach past the end, then each alone. Registers are
// scarce: the stream positions stay in memory, and the outputs are addressed by two pointers and one stride.
template <int Flight, int Longest, class To>
INLINE bool huffman_read_flight(const HuffmanRead& r, int first, const To& sink) {
  constexpr int kRounds = 8;                         // between two checks of the end; at most seven bytes per round
  constexpr int PerRefill = Longest <= 14 ? 4 : 3;   // a refill provides 56 bits
  constexpr uint64_t mask = (uint64_t{1} << Longest) - 1;
  const uint8_t* volatile at[Flight];
  uint64_t held[Flight];
  const int64_t length = r.each, rounds = r.count(first + Flight - 1) / (kRounds * PerRefill);
  const uint64_t* const table = r.table;
  bool inside = true;
  for (int s = 0; s < Flight; ++s) {
    const int64_t bit = r.start[first + s];
    at[s] = r.bits + (bit >> 3);
    inside &= (bit >> 3) + 8 <= r.nbytes;
    held[s] = kMark;
    if (inside) held[s] = (load<uint64_t>(at[s]) | kMark) >> (bit & 7);
  }
  auto* low = sink.out + first * length;
  int64_t symbol = 0;
  for (int64_t look = 0; inside && look < rounds; ++look) {
    for (int s = 0; s < Flight; ++s) inside &= r.bits + r.nbytes - at[s] >= 8 * kRounds + 16;
    if (!inside) break;
    for (int round = 0; round < kRounds; ++round) {
      auto* high = low + 3 * length;
      int64_t stride = length;
      asm("" : "+r"(stride), "+r"(high));  // keeps the compiler from using six registers
      unroll<Flight>([&](auto s) {
        auto* to = s < 3 ? low + s * stride : high + (s - 3) * stride;
        const unsigned used = static_cast<unsigned>(__builtin_clzll(held[s]));
        const uint8_t* here = at[s] + (used >> 3);
        at[s] = here;
        held[s] = (load<uint64_t>(here) | kMark) >> (used & 7);
        unroll<PerRefill>([&](auto k) {
          const uint64_t entry = table[held[s] & mask];
          held[s] >>= entry & 63;
          sink.put(to + k, static_cast<uint32_t>(entry >> 32));
        });
      });
      low += PerRefill;
    }
    symbol += kRounds * PerRefill;
  }
  for (int s = 0; s < Flight; ++s) {
    const int64_t begin = (first + s) * length;
    const int64_t bit = symbol ? (at[s] - r.bits) * 8 + __builtin_clzll(held[s]) : r.start[first + s];
    const int64_t end = huffman_read_on(r, bit, begin + symbol, begin + r.count(first + s), sink);
    if (!r.ends_well(first + s, end)) return false;
  }
  return true;
}
template <int Longest, class To>
bool huffman_read_streams(const HuffmanRead& r, const To& sink) {
  for (int first = 0; first < r.streams; first += kFlight) {
    if (!(r.streams < kFlight ? huffman_read_flight<1, Longest>(r, first, sink)
                              : huffman_read_flight<kFlight, Longest>(r, first, sink))) {
      return false;
    }
  }
  return true;
}
template <class To>
bool huffman_read_to(const HuffmanRead& r, const To& sink) {
  switch (r.longest) {
    case 11: return huffman_read_streams<11>(r, sink);
    case 12: return huffman_read_streams<12>(r, sink);
    case 13: return huffman_read_streams<13>(r, sink);
    case 14: return huffman_read_streams<14>(r, sink);
    default: return huffman_read_streams<15>(r, sink);
  }
}
bool huffman_read_floats(const HuffmanRead& r, const Sink& sink, int64_t begin) {
  if (sink.accumulate) return huffman_read_to(r, ToSum{sink.out + begin, sink.weight});
  return huffman_read_to(r, ToFloat{sink.out + begin});
}
bool huffman_read8(const HuffmanRead& r, uint8_t* out) { return huffman_read_to(r, ToSymbol<uint8_t>{out}); }
bool huffman_read16(const HuffmanRead& r, uint16_t* out) { return huffman_read_to(r, ToSymbol<uint16_t>{out}); }

}  // namespace
}  // namespace laconic
