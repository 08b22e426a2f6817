// The hot loops. Compiled once per instruction set with LACONIC_ISA naming the variant; nothing here may have external
// linkage but the table at the end, so that no variant's code can stand in for another's.
//
// Vectors are the compiler's own (8 lanes of 32 bits): one source, whatever registers the target has. Memory sets the
// pace, so two things matter most: each block is read once while it is in L1, and the lines of the next block are
// fetched interleaved over its pages, which keeps more of them in flight than the hardware's own prefetch does.

#include "core.hpp"

#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef LACONIC_ISA
#error "LACONIC_ISA names the variant"
#endif
#define LACONIC_TEXT_(x) #x
#define LACONIC_TEXT(x) LACONIC_TEXT_(x)

namespace laconic {
namespace {

typedef float f8 __attribute__((vector_size(32)));
typedef int32_t i8 __attribute__((vector_size(32)));
typedef uint32_t u8v __attribute__((vector_size(32)));
typedef float f4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef double d4 __attribute__((vector_size(32)));

#define INLINE inline __attribute__((always_inline))

constexpr float kFloatMax = 3.4028234663852886e38f;
constexpr int64_t kBlock = 8192;  // values per block: eight pages
constexpr int64_t kPage = 4096;

template <class V>
INLINE V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class V>
INLINE void store(void* p, V v) {
  std::memcpy(p, &v, sizeof v);
}
INLINE f8 splat(float v) { return f8{v, v, v, v, v, v, v, v}; }
INLINE u8v splat_u(uint32_t v) { return u8v{v, v, v, v, v, v, v, v}; }
INLINE u8v bits_of(f8 v) { return (u8v)v; }
INLINE u8v larger(u8v a, u8v b) { return (u8v)((i8)a > (i8)b ? (i8)a : (i8)b); }  // magnitudes fit a signed word
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

INLINE uint32_t fold_max(u8v v) {
  v = larger(v, __builtin_shuffle(v, u8v{4, 5, 6, 7, 0, 1, 2, 3}));
  v = larger(v, __builtin_shuffle(v, u8v{2, 3, 0, 1, 6, 7, 4, 5}));
  return most(v[0], v[1]);
}

template <class F, int... J>
INLINE void unroll(F&& body, std::integer_sequence<int, J...>) {
  (body(std::integral_constant<int, J>{}), ...);
}
template <int N, class F>
INLINE void unroll(F&& body) {
  unroll(body, std::make_integer_sequence<int, N>{});
}

// One line of the block ahead for each line consumed. `line` counts lines within the block, pages interleaved.
INLINE void fetch_ahead(const float* next_block, int64_t line) {
  __builtin_prefetch(reinterpret_cast<const char*>(next_block) + (line & 7) * kPage + (line >> 3) * 64, 0, 3);
}

INLINE float read_float(const uint8_t* p, int64_t i) {
  float v;
  std::memcpy(&v, p + 4 * i, 4);
  return v;
}
INLINE void write_float(uint8_t* p, int64_t i, float v) { std::memcpy(p + 4 * i, &v, 4); }
INLINE uint32_t magnitude_bits(float v) {
  uint32_t b;
  std::memcpy(&b, &v, 4);
  return b & kMagnitude;
}
INLINE bool finite_and_positive(float v) {  // what a norm or a mean magnitude must be; -0 is harmless
  return magnitude_bits(v) < kNonFinite && !(v < 0.0f);
}

// ---------------------------------------------------------------------------------------------------------- randomness

INLINE u8v hash8(u8v counter, u8v low, u8v high) {
  u8v h = counter ^ low;
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= (h >> 15) ^ high;
  h *= 0x846CA68Bu;
  return h ^ (h >> 16);
}
INLINE u8v low_key(Key key, uint64_t counter) {
  return splat_u(key.low ^ (static_cast<uint32_t>(counter >> 32) * 0x9E3779B9u));
}
constexpr u8v kLanes = {0, 1, 2, 3, 4, 5, 6, 7};

// --------------------------------------------------------------------------------------------------------- bit packing

// Collects rows of 8 symbols into words: each lane is a bit stream of its own.
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

// The same for a symbol that is the integer part of a fixed-point number: where words hold whole symbols, one shift
// and a mask put it in its place.
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

// ---------------------------------------------------------------------------------------------------------- storing

// How eight decoded values reach memory. Streaming stores spare the read that a plain store makes of its line first.
enum class Store { plain, stream, add };

template <Store How>
INLINE void emit(float* out, f8 v, f8 weight) {
  if constexpr (How == Store::add) {
    store(out, load<f8>(out) + v * weight);
  } else {
#if defined(__AVX2__)
    if constexpr (How == Store::stream) {
      _mm256_stream_ps(out, (__m256)v);
      return;
    }
#endif
    store(out, v);
  }
}
INLINE void emit_one(const Sink& sink, int64_t i, float v) {
  if (sink.accumulate) {
    const float product = v * sink.weight;
    sink.out[i] = sink.out[i] + product;
  } else {
    sink.out[i] = v;
  }
}
INLINE Store how_to_store(const Sink& sink) {
  if (sink.accumulate) return Store::add;
  const bool large = sink.n * 4 >= kStreamBytes;
  return large && reinterpret_cast<uintptr_t>(sink.out) % 32 == 0 ? Store::stream : Store::plain;
}
#if defined(__AVX2__)
// One whole line at once. Parts of a line with other traffic between them are flushed one by one, ten times slower.
INLINE void stream_line(uint8_t* to, __m256i low, __m256i high) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
}
#endif
// Elements of a size that come before the first whole line of an output.
INLINE int64_t before_line(const uint8_t* to, int64_t size, int64_t count) {
  const int64_t gap = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63);
  return gap % size ? count : least(gap / size, count);
}
INLINE void finish_stores() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

// ----------------------------------------------------------------------------------------------- magnitudes and sums

INLINE uint32_t largest_magnitude(const float* x, int64_t n, const float* ahead, int64_t line) {  // n a multiple of 128
#if defined(__AVX512F__)
  const __m512i wide_mask = _mm512_set1_epi32(static_cast<int>(kMagnitude));
  __m512i wide[2] = {};
  for (int64_t i = 0; i < n; i += 128) {
    unroll<8>([&](auto row) {
      if constexpr (row % 4 == 3) fetch_ahead(ahead, line + i / 16 + row);
      wide[row % 2] = _mm512_max_epi32(wide[row % 2], _mm512_and_si512(_mm512_loadu_si512(x + i + 16 * row), wide_mask));
    });
  }
  const __m512i both = _mm512_max_epi32(wide[0], wide[1]);
  return fold_max(larger((u8v)_mm512_castsi512_si256(both), (u8v)_mm512_extracti64x4_epi64(both, 1)));
#else
  const u8v mask = splat_u(kMagnitude);
  u8v most_of[4] = {};
  for (int64_t i = 0; i < n; i += 128) {
    unroll<16>([&](auto row) {
      if constexpr (row % 8 == 7) fetch_ahead(ahead, line + i / 16 + row / 2);
      most_of[row % 4] = larger(most_of[row % 4], load<u8v>(x + i + 8 * row) & mask);
    });
  }
  return fold_max(larger(larger(most_of[0], most_of[1]), larger(most_of[2], most_of[3])));
#endif
}

