"""The C++ core: the bytes of ``reference``, at the speed of memory.

Each file here is named as the reference's that it serves for. Threads: as many as ``torch.get_num_threads()``.
"""

from __future__ import annotations

import logging
import os

from laconic import _core
from laconic.kernels.cpu.casts import add_momentum, all_finite, cast_decode, cast_encode, copy_finite, raw_decode
from laconic.kernels.cpu.entropy_coding import (
    chunk_modes,
    decode_symbols,
    decode_values,
    encode_symbols,
    encode_values,
    huffman_nbytes,
)
from laconic.kernels.cpu.linear import (
    grid_symbols,
    histogram,
    linear_encode,
    pack_symbols,
    range_histogram,
    sample,
    table_decode,
    unpack_symbols,
)
from laconic.kernels.cpu.lowrank import lowrank_decode, project_columns, project_rows
from laconic.kernels.cpu.packed_ints import (
    block_scales,
    packed_int_accumulate,
    packed_int_add,
    packed_int_decode,
    packed_int_encode,
    packed_int_max,
    packed_int_repack,
    rotate,
)
from laconic.kernels.cpu.packing import pack, unpack
from laconic.kernels.cpu.positions import (
    positions_decode,
    positions_encode,
    positions_plan,
    positions_write,
    randk_decode,
    scatter,
    sparse_decode,
    topk_encode,
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
from laconic.kernels.cpu.selection import randk_encode, random_positions, threshold_select, topk, topk_sampled

__all__ = [
    "add_momentum",
    "all_finite",
    "block_scales",
    "cast_decode",
    "cast_encode",
    "chunk_modes",
    "copy_finite",
    "decode_symbols",
    "decode_values",
    "encode_symbols",
    "encode_values",
    "grid_symbols",
    "histogram",
    "huffman_nbytes",
    "linear_encode",
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

if os.environ.get("LACONIC_ISA", _core.isa) != _core.isa:
    logging.getLogger("laconic").warning(
        "LACONIC_ISA=%s cannot be had here: %s serves", os.environ["LACONIC_ISA"], _core.isa
    )
