// bins: the bin of each value, and the mean of each bin of a bucket.
#pragma once

#include "packing.hpp"
#include "sink.hpp"
#include "reductions.hpp"

namespace laconic {
namespace {

constexpr int64_t kBinBlock = 128;  // values that are added before they meet the sums of other blocks

// Where the bins of a bucket are, for values that are multiplied by `scale` first.
struct BinEdges {
  float scale, mean, distance, factor, offset;
};

// The bins of eight values, with Half bins on each side of the mean.
template <int Half>
INLINE i8 bins_of_row(f8 v, const BinEdges& e) {
  const f8 centred = v * e.scale - e.mean, zero = {};
  const i8 below = centred < zero;
  if constexpr (Half == 1) return below + 1;
  const f8 top = splat(static_cast<float>(Half - 1));
  f8 t = ((f8)(bits_of(centred) & splat_u(kMagnitude)) - e.distance) * e.factor + e.offset;
  t = t > zero ? t : zero;
  t = t < top ? t : top;
  return (__builtin_convertvector(t, i8) ^ below) + Half;  // Half + level, or Half - 1 - level below the mean
}

// Sums and counts of each bin, in the order of reference.pairwise_sum.
template <int Bins>
struct BinSums {
  Lanes16 stack[10][Bins];  // 65536 values are 2^9 blocks
  i8 counts[Bins] = {};
  int depth = 0;

  INLINE void add_block(const float* x, float scale, const uint32_t* symbols, int64_t block) {
    for (int b = 0; b < Bins; ++b) {
      f8 low[8], high[8];
      const u8v bin = splat_u(static_cast<uint32_t>(b));
      i8 inside_count = {};
      unroll<8>([&](auto i) {
        const i8 first = load<u8v>(symbols + 16 * i) == bin, second = load<u8v>(symbols + 16 * i + 8) == bin;
        low[i] = (f8)((u8v)(load<f8>(x + 16 * i) * scale) & (u8v)first);
        high[i] = (f8)((u8v)(load<f8>(x + 16 * i + 8) * scale) & (u8v)second);
        inside_count -= first + second;
      });
      counts[b] += inside_count;
      Lanes16 sum = {((low[0] + low[1]) + (low[2] + low[3])) + ((low[4] + low[5]) + (low[6] + low[7])),
                     ((high[0] + high[1]) + (high[2] + high[3])) + ((high[4] + high[5]) + (high[6] + high[7]))};
      int level = depth;
      for (int64_t bit = block; bit & 1; bit >>= 1) {
        --level;
        sum = {stack[level][b].low + sum.low, stack[level][b].high + sum.high};
      }
      stack[level][b] = sum;
    }
    for (int64_t bit = block; bit & 1; bit >>= 1) --depth;
    ++depth;
  }

  INLINE float mean(int b) const {
    int64_t count = 0;
    for (int lane = 0; lane < 8; ++lane) count += counts[b][lane];
    return fold_sum(stack[0][b]) / static_cast<float>(count ? count : 1);
  }
};

// The power of two that keeps sums and squares of a bucket's values in the range of float32.
INLINE float bin_scale(uint32_t largest_bits) {
  float largest;
  std::memcpy(&largest, &largest_bits, 4);
  return largest >= 0x1p40f ? 0x1p-96f : largest < 0x1p-40f ? 0x1p96f : 1.0f;
}

// The sum over a bucket of map(distance to the mean).
template <class Map>
INLINE float sum_distances(const float* x, int64_t rows, const float* ahead, int64_t line, const BinEdges& e, Map map) {
  const u8v mask = splat_u(kMagnitude);
  return fold_sum(sum_rows(x, rows, ahead, line, [&](f8 v) {
    return map((f8)(bits_of(v * e.scale - e.mean) & mask));
  }));
}

template <int Bits>
uint32_t bins_encode_as(const BucketEncode& a, int64_t begin, int64_t end) {
  constexpr int bins = 1 << Bits;
  alignas(32) uint32_t symbols[kGroup];
  uint32_t amax_bits = 0;
  for (int64_t at = begin; at < end; at += a.bucket) {
    const int64_t count = least(a.bucket, end - at), rows = a.bucket / 16, line = at % kBlock / 16;
    const float *x = a.x + at, *ahead = a.x + (at / kBlock + 1) * kBlock;
    if (count < a.bucket) {
      std::memcpy(a.scratch, x, count * 4);
      std::memset(a.scratch + count, 0, (a.bucket - count) * 4);
      x = a.scratch;
    }
    const u8v mask = splat_u(kMagnitude);
    u8v magnitudes = {};
    float sum = fold_sum(sum_rows(x, rows, ahead, line, [&](f8 v) {
      magnitudes = larger(magnitudes, bits_of(v) & mask);
      return v;
    }));
    const uint32_t largest = fold_max(magnitudes);
    amax_bits = most(amax_bits, largest);
    if (__builtin_expect(amax_bits >= kNonFinite, 0)) return amax_bits;

    const float scale = bin_scale(largest), size = static_cast<float>(count);
    if (__builtin_expect(scale != 1.0f, 0)) {
      sum = fold_sum(sum_rows(x, rows, ahead, line, [&](f8 v) { return v * scale; }));
    }
    BinEdges edges{scale, sum / size, 0.0f, 0.0f, a.offset};
    if (count < a.bucket) {  // padded with the mean, whose distance is zero
      for (int64_t i = 0; i < a.bucket; ++i) a.scratch[i] = i < count ? a.scratch[i] * scale : edges.mean;
      edges.scale = 1.0f;
    }
    if constexpr (Bits > 1) {
      edges.distance = sum_distances(x, rows, ahead, line, edges, [](f8 d) { return d; }) / size;
      const float square = sum_distances(x, rows, ahead, line, edges, [](f8 d) { return d * d; }) / size;
      const float variance = square - edges.distance * edges.distance;
      edges.factor = variance > 0.0f ? a.slope / __builtin_sqrtf(variance) : 0.0f;
    }

    BinSums<bins> sums;
    for (int64_t block = 0; block < a.bucket / kBinBlock; ++block) {
      const int64_t i = block * kBinBlock, in_group = (at + i) % kGroup;
      uint32_t* out = symbols + in_group;
      if (i >= count) {  // the sums of a whole bucket have this many blocks
        for (int64_t j = 0; j < kBinBlock; ++j) out[j] = bins;
      } else {
        unroll<16>([&](auto row) {
          store(out + 8 * row, bins_of_row<bins / 2>(load<f8>(x + i + 8 * row), edges));
        });
        for (int64_t j = count - i; j < kBinBlock; ++j) out[j] = bins;  // no bin's
        const int64_t group = at + i - in_group, packed = least(kGroup, at + count - group);
        uint8_t* to = a.packed + group / kGroup * 32 * Bits;
        if (in_group == kGroup - kBinBlock && packed == kGroup) {
          pack_group<Bits>(symbols, to);
        } else if (at + i + kBinBlock >= a.n) {
          pack_tail(symbols, packed, Bits, to);
        }
      }
      sums.add_block(x + i, edges.scale, out, block);
    }
    for (int b = 0; b < bins; ++b) {
      float mean = sums.mean(b) * (1.0f / scale);
      mean = mean > kFloatMax ? kFloatMax : mean < -kFloatMax ? -kFloatMax : mean;
      write_float(a.floats, at / a.bucket * bins + b, mean + 0.0f);  // -0 becomes 0
    }
  }
  return amax_bits;
}

uint32_t bins_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  switch (a.bits) {
    case 1: return bins_encode_as<1>(a, begin, end);
    case 2: return bins_encode_as<2>(a, begin, end);
    case 3: return bins_encode_as<3>(a, begin, end);
    default: return bins_encode_as<4>(a, begin, end);
  }
}

// Up to 16 means of a bucket in two vectors.
struct BinMeans {
  f8 low, high;