// The fixed order of reference.pairwise_sum: rows of 16 lanes, neighbours first, then the lanes folded in half.
struct Lanes16 {
  f8 low, high;
};
template <class Map>
INLINE Lanes16 sum_rows(const float* x, int64_t rows, const float* ahead, int64_t line, Map map) {
  // A stack of partial sums, one per level: merge while the finished count has trailing ones.
  Lanes16 stack[16];
  int depth = 0;
  for (int64_t done = 0; done < rows / 8; ++done) {
    Lanes16 r[8];
    unroll<8>([&](auto i) {
      fetch_ahead(ahead, line + done * 8 + i);
      const float* row = x + done * 128 + 16 * i;
      r[i] = {map(load<f8>(row)), map(load<f8>(row + 8))};
    });
    Lanes16 sum = {
        ((r[0].low + r[1].low) + (r[2].low + r[3].low)) + ((r[4].low + r[5].low) + (r[6].low + r[7].low)),
        ((r[0].high + r[1].high) + (r[2].high + r[3].high)) + ((r[4].high + r[5].high) + (r[6].high + r[7].high))};
    for (int64_t bit = done; bit & 1; bit >>= 1) {
      --depth;
      sum = {stack[depth].low + sum.low, stack[depth].high + sum.high};
    }
    stack[depth++] = sum;
  }
  return stack[0];
}
INLINE float fold_sum(Lanes16 s) {
  const f8 e = s.low + s.high;
  const float a = e[0] + e[4], b = e[1] + e[5], c = e[2] + e[6], d = e[3] + e[7];
  return (a + c) + (b + d);
}

double sum_of_squares(const float* x, int64_t bucket) {
  d4 stack[16][4];
  int depth = 0;
  for (int64_t row = 0; row < bucket / 16; ++row) {
    d4 sum[4];
    for (int q = 0; q < 4; ++q) {
      const d4 v = __builtin_convertvector(load<f4>(x + row * 16 + 4 * q), d4);
      sum[q] = v * v;
    }
    for (int64_t bit = row; bit & 1; bit >>= 1) {
      --depth;
      for (int q = 0; q < 4; ++q) sum[q] = stack[depth][q] + sum[q];
    }
    for (int q = 0; q < 4; ++q) stack[depth][q] = sum[q];
    ++depth;
  }
  const d4* s = stack[0];
  const d4 a = s[0] + s[2], b = s[1] + s[3], c = a + b;
  return (c[0] + c[2]) + (c[1] + c[3]);
}

// --------------------------------------------------------------------------------------------------------------- qsgd

INLINE float bucket_norm(const float* x, int64_t bucket, uint32_t largest, bool l2) {
  float norm;
  std::memcpy(&norm, &largest, 4);
  if (l2) {
    const float root = static_cast<float>(__builtin_sqrt(sum_of_squares(x, bucket)));
    if (!(root <= kFloatMax)) return kFloatMax;
    if (root > norm) norm = root;
  }
  return norm;
}

// What a value is multiplied by to become fixed point, and the exact shift up that a tiny bucket needs first.
struct Scale {
  float up, factor;
};
INLINE Scale scale_of(float norm, int levels, int fraction_bits) {
  const float up = norm < 0x1p-90f ? 0x1p64f : 1.0f;
  if (norm == 0.0f) return {up, 0.0f};
  const float unit = static_cast<float>(static_cast<int64_t>(levels) << fraction_bits);
  const float quotient = unit / (norm * up);
  return {up, quotient * (1.0f - 0x1p-22f)};
}

// The odd factor of each row: what turns one hash per lane and group into 32 numbers. See kernels/random.py.
constexpr uint32_t row_factor(uint64_t row) {
  uint64_t x = row + 0x9E3779B97F4A7C15u;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
  x = (x ^ x >> 27) * 0x94D049BB133111EBu;
  return static_cast<uint32_t>(x ^ x >> 31) | 1;
}

struct RowFactors {
  alignas(32) uint32_t at[32][8];
  constexpr RowFactors() : at() {
    for (int row = 0; row < 32; ++row) {
      for (int lane = 0; lane < 8; ++lane) at[row][lane] = row_factor(static_cast<uint64_t>(row));
    }
  }
};
constexpr RowFactors kRowFactors;

// One group of 256 values in fixed point, row by row: put(row, v) gets levels * x / norm + levels + noise, with
// FractionBits bits after the point. Two halves may have different scales (buckets of 128).
template <int FractionBits, int Levels, bool Stochastic, class Put>
INLINE void quantize_group(const float* x, Scale first, Scale second, uint64_t group, Key key, const float* ahead,
                           int64_t line, Put put) {
  constexpr uint32_t offset = static_cast<uint32_t>(Levels) << FractionBits;
  const uint64_t counter = group << 3;
  const u8v hash = hash8(splat_u(static_cast<uint32_t>(counter)) + kLanes, low_key(key, counter), splat_u(key.high));
  const bool tiny = first.up != 1.0f || second.up != 1.0f;
  alignas(32) float lifted[kGroup];
  if (__builtin_expect(tiny, 0)) {
    for (int64_t i = 0; i < kGroup; ++i) lifted[i] = x[i] * (i < 128 ? first.up : second.up);
    x = lifted;
  }
  const f8 scales[2] = {splat(first.factor), splat(second.factor)};
  const auto* factors = kRowFactors.at;
  asm("" : "+r"(factors));  // as operands in memory: as constants they would be rebuilt in registers for every row
  unroll<32>([&](auto row) {
    if constexpr (row % 2 == 0 && row / 2 % 4 != 3) fetch_ahead(ahead, line + row / 2);
    const u8v fixed = (u8v) __builtin_convertvector(load<f8>(x + 8 * row) * scales[row / 16], i8);
    if constexpr (Stochastic) {
      put(row, fixed + ((hash * load<u8v>(factors[row])) >> (32 - FractionBits)) + offset);
    } else {
      put(row, fixed + (offset + (1u << (FractionBits - 1))));
    }
  });
}

#if defined(__AVX512F__)
// The same for widths that divide 32, two rows a register. Rotating a fixed-point value and masking it puts a symbol in
// its place, to the left or to the right, in one step for both rows.
template <int Bits>
struct Places {
  alignas(64) uint32_t rotate[16 / Bits][16], mask[16 / Bits][16];
  constexpr Places() : rotate(), mask() {
    for (int pair = 0; pair < 16 / Bits; ++pair) {
      for (int lane = 0; lane < 16; ++lane) {
        const int place = (2 * pair + lane / 8) * Bits % 32;
        rotate[pair][lane] = static_cast<uint32_t>(31 - Bits - place) & 31;
        mask[pair][lane] = ((1u << Bits) - 1) << place;
      }
    }
  }
};
template <int Bits>
constexpr Places<Bits> kPlaces;

