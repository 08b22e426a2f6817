// Code tables: Huffman lengths, rANS frequencies, and their bytes. Integer arithmetic only, so that every backend
// writes the same table.

#include "core.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

namespace laconic {
namespace {

struct Leaf {
  uint64_t weight;
  int symbol;
};

// The symbols that occur, in ascending order of their counts; of equal ones the lower symbol first.
std::vector<Leaf> leaves_of(const uint32_t* counts, int alphabet) {
  std::vector<Leaf> leaves;
  leaves.reserve(static_cast<size_t>(alphabet));
  for (int s = 0; s < alphabet; ++s) {
    if (counts[s]) leaves.push_back({counts[s], s});
  }
  std::stable_sort(leaves.begin(), leaves.end(), [](const Leaf& a, const Leaf& b) { return a.weight < b.weight; });
  return leaves;
}

int bits_for(uint32_t values) { return values > 1 ? 32 - __builtin_clz(values - 1) : 0; }

// The limit keeps the decoder's table in the L1 cache at a small cost in size, since only rare symbols have longer
// codes.
int length_limit(int used) {
  return std::min(kMaxLength, std::max(12, bits_for(static_cast<uint32_t>(used)) + 3));
}

}  // namespace

int code_lengths(const uint32_t* counts, int alphabet, uint8_t* lengths) {
  // Package-merge (Larmore and Hirschberg 1990). Level by level the cheapest pairs of the level below are merged with
  // the leaves; a symbol's length is the number of levels at which its leaf is among the 2 n - 2 cheapest items.
  std::memset(lengths, 0, static_cast<size_t>(alphabet));
  const std::vector<Leaf> leaves = leaves_of(counts, alphabet);
  const int used = static_cast<int>(leaves.size()), limit = length_limit(used);
  const size_t capacity = 2 * static_cast<size_t>(used);
  std::vector<uint64_t> items(capacity), merged(capacity);
  std::vector<uint8_t> is_leaf(capacity * static_cast<size_t>(limit));
  int count = used;
  for (int i = 0; i < used; ++i) items[i] = leaves[i].weight;
  std::fill_n(is_leaf.begin(), used, uint8_t{1});
  for (int level = 1; level < limit; ++level) {
    uint8_t* leaf_here = is_leaf.data() + capacity * static_cast<size_t>(level);
    const int pairs = count / 2;
    int leaf = 0, pair = 0, total = 0;
    while (leaf < used || pair < pairs) {
      const uint64_t package = pair < pairs ? items[2 * pair] + items[2 * pair + 1] : UINT64_MAX;
      const bool take_leaf = leaf < used && leaves[leaf].weight <= package;
      merged[total] = take_leaf ? leaves[leaf++].weight : package;
      pair += !take_leaf;
      leaf_here[total++] = take_leaf;
    }
    items.swap(merged);
    count = total;
  }
  int chosen = 2 * used - 2, longest = 0;
  for (int level = limit - 1; level >= 0 && chosen > 0; --level) {
    const uint8_t* leaf_here = is_leaf.data() + capacity * static_cast<size_t>(level);
    int among = 0;
    for (int i = 0; i < chosen; ++i) among += leaf_here[i];
    for (int i = 0; i < among; ++i) ++lengths[leaves[i].symbol];
    chosen = 2 * (chosen - among);
  }
  for (int s = 0; s < alphabet; ++s) longest = std::max<int>(longest, lengths[s]);
  return longest;
}

void scale_frequencies(const uint32_t* counts, int alphabet, int64_t n, int scale, uint32_t* frequencies) {
  const uint64_t whole = uint64_t{1} << scale;
  int64_t left = static_cast<int64_t>(whole);
  std::vector<Leaf> remainders;
  for (int s = 0; s < alphabet; ++s) {
    frequencies[s] = 0;
    if (!counts[s]) continue;
    const uint64_t exact = counts[s] * whole, part = exact / static_cast<uint64_t>(n);
    frequencies[s] = static_cast<uint32_t>(part ? part : 1);
    left -= frequencies[s];
    if (part) remainders.push_back({exact % static_cast<uint64_t>(n), s});
  }
  if (left > 0) {  // one more for the symbols with the largest remainders
    const auto larger = [](const Leaf& a, const Leaf& b) {
      return a.weight > b.weight || (a.weight == b.weight && a.symbol < b.symbol);
    };
    std::sort(remainders.begin(), remainders.end(), larger);
    for (int64_t i = 0; i < left; ++i) ++frequencies[remainders[static_cast<size_t>(i)].symbol];
  } else if (left < 0) {  // rare symbols were raised to 1; the others lose in proportion, less than a third each
    std::vector<Leaf> leaves = leaves_of(counts, alphabet);
    int64_t reducible = 0, excess = -left;
    for (const Leaf& leaf : leaves) reducible += frequencies[leaf.symbol] > 1 ? frequencies[leaf.symbol] : 0;
    for (auto leaf = leaves.rbegin(); excess > 0 && leaf != leaves.rend(); ++leaf) {
      uint32_t& freq = frequencies[leaf->symbol];
      const int64_t part = (-left * freq + reducible - 1) / reducible;
      const int64_t reduction = std::min({part, excess, int64_t{freq} - 1});
      freq -= static_cast<uint32_t>(reduction);
      excess -= reduction;
    }
  }
}

uint32_t log2_fixed(uint32_t f) {
  const int whole = 31 - __builtin_clz(f);
  uint64_t y = static_cast<uint64_t>(f) << (31 - whole);  // [2^31, 2^32): squared and halved, bit by bit
  uint32_t fraction = 0;
  for (int bit = 0; bit < 16; ++bit) {
    y = y * y >> 31;
    fraction <<= 1;
    if (y >> 32) {
      fraction |= 1;
      y >>= 1;
    }
  }
  return static_cast<uint32_t>(whole) << 16 | fraction;
}

// A table is u16 first symbol that occurs, u16 distance to the last one, and tokens: 0 the previous class (initially
// 8), 10s one less or one more, 110vvvv class v, 111 and an Elias gamma number: a run of symbols that do not occur. A
// class is followed by its mantissa.
namespace {

constexpr int kFirstClass = 8;

struct TableWriter {
  uint8_t* out;
  int64_t bits = 0;
  uint64_t held = 0;
  int waiting = 0;

