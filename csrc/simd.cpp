// The hot loops of csrc/simd/, compiled once per instruction set with LACONIC_ISA naming the variant. Nothing there may
// have external linkage but the table here, so that no variant's code can stand in for another's.

#include "core.hpp"
#include "simd/casts.hpp"
#include "simd/feedback.hpp"
#include "simd/huffman.hpp"
#include "simd/lanes.hpp"
#include "simd/linear.hpp"
#include "simd/lowrank.hpp"
#include "simd/qsgd.hpp"
#include "simd/rans.hpp"
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
    uniform_symbols8,
    uniform_symbols16,
    copy_finite,
    add_raw,
    cast_encode,
    cast_decode,
    add_momentum,
    compact,
    count_reaching,
    compact_hashes,
    scatter32,
    scatter64,
    pack,
    unpack,
    linear_encode,
    linear_symbols8,
    linear_symbols16,
    table_decode,
    count_symbols8,
    count_symbols16,
    block_scales,
    rotate_blocks,
    lane_encode,
    lane_decode,
    lane_add,
    lane_accumulate,
    lane_pack,
    lane_largest,
    project_rows,
    project_columns,
    lowrank_fill,
    huffman_write8,
    huffman_write16,
    rans_write8,
    rans_write16,
    huffman_read_floats,
    huffman_read8,
    huffman_read16,
    rans_read_floats,
    rans_read8,
    rans_read16,
};

}  // namespace laconic