template <int Bits, bool Stochastic>
INLINE void quantize_and_pack(const float* x, Scale first, Scale second, uint64_t group, Key key, const float* ahead,
                              int64_t line, uint8_t* out) {
  constexpr int F = 31 - Bits, pairs = 16 / Bits;
  constexpr uint32_t offset = ((1u << (Bits - 1)) - 1) << F;
  const uint64_t counter = group << 3;
  const u8v narrow = hash8(splat_u(static_cast<uint32_t>(counter)) + kLanes, low_key(key, counter), splat_u(key.high));
  const __m512i hash = _mm512_broadcast_i64x4((__m256i)narrow);
  const __m512i shift = _mm512_set1_epi32(static_cast<int>(Stochastic ? offset : offset + (1u << (F - 1))));
  const __m512 scales[2] = {_mm512_set1_ps(first.factor), _mm512_set1_ps(second.factor)};
  const auto* factors = kRowFactors.at;
  asm("" : "+r"(factors));
  __m512i word = _mm512_setzero_si512();
  unroll<16>([&](auto pair) {
    if constexpr (pair % 4 != 3) fetch_ahead(ahead, line + pair);
    __m512i v = _mm512_cvttps_epi32(_mm512_mul_ps(_mm512_loadu_ps(x + 16 * pair), scales[pair / 8]));
    if constexpr (Stochastic) {
      v = _mm512_add_epi32(v, _mm512_srli_epi32(_mm512_mullo_epi32(hash, _mm512_load_si512(factors[2 * pair])), 32 - F));
    }
    v = _mm512_rorv_epi32(_mm512_add_epi32(v, shift), _mm512_load_si512(kPlaces<Bits>.rotate[pair % pairs]));
    word = _mm512_or_si512(word, _mm512_and_si512(v, _mm512_load_si512(kPlaces<Bits>.mask[pair % pairs])));
    if constexpr (pair % pairs == pairs - 1) {
      store(out + pair / pairs * 32,
            _mm256_or_si256(_mm512_castsi512_si256(word), _mm512_extracti64x4_epi64(word, 1)));
      word = _mm512_setzero_si512();
    }
  });
}
#endif

// Walks a range in batches: first the norms of its buckets, then `group(values, scales of its halves, where, count)`
// for each group, the last of which may be partial. Returns the largest key; stops at one that is not finite.
template <int FractionBits, int Levels, class Group>
INLINE uint32_t each_group(const BucketEncode& a, int64_t begin, int64_t end, Group group) {
  // The norms of a batch come first, then its groups: one bucket at a time would wait for each division in turn.
  const int64_t unit = a.bucket < kBatch ? kBatch : a.bucket;
  Scale scales[kBatch / 128];
  uint32_t key = 0;
  for (int64_t at = begin; at < end; at += unit) {
    const int64_t here = least(unit, end - at);
    const float* x = a.x + at;
    if (here < unit) {  // the end: padded with zeros, which change neither norm nor sum
      std::memcpy(a.scratch, x, here * 4);
      std::memset(a.scratch + here, 0, (unit - here) * 4);
      x = a.scratch;
    }
    const int64_t buckets = (here + a.bucket - 1) / a.bucket;
    for (int64_t b = 0; b < buckets; ++b) {
      const float* values = x + b * a.bucket;
      const uint32_t largest = largest_magnitude(values, a.bucket, a.x + (at / kBlock + 1) * kBlock, (at % kBlock + b * a.bucket) / 16);
      key = most(key, largest);
      if (__builtin_expect(largest >= kNonFinite, 0)) return key;
      const float norm = bucket_norm(values, a.bucket, largest, a.l2);
      write_float(a.floats, at / a.bucket + b, norm);
      scales[b] = scale_of(norm, Levels, FractionBits);
    }
    for (int64_t g = 0; g < here; g += kGroup) {
      const int64_t b = g / a.bucket, second = a.bucket < kGroup ? b + 1 : b;
      group(x + g, scales[b], scales[second < buckets ? second : b], at + g, least(kGroup, here - g));
    }
  }
  return key;
}

template <int Bits, bool Stochastic>
uint32_t qsgd_encode_as(const BucketEncode& a, int64_t begin, int64_t end) {
  constexpr int F = 31 - Bits, levels = (1 << (Bits - 1)) - 1;
  return each_group<F, levels>(a, begin, end, [&](const float* x, Scale first, Scale second, int64_t at, int64_t count) {
    uint8_t* out = a.packed + at / kGroup * 32 * Bits;
    const float* ahead = a.x + (at / kBlock + 1) * kBlock;
    const int64_t line = at % kBlock / 16;
#if defined(__AVX512F__)
    if constexpr (16 % Bits == 0) {
      if (count == kGroup && first.up == 1.0f && second.up == 1.0f) {
        return quantize_and_pack<Bits, Stochastic>(x, first, second, at / kGroup, a.key, ahead, line, out);
      }
    }
#endif
    if (count == kGroup) {
      RowWriter<Bits> writer{out};
      quantize_group<F, levels, Stochastic>(
          x, first, second, at / kGroup, a.key, ahead, line,
          [&](auto row, u8v fixed) { put_fixed<Bits, F, decltype(row)::value>(writer, fixed); });
    } else {
      uint32_t symbols[kGroup];
      quantize_group<F, levels, Stochastic>(x, first, second, at / kGroup, a.key, x, 0,
                                            [&](auto row, u8v v) { store(symbols + 8 * row, v >> F); });
      pack_tail(symbols, count, Bits, out);
    }
  });
}

template <int... B>
uint32_t qsgd_encode_with(const BucketEncode& a, int64_t begin, int64_t end, std::integer_sequence<int, B...>) {
  static constexpr uint32_t (*table[2][sizeof...(B)])(const BucketEncode&, int64_t, int64_t) = {
      {qsgd_encode_as<B + 2, false>...}, {qsgd_encode_as<B + 2, true>...}};
  return table[a.stochastic][a.bits - 2](a, begin, end);
}
uint32_t qsgd_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  return qsgd_encode_with(a, begin, end, std::make_integer_sequence<int, 11>{});
}

INLINE float step_of(float norm, int levels) {
  const float step = norm / static_cast<float>(levels);
  return step * static_cast<float>(levels) <= kFloatMax ? step : step * (1.0f - 0x1p-22f);
}

// Steps of a group's two halves; false when a norm is no norm.
template <int Levels>
INLINE bool steps_at(const BucketDecode& a, int64_t at, float steps[2]) {
  for (int half = 0; half < 2; ++half) {
    const int64_t value = at + 128 * half;
    if (half && (a.bucket > 128 || value >= a.sink.n)) {
      steps[1] = steps[0];
      break;
    }
    const float norm = read_float(a.floats, value / a.bucket);
    if (!finite_and_positive(norm)) return false;
    steps[half] = step_of(norm, Levels);
  }
  return true;
}

template <int Levels>
INLINE f8 level_values(u8v symbols, f8 step) {
  i8 q = (i8)symbols - Levels;
  q = q > Levels ? (i8{} + Levels) : q;  // the one pattern that no encoder writes
  return __builtin_convertvector(q, f8) * step;
}

