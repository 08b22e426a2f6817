// The hot loops of csrc/simd/, compiled once per instruction set with LACONIC_ISA naming the variant. Nothing there may
// have external linkage but the table here, so that no variant's code can stand in for another's.

#include "core.hpp"
#include "simd/casts.hpp"
#include "simd/qsgd.hpp"
#include "simd/selection.hpp"
#include "simd/sign.hpp"
#include "simd/ternary.hpp"
#include "simd/uniform.hpp"

#ifndef LACONIC_ISA
#error "LACONIC_ISA names the variant"
#endif
#define LACONIC_TEXT_(x) #x
#define LACONIC_TEXT(x) LACONIC_TEXT_(x)

namespace laconic {

#define LACONIC_TABLE_(isa) simd_##isa
#define LACONIC_TABLE(isa) LACONIC_TABLE_(isa)

extern const Simd LACONIC_TABLE(LACONIC_ISA);
const Simd LACONIC_TABLE(LACONIC_ISA) = {
    LACONIC_TEXT(LACONIC_ISA),
    qsgd_encode,
    ternary_encode,
    sign_encode,
    onebit_encode,
    qsgd_decode,
    ternary_decode,
    sign_decode,
    onebit_decode,
    value_range,
    uniform_encode,
    uniform_decode,
    copy_finite,
    add_raw,
    cast_encode,
    cast_decode,
    compact,
    count_reaching,
    compact_hashes,
    scatter32,
    scatter64,
    pack,
    unpack,
};

}  // namespace laconic
