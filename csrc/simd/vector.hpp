// Vectors of 8 lanes, prefetching, and the counter-based hash: the basis of every loop.
//
// Vectors are compiler extensions: one source for all instruction sets. Memory bandwidth is the limit, so two things
// matter most: each block is read once while it is in L1, and the cache lines of the next block are prefetched
// interleaved over its pages, which keeps more of them in flight than the hardware prefetcher does.
#pragma once

#include "../core.hpp"

#include <cstring>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

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
INLINE u8v larger(u8v a, u8v b) { return (u8v)((i8)a > (i8)b ? (i8)a : (i8)b); }  // magnitudes fit a signed integer
INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE uint32_t most(uint32_t a, uint32_t b) { return a > b ? a : b; }

// A NaN becomes `low`.
INLINE f8 clamped(f8 v, f8 low, f8 high) {
#if defined(__AVX2__)
  return (f8)_mm256_min_ps(_mm256_max_ps((__m256)v, (__m256)low), (__m256)high);  // GCC writes compare and blend
#else
  v = v > low ? v : low;
  return v < high ? v : high;
#endif
}

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

// Prefetches one cache line of the next block for each line consumed. `line` is the line within the block. Only where it
// helps: a Zen 4 reads twice as fast by its hardware prefetcher alone.
INLINE void fetch_ahead(const float* next_block, int64_t line) {
#if defined(__x86_64__)
  if (!__builtin_cpu_is("intel")) return;
#endif
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
INLINE bool finite_and_positive(float v) {  // as a norm or a mean magnitude must be; -0 is harmless
  return magnitude_bits(v) < kNonFinite && !(v < 0.0f);
}

// The hash but for its last step, h ^ (h >> 16), which does not change the upper 16 bits.
template <class V>
INLINE V unfinished_hash(V counter, V low, V high) {
  V h = counter ^ low;
  h ^= h >> 16;
  h *= 0x7FEB352Du;
  h ^= (h >> 15) ^ high;
  return h * 0x846CA68Bu;
}
INLINE u8v hash8(u8v counter, u8v low, u8v high) {
  const u8v h = unfinished_hash(counter, low, high);
  return h ^ (h >> 16);
}
INLINE u8v low_key_word(HashKey key, uint64_t counter) {
  return splat_u(key.low ^ (static_cast<uint32_t>(counter >> 32) * 0x9E3779B9u));
}
constexpr u8v kLanes = {0, 1, 2, 3, 4, 5, 6, 7};
// The hash of each lane of a packing group.
INLINE u8v group_hash(HashKey key, uint64_t group) {
  const uint64_t counter = group << 3;
  return hash8(splat_u(static_cast<uint32_t>(counter)) + kLanes, low_key_word(key, counter), splat_u(key.high));
}

}  // namespace
}  // namespace laconic
