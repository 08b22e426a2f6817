// terngrad: the rounding of qsgd to three levels, five values per byte.
#pragma once

#include "qsgd.hpp"

namespace laconic {
namespace {

constexpr int64_t kTritGroup = 5 * kTritGroupBytes;

uint32_t ternary_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  // Symbols of up to 1,280 values: five groups of 256, four groups of 320.
  constexpr int64_t window = 1280;
  alignas(64) uint8_t symbols[window];
  int64_t filled = 0;
  uint8_t* out = a.packed + begin / 5;
  auto flush = [&](bool last) {
    int64_t i = 0;
    for (; i + kTritGroup <= filled; i += kTritGroup, out += kTritGroupBytes) {
      const uint8_t* s = symbols + i;
      for (int64_t lane = 0; lane < kTritGroupBytes; ++lane) {
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
  const uint32_t amax_bits =
      each_group<29, 1>(a, begin, end, [&](const float* x, Scale first, Scale second, int64_t at, int64_t count) {
    uint32_t wide[kGroup];
    quantize_group<29, 1, true>(x, first, second, at / kGroup, a.key, a.x + (at / kBlock + 1) * kBlock,
                                at % kBlock / 16, [&](auto row, u8v v) { store(wide + 8 * row, v >> 29); });
    for (int64_t i = 0; i < count; ++i) symbols[filled + i] = static_cast<uint8_t>(wide[i]);
    filled += count;
    if (filled == window) flush(false);
  });
  flush(true);
  return amax_bits;
}

bool ternary_decode(const BucketDecode& a, int64_t begin, int64_t end) {
  constexpr int64_t window = 640;  // two groups of 320, and whole buckets of 128
  const uint8_t* in = a.packed + begin / 5;
  for (int64_t at = begin; at < end; at += window) {
    const int64_t count = least(window, end - at);
    int8_t values[window + 5];
    int64_t done = 0;
    bool valid = true;
    for (; done + kTritGroup <= count; done += kTritGroup, in += kTritGroupBytes) {
      uint16_t left[kTritGroupBytes];
      uint16_t top = 0;
      for (int64_t lane = 0; lane < kTritGroupBytes; ++lane) {
        left[lane] = in[lane];
        top = left[lane] > top ? left[lane] : top;
      }
      valid &= top <= 242;
      for (int j = 0; j < 5; ++j) {
        int8_t* row = values + done + kTritGroupBytes * j;
        for (int64_t lane = 0; lane < kTritGroupBytes; ++lane) {
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

}  // namespace
}  // namespace laconic
