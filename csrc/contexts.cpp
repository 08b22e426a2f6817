// Positions as decisions, one for each value of a matrix: sent or not, by a binary arithmetic coder. The probability of a
// decision is the product of what remains to be sent, what the row sent so far, and what the column sent so far. In
// chunks that send equally many values, it is the column's share of what the rest of the chunk has to send.

#include "core.hpp"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

namespace laconic {
namespace {

__extension__ typedef unsigned __int128 Wide;  // products of counts of 2^34 values

constexpr int64_t kSegment = 16;          // values after which a row's rate is computed again, if nothing was sent
constexpr uint32_t kEvent = 256;          // weight that a column gains when it sends
constexpr uint32_t kMaxWeight = 1 << 16;  // of a column; then all are halved
constexpr uint64_t kMaxRate = 1 << 18;    // of a row, in units of 2^-12
constexpr uint64_t kLeast = 16, kMost = 15 << 16;  // probabilities, in units of 2^-20
constexpr uint32_t kCertain = 1 << 20;             // the coder takes no bits for it

// Calls decide(position, probability), which returns whether the value is sent, until k values were. False if they do
// not fit into n.
template <class Decide>
bool walk_rows(int64_t n, int64_t k, const ContextHeader& header, Decide decide) {
  const int64_t columns = header.columns;
  const uint64_t row_prior = uint64_t{32} << header.row_prior;
  std::vector<uint32_t> weights(static_cast<size_t>(columns), uint32_t{32} << header.column_prior);
  std::vector<int64_t> sent;
  uint64_t total = static_cast<uint64_t>(columns) << (5 + header.column_prior);
  uint64_t left = static_cast<uint64_t>(k);
  for (int64_t begin = 0; begin < n && left; begin += columns) {
    const uint64_t cells = static_cast<uint64_t>(n - begin);
    if (left > cells) return false;
    const int64_t width = std::min(columns, n - begin);
    // what a unit of weight is expected to send, in units of 2^-36
    const uint64_t unit = (((left << 24) / cells * static_cast<uint64_t>(columns)) << 12) / total;
    uint64_t seen = 0;
    sent.clear();
    for (int64_t column = 0; column < width && left;) {
      const uint64_t expected = (unit * seen) >> 28;
      const uint64_t events = static_cast<uint64_t>(sent.size()) << 8;
      const uint64_t rate = std::min(((events + row_prior) << 12) / (expected + row_prior), kMaxRate);
      const uint64_t scale = (unit * rate) >> 12;
      const int64_t end = std::min(width, (column / kSegment + 1) * kSegment);
      while (column < end) {
        const uint64_t weight = weights[static_cast<size_t>(column)];
        const uint64_t probability = std::clamp((scale * weight) >> 16, kLeast, kMost);
        seen += weight;
        if (decide(begin + column++, static_cast<uint32_t>(probability))) {
          sent.push_back(column - 1);
          --left;
          break;
        }
      }
    }
    bool heavy = false;
    for (const int64_t column : sent) {
      uint32_t& weight = weights[static_cast<size_t>(column)];
      weight += kEvent;
      total += kEvent;
      heavy |= weight >= kMaxWeight;
    }
    if (heavy) {
      total = 0;
      for (uint32_t& weight : weights) total += weight = (weight + 1) / 2;
    }
  }
  return left == 0;
}

// The same if every chunk sends equally many values, and the last one the rest. The caller has checked that they fit.
// A share does not overflow: `left` is at most 2^16, and a weight at most 2^24 when it is used. A column gains 256 for
// each value of a chunk, at most 2^24 in all; a weight of up to 2^24 becomes at most (2^25 + 1) / 2 by that and halving.
template <class Decide>
bool walk_chunks(int64_t n, int64_t k, const ContextHeader& header, Decide decide) {
  const int64_t columns = header.columns, chunk = int64_t{1} << header.chunk_bits;
  std::vector<uint32_t> weights(static_cast<size_t>(columns), uint32_t{32} << header.column_prior);
  std::vector<int64_t> sent;
  const auto next = [columns](int64_t column) { return column + 1 == columns ? 0 : column + 1; };
  for (int64_t begin = 0, remaining = k, first = 0; begin < n; begin += chunk) {
    const int64_t end = std::min(n, begin + chunk);
    int64_t left = std::min(header.each, remaining);
    remaining -= left;
    uint64_t total = 0;
    int64_t column = first;
    for (int64_t i = begin; i < end; ++i, column = next(column)) total += weights[static_cast<size_t>(column)];
    std::swap(column, first);
    sent.clear();
    for (int64_t i = begin; i < end && left; ++i, column = next(column)) {
      const uint64_t weight = weights[static_cast<size_t>(column)];
      const uint64_t share = (static_cast<uint64_t>(left) << 20) * weight / total;
      const bool certain = left == end - i;
      total -= weight;
      if (decide(i, certain ? kCertain : static_cast<uint32_t>(std::clamp(share, kLeast, kMost)))) {
        sent.push_back(column);
        --left;
      }
    }
    bool heavy = false;
    for (const int64_t column : sent) heavy |= (weights[static_cast<size_t>(column)] += kEvent) >= kMaxWeight;
    if (heavy) {
      for (uint32_t& weight : weights) weight = (weight + 1) / 2;
    }
  }
  return true;
}

template <class Decide>
bool walk(int64_t n, int64_t k, const ContextHeader& header, Decide decide) {
  return header.chunk_bits ? walk_chunks(n, k, header, decide) : walk_rows(n, k, header, decide);
}

// The interval of an arithmetic coder: 32 bits, of which leading bytes that both ends share are shifted out.
struct Interval {
  uint32_t low = 0, high = 0xFFFFFFFF;

