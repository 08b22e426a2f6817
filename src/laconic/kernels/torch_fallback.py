"""Backend for devices without kernels: torch on the device, entropy coding on the host.

Entropy coding goes symbol by symbol, which torch cannot do; the C++ core can, on symbols a tenth the tensor's size.
"""

from __future__ import annotations

from torch import Tensor

from laconic import counters
from laconic.kernels import cpu
from laconic.kernels.interface import ChunkCounts, Grid
from laconic.kernels.reference import positions as plain
from laconic.kernels.reference.casts import *
from laconic.kernels.reference.gaps import read_gaps, write_gaps
from laconic.kernels.reference.linear import *
from laconic.kernels.reference.linear import grid_symbols
from laconic.kernels.reference.lowrank import *
from laconic.kernels.reference.packed_ints import *
from laconic.kernels.reference.packing import *
from laconic.kernels.reference.positions import positions_encode as positions_encode
from laconic.kernels.reference.positions import randk_decode as randk_decode
from laconic.kernels.reference.positions import scatter as scatter
from laconic.kernels.reference.positions import sparse_decode_by
from laconic.kernels.reference.positions import topk_chunks_encode as topk_chunks_encode
from laconic.kernels.reference.positions import topk_encode as topk_encode
from laconic.kernels.reference.quantizers import *
from laconic.kernels.reference.ranks import *
from laconic.kernels.reference.reductions import put
from laconic.kernels.reference.selection import *
from laconic.kernels.sections import CONTEXTS, GAPS, PositionHeader, coded_max_nbytes


def encode_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
    section = out.new_empty(coded_max_nbytes(symbols.numel(), alphabet), device="cpu")
    nbytes = cpu.encode_symbols(symbols.cpu(), alphabet, coding, section)
    out[:nbytes] = section[:nbytes]
    return nbytes


def encode_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
    return encode_symbols(grid_symbols(x, grid), grid.levels, coding, out)


def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:
    return cpu.decode_symbols(section.cpu(), n, alphabet).to(section.device)


def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    symbols = decode_symbols(section, out.numel(), table.numel())
    put(out, table.to(out.device)[symbols.long()], weight)


def chunk_modes(section: Tensor, n: int) -> Tensor:
    return cpu.chunk_modes(section.cpu(), n)


def gaps_encode(positions: Tensor, n: int, out: Tensor) -> int:
    return write_gaps(positions, n, out, encode_symbols)


def contexts_encode(positions: Tensor, n: int, columns: int, counts: ChunkCounts | None, out: Tensor) -> int:
    _count_host(out)
    section = out.new_empty(out.numel(), device="cpu")
    nbytes = cpu.contexts_encode(positions.cpu(), n, columns, counts, section)
    out[:nbytes] = section[:nbytes]
    return nbytes


def contexts_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    """Decode decisions on the host, because each depends on those before it."""
    _count_host(section)
    return cpu.positions_decode(section.cpu(), n, header).to(section.device)


def _count_host(x: Tensor) -> None:
    if not x.is_cpu:
        counters.count("hosted_kernels", 1, f"code=context has no kernel for {x.device.type} and runs on the host")


def positions_decode(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    if header.mode == GAPS:
        return read_gaps(section, n, header.kept, decode_symbols)
    if header.mode == CONTEXTS:
        return contexts_decode(section, n, header)
    return plain.positions_decode(section, n, header)


def sparse_decode(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    return sparse_decode_by(positions_decode, section, values, out, weight)
