// sign and onebit: a bit per value, and one or two means per bucket.
#pragma once

#include "packing.hpp"
#include "sink.hpp"
#include "reductions.hpp"

namespace laconic {
namespace {

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

// Processes a range bucket by bucket; `scale(values padded to the bucket, the block ahead, index, count)` writes the
// bucket's floats and returns its amax bits.
template <class ScaleFn>
INLINE uint32_t each_sign_bucket(const BucketEncode& a, int64_t begin, int64_t end, ScaleFn scale) {
  uint32_t amax_bits = 0;
  for (int64_t at = begin; at < end; at += a.bucket) {
    const int64_t here = least(a.bucket, end - at);
    const float* x = a.x + at;
    if (here < a.bucket) {
      std::memcpy(a.scratch, x, here * 4);
      std::memset(a.scratch + here, 0, (a.bucket - here) * 4);
      x = a.scratch;
    }
    amax_bits = most(amax_bits, scale(x, a.x + (at / kBlock + 1) * kBlock, at, here));
    if (amax_bits >= kNonFinite) return amax_bits;
    if (a.bucket >= kGroup) {
      pack_signs(x, here, a.packed + at / 8);
    } else if (at % kGroup == 0) {  // buckets of 128: a group holds two
      pack_signs(a.x + at, least(kGroup, a.n - at), a.packed + at / 8);
    }
  }
  return amax_bits;
}

INLINE float mean_of(float scaled_sum, int64_t bucket, int64_t count) {
  const float factor = static_cast<float>(bucket) / static_cast<float>(count);
  const float mean = scaled_sum * factor;
  return mean <= kFloatMax ? mean : kFloatMax;
}

uint32_t sign_encode(const BucketEncode& a, int64_t begin, int64_t end) {
  const f8 share = splat(1.0f / static_cast<float>(a.bucket));
  return each_sign_bucket(a, begin, end, [&](const float* x, const float* ahead, int64_t at, int64_t count) {
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
  return each_sign_bucket(a, begin, end, [&](const float* x, const float* ahead, int64_t at, int64_t count) {
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

// Decodes bits to `plus` where the bit is clear and `minus` where it is set.
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

}  // namespace
}  // namespace laconic
