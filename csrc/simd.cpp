// The hot loops of csrc/simd/, compiled once per instruction set with LACONIC_ISA as the name of the variant. Only the
// table has external linkage, so the linker cannot replace one variant's code by another's.

#include "core.hpp"
#include "simd/bins.hpp"
#include "simd/casts.hpp"
#include "simd/huffman.hpp"
#include "simd/linear.hpp"
#include "simd/lowrank.hpp"
#include "simd/momentum.hpp"
#include "simd/packed_ints.hpp"
#include "simd/qsgd.hpp"
#include "simd/rans.hpp"
#include "simd/rice.hpp"
#include "simd/selection.hpp"
#include "simd/sign.hpp"
#include "simd/ternary.hpp"
#include "simd/uniform.hpp"

#ifndef LACONIC_ISA
#error "LACONIC_ISA must name the variant"
#endif
#define LACONIC_TEXT_(x) #x
#define LACONIC_TEXT(x) LACONIC_TEXT_(x)

namespace laconic {

#define LACONIC_TABLE_(isa) simd_##isa
#define LACONIC_TABLE(isa) LACONIC_TABLE_(isa)

extern const Simd LACONIC_TABLE(LACONIC_ISA);
const Simd LACONIC_TABLE(LACONIC_ISA) = {
    LACONIC_TEXT(LACONIC_ISA),
#define LOOP(name, result, parameters) name,
#include "simd/table.inc"
#undef LOOP
};

}  // namespace laconic