template <int Bits, Store How>
bool qsgd_decode_as(const BucketDecode& a, int64_t begin, int64_t end) {
  constexpr int levels = (1 << (Bits - 1)) - 1;
  const f8 weight = splat(a.sink.weight);
  for (int64_t at = begin; at < end; at += kGroup) {
    float steps[2];
    if (!steps_at<levels>(a, at, steps)) return false;
    const uint8_t* packed = a.packed + at / kGroup * 32 * Bits;
    float* out = a.sink.out + at;
    const int64_t count = least(kGroup, end - at);
    if (count == kGroup) {
      const f8 step[2] = {splat(steps[0]), splat(steps[1])};
      unroll<32>([&](auto row) {
        emit<How>(out + 8 * row, level_values<levels>(row_of<Bits, row>(packed), step[row / 16]), weight);
      });
    } else {
      uint32_t symbols[kGroup];
      unpack_tail(packed, count, Bits, symbols);
      for (int64_t i = 0; i < count; ++i) {
        int32_t q = static_cast<int32_t>(symbols[i]) - levels;
        if (q > levels) q = levels;
        emit_one(a.sink, at + i, static_cast<float>(q) * steps[i / 128]);
      }
    }
  }
  finish_stores();
  return true;
}

template <Store How, int... B>
bool qsgd_decode_with(const BucketDecode& a, int64_t begin, int64_t end, std::integer_sequence<int, B...>) {
  static constexpr bool (*table[])(const BucketDecode&, int64_t, int64_t) = {qsgd_decode_as<B + 2, How>...};
  return table[a.bits - 2](a, begin, end);
}
bool qsgd_decode(const BucketDecode& a, int64_t begin, int64_t end) {
  constexpr auto bits = std::make_integer_sequence<int, 11>{};
  switch (how_to_store(a.sink)) {
    case Store::add: return qsgd_decode_with<Store::add>(a, begin, end, bits);
    case Store::stream: return qsgd_decode_with<Store::stream>(a, begin, end, bits);
    default: return qsgd_decode_with<Store::plain>(a, begin, end, bits);
  }
}

// ------------------------------------------------------------------------------------------------------------ ternary

constexpr int64_t kTritGroup = 5 * kTritLanes;

uint32_t ternary_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  // Symbols of up to 1,280 values: five groups of 256, four groups of 320.
  constexpr int64_t window = 1280;
  alignas(64) uint8_t symbols[window];
  int64_t filled = 0;
  uint8_t* out = a.packed + begin / 5;
  auto flush = [&](bool last) {
    int64_t i = 0;
    for (; i + kTritGroup <= filled; i += kTritGroup, out += kTritLanes) {
      const uint8_t* s = symbols + i;
      for (int64_t lane = 0; lane < kTritLanes; ++lane) {
        out[lane] = static_cast<uint8_t>(s[lane] + 3 * s[64 + lane] + 9 * s[128 + lane] + 27 * s[192 + lane] +
                                         81 * s[256 + lane]);
      }
    }
    for (; last && i < filled; i += 5) {
      int byte = 0, power = 1;
      for (int64_t j = i; j < least(i + 5, filled); ++j, power *= 3) byte += power * symbols[j];
      *out++ = static_cast<uint8_t>(byte);
    }
    filled = 0;
  };
  const uint32_t key =
      each_group<29, 1>(a, begin, end, [&](const float* x, Scale first, Scale second, int64_t at, int64_t count) {
        uint32_t wide[kGroup];
        quantize_group<29, 1, true>(x, first, second, at / kGroup, a.key, a.x + (at / kBlock + 1) * kBlock,
                                    at % kBlock / 16,
                                    [&](auto row, u8v v) { store(wide + 8 * row, v >> 29); });
        for (int64_t i = 0; i < count; ++i) symbols[filled + i] = static_cast<uint8_t>(wide[i]);
        filled += count;
        if (filled == window) flush(false);
      });
  flush(true);
  return key;
}

bool ternary_decode(const BucketDecode& a, int64_t begin, int64_t end) {
  constexpr int64_t window = 640;  // two groups of 320, and whole buckets of 128
  const uint8_t* in = a.packed + begin / 5;
  for (int64_t at = begin; at < end; at += window) {
    const int64_t count = least(window, end - at);
    int8_t values[window + 5];
    int64_t done = 0;
    bool valid = true;
    for (; done + kTritGroup <= count; done += kTritGroup, in += kTritLanes) {
      uint16_t left[kTritLanes];
      uint16_t top = 0;
      for (int64_t lane = 0; lane < kTritLanes; ++lane) {
        left[lane] = in[lane];
        top = left[lane] > top ? left[lane] : top;
      }
      valid &= top <= 242;
      for (int j = 0; j < 5; ++j) {
        int8_t* row = values + done + kTritLanes * j;
        for (int64_t lane = 0; lane < kTritLanes; ++lane) {
          const uint16_t third = static_cast<uint16_t>(static_cast<uint16_t>(left[lane] * 171) >> 9);
          row[lane] = static_cast<int8_t>(left[lane] - 3 * third - 1);
          left[lane] = third;
        }
      }
    }
    for (; done < count; done += 5) {
      int byte = *in++;
      valid &= byte <= 242;
      for (int j = 0; j < 5; ++j, byte /= 3) values[done + j] = static_cast<int8_t>(byte % 3 - 1);
    }
    if (!valid) return false;
    for (int64_t i = 0; i < count; i += 128) {
      const float norm = read_float(a.floats, (at + i) / a.bucket);
      if (!finite_and_positive(norm)) return false;
      const int64_t stop = least(i + 128, count);
      float* out = a.sink.out + at;
      if (a.sink.accumulate) {
        const float weight = a.sink.weight;
        for (int64_t j = i; j < stop; ++j) {
          const float product = (static_cast<float>(values[j]) * norm) * weight;
          out[j] = out[j] + product;
        }
      } else {
        for (int64_t j = i; j < stop; ++j) out[j] = static_cast<float>(values[j]) * norm;
      }
    }
  }
  return true;
}

// --------------------------------------------------------------------------------------------------- sign and onebit

void pack_signs(const float* x, int64_t count, uint8_t* out) {
  int64_t i = 0;
  for (; i + kGroup <= count; i += kGroup, out += 32) {
    u8v word = {};
    unroll<32>([&](auto row) { word |= (load<u8v>(x + i + 8 * row) >> 31) << static_cast<int>(row); });
    store(out, word);
  }
  for (; i < count; i += 8) {
    unsigned byte = 0;
    for (int64_t j = i; j < least(i + 8, count); ++j) {
      uint32_t b;
      std::memcpy(&b, x + j, 4);
      byte |= (b >> 31) << (j - i);
    }
    *out++ = static_cast<uint8_t>(byte);
  }
}

