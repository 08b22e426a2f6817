// Positions of a selector: Rice-coded gaps (low bits packed, high parts in unary), a bitmap, or gaps as classes for an
// entropy coder, with the bits that tell the gaps of a class apart.

#include "core.hpp"

#include <algorithm>
#include <cstring>

namespace laconic {
template <class Index>
PositionPlan plan_positions(const Index* positions, int64_t k, int64_t n) {
  if (k == n) return {PositionMode::all, 0, kPositionsHeader};
  // Rice parameters around log2(0.69 n / k), where a geometric gap is coded best.
  const uint64_t typical = static_cast<uint64_t>(69 * n / (100 * k));
  const int log2 = 63 - __builtin_clzll(typical ? typical : 1);
  const int middle = log2 < kMaxLowBits ? log2 : kMaxLowBits, first = middle > 0 ? middle - 1 : 0;
  uint64_t high[3] = {};
  if constexpr (sizeof(Index) == 8) {
    simd().sum_gaps64(positions, k, first, high);
  } else {
    simd().sum_gaps32(positions, k, first, high);
  }
  PositionPlan best{PositionMode::bitmap, 0, kPositionsHeader + (n + 7) / 8};
  for (int low_bits = middle + 1; low_bits >= first; --low_bits) {  // among equal sizes the smallest parameter wins
    if (low_bits > kMaxLowBits) continue;
    const int64_t unary = k + static_cast<int64_t>(high[low_bits - first]);
    const int64_t nbytes = kPositionsHeader + packed_nbytes(k, low_bits) + (unary + 7) / 8;
    if (nbytes <= best.nbytes) best = {PositionMode::rice, low_bits, nbytes};
  }
  return best;
}

template <class Index>
void write_positions(const Index* positions, int64_t k, const PositionPlan& plan, uint8_t* out) {
  const uint64_t header =
      static_cast<uint64_t>(plan.mode) | static_cast<uint64_t>(plan.low_bits) << 8 | static_cast<uint64_t>(k) << 16;
  std::memcpy(out, &header, sizeof header);
  out += kPositionsHeader;
  const int64_t body = plan.nbytes - kPositionsHeader;
  if (plan.mode == PositionMode::rice) {
    const int64_t low = packed_nbytes(k, plan.low_bits);
    if constexpr (sizeof(Index) == 8) {
      simd().rice_write64(positions, k, plan.low_bits, out, out + low, body - low);
    } else {
      simd().rice_write32(positions, k, plan.low_bits, out, out + low, body - low);
    }
  } else if (plan.mode == PositionMode::bitmap) {
    std::memset(out, 0, static_cast<size_t>(body));
    for (int64_t i = 0; i < k; ++i) out[positions[i] >> 3] |= static_cast<uint8_t>(1 << (positions[i] & 7));
  }
}

// A position is the number of zeros before its unary bit times 2^low_bits, plus the low bits so far, plus the positions
// before it: both sums never fall, so one check for each group of 256 covers all of its positions. take(positions, first,
// count) receives each group.
template <class Take>
static bool rice_read(const uint8_t* low, const uint8_t* unary, int64_t unary_nbytes, int64_t k, int low_bits,
                      int64_t n, Take take) {
  uint32_t symbols[kGroup];
  int64_t ends[kGroup + kSetBitsSlack];  // the indices of unary bits: a group's, and what a whole word adds
  int64_t found = 0, read = 0, low_sum = 0, last_end = -1;
  for (int64_t byte = 0; byte < unary_nbytes || found;) {
    found = simd().set_bits(unary, unary_nbytes, &byte, kGroup, ends, found);
    if (found == 0) break;
    const int64_t count = found < kGroup ? found : kGroup;
    if (read + count > k) return false;
    last_end = ends[count - 1];
    if (last_end - (read + count - 1) > n >> low_bits) return false;
    simd().unpack(low + read / kGroup * 32 * low_bits, count, low_bits, symbols);
    low_sum = simd().rice_positions(symbols, count, low_bits, read, low_sum, ends);
    if (ends[count - 1] >= n) return false;
    take(ends, read, count);
    read += count;
    found -= count;
    std::memmove(ends, ends + count, static_cast<size_t>(found) * sizeof *ends);
  }
  return read == k && last_end >= (unary_nbytes - 1) * 8;
}

template <class Take>
static bool bitmap_read(const uint8_t* bitmap, int64_t n, int64_t k, Take take) {
  int64_t found[kGroup + kSetBitsSlack];
  const int64_t nbytes = (n + 7) / 8;
  int64_t read = 0;
  for (int64_t byte = 0; byte < nbytes;) {
    const int64_t count = simd().set_bits(bitmap, nbytes, &byte, kGroup, found, 0);
    if (read + count > k || (count && found[count - 1] >= n)) return false;
    if (count) take(found, read, count);
    read += count;
  }
  return read == k;
}

template <class Take>
static bool read_groups(const uint8_t* body, int64_t nbytes, PositionMode mode, int low_bits, int64_t k, int64_t n,
                        Take take) {
  if (mode == PositionMode::bitmap) return bitmap_read(body, n, k, take);
  const int64_t low = packed_nbytes(k, low_bits);
  return rice_read(body, body + low, nbytes - low, k, low_bits, n, take);
}

template <class Index>
bool read_positions(const uint8_t* body, int64_t nbytes, PositionMode mode, int low_bits, int64_t k, int64_t n,
                    Index* positions) {
  return read_groups(body, nbytes, mode, low_bits, k, n, [&](const int64_t* group, int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) positions[first + i] = static_cast<Index>(group[i]);
  });
}

