// Selection of entries, and their positions.

#include "bindings.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>

#include <stdexcept>

namespace laconic {
namespace {

// Calls body with a value of the index type: int64_t if positions are wide, int32_t otherwise.
template <class F>
auto by_index(bool wide, F body) {
  return wide ? body(int64_t{}) : body(int32_t{});
}

}  // namespace

void bind_selection(nb::module_& m) {
  m.def("topk", [](Address x, int64_t n, int64_t k, bool wide, Address positions, Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return topk(at<const float>(x), n, k, at<Index>(positions), at<float>(values), threads);
    });
  }, Unlocked());
  m.def("topk_encode", [](Address x, int64_t n, int64_t k, Address values, Address section, int threads) {
    uint32_t amax_bits;
    const int64_t nbytes = topk_encode(at<const float>(x), n, k, at<float>(values), at<uint8_t>(section), &amax_bits,
                                       threads);
    return std::pair<int64_t, uint32_t>(nbytes, amax_bits);
  }, Unlocked());
  m.def("encode_positions", [](Address positions, int64_t k, bool wide, int64_t n, Address out) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      const PositionPlan plan = plan_positions(at<const Index>(positions), k, n);
      write_positions(at<const Index>(positions), k, plan, at<uint8_t>(out));
      return plan.nbytes;
    });
  }, Unlocked());
  m.def("sparse_decode",
        [](Address section, int64_t nbytes, Address values, int64_t k, Address out, int64_t n, float weight,
           int threads) {
    return sparse_decode(at<const uint8_t>(section), nbytes, at<const float>(values), k, sink_of(out, n, weight),
                         threads);
  },
        Unlocked());
  m.def("topk_double", [](Address x, int64_t n, int64_t k, bool wide, Address positions, Address values) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      topk_double(at<const double>(x), n, k, at<Index>(positions), at<double>(values));
    });
  }, Unlocked());
  m.def("topk_chunks",
        [](Address x, int64_t n, int64_t chunk, int64_t each, int64_t last, bool wide, Address positions,
           Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return topk_chunks(at<const float>(x), n, {chunk, each, last}, at<Index>(positions), at<float>(values), threads);
    });
  },
        Unlocked());
  m.def("topk_chunks_double",
        [](Address x, int64_t n, int64_t chunk, int64_t each, int64_t last, bool wide, Address positions,
           Address values, int threads) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      topk_chunks_double(at<const double>(x), n, {chunk, each, last}, at<Index>(positions), at<double>(values),
                         threads);
    });
  },
        Unlocked());
  m.def("topk_sampled",
        [](Address x, int64_t n, int64_t k, uint64_t key, bool wide, Address positions, Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return topk_sampled(at<const float>(x), n, k, hash_key(key), at<Index>(positions), at<float>(values), threads);
    });
  }, Unlocked());
  m.def("count_threshold", [](Address x, int64_t n, uint32_t threshold, int threads) {
    return count_threshold(at<const float>(x), n, threshold, threads);
  }, Unlocked());
  m.def("threshold_select",
        [](Address x, int64_t n, uint32_t threshold, bool wide, Address positions, Address values, int64_t capacity) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      uint32_t amax_bits;
      const int64_t count = threshold_select(at<const float>(x), n, threshold, at<Index>(positions), at<float>(values),
                                             capacity, &amax_bits);
      return std::pair<int64_t, uint32_t>(count, amax_bits);
    });
  }, Unlocked());
  m.def("random_positions", [](int64_t n, int64_t k, uint64_t key, bool wide, Address positions, int threads) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      random_positions(n, k, hash_key(key), at<Index>(positions), threads);
    });
  }, Unlocked());
  m.def("random_entries",
        [](Address x, int64_t n, int64_t k, uint64_t key, bool wide, Address positions, Address values, int threads) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return random_entries(at<const float>(x), n, k, hash_key(key), at<Index>(positions), at<float>(values), threads);
    });
  }, Unlocked());
  m.def("gather", [](Address x, int itemsize, Address positions, int64_t k, bool wide, Address out, int threads) {
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      const Index* from = at<const Index>(positions);
      if (itemsize == 2) return gather(at<const uint16_t>(x), from, k, at<uint16_t>(out), threads);
      if (itemsize == 4) return gather(at<const uint32_t>(x), from, k, at<uint32_t>(out), threads);
      return gather(at<const uint64_t>(x), from, k, at<uint64_t>(out), threads);
    });
  }, Unlocked());
  m.def("scale_saturating", [](Address values, int64_t k, float gain, Address out) {
    return scale_saturating(at<const float>(values), k, gain, at<float>(out));
  }, Unlocked());

  m.def("plan_positions", [](Address positions, int64_t k, bool wide, int64_t n) {
    const PositionPlan plan = by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return plan_positions(at<const Index>(positions), k, n);
    });
    return std::tuple<int, int, int64_t>(static_cast<int>(plan.mode), plan.low_bits, plan.nbytes);
  }, Unlocked());
  m.def("write_positions",
        [](Address positions, int64_t k, bool wide, int mode, int low_bits, int64_t nbytes, Address out) {
    const PositionPlan plan{static_cast<PositionMode>(mode), low_bits, nbytes};
    by_index(wide, [&](auto index) {
      using Index = decltype(index);
      write_positions(at<const Index>(positions), k, plan, at<uint8_t>(out));
    });
  }, Unlocked());
  m.def("read_positions",
        [](Address body, int64_t nbytes, int mode, int low_bits, int64_t k, int64_t n, bool wide, Address positions) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return read_positions(at<const uint8_t>(body), nbytes, static_cast<PositionMode>(mode), low_bits, k, n,
                            at<Index>(positions));
    });
  }, Unlocked());
  m.def("split_gaps", [](Address positions, int64_t k, bool wide, Address classes, Address low) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return split_gaps(at<const Index>(positions), k, at<uint8_t>(classes), at<uint8_t>(low));
    });
  }, Unlocked());
  m.def("join_gaps",
        [](Address classes, int64_t k, int64_t n, Address low, int64_t nbytes, bool wide, Address positions) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return join_gaps(at<const uint8_t>(classes), k, n, at<const uint8_t>(low), nbytes, at<Index>(positions));
    });
  }, Unlocked());
  m.def("write_contexts",
        [](Address positions, int64_t k, bool wide, int64_t n, int64_t columns, int chunk_bits,
           int64_t each, Address out, int64_t capacity) {
    const int64_t nbytes = by_index(wide, [&](auto index) {
      using Index = decltype(index);
      return write_contexts(at<const Index>(positions), k, n, columns, chunk_bits, each, at<uint8_t>(out),
                            capacity);
    });
    if (nbytes < 0) throw std::invalid_argument("positions that are not ascending, or not those of the chunks' counts");
    return nbytes;
  }, Unlocked());
  m.def("read_contexts", [](Address body, int64_t nbytes, int64_t columns, int row_prior, int column_prior,
                            int chunk_bits, int64_t each, int64_t k, int64_t n, bool wide, Address positions) {
    return by_index(wide, [&](auto index) {
      using Index = decltype(index);
      const ContextHeader header{columns, row_prior, column_prior, chunk_bits, each};
      return read_contexts(at<const uint8_t>(body), nbytes, header, k, n, at<Index>(positions));
    });
  }, Unlocked());
  m.def("scatter",
        [](Address positions, Address values, int64_t k, bool wide, Address out, int64_t n, float weight, int threads) {
    const Sink sink = sink_of(out, n, weight);
    for_ranges(n, kSplit, threads, [&](int64_t begin, int64_t end) {
      if (wide) {
        simd().scatter64(at<const int64_t>(positions), at<const float>(values), k, sink, begin, end);
      } else {
        simd().scatter32(at<const int32_t>(positions), at<const float>(values), k, sink, begin, end);
      }
    });
  }, Unlocked());
}

}  // namespace laconic