// Walks a range bucket by bucket; `scale(values padded to the bucket, count)` writes its floats and returns a key.
template <class ScaleFn>
INLINE uint32_t each_sign_bucket(const BucketEncode& a, int64_t begin, int64_t end, ScaleFn scale) {
  uint32_t key = 0;
  for (int64_t at = begin; at < end; at += a.bucket) {
    const int64_t here = least(a.bucket, end - at);
    const float* x = a.x + at;
    if (here < a.bucket) {
      std::memcpy(a.scratch, x, here * 4);
      std::memset(a.scratch + here, 0, (a.bucket - here) * 4);
      x = a.scratch;
    }
    key = most(key, scale(x, at, here));
    if (key >= kNonFinite) return key;
    if (a.bucket >= kGroup) {
      pack_signs(x, here, a.packed + at / 8);
    } else if (at % kGroup == 0) {  // buckets of 128: a group holds two
      pack_signs(a.x + at, least(kGroup, a.n - at), a.packed + at / 8);
    }
  }
  return key;
}

INLINE float mean_of(float scaled_sum, int64_t bucket, int64_t count) {
  const float factor = static_cast<float>(bucket) / static_cast<float>(count);
  const float mean = scaled_sum * factor;
  return mean <= kFloatMax ? mean : kFloatMax;
}

uint32_t sign_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  const f8 share = splat(1.0f / static_cast<float>(a.bucket));
  return each_sign_bucket(a, begin, end, [&](const float* x, int64_t at, int64_t count) {
    const float* ahead = a.x + (at / kBlock + 1) * kBlock;
    const int64_t line = at % kBlock / 16;
    const u8v mask = splat_u(kMagnitude);
    u8v largest = {};
    const float sum = fold_sum(sum_rows(x, a.bucket / 16, ahead, line, [&](f8 v) {
      const u8v magnitude = bits_of(v) & mask;
      largest = larger(largest, magnitude);
      return (f8)magnitude * share;
    }));
    write_float(a.floats, at / a.bucket, mean_of(sum, a.bucket, count));
    return fold_max(largest);
  });
}

uint32_t onebit_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  const f8 share = splat(1.0f / static_cast<float>(a.bucket));
  return each_sign_bucket(a, begin, end, [&](const float* x, int64_t at, int64_t count) {
    const float* ahead = a.x + (at / kBlock + 1) * kBlock;
    const int64_t line = at % kBlock / 16;
    const u8v mask = splat_u(kMagnitude);
    u8v largest = {};
    i8 minus_counts = {};
    auto masked = [&](f8 v, bool minus) {
      const u8v magnitude = bits_of(v) & mask;
      const u8v is_minus = (u8v)((i8)bits_of(v) >> 31);
      return (f8)((u8v)((f8)magnitude * share) & (minus ? is_minus : ~is_minus));
    };
    const float plus = fold_sum(sum_rows(x, a.bucket / 16, ahead, line, [&](f8 v) {
      largest = larger(largest, bits_of(v) & mask);
      minus_counts -= (i8)bits_of(v) >> 31;
      return masked(v, false);
    }));
    const float minus = fold_sum(sum_rows(x, a.bucket / 16, ahead, line, [&](f8 v) { return masked(v, true); }));
    int64_t below = 0;
    for (int i = 0; i < 8; ++i) below += minus_counts[i];
    const int64_t above = count - below;
    write_float(a.floats, 2 * (at / a.bucket), mean_of(plus, a.bucket, above ? above : 1));
    write_float(a.floats, 2 * (at / a.bucket) + 1, mean_of(minus, a.bucket, below ? below : 1));
    return fold_max(largest);
  });
}

// Bits to one of two values: plus where the bit is clear, minus where it is set.
template <Store How>
INLINE void signs_to_values(const Sink& sink, const uint8_t* packed, int64_t at, int64_t first_bit_group, int64_t count,
                            float plus, float minus, int64_t skip) {
  // `skip` rows of 8 lie before `at` within its group (buckets of 128).
  const f8 weight = splat(sink.weight);
  const u8v p = bits_of(splat(plus)), m = bits_of(splat(minus));
  float* out = sink.out + at;
  const int64_t rows = count / 8;
  const u8v word = load<u8v>(packed + first_bit_group * 32);
  for (int64_t row = 0; row < rows; ++row) {
    const u8v set = (u8v)((i8)(word << static_cast<int>(31 - row - skip)) >> 31);
    emit<How>(out + 8 * row, (f8)((p & ~set) | (m & set)), weight);
  }
}

template <Store How, class Values>
INLINE bool decode_signs(const BucketDecode& a, int64_t begin, int64_t end, Values values) {
  const int64_t span = a.bucket < kGroup ? a.bucket : kGroup;
  for (int64_t at = begin; at < end; at += span) {
    float plus, minus;
    if (!values(at / a.bucket, &plus, &minus)) return false;
    const int64_t group = at / kGroup, count = least(span, end - at);
    if ((group + 1) * kGroup <= a.sink.n) {
      signs_to_values<How>(a.sink, a.packed, at, group, count, plus, minus, at % kGroup / 8);
    } else {
      for (int64_t i = at; i < at + count; ++i) {
        const int64_t bit = i - group * kGroup;
        const bool set = a.packed[group * 32 + bit / 8] >> (bit % 8) & 1;
        emit_one(a.sink, i, set ? minus : plus);
      }
    }
  }
  finish_stores();
  return true;
}

template <class Values>
INLINE bool decode_signs(const BucketDecode& a, int64_t begin, int64_t end, Values values) {
  switch (how_to_store(a.sink)) {
    case Store::add: return decode_signs<Store::add>(a, begin, end, values);
    case Store::stream: return decode_signs<Store::stream>(a, begin, end, values);
    default: return decode_signs<Store::plain>(a, begin, end, values);
  }
}

bool sign_decode(const BucketDecode& a, int64_t begin, int64_t end) {
  return decode_signs(a, begin, end, [&](int64_t bucket, float* plus, float* minus) {
    *plus = read_float(a.floats, bucket);
    *minus = -*plus;
    return finite_and_positive(*plus);
  });
}
bool onebit_decode(const BucketDecode& a, int64_t begin, int64_t end) {
  return decode_signs(a, begin, end, [&](int64_t bucket, float* plus, float* minus) {
    *plus = read_float(a.floats, 2 * bucket);
    const float below = read_float(a.floats, 2 * bucket + 1);
    *minus = -below;
    return finite_and_positive(*plus) && finite_and_positive(below);
  });
}

// ------------------------------------------------------------------------------------------------------------ uniform

uint32_t value_range(const float* x, int64_t begin, int64_t end, float* low, float* high) {
  constexpr int kChains = 4;  // a minimum takes four cycles: so many must be under way at once
  f8 least_of[kChains], most_of[kChains];
  for (int c = 0; c < kChains; ++c) least_of[c] = most_of[c] = splat(x[begin]);
  u8v largest = {};
  const u8v mask = splat_u(kMagnitude);
  int64_t i = begin;
  for (; i + 32 <= end; i += 32) {
    const float* ahead = x + (i / kBlock + 1) * kBlock;
    const int64_t line = i % kBlock / 16;
    fetch_ahead(ahead, line);
    fetch_ahead(ahead, line + 1);
    unroll<kChains>([&](auto c) {
      const f8 v = load<f8>(x + i + 8 * c);
      least_of[c] = v < least_of[c] ? v : least_of[c];
      most_of[c] = v > most_of[c] ? v : most_of[c];
      largest = larger(largest, bits_of(v) & mask);
    });
  }
  uint32_t key = fold_max(largest);
  float smallest = x[begin], greatest = x[begin];
  auto take = [&](float below, float above) {
    if (below < smallest) smallest = below;
    if (above > greatest) greatest = above;
  };
  for (int c = 0; c < kChains; ++c) {
    for (int lane = 0; lane < 8; ++lane) take(least_of[c][lane], most_of[c][lane]);
  }
  for (; i < end; ++i) {
    take(x[i], x[i]);
    key = most(key, magnitude_bits(x[i]));
  }
  *low = smallest;
  *high = greatest;
  return key;
}

