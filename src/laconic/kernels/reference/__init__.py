"""The truth, in plain torch, on any device: what bytes a codec sends is what these functions write.

Written to be read, in vectors rather than element loops; docs/wire-format.md says the same in words. Sums that decide
bytes have a fixed order (``pairwise_sum``), so that thread count and backend cannot change a frame.
"""

from __future__ import annotations

from laconic.kernels.reference.casts import add_momentum, all_finite, cast_decode, cast_encode, copy_finite, raw_decode
from laconic.kernels.reference.entropy_coding import (
    chunk_modes,
    decode_symbols,
    decode_values,
    encode_symbols,
    encode_values,
)
from laconic.kernels.reference.linear import (
    full_table,
    grid_symbols,
    histogram,
    linear_encode,
    linear_symbols,
    pack_symbols,
    range_histogram,
    sample,
    table_decode,
    unpack_symbols,
)
from laconic.kernels.reference.lowrank import lowrank_decode, project_columns, project_rows
from laconic.kernels.reference.packed_ints import (
    block_scales,
    packed_int_accumulate,
    packed_int_add,
    packed_int_decode,
    packed_int_encode,
    packed_int_max,
    packed_int_repack,
    rotate,
)
from laconic.kernels.reference.packing import pack, unpack
from laconic.kernels.reference.positions import (
    positions_decode,
    positions_encode,
    positions_plan,
    positions_write,
    randk_decode,
    scatter,
    sparse_decode,
    topk_encode,
)
from laconic.kernels.reference.quantizers import (
    onebit_decode,
    onebit_encode,
    qsgd_decode,
    qsgd_encode,
    qsgd_feedback,
    sign_decode,
    sign_encode,
    ternary_decode,
    ternary_encode,
    uniform_decode,
    uniform_encode,
    value_range,
)
from laconic.kernels.reference.reductions import pairwise_sum
from laconic.kernels.reference.selection import (
    amax_bits_any_dtype,
    randk_encode,
    random_positions,
    threshold_select,
    topk,
    topk_sampled,
)

__all__ = [
    "add_momentum",
    "all_finite",
    "amax_bits_any_dtype",
    "block_scales",
    "cast_decode",
    "cast_encode",
    "chunk_modes",
    "copy_finite",
    "decode_symbols",
    "decode_values",
    "encode_symbols",
    "encode_values",
    "full_table",
    "grid_symbols",
    "histogram",
    "linear_encode",
    "linear_symbols",
    "lowrank_decode",
    "onebit_decode",
    "onebit_encode",
    "pack",
    "pack_symbols",
    "packed_int_accumulate",
    "packed_int_add",
    "packed_int_decode",
    "packed_int_encode",
    "packed_int_max",
    "packed_int_repack",
    "pairwise_sum",
    "positions_decode",
    "positions_encode",
    "positions_plan",
    "positions_write",
    "project_columns",
    "project_rows",
    "qsgd_decode",
    "qsgd_encode",
    "qsgd_feedback",
    "randk_decode",
    "randk_encode",
    "random_positions",
    "range_histogram",
    "raw_decode",
    "rotate",
    "sample",
    "scatter",
    "sign_decode",
    "sign_encode",
    "sparse_decode",
    "table_decode",
    "ternary_decode",
    "ternary_encode",
    "threshold_select",
    "topk",
    "topk_encode",
    "topk_sampled",
    "uniform_decode",
    "uniform_encode",
    "unpack",
    "unpack_symbols",
    "value_range",
]
