"""Vertical bit packing of symbols."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic import _core
from laconic.kernels.cpu.pointers import packed_at


def pack(symbols: Tensor, bits: int, out: Tensor) -> None:
    symbols = symbols.to(torch.int32).contiguous()
    n = symbols.numel()
    _core.pack(symbols.data_ptr(), n, bits, packed_at(out, n, bits))


def unpack(packed: Tensor, n: int, bits: int) -> Tensor:
    out = torch.empty(n, dtype=torch.int32)
    _core.unpack(packed_at(packed, n, bits), n, bits, out.data_ptr())
    return out
