// Reads sections of coded symbols, from anywhere: whatever they hold, nothing outside of the section is read.

#include "coded_chunks.hpp"

#include <algorithm>
#include <atomic>

namespace laconic {
namespace {

constexpr int kLeastTable = 11;  // bits of the smallest table of the Huffman decoder

// The destination of a chunk: floats, looked up in a table, or symbols.
struct Target {
  const float* table;
  Sink sink;
  void* symbols;
  bool narrow;

  uint32_t entry(int symbol) const {
    if (!table) return static_cast<uint32_t>(symbol);
    uint32_t bits;
    std::memcpy(&bits, table + symbol, 4);
    return bits;
  }
  void one(int64_t i, uint32_t symbol) const {
    if (!table) {
      if (narrow) {
        static_cast<uint8_t*>(symbols)[i] = static_cast<uint8_t>(symbol);
      } else {
        static_cast<uint16_t*>(symbols)[i] = static_cast<uint16_t>(symbol);
      }
    } else if (sink.accumulate) {
      const float product = table[symbol] * sink.weight;
      sink.out[i] = sink.out[i] + product;
    } else {
      sink.out[i] = table[symbol];
    }
  }
};

bool read_huffman(const uint8_t* in, int64_t nbytes, int64_t begin, int64_t n, int alphabet, const Target& target,
                  ChunkWorkspace& work) {
  const int64_t table_nbytes = read_code_table(in, nbytes, alphabet, work.lengths, nullptr);
  if (table_nbytes < 0) return false;
  HuffmanRead how{};
  how.longest = kLeastTable;
  how.streams = streams_for(n);
  const uint8_t* starts = in + table_nbytes;
  how.bits = starts + 4 * (how.streams - 1);
  how.nbytes = in + nbytes - how.bits;
  if (how.nbytes < 1) return false;
  // The code must be complete, so that the table has an entry for every bit pattern.
  uint32_t filled = 0, used = 0;
  for (int s = 0; s < alphabet; ++s) {
    if (work.lengths[s]) filled += 1u << (kMaxLength - work.lengths[s]), ++used;
    how.longest = std::max<int>(how.longest, work.lengths[s]);
  }
  if (filled != 1u << kMaxLength || used < 2) return false;
  const uint32_t size = 1u << how.longest;
  for_each_code(work.lengths, alphabet, [&](int s, int length, uint32_t code) {
    const uint64_t entry = static_cast<uint64_t>(target.entry(s)) << 32 | static_cast<uint64_t>(length);
    for (uint32_t i = code; i < size; i += 1u << length) work.entries[i] = entry;
  });
  how.table = work.entries.data();
  how.each = (n + how.streams - 1) / how.streams;
  how.n = n;
  int64_t start[kHuffmanStreams] = {};
  for (int stream = 1; stream < how.streams; ++stream) {
    start[stream] = read<uint32_t>(starts + 4 * (stream - 1));
    if (start[stream] < start[stream - 1] || start[stream] > 8 * how.nbytes) return false;
  }
  how.start = start;
  if (target.table) return simd().huffman_read_floats(how, target.sink, begin);
  if (target.narrow) return simd().huffman_read8(how, static_cast<uint8_t*>(target.symbols) + begin);
  return simd().huffman_read16(how, static_cast<uint16_t*>(target.symbols) + begin);
}

bool read_rans(const uint8_t* in, int64_t nbytes, int64_t begin, int64_t n, int alphabet, const Target& target,
               ChunkWorkspace& work) {
  if (nbytes < 1) return false;
  RansRead how{};
  how.scale = in[0];
  if (how.scale != kScales[0] && how.scale != kScales[1]) return false;
  const int64_t table_nbytes = read_code_table(in + 1, nbytes - 1, alphabet, work.classes, work.freqs);
  if (table_nbytes < 0) return false;
  how.num_states = rans_states_for(n);
  how.states = in + 1 + table_nbytes;
  how.words = how.states + 4 * how.num_states;
  how.end = in + nbytes;
  if (how.end < how.words || (how.end - how.words) % 2) return false;
  uint64_t total = 0;
  for (int s = 0; s < alphabet; ++s) total += work.freqs[s];
  if (total != uint64_t{1} << how.scale) return false;
  uint32_t slot = 0;
  for (int s = 0; s < alphabet; ++s) {
    const uint32_t freq = work.freqs[s], value = target.entry(s);
    if (freq >> how.scale) return false;  // a constant must use its own mode
    for (uint32_t i = 0; i < freq; ++i, ++slot) {
      work.step[slot] = i << 16 | freq;
      work.value[slot] = value;
    }
  }
  for (int i = 0; i < how.num_states; ++i) {
    const uint32_t state = read<uint32_t>(how.states + 4 * i);
    if (state < kRansLow || state >> 31) return false;
  }
  how.step = work.step.data();
  how.value = work.value.data();
  if (target.table) return simd().rans_read_floats(how, target.sink, begin, n);
  if (target.narrow) return simd().rans_read8(how, n, static_cast<uint8_t*>(target.symbols) + begin);
  return simd().rans_read16(how, n, static_cast<uint16_t*>(target.symbols) + begin);
}

bool read_raw(const uint8_t* in, int64_t nbytes, int64_t begin, int64_t n, int alphabet, const Target& target) {
  const int bits = symbol_bits(alphabet);
  if (nbytes != packed_nbytes(n, bits)) return false;
  for (int64_t i = 0; i < n; i += kGroup) {
    const int64_t count = std::min(kGroup, n - i);
    uint32_t group[kGroup];
    simd().unpack(in + i / kGroup * 32 * bits, count, bits, group);
    for (int64_t k = 0; k < count; ++k) {
      if (group[k] >= static_cast<uint32_t>(alphabet)) return false;
      target.one(begin + i + k, group[k]);
    }
  }
  return true;
}

bool read_chunk(const uint8_t* in, int64_t nbytes, int64_t begin, int64_t n, int alphabet, const Target& target) {
  if (nbytes < 1) return false;
  const uint8_t* body = in + 1;
  --nbytes;
  switch (in[0]) {
    case kConstant: {
      if (nbytes != 2) return false;
      const uint32_t symbol = read<uint16_t>(body);
      if (symbol >= static_cast<uint32_t>(alphabet)) return false;
      for (int64_t i = 0; i < n; ++i) target.one(begin + i, symbol);
      return true;
    }
    case kRaw: return read_raw(body, nbytes, begin, n, alphabet, target);
    case kHuffman: return read_huffman(body, nbytes, begin, n, alphabet, target, chunk_workspace());
    case kRans: return read_rans(body, nbytes, begin, n, alphabet, target, chunk_workspace());
    default: return false;
  }
}

// The offset of each chunk, and the end; empty if the directory does not fit the section.
std::vector<int64_t> chunk_bounds(const uint8_t* section, int64_t nbytes, int64_t n) {
  const int64_t chunks = chunks_of(n);
  if (nbytes < 5 * chunks) return {};
  std::vector<int64_t> bounds(static_cast<size_t>(chunks) + 1);
  int64_t at = bounds[0] = 4 * chunks;
  for (int64_t i = 0; i < chunks; ++i) {
    const uint32_t size = read<uint32_t>(section + 4 * i);
    at += size;
    if (size == 0 || at > nbytes) return {};
    bounds[static_cast<size_t>(i) + 1] = at;
  }
  if (at != nbytes) return {};
  return bounds;
}

bool decode_to(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, const Target& target, int threads) {
  const std::vector<int64_t> bounds = chunk_bounds(section, nbytes, n);
  if (bounds.empty()) return false;
  std::atomic<bool> valid{true};
  parallel_for(chunks_of(n), threads, [&](int64_t i) {
    const size_t c = static_cast<size_t>(i);
    if (!read_chunk(section + bounds[c], bounds[c + 1] - bounds[c], i * kChunk, std::min(kChunk, n - i * kChunk),
                    alphabet, target)) {
      valid = false;
    }
  });
  return valid;
}

}  // namespace

bool decode_symbols(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, void* symbols, int threads) {
  return decode_to(section, nbytes, n, alphabet, {nullptr, {}, symbols, alphabet <= 256}, threads);
}
bool decode_values(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, const float* table, Sink sink,
                   int threads) {
  return decode_to(section, nbytes, n, alphabet, {table, sink, nullptr, false}, threads);
}

bool chunk_modes(const uint8_t* section, int64_t nbytes, int64_t n, uint8_t* modes) {
  const std::vector<int64_t> bounds = chunk_bounds(section, nbytes, n);
  for (size_t i = 0; i + 1 < bounds.size(); ++i) modes[i] = section[bounds[i]];
  return !bounds.empty();
}

}  // namespace laconic
