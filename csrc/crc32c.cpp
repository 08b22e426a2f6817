// CRC-32C (Castagnoli). With AVX-512, carry-less products fold 256 bytes a step. On older x86 three streams of the crc32
// instruction run side by side and are joined by a table that advances a CRC over a run of zeros. Elsewhere eight tables,
// eight bytes a step.

#include "core.hpp"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace laconic {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78u;

struct Tables {
  uint32_t at[8][256];
  constexpr Tables() : at() {
    for (uint32_t i = 0; i < 256; ++i) {
      uint32_t c = i;
      for (int bit = 0; bit < 8; ++bit) c = c & 1 ? c >> 1 ^ kPolynomial : c >> 1;
      at[0][i] = c;
    }
    for (uint32_t i = 0; i < 256; ++i) {
      for (int t = 1; t < 8; ++t) at[t][i] = at[t - 1][i] >> 8 ^ at[0][at[t - 1][i] & 0xFF];
    }
  }
};
constexpr Tables kTables;

uint64_t word_at(const uint8_t* p) {
  uint64_t w;
  std::memcpy(&w, p, 8);
  return w;
}

uint32_t by_tables(uint32_t crc, const uint8_t* p, size_t n) {
  const auto& t = kTables.at;
  for (; n >= 8; p += 8, n -= 8) {
    const uint64_t w = word_at(p) ^ crc;
    crc = t[7][w & 0xFF] ^ t[6][w >> 8 & 0xFF] ^ t[5][w >> 16 & 0xFF] ^ t[4][w >> 24 & 0xFF] ^ t[3][w >> 32 & 0xFF] ^
          t[2][w >> 40 & 0xFF] ^ t[1][w >> 48 & 0xFF] ^ t[0][w >> 56];
  }
  for (; n; ++p, --n) crc = crc >> 8 ^ t[0][(crc ^ *p) & 0xFF];
  return crc;
}

#if defined(__x86_64__)
// CRC after `bytes` more zero bytes, by one table per byte of the CRC.
template <size_t Bytes>
struct Advance {
  uint32_t at[4][256];
  Advance() {
    for (int byte = 0; byte < 4; ++byte) {
      for (uint32_t v = 0; v < 256; ++v) {
        uint32_t crc = v << (8 * byte);
        for (size_t i = 0; i < Bytes; ++i) crc = crc >> 8 ^ kTables.at[0][crc & 0xFF];
        at[byte][v] = crc;
      }
    }
  }
  uint32_t operator()(uint32_t crc) const {
    return at[0][crc & 0xFF] ^ at[1][crc >> 8 & 0xFF] ^ at[2][crc >> 16 & 0xFF] ^ at[3][crc >> 24];
  }
};

template <size_t Run>
__attribute__((target("sse4.2"))) const uint8_t* three_streams(uint64_t& crc, const uint8_t* p, size_t& n,
                                                               const Advance<Run>& advance) {
  for (; n >= 3 * Run; p += 3 * Run, n -= 3 * Run) {
    uint64_t b = 0, c = 0;
    for (size_t i = 0; i < Run; i += 8) {
      if (Run >= 4096 && i % 64 == 0) {
        // Three lines of what comes next for three that are consumed, interleaved over its pages: more are in flight.
        constexpr size_t pages = 3 * Run / 4096;
        for (size_t line = i / 64 * 3, last = line + 3; line < last; ++line) {
          __builtin_prefetch(p + 3 * Run + line % pages * 4096 + line / pages * 64);
        }
      }
      crc = _mm_crc32_u64(crc, word_at(p + i));
      b = _mm_crc32_u64(b, word_at(p + Run + i));
      c = _mm_crc32_u64(c, word_at(p + 2 * Run + i));
    }
    crc = advance(static_cast<uint32_t>(crc)) ^ b;
    crc = advance(static_cast<uint32_t>(crc)) ^ c;
  }
  return p;
}

__attribute__((target("sse4.2"))) uint32_t by_words(uint64_t crc, const uint8_t* p, size_t n) {
  for (; n >= 8; p += 8, n -= 8) crc = _mm_crc32_u64(crc, word_at(p));
  for (; n; ++p, --n) crc = _mm_crc32_u8(static_cast<uint32_t>(crc), *p);
  return static_cast<uint32_t>(crc);
}

uint32_t by_instruction(uint32_t start, const uint8_t* p, size_t n) {
  static const Advance<8192> far;
  static const Advance<256> near;
  uint64_t crc = start;
  p = three_streams(crc, p, n, far);
  p = three_streams(crc, p, n, near);
  return by_words(crc, p, n);
}

// x^bits modulo the polynomial. Bits are reflected, as in the CRC, so its product with 64 bits is short of one more x.
constexpr int64_t power_of_x(int bits) {
  uint32_t remainder = 1u << 31;
  for (; bits; --bits) remainder = remainder & 1 ? remainder >> 1 ^ kPolynomial : remainder >> 1;
  return int64_t{remainder} << 1;
}

#define LACONIC_FOLDING __attribute__((target("avx512f,vpclmulqdq,sse4.2")))

// What stands for `sum` in each 128 bits of the bytes that follow it after `Bits` bits, added to those.
template <int Bits>
LACONIC_FOLDING inline __m512i folded(__m512i sum, __m512i next) {
  const __m512i by = _mm512_broadcast_i32x4(_mm_set_epi64x(power_of_x(Bits - 32), power_of_x(Bits + 32)));
  const __m512i low = _mm512_clmulepi64_epi128(sum, by, 0x00), high = _mm512_clmulepi64_epi128(sum, by, 0x11);
  return _mm512_ternarylogic_epi64(low, high, next, 0x96);  // the sum of all three
}

LACONIC_FOLDING uint32_t by_folding(uint32_t start, const uint8_t* p, size_t n) {
  constexpr size_t kStep = 256;
  if (n < kStep) return by_words(start, p, n);
  __m512i a = _mm512_xor_si512(_mm512_loadu_si512(p), _mm512_zextsi128_si512(_mm_cvtsi64_si128(start)));
  __m512i b = _mm512_loadu_si512(p + 64), c = _mm512_loadu_si512(p + 128), d = _mm512_loadu_si512(p + 192);
  for (p += kStep, n -= kStep; n >= kStep; p += kStep, n -= kStep) {
    a = folded<8 * kStep>(a, _mm512_loadu_si512(p));
    b = folded<8 * kStep>(b, _mm512_loadu_si512(p + 64));
    c = folded<8 * kStep>(c, _mm512_loadu_si512(p + 128));
    d = folded<8 * kStep>(d, _mm512_loadu_si512(p + 192));
  }
  uint8_t last[64];  // the bytes whose CRC from zero on is that of all bytes so far
  _mm512_storeu_si512(last, folded<512>(folded<512>(folded<512>(a, b), c), d));
  return by_words(by_words(0, last, sizeof last), p, n);
}
#undef LACONIC_FOLDING
#endif

}  // namespace

uint32_t crc32c(const uint8_t* data, size_t nbytes) {
#if defined(__x86_64__)
  static const bool folds = !std::strcmp(simd().name, "avx512") && __builtin_cpu_supports("vpclmulqdq");
  if (folds) return ~by_folding(~0u, data, nbytes);
  static const bool has_instruction = (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2"));
  if (has_instruction) return ~by_instruction(~0u, data, nbytes);
#endif
  return ~by_tables(~0u, data, nbytes);
}

}  // namespace laconic