void uniform_encode(const float* x, UniformCoding c, uint8_t* packed, int64_t begin, int64_t end, int64_t) {
  const PackGroup group = pack_group_of(c.bits);
  const double inverse = static_cast<double>(c.levels) / (c.high - c.low);
  const d4 low = {c.low, c.low, c.low, c.low}, scale = {inverse, inverse, inverse, inverse};
  const int32_t top = c.levels - 1;
  for (int64_t at = begin; at < end; at += kGroup) {
    const int64_t count = least(kGroup, end - at);
    float padded[kGroup];
    const float* v = x + at;
    if (count < kGroup) {
      for (int64_t i = 0; i < kGroup; ++i) padded[i] = i < count ? v[i] : static_cast<float>(c.low);
      v = padded;
    }
    alignas(32) int32_t symbols[kGroup];
    const float* ahead = x + (at / kBlock + 1) * kBlock;
    for (int64_t i = 0; i < kGroup; i += 4) {
      if (i % 16 == 0) fetch_ahead(ahead, (at % kBlock + i) / 16);
      const d4 t = (__builtin_convertvector(load<f4>(v + i), d4) - low) * scale;
      i4 q = __builtin_convertvector(t, i4);
      q = q > top ? (i4{} + top) : q;
      store(symbols + i, q);
    }
    uint8_t* out = packed + at / kGroup * 32 * c.bits;
    if (count == kGroup) {
      group(reinterpret_cast<uint32_t*>(symbols), out);
    } else {
      pack_tail(reinterpret_cast<uint32_t*>(symbols), count, c.bits, out);
    }
  }
}

template <Store How>
void uniform_decode_as(const uint8_t* packed, UniformCoding c, const Sink& sink, int64_t begin, int64_t end) {
  const UnpackGroup group = unpack_group_of(c.bits);
  const double width = (c.high - c.low) / static_cast<double>(c.levels);
  const d4 low = {c.low, c.low, c.low, c.low}, w = {width, width, width, width}, half = {.5, .5, .5, .5};
  const int32_t top = c.levels - 1;
  const f8 weight = splat(sink.weight);
  alignas(32) uint32_t symbols[kGroup];
  alignas(32) float values[kGroup];
  for (int64_t at = begin; at < end; at += kGroup) {
    const int64_t count = least(kGroup, end - at);
    const uint8_t* in = packed + at / kGroup * 32 * c.bits;
    if (count == kGroup) {
      group(in, symbols);
    } else {
      std::memset(symbols, 0, sizeof symbols);
      unpack_tail(in, count, c.bits, symbols);
    }
    for (int64_t i = 0; i < kGroup; i += 4) {
      i4 q = load<i4>(symbols + i);
      q = q > top ? (i4{} + top) : q;
      const d4 v = low + (__builtin_convertvector(q, d4) + half) * w;
      store(values + i, __builtin_convertvector(v, f4));
    }
    if (count == kGroup) {
      for (int64_t i = 0; i < kGroup; i += 8) emit<How>(sink.out + at + i, load<f8>(values + i), weight);
    } else {
      for (int64_t i = 0; i < count; ++i) emit_one(sink, at + i, values[i]);
    }
  }
  finish_stores();
}
void uniform_decode(const uint8_t* packed, UniformCoding c, Sink sink, int64_t begin, int64_t end) {
  switch (how_to_store(sink)) {
    case Store::add: return uniform_decode_as<Store::add>(packed, c, sink, begin, end);
    case Store::stream: return uniform_decode_as<Store::stream>(packed, c, sink, begin, end);
    default: return uniform_decode_as<Store::plain>(packed, c, sink, begin, end);
  }
}

// -------------------------------------------------------------------------------------------------------------- casts

template <class Word>
INLINE bool copy_checked(const uint8_t* from, uint8_t* to, int64_t count, Word exponent) {
  Word bad = 0;
  auto plain = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      Word v;
      std::memcpy(&v, from + i * sizeof v, sizeof v);
      bad |= static_cast<Word>((v & exponent) == exponent ? 1 : 0);
      std::memcpy(to + i * sizeof v, &v, sizeof v);
    }
  };
  int64_t i = 0;
#if defined(__AVX2__)
  if (sizeof(Word) == 4 && count * 4 >= kStreamBytes) {
    i = before_line(to, 4, count);
    plain(0, i);
    const u8v mask = splat_u(static_cast<uint32_t>(exponent));
    i8 found = {};
    for (; i + 16 <= count; i += 16) {
      fetch_ahead(reinterpret_cast<const float*>(from) + (i / kBlock + 1) * kBlock, i % kBlock / 16);
      const u8v low = load<u8v>(from + 4 * i), high = load<u8v>(from + 4 * i + 32);
      found |= (i8)((low & mask) == mask) | (i8)((high & mask) == mask);
      stream_line(to + 4 * i, (__m256i)low, (__m256i)high);
    }
    for (int lane = 0; lane < 8; ++lane) bad |= static_cast<Word>(found[lane]);
    finish_stores();
  }
#endif
  plain(i, count);
  return bad == 0;
}
bool copy_finite(const uint8_t* from, uint8_t* to, int64_t nbytes, int itemsize, uint64_t exponent) {
  switch (itemsize) {
    case 2: return copy_checked<uint16_t>(from, to, nbytes / 2, static_cast<uint16_t>(exponent));
    case 4: return copy_checked<uint32_t>(from, to, nbytes / 4, static_cast<uint32_t>(exponent));
    default: return copy_checked<uint64_t>(from, to, nbytes / 8, exponent);
  }
}
bool add_raw(const uint8_t* from, Sink sink, int64_t begin, int64_t end) {
  uint32_t bad = 0;
  for (int64_t i = begin; i < end; ++i) {
    const float v = read_float(from, i);
    bad |= magnitude_bits(v) >= kNonFinite;
    const float product = v * sink.weight;
    sink.out[i] = sink.out[i] + product;
  }
  return !bad;
}