  INLINE float at(uint32_t bin) const { return bin < 8 ? low[bin] : high[bin - 8]; }
  template <int Bits>
  INLINE f8 of(u8v symbols) const {
    if constexpr (Bits == 4) {
      return __builtin_shuffle(low, high, (i8)symbols);
    } else {
      return __builtin_shuffle(low, (i8)symbols);
    }
  }
};

template <int Bits>
INLINE bool read_bin_means(const BucketDecode& a, int64_t bucket, BinMeans* means) {
  uint32_t largest = 0;
  float values[16] = {};
  for (int b = 0; b < 1 << Bits; ++b) {
    values[b] = read_float(a.floats, (bucket << Bits) + b);
    largest = most(largest, magnitude_bits(values[b]));
  }
  *means = {load<f8>(values), load<f8>(values + 8)};
  return largest < kNonFinite;
}

template <int Bits, Store How>
bool bins_decode_as(const BucketDecode& a, int64_t begin, int64_t end) {
  const f8 weight = splat(a.sink.weight);
  BinMeans means[2] = {};  // of both halves of a group
  for (int64_t at = begin; at < end; at += kGroup) {
    const int64_t count = least(kGroup, end - at);
    if (at % a.bucket == 0 || a.bucket < kGroup) {
      if (!read_bin_means<Bits>(a, at / a.bucket, means)) return false;
      means[1] = means[0];
      if (a.bucket < kGroup && count > a.bucket && !read_bin_means<Bits>(a, at / a.bucket + 1, means + 1)) return false;
    }
    const uint8_t* packed = a.packed + at / kGroup * 32 * Bits;
    float* out = a.sink.out + at;
    if (count == kGroup) {
      unroll<32>([&](auto row) {
        emit<How>(out + 8 * row, means[row / 16].template of<Bits>(row_of<Bits, row>(packed)), weight);
      });
    } else {
      uint32_t symbols[kGroup];
      unpack_tail(packed, count, Bits, symbols);
      for (int64_t i = 0; i < count; ++i) emit_one(a.sink, at + i, means[i / 128].at(symbols[i]));
    }
  }
  finish_stores();
  return true;
}

template <Store How>
bool bins_decode_with(const BucketDecode& a, int64_t begin, int64_t end) {
  switch (a.bits) {
    case 1: return bins_decode_as<1, How>(a, begin, end);
    case 2: return bins_decode_as<2, How>(a, begin, end);
    case 3: return bins_decode_as<3, How>(a, begin, end);
    default: return bins_decode_as<4, How>(a, begin, end);
  }
}
bool bins_decode(const BucketDecode& a, int64_t begin, int64_t end) {
  switch (how_to_store(a.sink)) {
    case Store::add: return bins_decode_with<Store::add>(a, begin, end);
    case Store::stream: return bins_decode_with<Store::stream>(a, begin, end);
    default: return bins_decode_with<Store::plain>(a, begin, end);
  }
}

}  // namespace
}  // namespace laconic
