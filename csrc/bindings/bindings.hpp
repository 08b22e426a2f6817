// The only folder that knows Python. Tensors arrive as addresses and sizes: laconic/kernels/cpu/ is the only caller and
// has checked them (a DLPack exchange per tensor would cost more than encoding a small one). All work runs without the
// GIL.

#pragma once

#include "../core.hpp"

#include <nanobind/nanobind.h>

#include <cmath>

namespace nb = nanobind;

namespace laconic {

using Address = uintptr_t;
using Unlocked = nb::call_guard<nb::gil_scoped_release>;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}
inline HashKey hash_key(uint64_t key) { return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)}; }
// A NaN as weight means: store.
inline Sink sink_of(Address out, int64_t n, float weight) { return {at<float>(out), n, !std::isnan(weight), weight}; }

void bind_quantizers(nb::module_& m);
void bind_packed_ints(nb::module_& m);
void bind_selection(nb::module_& m);
void bind_coding(nb::module_& m);

}  // namespace laconic