  uint32_t middle(uint32_t probability) const {
    return low + static_cast<uint32_t>((uint64_t{high - low} * probability) >> 20);
  }
  void take(bool sent, uint32_t middle) { sent ? high = middle : low = middle + 1; }
  bool settled() const { return ((low ^ high) >> 24) == 0; }
  void shift() { low <<= 8, high = high << 8 | 0xFF; }
  // How many bytes of `high`, followed by zeros, are within the interval.
  int final_bytes() const {
    int count = 0;
    while (count < 4 && final_value(count) < low) ++count;
    return count;
  }
  uint32_t final_value(int count) const { return count == 0 ? 0 : high & (0xFFFFFFFFu << (32 - 8 * count)); }
};

// The prior of rates whose counts have this sum and this sum of squares: by the variance beyond that of chance.
int prior_of(int64_t count, int64_t sum, Wide squares) {
  const Wide k = static_cast<Wide>(sum), lines = static_cast<Wide>(count), by_chance = k * k + k * lines;
  if (lines * squares <= by_chance) return kMaxPrior;
  const Wide excess = lines * squares - by_chance;
  int prior = 0;
  while (prior < kMaxPrior && ((k * k) << 15) > ((excess * (181u * 32u)) << prior)) ++prior;
  return prior;
}

}  // namespace

template <class Index>
int64_t write_contexts(const Index* positions, int64_t k, int64_t n, int64_t columns, int chunk_bits, int64_t each,
                       uint8_t* out, int64_t capacity) {
  int64_t used = chunk_bits ? kChunkedContextsHeader : kContextsHeader;
  if (capacity < used) return 0;
  std::vector<int64_t> by_column(static_cast<size_t>(columns));
  Wide squares = 0;
  for (int64_t i = 0; i < k;) {
    const int64_t row = static_cast<int64_t>(positions[i]) / columns;
    uint64_t count = 0;
    for (; i < k && static_cast<int64_t>(positions[i]) / columns == row; ++i, ++count) {
      ++by_column[static_cast<size_t>(static_cast<int64_t>(positions[i]) % columns)];
    }
    squares += static_cast<Wide>(count) * count;
  }
  const int row_prior = chunk_bits ? 0 : prior_of((n + columns - 1) / columns, k, squares);
  squares = 0;
  for (const int64_t count : by_column) squares += static_cast<Wide>(count) * static_cast<Wide>(count);
  const ContextHeader header{columns, row_prior, prior_of(columns, k, squares), chunk_bits, each};

  const uint64_t fields[3] = {static_cast<uint64_t>(PositionMode::contexts) | static_cast<uint64_t>(k) << 16,
                              static_cast<uint64_t>(columns) | static_cast<uint64_t>(header.row_prior) << 32 |
                                  static_cast<uint64_t>(header.column_prior) << 40 |
                                  static_cast<uint64_t>(header.chunk_bits) << 48,
                              static_cast<uint64_t>(header.each)};
  std::memcpy(out, fields, static_cast<size_t>(used));
  Interval interval;
  int64_t next = 0;
  bool in_order = true;
  walk(n, k, header, [&](int64_t position, uint32_t probability) {
    const bool sent = next < k && static_cast<int64_t>(positions[next]) == position;
    next += sent;
    if (probability == kCertain && !sent) {  // no code stands for it: the interval would be empty
      in_order = false;
      return true;
    }
    interval.take(sent, interval.middle(probability));
    for (; interval.settled(); interval.shift(), ++used) {
      if (used < capacity) out[used] = static_cast<uint8_t>(interval.high >> 24);
    }
    return sent;
  });
  if (!in_order || next < k) return -1;
  const int last = interval.final_bytes();
  if (used + last > capacity) return 0;
  for (int i = 0; i < last; ++i) out[used + i] = static_cast<uint8_t>(interval.high >> (24 - 8 * i));
  return used + last;
}

template <class Index>
bool read_contexts(const uint8_t* body, int64_t nbytes, const ContextHeader& header, int64_t k, int64_t n,
                   Index* positions) {
  Interval interval;
  uint32_t value = 0;
  int64_t shifted = 0, read = 0;
  const auto byte = [&](int64_t at) { return at < nbytes ? body[at] : 0; };
  for (int i = 0; i < 4; ++i) value = value << 8 | static_cast<uint32_t>(byte(i));
  const bool complete = walk(n, k, header, [&](int64_t position, uint32_t probability) {
    const uint32_t middle = interval.middle(probability);
    const bool sent = value <= middle;
    if (sent) positions[read++] = static_cast<Index>(position);
    interval.take(sent, middle);
    for (; interval.settled(); interval.shift()) value = value << 8 | static_cast<uint32_t>(byte(4 + shifted++));
    return sent;
  });
  const int last = interval.final_bytes();
  return complete && nbytes == shifted + last && value == interval.final_value(last);
}

#define LACONIC_FOR_INDEX(Index)                                                                             \
  template int64_t write_contexts<Index>(const Index*, int64_t, int64_t, int64_t, int, int64_t, uint8_t*, int64_t); \
  template bool read_contexts<Index>(const uint8_t*, int64_t, const ContextHeader&, int64_t, int64_t, Index*);
LACONIC_FOR_INDEX(int32_t)
LACONIC_FOR_INDEX(int64_t)

}  // namespace laconic