bool read_positions_header(const uint8_t* section, int64_t nbytes, int64_t n, PositionHeader* header) {
  if (nbytes < kPositionsHeader) return false;
  uint64_t fields;
  std::memcpy(&fields, section, sizeof fields);
  const int mode = static_cast<int>(fields & 0xFF);
  *header = {static_cast<PositionMode>(mode), static_cast<int>(fields >> 8 & 0xFF), static_cast<int64_t>(fields >> 16)};
  const int64_t k = header->k, body = nbytes - kPositionsHeader;
  if (k < 1 || k > n) return false;
  switch (header->mode) {
    case PositionMode::all: return k == n && header->low_bits == 0 && body == 0;
    case PositionMode::bitmap: return header->low_bits == 0 && body == (n + 7) / 8;
    case PositionMode::rice:
      return header->low_bits <= kMaxLowBits && body >= packed_nbytes(k, header->low_bits) + (k + 7) / 8;
    case PositionMode::contexts: return false;
  }
  return false;
}

bool scatter_positions(const uint8_t* body, int64_t nbytes, const PositionHeader& header, const float* values,
                       const Sink& sink) {
  alignas(64) float window[kWindow] = {};
  WindowedOutput to{sink.out, sink.n, 0, window};
  uint32_t amax_bits = 0;
  const auto take = [&](const int64_t* group, int64_t first, int64_t count) {
    amax_bits = std::max(amax_bits, value_range(values + first, count, 1).amax_bits);
    simd().scatter_on(to, group, values + first, count);
  };
  if (!read_groups(body, nbytes, header.mode, header.low_bits, header.k, sink.n, take)) return false;
  simd().scatter_end(to);
  return amax_bits < kNonFinite;
}

// Classes of gaps: four for each power of two. A class above 7 spans 2^width gaps from (4 + class mod 4) * 2^width.
static int gap_class_width(int gap_class) { return gap_class < 8 ? 0 : gap_class / 4 - 1; }

template <class Index>
int64_t split_gaps(const Index* positions, int64_t k, uint8_t* classes, uint8_t* low) {
  const uint8_t* begin = low;
  uint64_t held = 0;
  int count = 0;
  for (int64_t i = 0; i < k; ++i) {
    const uint64_t gap = static_cast<uint64_t>(i == 0 ? positions[0] : positions[i] - positions[i - 1] - 1);
    if (gap < 8) {
      classes[i] = static_cast<uint8_t>(gap);
      continue;
    }
    const int width = 61 - __builtin_clzll(gap);  // all bits but the leading one and the two that follow it
    classes[i] = static_cast<uint8_t>(4 * (width + 1) + static_cast<int>(gap >> width & 3));
    held |= (gap & ((uint64_t{1} << width) - 1)) << count;
    count += width;
    for (; count >= 8; count -= 8, held >>= 8) *low++ = static_cast<uint8_t>(held);
  }
  if (count) *low++ = static_cast<uint8_t>(held);
  return low - begin;
}

template <class Index>
bool join_gaps(const uint8_t* classes, int64_t k, int64_t n, const uint8_t* low, int64_t nbytes, Index* positions) {
  int64_t bit = 0, position = -1;
  for (int64_t i = 0; i < k; ++i) {
    const int width = gap_class_width(classes[i]);
    int64_t gap = classes[i];
    if (gap >= 8) {
      if (bit + width > 8 * nbytes) return false;
      uint64_t word = 0;  // a width is at most 31, and 7 bits of the first byte may precede it
      const int64_t byte = bit >> 3, here = nbytes - byte < 8 ? nbytes - byte : 8;
      if (here > 0) std::memcpy(&word, low + byte, static_cast<size_t>(here));
      gap = (int64_t{4 + (classes[i] & 3)} << width) +
            static_cast<int64_t>(word >> (bit & 7) & ((uint64_t{1} << width) - 1));
      bit += width;
    }
    position += gap + 1;
    if (position >= n) return false;
    positions[i] = static_cast<Index>(position);
  }
  return (bit + 7) / 8 == nbytes && (bit % 8 == 0 || low[nbytes - 1] >> (bit % 8) == 0);
}

#define LACONIC_FOR_INDEX(Index)                                                              \
  template PositionPlan plan_positions<Index>(const Index*, int64_t, int64_t);                \
  template void write_positions<Index>(const Index*, int64_t, const PositionPlan&, uint8_t*); \
  template bool read_positions<Index>(const uint8_t*, int64_t, PositionMode, int, int64_t, int64_t, Index*); \
  template int64_t split_gaps<Index>(const Index*, int64_t, uint8_t*, uint8_t*);              \
  template bool join_gaps<Index>(const uint8_t*, int64_t, int64_t, const uint8_t*, int64_t, Index*);
LACONIC_FOR_INDEX(int32_t)
LACONIC_FOR_INDEX(int64_t)

}  // namespace laconic
