// Packed integers that can be added without decoding: levels of a scale that all workers share, in fields wide enough
// for the sum, optionally after a rotation by random signs and a Hadamard matrix. Blocks of 1,024 values.
#pragma once

#include "packing.hpp"
#include "qsgd.hpp"
#include "reductions.hpp"
#include "rotation.hpp"
#include "sink.hpp"

namespace laconic {
namespace {

constexpr float kClipLimit = 0x1.fffffp127f;  // the largest clip: none of its levels leaves float32
constexpr float kLargeClip = 0x1p90f, kTinyClip = 0x1p-90f;
constexpr int kSumBlockRows = kSumBlock / 8;

// ---------------------------------------------------------------------------------------------------------- scales

INLINE float block_scale(const float* block, uint32_t largest, bool rms) {
  float scale;
  std::memcpy(&scale, &largest, 4);
  if (largest >= kNonFinite) return __builtin_inff();
  return rms ? static_cast<float>(__builtin_sqrt(sum_of_squares(block, kSumBlock)) * 0x1p-5) : scale;
}

void block_scales(const float* x, int64_t n, bool rms, float* out, int64_t begin, int64_t end) {
  alignas(64) float padded[kSumBlock];
  for (int64_t at = begin; at < end; at += kSumBlock) {
    const float* block = padded_block(x, at, n, padded);
    const uint32_t largest = largest_magnitude(block, kSumBlock, x + (at / kBlock + 1) * kBlock, at % kBlock / 16);
    out[at / kSumBlock] = block_scale(block, largest, rms);
  }
}

// --------------------------------------------------------------------------------------------------------- packing

INLINE int integers_per_word(int width) { return 32 / width; }

// Rows of eight symbols side by side in words; no symbol straddles two words.
INLINE void write_words(const uint32_t* symbols, int rows, int width, uint8_t* out) {
  const int per_word = integers_per_word(width);
  for (int row = 0; row < rows; out += 32) {
    u8v word = load<u8v>(symbols + 8 * row++);
    for (int i = 1; i < per_word && row < rows; ++i) word |= load<u8v>(symbols + 8 * row++) << (i * width);
    store(out, word);
  }
}
INLINE void read_words(const uint8_t* packed, int rows, int width, uint32_t* symbols) {
  const int per_word = integers_per_word(width);
  const u8v mask = splat_u(static_cast<uint32_t>((uint64_t{1} << width) - 1));
  for (int row = 0; row < rows; packed += 32) {
    const u8v word = load<u8v>(packed);
    for (int i = 0; i < per_word && row < rows; ++i) store(symbols + 8 * row++, (word >> (i * width)) & mask);
  }
}
INLINE int64_t words_block_nbytes(int width) {
  const int per_word = integers_per_word(width);
  return 32 * ((kSumBlockRows + per_word - 1) / per_word);
}

struct BlockPacking {
  int width;
  bool packed;
  int64_t block_nbytes;
  PackGroup pack;
  UnpackGroup unpack;
  explicit BlockPacking(const PackedIntCoding& c)
      : width(c.width), packed(c.packed), block_nbytes(c.packed ? 4 * 32 * c.width : words_block_nbytes(c.width)),
        pack(c.packed ? pack_group_of(c.width) : nullptr), unpack(c.packed ? unpack_group_of(c.width) : nullptr) {}

