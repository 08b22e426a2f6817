// Sparse tensors: positions and values to and from sections, and values at positions.

#include "candidates.hpp"

#include <limits>
#include <numeric>
#include <type_traits>

namespace laconic {
namespace {

template <class Index>
Index* position_workspace(int64_t count) {
  static thread_local std::vector<Index> positions;
  // Grows with the calls and shrinks after a large one, like the workspace.
  const size_t size = static_cast<size_t>(count), most = size_t{1} << 24;
  if (positions.size() < size || (positions.size() > most && size <= most)) {
    positions = {};
    positions.resize(size);
  }
  return positions.data();
}

// Calls body with a null pointer of the index type for positions below n.
template <class F>
auto by_index(int64_t n, F body) {
  return n > int64_t{1} << 31 ? body(static_cast<int64_t*>(nullptr)) : body(static_cast<int32_t*>(nullptr));
}

}  // namespace

int64_t topk_encode(const float* x, int64_t n, int64_t k, float* values, uint8_t* section, uint32_t* amax_bits,
                    int threads) {
  return by_index(n, [&](auto* null) {
    using Index = std::remove_pointer_t<decltype(null)>;
    Index* positions = position_workspace<Index>(k);
    *amax_bits = topk(x, n, k, positions, values, threads);
    const PositionPlan plan = plan_positions(positions, k, n);
    write_positions(positions, k, plan, section);
    return plan.nbytes;
  });
}

bool sparse_decode(const uint8_t* section, int64_t nbytes, const float* values, int64_t k, const Sink& sink,
                   int threads) {
  const int64_t n = sink.n;
  PositionHeader header;
  if (!read_positions_header(section, nbytes, n, &header) || header.k != k) return false;
  const uint8_t* body = section + kPositionsHeader;
  nbytes -= kPositionsHeader;
  // Positions that follow each other closely are scattered as they are read; a list of few costs less than a window.
  const bool streams = n * 4 >= kStreamBytes && reinterpret_cast<uintptr_t>(sink.out) % 32 == 0;
  if (!sink.accumulate && threads <= 1 && streams && k > n / 32 && header.mode != PositionMode::all) {
    return scatter_positions(body, nbytes, header, values, sink);
  }
  if (value_range(values, k, threads).amax_bits >= kNonFinite) return false;
  return by_index(n, [&](auto* null) {
    using Index = std::remove_pointer_t<decltype(null)>;
    Index* positions = position_workspace<Index>(k);
    if (header.mode == PositionMode::all) {
      std::iota(positions, positions + k, Index{0});
    } else if (!read_positions(body, nbytes, header.mode, header.low_bits, k, n, positions)) {
      return false;
    }
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      if constexpr (sizeof(Index) == 8) {
        simd().scatter64(positions, values, k, sink, begin, end);
      } else {
        simd().scatter32(positions, values, k, sink, begin, end);
      }
    });
    return true;
  });
}

template <class Index, class Word>
void gather(const Word* x, const Index* positions, int64_t k, Word* out, int threads) {
  for_ranges(k, int64_t{1} << 14, threads, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) out[i] = x[positions[i]];
  });
}

bool scale_saturating(const float* values, int64_t k, float gain, float* out) {
  constexpr float most = std::numeric_limits<float>::max();
  uint32_t amax_bits = 0;
  for (int64_t i = 0; i < k; ++i) {
    amax_bits = std::max(amax_bits, magnitude_at(values, i));
    out[i] = std::min(std::max(values[i] * gain, -most), most);
  }
  return amax_bits < kNonFinite;
}

#define LACONIC_FOR_INDEX(Index)                                                       \
  template void gather<Index>(const uint16_t*, const Index*, int64_t, uint16_t*, int); \
  template void gather<Index>(const uint32_t*, const Index*, int64_t, uint32_t*, int); \
  template void gather<Index>(const uint64_t*, const Index*, int64_t, uint64_t*, int); \
  template void gather<Index>(const float*, const Index*, int64_t, float*, int);
LACONIC_FOR_INDEX(int32_t)
LACONIC_FOR_INDEX(int64_t)

}  // namespace laconic
