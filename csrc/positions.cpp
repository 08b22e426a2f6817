// Positions of a selector: Rice-coded gaps (low bits packed, high parts in unary), a bitmap, or gaps as classes for an
// entropy coder, with the bits that tell the gaps of a class apart.

#include "core.hpp"

#include <cstring>
#include <type_traits>

namespace laconic {
namespace {

template <class Index>
using Gap = std::make_unsigned_t<Index>;  // positions are below 2^31 or 2^63

// How many positions are skipped before each of `count` positions from `at` on.
template <class Index>
void gaps_of(const Index* positions, int64_t at, int64_t count, Gap<Index>* gaps) {
  const Index* here = positions + at;
  gaps[0] = static_cast<Gap<Index>>(at == 0 ? here[0] : here[0] - here[-1] - 1);
  for (int64_t i = 1; i < count; ++i) gaps[i] = static_cast<Gap<Index>>(here[i] - here[i - 1] - 1);
}

}  // namespace

template <class Index>
PositionPlan plan_positions(const Index* positions, int64_t k, int64_t n) {
  if (k == n) return {PositionMode::all, 0, kPositionsHeader};
  // Rice parameters around log2(0.69 n / k), where a geometric gap is coded best.
  const uint64_t typical = static_cast<uint64_t>(69 * n / (100 * k));
  const int log2 = 63 - __builtin_clzll(typical ? typical : 1);
  const int middle = log2 < kMaxLowBits ? log2 : kMaxLowBits, first = middle > 0 ? middle - 1 : 0;
  uint64_t high[3] = {};
  Gap<Index> gaps[kGroup];
  for (int64_t at = 0; at < k; at += kGroup) {
    const int64_t count = k - at < kGroup ? k - at : kGroup;
    gaps_of(positions, at, count, gaps);
    for (int j = 0; j < 3; ++j) {
      Gap<Index> sum = 0;  // of gaps between positions that Index holds, so it does not overflow
      for (int64_t i = 0; i < count; ++i) sum += gaps[i] >> (first + j);
      high[j] += sum;
    }
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

namespace {
// Writes numbers in unary, each as zeros and a one, into bytes that are zero.
class UnaryWriter {
 public:
  UnaryWriter(uint8_t* out, int64_t nbytes) : at_(out), end_(out + nbytes) {}

  // Appends four numbers, given with their ones: each is at least 1.
  void put4(uint64_t a, uint64_t b, uint64_t c, uint64_t d) {
    const uint64_t ab = a + b, abc = ab + c, all = abc + d;
    if (a > 63 || b > 63 || c > 63 || d > 63 || filled_ + all > 63) {
      put(a), put(b), put(c), put(d);
      return;
    }
    held_ |= (uint64_t{1} << (a - 1) | uint64_t{1} << (ab - 1) | uint64_t{1} << (abc - 1) | uint64_t{1} << (all - 1))
             << filled_;
    filled_ += all;
    store_whole_bytes();
  }
  void put(uint64_t number) {
    const uint64_t place = filled_ + number - 1;
    if (place < 63) {
      held_ |= uint64_t{1} << place;
      filled_ = place + 1;
    } else {
      if (filled_) *at_ = static_cast<uint8_t>(held_);
      at_ += place >> 3;
      held_ = uint64_t{1} << (place & 7);
      filled_ = (place & 7) + 1;
    }
    store_whole_bytes();
  }
  void finish() {
    if (filled_) *at_ = static_cast<uint8_t>(held_);
  }

 private:
  void store_whole_bytes() {
    if (end_ - at_ >= 8) {
      std::memcpy(at_, &held_, 8);
    } else {
      std::memcpy(at_, &held_, static_cast<size_t>(end_ - at_));
    }
    at_ += filled_ >> 3;
    held_ >>= filled_ & 56;
    filled_ &= 7;
  }

  uint8_t *at_, *end_;
  uint64_t held_ = 0, filled_ = 0;  // between two calls fewer than eight bits wait
};
}  // namespace

template <class Index>
static void rice_write(const Index* positions, int64_t k, int low_bits, uint8_t* low, uint8_t* unary,
                       int64_t unary_nbytes) {
  const uint32_t mask = (1u << low_bits) - 1;
  Gap<Index> gaps[kGroup];
  uint32_t symbols[kGroup];
  std::memset(unary, 0, static_cast<size_t>(unary_nbytes));
  UnaryWriter writer(unary, unary_nbytes);
  for (int64_t at = 0; at < k; at += kGroup) {
    const int64_t count = k - at < kGroup ? k - at : kGroup;
    gaps_of(positions, at, count, gaps);
    for (int64_t i = 0; i < count; ++i) {
      symbols[i] = static_cast<uint32_t>(gaps[i]) & mask;
      gaps[i] = (gaps[i] >> low_bits) + 1;
    }
    int64_t i = 0;
    for (; i + 4 <= count; i += 4) writer.put4(gaps[i], gaps[i + 1], gaps[i + 2], gaps[i + 3]);
    for (; i < count; ++i) writer.put(gaps[i]);
    simd().pack(symbols, count, low_bits, low + at / kGroup * 32 * low_bits);
  }
  writer.finish();
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
    rice_write(positions, k, plan.low_bits, out, out + low, body - low);
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
    for (int64_t i = 0; i < count; ++i) {
      low_sum += symbols[i];
      ends[i] = ((ends[i] - (read + i)) << low_bits) + low_sum + read + i;
    }
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
  const auto take = [&](const int64_t* group, int64_t first, int64_t count) {
    simd().scatter_on(to, group, values + first, count);
  };
  if (!read_groups(body, nbytes, header.mode, header.low_bits, header.k, sink.n, take)) return false;
  simd().scatter_end(to);
  return true;
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
