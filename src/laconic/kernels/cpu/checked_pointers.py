"""Addresses for the core, which believes them: tensors are checked here."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import symbol_dtype

__all__ = ["bytes_at", "floats_at", "index_room", "is_wide", "refuse", "symbols_at", "threads", "weight_of"]

_STORE: Final = math.nan
"""The core's word for "store, do not accumulate"."""


def threads() -> int:
    return torch.get_num_threads()


def floats_at(x: Tensor) -> int:
    """Address of a flat float32 tensor."""
    assert x.dtype == torch.float32 and x.dim() == 1 and x.is_contiguous() and x.is_cpu, x
    return x.data_ptr()


def bytes_at(section: Tensor, nbytes: int) -> int:
    """Address of a section of exactly so many bytes."""
    assert section.dtype == torch.uint8 and section.is_contiguous() and section.numel() == nbytes, (section, nbytes)
    return section.data_ptr()


def symbols_at(symbols: Tensor, alphabet: int) -> int:
    """Address of ready-made symbols: a byte each where the alphabet fits one, two bytes otherwise."""
    assert symbols.dtype == symbol_dtype(alphabet) and symbols.is_contiguous() and symbols.is_cpu, symbols
    return symbols.data_ptr()


def index_room(n: int, count: int) -> tuple[bool, Tensor]:
    """Whether positions need 64 bits, and room for so many."""
    wide = n > 1 << 31
    return wide, torch.empty(count, dtype=torch.int64 if wide else torch.int32)


def is_wide(positions: Tensor) -> bool:
    assert positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous()
    return positions.dtype == torch.int64


def weight_of(weight: float | None) -> float:
    return _STORE if weight is None else weight


def refuse(valid: bool, what: str) -> None:
    if not valid:
        raise FrameError(f"the frame holds {what}")
