"""The C++ core: the bytes of ``reference``, at the speed of memory.

Each file here is named as the reference's that it serves for. Threads: as many as ``torch.get_num_threads()``.
"""

from __future__ import annotations

import logging
import os

from laconic import _core
from laconic.kernels.cpu.casts import add_momentum, all_finite, cast_decode, cast_encode, copy_finite, raw_decode
from laconic.kernels.cpu.entropy_coding import (
    code_symbols,
    code_values,
    coded_modes,
    decode_symbols,
    decode_values,
    huffman_nbytes,
)
from laconic.kernels.cpu.linear import (
    histogram,
    linear_encode,
    make_symbols,
    pack_symbols,
    range_histogram,
    sample,
    table_decode,
    unpack_symbols,
)
from laconic.kernels.cpu.lowrank import lowrank_decode, project_columns, project_rows
from laconic.kernels.cpu.packed_ints import (
    block_scales,
    lane_accumulate,
    lane_add,
    lane_decode,
    lane_encode,
    lane_largest,
    lane_pack,
    rotate,
)
from laconic.kernels.cpu.packing import pack, unpack
from laconic.kernels.cpu.positions import (
    place,
    place_drawn,
    positions_code,
    positions_plan,
    positions_read,
    positions_write,
    scatter,
    topk_write,
)
from laconic.kernels.cpu.quantizers import (
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
from laconic.kernels.cpu.selection import above, draw, random_positions, topk, topk_sampled

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
    "histogram",
    "huffman_nbytes",
    "lane_accumulate",
    "lane_add",
    "lane_decode",
    "lane_encode",
    "lane_largest",
    "lane_pack",
    "linear_encode",
    "lowrank_decode",
    "make_symbols",
    "onebit_decode",
    "onebit_encode",
    "pack",
    "pack_symbols",
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

if os.environ.get("LACONIC_ISA", _core.isa) != _core.isa:
    logging.getLogger("laconic").warning(
        "LACONIC_ISA=%s cannot be had here: %s serves", os.environ["LACONIC_ISA"], _core.isa
    )
