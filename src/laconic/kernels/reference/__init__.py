"""The truth, in plain torch, on any device: what bytes a codec sends is what these functions write.

Written to be read, in vectors rather than element loops; docs/wire-format.md says the same in words. Sums that decide
bytes have a fixed order (``pairwise_sum``), so that thread count and backend cannot change a frame.
"""

from __future__ import annotations

from laconic.kernels.reference.casts import add_momentum, all_finite, cast_decode, cast_encode, copy_finite, raw_decode
from laconic.kernels.reference.entropy_coding import (
    code_symbols,
    code_values,
    coded_modes,
    decode_symbols,
    decode_values,
)
from laconic.kernels.reference.linear import (
    full_table,
    histogram,
    linear_encode,
    linear_symbols,
    make_symbols,
    pack_symbols,
    range_histogram,
    sample,
    table_decode,
    unpack_symbols,
)
from laconic.kernels.reference.lowrank import lowrank_decode, project_columns, project_rows
from laconic.kernels.reference.packed_ints import (
    block_scales,
    lane_accumulate,
    lane_add,
    lane_decode,
    lane_encode,
    lane_largest,
    lane_pack,
    rotate,
)
from laconic.kernels.reference.packing import pack, unpack
from laconic.kernels.reference.positions import (
    place,
    place_drawn,
    positions_code,
    positions_plan,
    positions_read,
    positions_write,
    scatter,
    topk_write,
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
from laconic.kernels.reference.selection import above, draw, key_of_any, random_positions, topk, topk_sampled

__all__ = [
    "above",
    "add_momentum",
    "all_finite",
    "block_scales",
    "cast_decode",
    "cast_encode",
    "code_symbols",
    "code_values",
    "coded_modes",
    "copy_finite",
    "decode_symbols",
    "decode_values",
    "draw",
    "full_table",
    "histogram",
    "key_of_any",
    "lane_accumulate",
    "lane_add",
    "lane_decode",
    "lane_encode",
    "lane_largest",
    "lane_pack",
    "linear_encode",
    "linear_symbols",
    "lowrank_decode",
    "make_symbols",
    "onebit_decode",
    "onebit_encode",
    "pack",
    "pack_symbols",
    "pairwise_sum",
    "place",
    "place_drawn",
    "positions_code",
    "positions_plan",
    "positions_read",
    "positions_write",
    "project_columns",
    "project_rows",
    "qsgd_decode",
    "qsgd_encode",
    "qsgd_feedback",
    "random_positions",
    "range_histogram",
    "raw_decode",
    "rotate",
    "sample",
    "scatter",
    "sign_decode",
    "sign_encode",
    "table_decode",
    "ternary_decode",
    "ternary_encode",
    "topk",
    "topk_sampled",
    "topk_write",
    "uniform_decode",
    "uniform_encode",
    "unpack",
    "unpack_symbols",
    "value_range",
]