  void put(uint32_t value, int count) {
    bits += count;
    if (!out) return;
    held |= static_cast<uint64_t>(value) << waiting;
    for (waiting += count; waiting >= 8; waiting -= 8, held >>= 8) *out++ = static_cast<uint8_t>(held);
  }
  void finish() {
    if (out && waiting) *out++ = static_cast<uint8_t>(held);
  }
};

struct TableReader {
  const uint8_t* in;
  int64_t bits, at = 0;
  bool failed = false;

  uint32_t take(int count) {
    uint32_t value = 0;
    for (int i = 0; i < count; ++i, ++at) {
      if (at >= bits) {
        failed = true;
        return 0;
      }
      value |= static_cast<uint32_t>(in[at >> 3] >> (at & 7) & 1) << i;
    }
    return value;
  }
};

}  // namespace

int64_t write_code_table(const uint8_t* classes, const uint32_t* mantissa, int alphabet, uint8_t* out) {
  int first = 0, last = alphabet - 1;
  while (!classes[first]) ++first;
  while (!classes[last]) --last;
  TableWriter writer{out};
  writer.put(static_cast<uint32_t>(first), 16);
  writer.put(static_cast<uint32_t>(last - first), 16);
  int previous = kFirstClass;
  for (int s = first; s <= last; ++s) {
    if (!classes[s]) {
      const int begin = s;
      while (!classes[s + 1]) ++s;
      const uint32_t run = static_cast<uint32_t>(s - begin + 1);
      const int below = 31 - __builtin_clz(run);
      writer.put(0b111, 3);
      writer.put(1u << below, below + 1);
      writer.put(run & ((1u << below) - 1), below);
      continue;
    }
    const int here = classes[s], change = here - previous;
    if (change == 0) {
      writer.put(0, 1);
    } else if (change == 1 || change == -1) {
      writer.put(0b01u | (change > 0 ? 0b100u : 0u), 3);
    } else {
      writer.put(0b011u | static_cast<uint32_t>(here) << 3, 7);
    }
    if (mantissa) writer.put(mantissa[s] & ((1u << (here - 1)) - 1), here - 1);
    previous = here;
  }
  writer.finish();
  return (writer.bits + 7) / 8;
}

int64_t read_code_table(const uint8_t* in, int64_t nbytes, int alphabet, uint8_t* classes, uint32_t* frequencies) {
  std::memset(classes, 0, static_cast<size_t>(alphabet));
  if (frequencies) std::memset(frequencies, 0, static_cast<size_t>(alphabet) * sizeof(uint32_t));
  TableReader reader{in, 8 * nbytes};
  const int first = static_cast<int>(reader.take(16)), last = first + static_cast<int>(reader.take(16));
  if (reader.failed || last >= alphabet) return -1;
  int previous = kFirstClass;
  for (int s = first; s <= last && !reader.failed;) {
    int here = previous;
    if (reader.take(1)) {
      if (!reader.take(1)) {
        here += reader.take(1) ? 1 : -1;
      } else if (!reader.take(1)) {
        here = static_cast<int>(reader.take(4));
      } else {
        int below = 0;
        while (!reader.failed && below < 12 && !reader.take(1)) ++below;
        if (below >= 12) return -1;
        const uint32_t run = 1u << below | reader.take(below);
        s += static_cast<int>(run);
        if (s > last) return -1;  // the last symbol occurs
        continue;
      }
    }
    if (here < 1 || here > kMaxLength) return -1;
    classes[s] = static_cast<uint8_t>(here);
    if (frequencies) frequencies[s] = 1u << (here - 1) | reader.take(here - 1);
    previous = here;
    ++s;
  }
  if (reader.failed) return -1;
  const int64_t used = (reader.at + 7) / 8;
  return reader.take(static_cast<int>(8 * used - reader.at)) ? -1 : used;  // the padding must be zero
}

}  // namespace laconic
