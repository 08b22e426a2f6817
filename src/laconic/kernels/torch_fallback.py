"""For tensors of a device without kernels of its own: plain torch there, entropy coding on the host.

Coding is one symbol after the other, which vectors of torch cannot do; the C++ core can, on symbols that are a tenth
of the tensor.
"""

from __future__ import annotations

from torch import Tensor

from laconic.kernels import cpu
from laconic.kernels.interface import Grid, coded_max_nbytes
from laconic.kernels.reference import *  # noqa: F403
from laconic.kernels.reference import grid_symbols
from laconic.kernels.reference.reductions import put


def encode_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:  # type: ignore[no-redef]
    section = out.new_empty(coded_max_nbytes(symbols.numel(), alphabet), device="cpu")
    nbytes = cpu.encode_symbols(symbols.cpu(), alphabet, coding, section)
    out[:nbytes] = section[:nbytes]
    return nbytes


def encode_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:  # type: ignore[no-redef]
    return encode_symbols(grid_symbols(x, grid), grid.levels, coding, out)


def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:  # type: ignore[no-redef]
    return cpu.decode_symbols(section.cpu(), n, alphabet).to(section.device)


def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:  # type: ignore[no-redef]
    symbols = decode_symbols(section, out.numel(), table.numel())
    put(out, table.to(out.device)[symbols.long()], weight)


def chunk_modes(section: Tensor, n: int) -> Tensor:  # type: ignore[no-redef]
    return cpu.chunk_modes(section.cpu(), n)
