// Sections of coded symbols: a directory of chunks, each with its own code table, so that threads share the work.
//
//   u32 bytes of each chunk, then the chunks. A chunk is a mode, followed by
//   constant  u16 symbol
//   raw       the packed symbols
//   huffman   code table, u32 first bit of each stream but the first, the bits
//   rans      u8 scale, code table with frequencies, u32 states, u16 words

#pragma once

#include "core.hpp"

#include <cstring>
#include <memory>
#include <vector>

namespace laconic {

enum Mode : uint8_t { kConstant = 0, kRaw = 1, kHuffman = 2, kRans = 3 };
constexpr int kScales[] = {12, 15};

inline int symbol_bits(int alphabet) { return alphabet > 1 ? 32 - __builtin_clz(static_cast<uint32_t>(alphabet - 1)) : 0; }
inline int streams_for(int64_t n) { return n >= 65536 ? kHuffmanStreams : n >= 2048 ? 6 : 1; }
inline int rans_states_for(int64_t n) { return n >= 16384 ? kRansStates : 4; }
inline int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }

template <class T>
T read(const uint8_t* in) {
  T value;
  std::memcpy(&value, in, sizeof value);
  return value;
}

// Memory of one thread for a chunk, kept because fresh memory costs more than filling it.
struct ChunkWorkspace {
  std::vector<uint8_t> symbols = std::vector<uint8_t>(2 * kChunk);
  uint32_t counts[kMaxAlphabet], freqs[kMaxAlphabet], other[kMaxAlphabet];
  uint8_t lengths[kMaxAlphabet], classes[kMaxAlphabet];
  uint64_t codes[kMaxAlphabet];
  std::vector<uint64_t> entries = std::vector<uint64_t>(size_t{1} << kMaxLength);
  std::vector<uint32_t> step = std::vector<uint32_t>(size_t{1} << kMaxLength);
  std::vector<uint32_t> value = std::vector<uint32_t>(size_t{1} << kMaxLength);
};
inline ChunkWorkspace& chunk_workspace() {
  static thread_local std::unique_ptr<ChunkWorkspace> workspace;
  if (!workspace) workspace = std::make_unique<ChunkWorkspace>();
  return *workspace;
}

// Canonical codes, ordered by length, then by symbol; bits are reversed because the lowest is read first.
template <class F>
void for_each_code(const uint8_t* lengths, int alphabet, F body) {
  uint32_t next[kMaxLength + 2] = {};
  uint32_t number[kMaxLength + 1] = {};
  for (int s = 0; s < alphabet; ++s) ++number[lengths[s]];
  number[0] = 0;
  for (int l = 1; l <= kMaxLength; ++l) next[l + 1] = (next[l] + number[l]) << 1;
  for (int s = 0; s < alphabet; ++s) {
    const int length = lengths[s];
    if (!length) continue;
    uint32_t code = next[length]++, reversed = 0;
    for (int bit = 0; bit < length; ++bit, code >>= 1) reversed = reversed << 1 | (code & 1);
    body(s, length, reversed);
  }
}

}  // namespace laconic