  // Whole blocks of these widths go between values and bytes in one step: the widths divide 32, so that both layouts are
  // the same.
  INLINE bool in_registers() const { return width == 8 || width == 4; }
  INLINE void write(uint32_t* symbols, int64_t count, uint8_t* out) const {
    if (!packed) {
      const int rows = static_cast<int>((count + 7) / 8);
      for (int64_t i = count; i < 8 * rows; ++i) symbols[i] = 0;
      return write_words(symbols, rows, width, out);
    }
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup, out += 32 * width) pack(symbols + i, out);
    if (i < count) pack_tail(symbols + i, count - i, width, out);
  }
  INLINE void read(const uint8_t* in, int64_t count, uint32_t* symbols) const {
    if (!packed) return read_words(in, static_cast<int>((count + 7) / 8), width, symbols);
    int64_t i = 0;
    for (; i + kGroup <= count; i += kGroup, in += 32 * width) unpack(in, symbols + i);
    if (i < count) unpack_tail(in, count - i, width, symbols + i);
  }
};

// ------------------------------------------------------------------------------------------------- encode and decode

INLINE float prescale_of(float clip) { return clip > kLargeClip ? 0x1p-64f : clip < kTinyClip ? 0x1p64f : 1.0f; }

// Levels of a block: v * inverse + offset (+ noise), truncated and clamped to [0, top]. With a Width, which divides 32,
// they are packed at once (both layouts are the same then); without, they are 32-bit integers.
template <bool Stochastic, bool Prescaled, int Width>
INLINE void quantize_block(const float* v, float prescale, float inverse, float offset, float top, HashKey key,
                           int64_t at, const float* ahead, int64_t line, bool fetch_all, void* out) {
  const f8 scale = splat(inverse), shift = splat(offset), most_ = splat(top), zero = {};
  for (int64_t g = 0; g < kSumBlock / kGroup; ++g) {
    u8v hash = {};
    if constexpr (Stochastic) {
      hash = group_hash(key, static_cast<uint64_t>(at / kGroup + g));
    }
    const auto* factors = kRowFactors.at;
    asm("" : "+r"(factors));
    RowWriter<Width> writer{static_cast<uint8_t*>(out) + g * 32 * Width};
    unroll<32>([&](auto row) {
      if constexpr (row % 2 == 0 && row / 2 % 4 != 3) {
        fetch_ahead(ahead, line + g * 16 + row / 2);
      } else if constexpr (row % 2 == 0) {
        if (fetch_all) fetch_ahead(ahead, line + g * 16 + row / 2);
      }
      f8 x = load<f8>(v + g * kGroup + 8 * row);
      if constexpr (Prescaled) x = x * prescale;
      f8 t = x * scale + shift;
      if constexpr (Stochastic) {
        const i8 noise = (i8)((hash * load<u8v>(factors[row])) >> 8);
        t = t + __builtin_convertvector(noise, f8) * 0x1p-24f;
      }
      const i8 level = __builtin_convertvector(clamped(t, zero, most_), i8);
      if constexpr (Width > 0) {
        writer.template put<row>((u8v)level);
      } else {
        store(static_cast<uint32_t*>(out) + g * kGroup + 8 * row, level);
      }
    });
  }
}
using QuantizeBlock = void (*)(const float*, float, float, float, float, HashKey, int64_t, const float*, int64_t, bool,
                               void*);
template <int Width>
QuantizeBlock quantize_block_of(bool stochastic, bool prescaled) {
  return stochastic ? (prescaled ? quantize_block<true, true, Width> : quantize_block<true, false, Width>)
                    : (prescaled ? quantize_block<false, true, Width> : quantize_block<false, false, Width>);
}

uint32_t packed_int_encode(const PackedIntEncode& a, int64_t begin, int64_t end) {
  alignas(64) float padded[kSumBlock], scratch[kSumBlock], rotated[kSumBlock];
  alignas(64) uint32_t symbols[kSumBlock];
  const BlockPacking packing(a.coding);
  const float top = static_cast<float>(a.coding.levels), half = 0.5f * top;
  uint32_t amax_bits = 0;
  for (int64_t at = begin; at < end; at += kSumBlock) {
    const float* block = padded_block(a.x, at, a.n, padded);
    const float* ahead = a.x + (at / kBlock + 1) * kBlock;
    const int64_t line = at % kBlock / 16, here = least(kSumBlock, a.n - at);
    float clip;
    if (a.own_clips) {
      const uint32_t largest = largest_magnitude(block, kSumBlock, ahead, line);
      amax_bits = most(amax_bits, largest);
      if (__builtin_expect(largest >= kNonFinite, 0)) return amax_bits;
      clip = block_scale(block, largest, a.rotate) * a.factor;
      if (!(clip < kClipLimit)) clip = kClipLimit;
      write_float(a.clips, at / kSumBlock, clip);
    } else {
      clip = read_float(a.clips, at / kSumBlock);
    }
    float prescale = prescale_of(clip);
    const float inverse = clip > 0.0f ? half / (clip * prescale) : 0.0f;
    const float offset = clip > 0.0f ? (a.stochastic ? half : half + 0.5f) : 0.0f;
    if (a.rotate) {
      rotate_block(block, prescale * 0x1p-5f, a.signs, at, scratch, rotated);
      block = rotated;
      prescale = 1.0f;
    }
    const bool prescaled = prescale != 1.0f;
    uint8_t* out = a.out + at / kSumBlock * packing.block_nbytes;
    if ((a.rotate || here == kSumBlock) && !a.feedback && packing.in_registers()) {
      const QuantizeBlock quantize = packing.width == 8 ? quantize_block_of<8>(a.stochastic, prescaled)
                                                        : quantize_block_of<4>(a.stochastic, prescaled);
      quantize(block, prescale, inverse, offset, top, a.noise, at, ahead, line, !a.own_clips, out);
      continue;
    }
    const QuantizeBlock quantize = quantize_block_of<0>(a.stochastic, prescaled);
    quantize(block, prescale, inverse, offset, top, a.noise, at, ahead, line, !a.own_clips, symbols);
    if (a.feedback) {
      const float step = clip / top;
      float* v = a.feedback + at;
      for (int64_t i = 0; i < here; ++i) {
        const float sent = static_cast<float>(2 * static_cast<int32_t>(symbols[i]) - a.coding.levels) * step;
        v[i] = v[i] - sent;
      }
    }
    packing.write(symbols, a.rotate ? kSumBlock : here, out);
  }
  return amax_bits;
}

// A whole block of integers whose Width divides 32, from the words to the values. Returns the largest integers.
template <Store How, int Width>
INLINE u8v decode_block(const uint8_t* in, int32_t total, f8 step, f8 weight, float* out) {
  constexpr int rows = 32 / Width;
  u8v largest = {};
  for (int64_t word = 0; word < kSumBlockRows / rows; ++word) {
    const u8v v = load<u8v>(in + 32 * word);
    unroll<rows>([&](auto row) {
      constexpr int shift = row * Width;
      u8v s = v >> shift;
      if constexpr (shift + Width < 32) s &= (1u << Width) - 1;
      largest = larger(largest, s);
      emit<How>(out + 8 * (word * rows + row), __builtin_convertvector((i8)(s + s) - total, f8) * step, weight);
    });
  }
  return largest;
}

template <Store How>
bool packed_int_decode_as(const PackedIntDecode& a, int64_t begin, int64_t end) {
  alignas(64) float scratch[kSumBlock], rotated[kSumBlock];
  alignas(64) uint32_t symbols[kSumBlock];
  const BlockPacking packing(a.coding);
  const f8 weight = splat(a.sink.weight);
  const float whole = static_cast<float>(a.total);
  const int32_t total = a.total;
  for (int64_t at = begin; at < end; at += kSumBlock) {
    const int64_t here = least(kSumBlock, a.sink.n - at), count = a.rotate ? kSumBlock : here;
    const float clip = read_float(a.clips, at / kSumBlock);
    if (!(clip >= 0.0f && clip <= kClipLimit)) return false;
    const uint8_t* in = a.integers + at / kSumBlock * packing.block_nbytes;
    if (here == kSumBlock && !a.rotate && packing.in_registers()) {
      const f8 step = splat(clip / whole);
      const u8v largest = packing.width == 8 ? decode_block<How, 8>(in, total, step, weight, a.sink.out + at)
                                             : decode_block<How, 4>(in, total, step, weight, a.sink.out + at);
      if (fold_max(largest) > static_cast<uint32_t>(total)) return false;
      continue;
    }
    packing.read(in, count, symbols);
    u8v largest = {};
    const int64_t rows = count / 8;
    if (!a.rotate) {
      const f8 step = splat(clip / whole);
      for (int64_t row = 0; row < rows; ++row) {
        const u8v s = load<u8v>(symbols + 8 * row);
        largest = larger(largest, s);
        const f8 v = __builtin_convertvector((i8)(s + s) - total, f8) * step;
        emit<How>(a.sink.out + at + 8 * row, v, weight);
      }
      for (int64_t i = 8 * rows; i < count; ++i) {
        if (symbols[i] > static_cast<uint32_t>(total)) return false;
        emit_one(a.sink, at + i, static_cast<float>(2 * static_cast<int32_t>(symbols[i]) - total) * (clip / whole));
      }
    } else {
      const bool large = clip > kLargeClip;
      const f8 step = splat(((large ? clip * 0x1p-64f : clip) / whole) * 0x1p-5f);
      const Signs signs = signs_of(a.signs, at);
      hadamard(scratch, [&](int row) {
        const u8v s = load<u8v>(symbols + 8 * row);
        largest = larger(largest, s);
        return __builtin_convertvector((i8)(s + s) - total, f8) * step;
      }, [&](int row, f8 v) { store(rotated + 8 * row, signs.flip(row, v)); });
      if (__builtin_expect(large, 0)) {
        for (float& v : rotated) {
          const float up = v * 0x1p64f;
          v = up > kFloatMax ? kFloatMax : up < -kFloatMax ? -kFloatMax : up;
        }
      }
      // Stored at the end and in order, because streaming parts of a cache line is slow.
      for (int64_t i = 0; i < here / 8; ++i) emit<How>(a.sink.out + at + 8 * i, load<f8>(rotated + 8 * i), weight);
      for (int64_t i = here / 8 * 8; i < here; ++i) emit_one(a.sink, at + i, rotated[i]);
    }
    if (fold_max(largest) > static_cast<uint32_t>(total)) return false;
  }
  finish_stores();
  return true;
}
bool packed_int_decode(const PackedIntDecode& a, int64_t begin, int64_t end) {
  switch (how_to_store(a.sink)) {
    case Store::add: return packed_int_decode_as<Store::add>(a, begin, end);
    case Store::stream: return packed_int_decode_as<Store::stream>(a, begin, end);
    default: return packed_int_decode_as<Store::plain>(a, begin, end);
  }
}

// -------------------------------------------------------------------------------------------------------------- sums

// Adds 32-bit words; no integer carries into the next as long as sums fit their width.
void packed_int_add(const uint8_t* from, uint8_t* to, int64_t begin, int64_t end) {
  constexpr int64_t kBytes = kBlock * 4;  // cache lines of the next block are fetched interleaved over its pages
  int64_t i = begin;
  for (; i + 64 <= end; i += 64) {
    const int64_t next = (i / kBytes + 1) * kBytes, line = i % kBytes / 64;
    fetch_ahead(reinterpret_cast<const float*>(from + next), line);
    fetch_ahead(reinterpret_cast<const float*>(to + next), line);
    unroll<2>([&](auto k) { store(to + i + 32 * k, load<u8v>(to + i + 32 * k) + load<u8v>(from + i + 32 * k)); });
  }
  for (; i < end; i += 4) {
    uint32_t a, b;
    std::memcpy(&a, to + i, 4);
    std::memcpy(&b, from + i, 4);
    a += b;
    std::memcpy(to + i, &a, 4);
  }
}

// Adds packed symbols to a vertically packed sum of 8, 16 or 32 bits per symbol whose last group is padded.
template <int SumWidth>
INLINE void packed_int_accumulate_as(const uint8_t* packed, int width, uint8_t* sum, int64_t begin, int64_t end) {
  constexpr int rows = 32 / SumWidth;  // rows that share a word
  const UnpackGroup unpack = unpack_group_of(width);
  alignas(64) uint32_t symbols[kGroup];
  for (int64_t at = begin; at < end; at += kGroup) {
    const uint8_t* in = packed + at / kGroup * 32 * width;
    uint8_t* out = sum + at * (SumWidth / 8);
    if (end - at >= kGroup) {
      unpack(in, symbols);
    } else {
      std::memset(symbols, 0, sizeof symbols);
      unpack_tail(in, end - at, width, symbols);
    }
    unroll<SumWidth>([&](auto word) {
      u8v v = load<u8v>(out + 32 * word);
      unroll<rows>([&](auto row) {
        constexpr int shift = row * SumWidth;
        v += load<u8v>(symbols + 8 * (word * rows + row)) << shift;
      });
      store(out + 32 * word, v);
    });
  }
}
void packed_int_accumulate(const uint8_t* packed, int width, int sum_width, uint8_t* sum, int64_t begin, int64_t end) {
  if (sum_width == 8) return packed_int_accumulate_as<8>(packed, width, sum, begin, end);
  if (sum_width == 16) return packed_int_accumulate_as<16>(packed, width, sum, begin, end);
  packed_int_accumulate_as<32>(packed, width, sum, begin, end);
}

// Packs such a sum with fewer bits per symbol.
template <int SumWidth>
INLINE void packed_int_repack_as(const uint8_t* sum, int width, uint8_t* packed, int64_t begin, int64_t end) {
  constexpr int rows = 32 / SumWidth;
  const PackGroup pack = pack_group_of(width);
  alignas(64) uint32_t symbols[kGroup];
  const u8v mask = splat_u(static_cast<uint32_t>((uint64_t{1} << SumWidth) - 1));
  for (int64_t at = begin; at < end; at += kGroup) {
    uint8_t* out = packed + at / kGroup * 32 * width;
    const uint8_t* in = sum + at * (SumWidth / 8);
    unroll<SumWidth>([&](auto word) {
      const u8v v = load<u8v>(in + 32 * word);
      unroll<rows>([&](auto row) {
        constexpr int shift = row * SumWidth;
        store(symbols + 8 * (word * rows + row), (v >> shift) & mask);
      });
    });
    if (end - at >= kGroup) {
      pack(symbols, out);
    } else {
      pack_tail(symbols, end - at, width, out);
    }
  }
}
void packed_int_repack(const uint8_t* sum, int sum_width, int width, uint8_t* packed, int64_t begin, int64_t end) {
  if (sum_width == 8) return packed_int_repack_as<8>(sum, width, packed, begin, end);
  if (sum_width == 16) return packed_int_repack_as<16>(sum, width, packed, begin, end);
  packed_int_repack_as<32>(sum, width, packed, begin, end);
}

// The largest symbol of a packing.
uint32_t packed_int_max(const uint8_t* integers, const PackedIntCoding& coding, int64_t n, int64_t begin, int64_t end) {
  const BlockPacking packing(coding);
  alignas(64) uint32_t symbols[kSumBlock];
  u8v largest = {};
  uint32_t rest = 0;
  for (int64_t at = begin; at < end; at += kSumBlock) {
    const int64_t count = least(kSumBlock, n - at);
    packing.read(integers + at / kSumBlock * packing.block_nbytes, count, symbols);
    for (int64_t i = 0; i + 8 <= count; i += 8) largest = larger(largest, load<u8v>(symbols + i));
    for (int64_t i = count / 8 * 8; i < count; ++i) rest = most(rest, symbols[i]);
  }
  return most(rest, fold_max(largest));
}

}  // namespace
}  // namespace laconic
