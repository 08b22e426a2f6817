// Writes sections of coded symbols: the plan of each chunk, then its mode, table and symbols.

#include "coded_chunks.hpp"

#include <algorithm>

namespace laconic {
namespace {

constexpr int64_t kSlack = 64;  // bytes that writers may touch behind their output

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

Plan plan_rans(const uint32_t* counts, int alphabet, int used, int64_t n, ChunkWorkspace& work) {
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

Plan choose(const uint32_t* counts, int alphabet, int64_t n, Coding coding, ChunkWorkspace& work) {
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

template <class Symbol>
uint8_t* write_huffman(const Symbol* symbols, int64_t n, int alphabet, const Plan& plan, ChunkWorkspace& work,
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
uint8_t* write_rans(const Symbol* symbols, int64_t n, int alphabet, const Plan& plan, ChunkWorkspace& work, uint8_t* out,
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
int64_t encode_chunk(const Symbol* symbols, int64_t n, int alphabet, Coding coding, ChunkWorkspace& work, uint8_t* out,
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
const Symbol* chunk_symbols(const Symbols& source, int64_t begin, int64_t n, ChunkWorkspace& work) {
  if (source.ready) return static_cast<const Symbol*>(source.ready) + begin;
  Symbol* made = reinterpret_cast<Symbol*>(work.symbols.data());
  grid_chunk(source, begin, n, made);
  return made;
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
    ChunkWorkspace& work = chunk_workspace();
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

}  // namespace laconic
