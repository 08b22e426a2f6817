// Sections of coded symbols: a directory of chunks, each with its own code table, so that threads share the work.
//
//   u32 bytes of each chunk, then the chunks. A chunk is a mode, followed by
//   constant  u16 symbol
//   raw       the packed symbols
//   huffman   code table, u32 first bit of each stream but the first, the bits
//   rans      u8 scale, code table with frequencies, u32 states, u16 words

#include "core.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

namespace laconic {
namespace {

enum Mode : uint8_t { kConstant = 0, kRaw = 1, kHuffman = 2, kRans = 3 };
constexpr int kScales[] = {12, 15};
constexpr int kLeastTable = 11;  // bits of the smallest table of the Huffman decoder
constexpr int64_t kSlack = 64;  // bytes that writers may touch behind their output

int symbol_bits(int alphabet) { return alphabet > 1 ? 32 - __builtin_clz(static_cast<uint32_t>(alphabet - 1)) : 0; }
int streams_for(int64_t n) { return n >= 65536 ? kHuffmanStreams : n >= 2048 ? 6 : 1; }
int rans_states_for(int64_t n) { return n >= 16384 ? kRansStates : 4; }
int64_t chunks_of(int64_t n) { return (n + kChunk - 1) / kChunk; }
// At most seven bits of class and fourteen of mantissa per symbol. An optimal code never exceeds one of equal lengths,
// and rANS exceeds that by less than two bits, because no frequency is less than a third of its exact value.
int64_t chunk_max_nbytes(int64_t n, int alphabet) {
  const int64_t table = 4 + (static_cast<int64_t>(alphabet) * 21 + 7) / 8;
  return 2 + table + 4 * kRansStates + n * (symbol_bits(alphabet) + 2) / 8 + kSlack;
}

template <class T>
void put(uint8_t*& out, T value) {
  std::memcpy(out, &value, sizeof value);
  out += sizeof value;
}
template <class T>
T read(const uint8_t* in) {
  T value;
  std::memcpy(&value, in, sizeof value);
  return value;
}

// Memory of one thread for a chunk, kept because fresh memory costs more than filling it.
struct Workspace {
  std::vector<uint8_t> symbols = std::vector<uint8_t>(2 * kChunk);
  uint32_t counts[kMaxAlphabet], freqs[kMaxAlphabet], other[kMaxAlphabet];
  uint8_t lengths[kMaxAlphabet], classes[kMaxAlphabet];
  uint64_t codes[kMaxAlphabet];
  std::vector<uint64_t> entries = std::vector<uint64_t>(size_t{1} << kMaxLength);
  std::vector<uint32_t> step = std::vector<uint32_t>(size_t{1} << kMaxLength);
  std::vector<uint32_t> value = std::vector<uint32_t>(size_t{1} << kMaxLength);
};
Workspace& workspace() {
  static thread_local std::unique_ptr<Workspace> workspace;
  if (!workspace) workspace = std::make_unique<Workspace>();
  return *workspace;
}

// How to code a chunk, and its bytes (for rANS a close estimate).
struct Plan {
  Mode mode;
  int64_t nbytes;
  int longest, scale;
};

Plan plan_huffman(const uint32_t* counts, int alphabet, int64_t n, uint8_t* lengths) {
  const int longest = code_lengths(counts, alphabet, lengths);
  int64_t bits = 0;
  for (int s = 0; s < alphabet; ++s) bits += static_cast<int64_t>(counts[s]) * lengths[s];
  const int64_t table = write_code_table(lengths, nullptr, alphabet, nullptr);
  return {kHuffman, 1 + table + 4 * (streams_for(n) - 1) + (bits + 7) / 8, longest, 0};
}

void classes_of(const uint32_t* freqs, int alphabet, uint8_t* classes) {
  for (int s = 0; s < alphabet; ++s) classes[s] = freqs[s] ? static_cast<uint8_t>(32 - __builtin_clz(freqs[s])) : 0;
}

Plan plan_rans(const uint32_t* counts, int alphabet, int used, int64_t n, Workspace& work) {
  Plan best{kRans, 0, 0, 0};
  for (const int scale : kScales) {
    if (used > 1 << (scale - 2) && scale < kMaxLength) continue;
    uint32_t* freqs = best.scale ? work.other : work.freqs;
    scale_frequencies(counts, alphabet, n, scale, freqs);
    classes_of(freqs, alphabet, work.classes);
    uint64_t cost = 0;  // in units of 2^-16 bits
    for (int s = 0; s < alphabet; ++s) {
      if (counts[s]) cost += counts[s] * (static_cast<uint64_t>(scale << 16) - log2_fixed(freqs[s]));
    }
    const int64_t table = write_code_table(work.classes, freqs, alphabet, nullptr);
    // A final state takes four bytes and carries about one byte of information on average.
    const int64_t nbytes = 2 + table + 3 * rans_states_for(n) + static_cast<int64_t>((cost + (1 << 19) - 1) >> 19);
    // The smaller scale decodes faster, so the larger one must save one byte in 512.
    if (best.scale && nbytes + nbytes / 512 >= best.nbytes) continue;
    if (best.scale) std::memcpy(work.freqs, freqs, static_cast<size_t>(alphabet) * sizeof(uint32_t));
    best.nbytes = nbytes;
    best.scale = scale;
  }
  return best;
}

Plan choose(const uint32_t* counts, int alphabet, int64_t n, Coding coding, Workspace& work) {
  int used = 0;
  for (int s = 0; s < alphabet; ++s) used += counts[s] > 0;
  if (used == 1) return {kConstant, 3, 0, 0};
  if (coding == Coding::huffman) return plan_huffman(counts, alphabet, n, work.lengths);
  if (coding == Coding::rans) return plan_rans(counts, alphabet, used, n, work);
  const Plan huffman = plan_huffman(counts, alphabet, n, work.lengths);
  const Plan rans = plan_rans(counts, alphabet, used, n, work);
  const Plan raw{kRaw, 1 + packed_nbytes(n, symbol_bits(alphabet)), 0, 0};
  // The preferred coder is kept unless another one saves more than one byte in 2,048.
  Plan best = coding == Coding::huffman_auto ? huffman : rans;
  for (const Plan& other : {huffman, rans, raw}) {
    if (other.nbytes + other.nbytes / 2048 < best.nbytes) best = other;
  }
  return best;
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

template <class Symbol>
uint8_t* write_huffman(const Symbol* symbols, int64_t n, int alphabet, const Plan& plan, Workspace& work,
                       uint8_t* out) {
  out += write_code_table(work.lengths, nullptr, alphabet, out);
  for_each_code(work.lengths, alphabet, [&](int s, int length, uint32_t code) {
    work.codes[s] = static_cast<uint64_t>(code) << (64 - length) | static_cast<uint64_t>(length);
  });
  const int streams = streams_for(n);
  const int64_t each = (n + streams - 1) / streams;
  uint8_t* starts = out;
  out += 4 * (streams - 1);
  const uint8_t* begin = out;
  BitSink sink{out, 0, 0};
  for (int stream = 0; stream < streams; ++stream) {
    if (stream) put(starts, static_cast<uint32_t>((sink.at - begin) * 8 + sink.count));
    const int64_t from = stream * each, count = std::min(each, n - from);
    if constexpr (sizeof(Symbol) == 1) {
      simd().huffman_write8(symbols + from, count, work.codes, plan.longest, sink);
    } else {
      simd().huffman_write16(symbols + from, count, work.codes, plan.longest, sink);
    }
  }
  if (sink.count) *sink.at++ = static_cast<uint8_t>(sink.held >> (64 - sink.count));
  return sink.at;
}

template <class Symbol>
uint8_t* write_rans(const Symbol* symbols, int64_t n, int alphabet, const Plan& plan, Workspace& work, uint8_t* out,
                    uint8_t* end) {
  classes_of(work.freqs, alphabet, work.classes);
  put(out, static_cast<uint8_t>(plan.scale));
  out += write_code_table(work.classes, work.freqs, alphabet, out);
  uint32_t start = 0;
  for (int s = 0; s < alphabet; ++s) {
    const uint32_t freq = work.freqs[s];
    if (!freq) continue;
    const int shift = freq > 1 ? 32 - __builtin_clz(freq - 1) : 0;
    const uint64_t reciprocal = ((uint64_t{1} << (31 + shift)) + freq - 1) / freq;
    work.codes[s] = reciprocal << 32 | start << 16 | freq;
    start += freq;
  }
  const int num_states = rans_states_for(n);
  const RansWrite how{work.codes, plan.scale, num_states};
  uint32_t state[kRansStates];
  uint8_t* words;
  if constexpr (sizeof(Symbol) == 1) {
    words = simd().rans_write8(how, symbols, n, end, state);
  } else {
    words = simd().rans_write16(how, symbols, n, end, state);
  }
  std::memcpy(out, state, static_cast<size_t>(num_states) * 4);
  out += 4 * num_states;
  std::memmove(out, words, static_cast<size_t>(end - words));
  return out + (end - words);
}

template <class Symbol>
int64_t encode_chunk(const Symbol* symbols, int64_t n, int alphabet, Coding coding, Workspace& work, uint8_t* out,
                     int64_t capacity) {
  if constexpr (sizeof(Symbol) == 1) {
    simd().count_symbols8(symbols, n, alphabet, work.counts);
  } else {
    simd().count_symbols16(symbols, n, alphabet, work.counts);
  }
  const Plan plan = choose(work.counts, alphabet, n, coding, work);
  uint8_t* at = out;
  put(at, static_cast<uint8_t>(plan.mode));
  switch (plan.mode) {
    case kConstant: put(at, static_cast<uint16_t>(symbols[0])); break;
    case kRaw:
      pack_symbols(symbols, n, alphabet, false, at);
      at += packed_nbytes(n, symbol_bits(alphabet));
      break;
    case kHuffman: at = write_huffman(symbols, n, alphabet, plan, work, at); break;
    case kRans: at = write_rans(symbols, n, alphabet, plan, work, at, out + capacity); break;
  }
  return at - out;
}

template <class Symbol>
void grid_chunk(const Symbols& source, int64_t begin, int64_t n, Symbol* out) {
  const float* x = source.x + begin;
  if constexpr (sizeof(Symbol) == 1) {
    source.linear ? simd().linear_symbols8(x, n, *source.linear, out)
                  : simd().uniform_symbols8(x, n, *source.uniform, out);
  } else {
    source.linear ? simd().linear_symbols16(x, n, *source.linear, out)
                  : simd().uniform_symbols16(x, n, *source.uniform, out);
  }
}
template <class Symbol>
const Symbol* chunk_symbols(const Symbols& source, int64_t begin, int64_t n, Workspace& work) {
  if (source.ready) return static_cast<const Symbol*>(source.ready) + begin;
  Symbol* made = reinterpret_cast<Symbol*>(work.symbols.data());
  grid_chunk(source, begin, n, made);
  return made;
}

// --------------------------------------------------------------------------------------------------------- reading

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
                  Workspace& work) {
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
               Workspace& work) {
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
    case kHuffman: return read_huffman(body, nbytes, begin, n, alphabet, target, workspace());
    case kRans: return read_rans(body, nbytes, begin, n, alphabet, target, workspace());
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

int64_t coded_max_nbytes(int64_t n, int alphabet) {
  const int64_t chunks = chunks_of(n);
  if (!chunks) return 0;
  return 4 * chunks + (chunks - 1) * chunk_max_nbytes(kChunk, alphabet) +
         chunk_max_nbytes(n - (chunks - 1) * kChunk, alphabet);
}

void grid_symbols(const Symbols& source, int64_t n, int alphabet, void* out, int threads) {
  parallel_for(chunks_of(n), threads, [&](int64_t i) {
    const int64_t begin = i * kChunk, count = std::min(kChunk, n - begin);
    if (alphabet <= 256) {
      grid_chunk(source, begin, count, static_cast<uint8_t*>(out) + begin);
    } else {
      grid_chunk(source, begin, count, static_cast<uint16_t*>(out) + begin);
    }
  });
}

int64_t encode_symbols(const Symbols& source, int64_t n, int alphabet, Coding coding, uint8_t* out, int threads) {
  const int64_t chunks = chunks_of(n), slot = chunk_max_nbytes(kChunk, alphabet);
  std::vector<int64_t> sizes(static_cast<size_t>(chunks));
  parallel_for(chunks, threads, [&](int64_t i) {
    Workspace& work = workspace();
    const int64_t begin = i * kChunk, count = std::min(kChunk, n - begin);
    uint8_t* to = out + 4 * chunks + i * slot;
    const int64_t capacity = chunk_max_nbytes(count, alphabet);
    const auto encode = [&](const auto* symbols) {
      return encode_chunk(symbols, count, alphabet, coding, work, to, capacity);
    };
    sizes[static_cast<size_t>(i)] = alphabet <= 256 ? encode(chunk_symbols<uint8_t>(source, begin, count, work))
                                                    : encode(chunk_symbols<uint16_t>(source, begin, count, work));
  });
  uint8_t *entry = out, *to = out + 4 * chunks;
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t nbytes = sizes[static_cast<size_t>(i)];
    put(entry, static_cast<uint32_t>(nbytes));
    std::memmove(to, out + 4 * chunks + i * slot, static_cast<size_t>(nbytes));
    to += nbytes;
  }
  return to - out;
}

bool decode_symbols(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, void* symbols, int threads) {
  return decode_to(section, nbytes, n, alphabet, {nullptr, {}, symbols, alphabet <= 256}, threads);
}
bool decode_values(const uint8_t* section, int64_t nbytes, int64_t n, int alphabet, const float* table, Sink sink,
                   int threads) {
  return decode_to(section, nbytes, n, alphabet, {table, sink, nullptr, false}, threads);
}

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

int64_t huffman_nbytes(const uint32_t* counts, int alphabet) {
  int64_t n = 0;
  int used = 0;
  for (int s = 0; s < alphabet; ++s) {
    n += counts[s];
    used += counts[s] > 0;
  }
  if (used <= 1) return used ? 4 + 3 : 0;
  uint8_t lengths[kMaxAlphabet];
  return 4 + plan_huffman(counts, alphabet, n, lengths).nbytes;
}

bool chunk_modes(const uint8_t* section, int64_t nbytes, int64_t n, uint8_t* modes) {
  const std::vector<int64_t> bounds = chunk_bounds(section, nbytes, n);
  for (size_t i = 0; i + 1 < bounds.size(); ++i) modes[i] = section[bounds[i]];
  return !bounds.empty();
}

}  // namespace laconic
