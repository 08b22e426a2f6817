// Writes decoded values to memory: stored, streamed past the cache, or accumulated.
#pragma once

#include "vector.hpp"

namespace laconic {
namespace {

// Streaming stores avoid the read of a cache line that precedes a plain store.
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
// Streams a whole cache line at once: parts of a line with other stores between them are flushed ten times slower.
INLINE void stream_line(uint8_t* to, __m256i low, __m256i high) {
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to), low);
  _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32), high);
}
#endif
// The number of elements before the first whole cache line of an output.
INLINE int64_t before_line(const uint8_t* to, int64_t size, int64_t count) {
  const int64_t gap = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(to) & 63);
  return gap % size ? count : least(gap / size, count);
}
INLINE void finish_stores() {
#if defined(__AVX2__)
  _mm_sfence();
#endif
}

}  // namespace
}  // namespace laconic
