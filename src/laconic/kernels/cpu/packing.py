"""Symbols to bits and back."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels.cpu.checked_pointers import bytes_at
from laconic.kernels.interface import packed_nbytes


def pack(symbols: Tensor, bits: int, out: Tensor) -> None:
    symbols = symbols.to(torch.int32).contiguous()
    n = symbols.numel()
    _core.pack(symbols.data_ptr(), n, bits, bytes_at(out, packed_nbytes(n, bits)))


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    out = torch.empty(n, dtype=torch.int32)
    _core.unpack(bytes_at(packed, packed_nbytes(n, bits)), n, bits, out.data_ptr())
    return out