uint16_t to_half(float value) {  // to nearest even; the caller has clamped to ±65504
  uint32_t x;
  std::memcpy(&x, &value, 4);
  const uint32_t sign = x >> 16 & 0x8000, magnitude = x & kMagnitude;
  if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal half, rounded by the adder
    float v;
    std::memcpy(&v, &magnitude, 4);
    v += 0.5f;
    uint32_t r;
    std::memcpy(&r, &v, 4);
    return static_cast<uint16_t>(sign | (r - 0x3F000000u));
  }
  return static_cast<uint16_t>(sign | ((magnitude - 0x38000000u + 0xFFF + (magnitude >> 13 & 1)) >> 13));
}
float from_half(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16, rest = h & 0x7FFF;
  uint32_t x;
  if (rest >= 0x7C00) {
    x = 0x7F800000u | (rest & 0x3FF) << 13;
  } else if (rest >= 0x400) {
    x = (rest << 13) + 0x38000000u;
  } else {
    const float v = static_cast<float>(rest) * 0x1p-24f;
    std::memcpy(&x, &v, 4);
  }
  x |= sign;
  float v;
  std::memcpy(&v, &x, 4);
  return v;
}
INLINE uint16_t to_bf16(float value) {
  uint32_t x;
  std::memcpy(&x, &value, 4);
  return static_cast<uint16_t>((x + 0x7FFF + (x >> 16 & 1)) >> 16);
}

#if defined(__AVX2__)
INLINE __m128i to_half8(f8 v) {
  return _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE __m128i to_bf16_8(f8 v) {
  const u8v x = bits_of(v), rounded = (x + (0x7FFFu + (x >> 16 & 1u))) >> 16;
  const __m256i halves = _mm256_packus_epi32((__m256i)rounded, (__m256i)rounded);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(halves, 0x08));
}
#endif

template <bool Half>
uint32_t cast_encode_as(const float* x, uint8_t* out, int64_t begin, int64_t end, int64_t* saturated) {
  constexpr float limit = Half ? 65504.0f : 0x1.FEp127f;
  const uint32_t limit_bits = magnitude_bits(limit);
  uint32_t key = 0;
  int64_t beyond = 0, i = begin;
  auto plain = [&](int64_t stop) {
    for (; i < stop; ++i) {
      const uint32_t magnitude = magnitude_bits(x[i]);
      key = most(key, magnitude);
      beyond += magnitude > limit_bits;
      const float v = x[i] > limit ? limit : x[i] < -limit ? -limit : x[i];
      const uint16_t r = Half ? to_half(v) : to_bf16(v);
      std::memcpy(out + 2 * i, &r, 2);
    }
  };
#if defined(__AVX2__)
  plain(begin + before_line(out + 2 * begin, 2, end - begin));
  const bool stream = (end - begin) * 2 >= kStreamBytes;
  const u8v mask = splat_u(kMagnitude), top = splat_u(limit_bits);
  const f8 most_v = splat(limit), least_v = splat(-limit);
  u8v largest = {};
  i8 over = {};
  for (; i + 32 <= end; i += 32) {
    const float* ahead = x + (i / kBlock + 1) * kBlock;
    fetch_ahead(ahead, i % kBlock / 16);
    fetch_ahead(ahead, i % kBlock / 16 + 1);
    __m128i narrow[4];
    unroll<4>([&](auto part) {
      f8 v = load<f8>(x + i + 8 * part);
      const u8v magnitude = bits_of(v) & mask;
      largest = larger(largest, magnitude);
      over -= (i8)((i8)magnitude > (i8)top);
      v = v > most_v ? most_v : v;
      v = v < least_v ? least_v : v;
      narrow[part] = Half ? to_half8(v) : to_bf16_8(v);
    });
    const __m256i low = _mm256_set_m128i(narrow[1], narrow[0]), high = _mm256_set_m128i(narrow[3], narrow[2]);
    if (stream) {
      stream_line(out + 2 * i, low, high);
    } else {
      store(out + 2 * i, low);
      store(out + 2 * i + 32, high);
    }
  }
  key = most(key, fold_max(largest));
  for (int lane = 0; lane < 8; ++lane) beyond += over[lane];
  finish_stores();
#endif
  plain(end);
  *saturated = beyond;
  return key;
}
uint32_t cast_encode(const float* x, bool half, uint8_t* out, int64_t begin, int64_t end, int64_t* saturated) {
  return half ? cast_encode_as<true>(x, out, begin, end, saturated)
              : cast_encode_as<false>(x, out, begin, end, saturated);
}
bool cast_decode(const uint8_t* from, bool half, Sink sink, int64_t begin, int64_t end) {
  const uint16_t exponent = half ? 0x7C00 : 0x7F80;
  bool finite = true;
  int64_t i = begin;
#if defined(__AVX2__)
  const Store how = how_to_store(sink);
  const f8 weight = splat(sink.weight);
  for (; i + 8 <= end; i += 8) {
    const __m128i h = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + 2 * i));
    const __m128i mask = _mm_set1_epi16(static_cast<short>(exponent));
    finite &= _mm_movemask_epi8(_mm_cmpeq_epi16(_mm_and_si128(h, mask), mask)) == 0;
    const f8 v = half ? (f8)_mm256_cvtph_ps(h) : (f8)_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16);
    if (how == Store::add) {
      emit<Store::add>(sink.out + i, v, weight);
    } else if (how == Store::stream) {
      emit<Store::stream>(sink.out + i, v, weight);
    } else {
      emit<Store::plain>(sink.out + i, v, weight);
    }
  }
  finish_stores();
#endif
  for (; i < end; ++i) {
    uint16_t h;
    std::memcpy(&h, from + 2 * i, 2);
    finite &= (h & exponent) != exponent;
    float v;
    const uint32_t wide = static_cast<uint32_t>(h) << 16;
    if (half) {
      v = from_half(h);
    } else {
      std::memcpy(&v, &wide, 4);
    }
    emit_one(sink, i, v);
  }
  return finite;
}

// ---------------------------------------------------------------------------------------------------------- selection

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each mask of eight lanes, the permutation that moves its set lanes to the front.
struct Compress {
  alignas(32) uint32_t order[256][8];
  constexpr Compress() : order() {
    for (int mask = 0; mask < 256; ++mask) {
      int at = 0;
      for (int lane = 0; lane < 8; ++lane) {
        if (mask >> lane & 1) order[mask][at++] = static_cast<uint32_t>(lane);
      }
    }
  }
};
constexpr Compress kCompress;
#endif

// Appends offset + lane and raw bits of the lanes whose key (raw & mask) is at least the threshold. Writes up to
// 16 entries past the count, so the arrays have that much room to spare.
INLINE int64_t append16(const uint32_t* raw, uint32_t mask, uint32_t threshold, uint32_t offset, uint32_t* offsets,
                        uint32_t* bits, int64_t count) {
#if defined(__AVX512F__)
  const __m512i v = _mm512_loadu_si512(raw);
  const __mmask16 hit = _mm512_cmpge_epu32_mask(_mm512_and_si512(v, _mm512_set1_epi32(static_cast<int>(mask))),
                                                _mm512_set1_epi32(static_cast<int>(threshold)));
  const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __m512i index = _mm512_add_epi32(lanes, _mm512_set1_epi32(static_cast<int>(offset)));
  _mm512_storeu_si512(offsets + count, _mm512_maskz_compress_epi32(hit, index));
  _mm512_storeu_si512(bits + count, _mm512_maskz_compress_epi32(hit, v));
  return count + __builtin_popcount(hit);
#elif defined(__AVX2__)
  for (int half = 0; half < 16; half += 8) {
    const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(raw + half));
    const __m256i key = _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(mask)));
    const __m256i limit = _mm256_set1_epi32(static_cast<int>(threshold));
    const __m256i reached = _mm256_cmpeq_epi32(_mm256_max_epu32(key, limit), key);
    const unsigned hit = static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(reached)));
    const __m256i order = _mm256_load_si256(reinterpret_cast<const __m256i*>(kCompress.order[hit]));
    const __m256i index = _mm256_add_epi32(order, _mm256_set1_epi32(static_cast<int>(offset) + half));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(offsets + count), index);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(bits + count), _mm256_permutevar8x32_epi32(v, order));
    count += __builtin_popcount(hit);
  }
  return count;
#else
  for (uint32_t i = 0; i < 16; ++i) {
    offsets[count] = offset + i;
    bits[count] = raw[i];
    count += (raw[i] & mask) >= threshold;
  }
  return count;
#endif
}
INLINE int64_t append_rest(const uint32_t* raw, int64_t n, uint32_t mask, uint32_t threshold, uint32_t offset,
                           Kept* kept, int64_t count) {
  for (int64_t i = 0; i < n; ++i) {
    kept->offset[count] = offset + static_cast<uint32_t>(i);
    kept->bits[count] = raw[i];
    count += (raw[i] & mask) >= threshold;
  }
  return count;
}

bool compact(const float* x, int64_t begin, int64_t end, uint32_t threshold, Kept* kept) {
  const uint32_t* raw = reinterpret_cast<const uint32_t*>(x);
  int64_t count = kept->count;
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t stop = least(at + kBlock, end);
    if (count + (stop - at) > kept->capacity) {
      // Room for the worst case is short: look before writing.
      int64_t reached = 0;
      for (int64_t i = at; i < stop; ++i) reached += (raw[i] & kMagnitude) >= threshold;
      if (count + reached + 16 > kept->capacity) return false;
    }
    int64_t i = at;
    for (; i + 16 <= stop; i += 16) {
      fetch_ahead(x + at + kBlock, (i - at) / 16);
      count = append16(raw + i, kMagnitude, threshold, static_cast<uint32_t>(i - begin), kept->offset, kept->bits, count);
    }
    count = append_rest(raw + i, stop - i, kMagnitude, threshold, static_cast<uint32_t>(i - begin), kept, count);
  }
  kept->count = count;
  return true;
}

int64_t count_reaching(const float* x, int64_t begin, int64_t end, uint32_t threshold) {
  const u8v mask = splat_u(kMagnitude), limit = splat_u(threshold);
  int64_t count = 0, i = begin;
  while (i + 16 <= end) {
    const int64_t stop = least(i + kBlock, end);
    const float* ahead = x + i + kBlock;
    i8 reached = {};
    for (int64_t line = 0; i + 16 <= stop; i += 16, ++line) {
      fetch_ahead(ahead, line);
      reached -= (i8)((i8)(load<u8v>(x + i) & mask) >= (i8)limit);
      reached -= (i8)((i8)(load<u8v>(x + i + 8) & mask) >= (i8)limit);
    }
    for (int lane = 0; lane < 8; ++lane) count += reached[lane];
  }
  for (; i < end; ++i) count += magnitude_bits(x[i]) >= threshold;
  return count;
}

bool compact_hashes(Key key, int64_t begin, int64_t end, uint32_t at_most, Kept* kept) {
  // The complement turns "at most" into "at least".
  const uint32_t threshold = ~at_most;
  int64_t count = kept->count;
  alignas(64) uint32_t inverted[256];
  for (int64_t at = begin; at < end; at += 256) {
    const int64_t n = least(256, end - at);
    if (count + n + 16 > kept->capacity) return false;
    const u8v low = low_key(key, static_cast<uint64_t>(at)), high = splat_u(key.high);
    const u8v counter = splat_u(static_cast<uint32_t>(at)) + kLanes;
    for (uint32_t i = 0; i < 256; i += 8) store(inverted + i, ~hash8(counter + i, low, high));
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
      count = append16(inverted + i, ~0u, threshold, static_cast<uint32_t>(at - begin + i), kept->offset, kept->bits,
                       count);
    }
    count = append_rest(inverted + i, n - i, ~0u, threshold, static_cast<uint32_t>(at - begin + i), kept, count);
  }
  kept->count = count;
  return true;
}

template <class Index>
int64_t first_at_least(const Index* positions, int64_t k, int64_t value) {
  int64_t low = 0, high = k;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (positions[middle] < value) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class Index>
void scatter(const Index* positions, const float* values, int64_t k, Sink sink, int64_t begin, int64_t end) {
  int64_t i = first_at_least(positions, k, begin);
  if (sink.accumulate) {
    for (; i < k && positions[i] < end; ++i) emit_one(sink, positions[i], values[i]);
    return;
  }
  if (how_to_store(sink) != Store::stream) {
    std::memset(sink.out + begin, 0, (end - begin) * 4);
    for (; i < k && positions[i] < end; ++i) sink.out[positions[i]] = values[i];
    return;
  }
  // A window in L1 is filled, streamed out and emptied again, so every line of the output is written once and none is
  // read.
  constexpr int64_t window = 2048;
  alignas(64) float buffer[window] = {};
  const f8 unused = {};
  for (int64_t at = begin; at < end; at += window) {
    const int64_t stop = least(at + window, end), first = i;
    for (; i < k && positions[i] < stop; ++i) buffer[positions[i] - at] = values[i];
    int64_t j = 0;
    for (; j + 8 <= stop - at; j += 8) emit<Store::stream>(sink.out + at + j, load<f8>(buffer + j), unused);
    for (; j < stop - at; ++j) sink.out[at + j] = buffer[j];
    for (int64_t filled = first; filled < i; ++filled) buffer[positions[filled] - at] = 0.0f;
  }
  finish_stores();
}
void scatter32(const int32_t* p, const float* v, int64_t k, Sink s, int64_t b, int64_t e) { scatter(p, v, k, s, b, e); }
void scatter64(const int64_t* p, const float* v, int64_t k, Sink s, int64_t b, int64_t e) { scatter(p, v, k, s, b, e); }

}  // namespace

#define LACONIC_TABLE_(isa) simd_##isa
#define LACONIC_TABLE(isa) LACONIC_TABLE_(isa)

extern const Simd LACONIC_TABLE(LACONIC_ISA);
const Simd LACONIC_TABLE(LACONIC_ISA) = {
    LACONIC_TEXT(LACONIC_ISA),
    qsgd_encode, ternary_encode, sign_encode, onebit_encode,
    qsgd_decode, ternary_decode, sign_decode, onebit_decode,
    value_range, uniform_encode, uniform_decode,
    copy_finite, add_raw, cast_encode, cast_decode,
    compact, count_reaching, compact_hashes, scatter32, scatter64,
    pack, unpack,
};

}  // namespace laconic
