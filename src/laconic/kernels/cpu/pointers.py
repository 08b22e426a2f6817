"""Validates tensors before their addresses go to the C++ core."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import Tensor

from laconic import _core
from laconic.errors import FrameError
from laconic.kernels.sections import num_buckets, packed_nbytes, symbol_dtype

_STORE: Final = math.nan
"""The weight that makes the core store instead of accumulate."""

_LARGE: Final = 1 << 23
"""Vectors of at least this many bytes are allocated in large pages."""


threads = torch.get_num_threads


def floats_at(x: Tensor) -> int:
    """Return the address of a flat float32 tensor."""
    assert x.dtype == torch.float32 and x.dim() == 1 and x.is_contiguous() and x.is_cpu, x
    return x.data_ptr()


def bytes_at(section: Tensor, nbytes: int) -> int:
    """Return the address of a section of exactly this size."""
    assert section.dtype == torch.uint8 and section.is_contiguous() and section.numel() == nbytes, (section, nbytes)
    return section.data_ptr()


def bucket_floats_at(section: Tensor, n: int, bucket: int, per_bucket: int = 1) -> int:
    """Return the address of a section with this many float32 for each bucket of n values."""
    nbytes = 4 * per_bucket * num_buckets(n, bucket)
    assert section.dtype == torch.uint8 and section.is_contiguous() and section.numel() == nbytes, (section, nbytes)
    return section.data_ptr()


def packed_at(section: Tensor, n: int, bits: int) -> int:
    """Return the address of n packed symbols."""
    nbytes = packed_nbytes(n, bits)
    assert section.dtype == torch.uint8 and section.is_contiguous() and section.numel() == nbytes, (section, nbytes)
    return section.data_ptr()


def symbols_at(symbols: Tensor, alphabet: int) -> int:
    """Return the address of unpacked symbols: one byte each if the alphabet fits, else two."""
    assert symbols.dtype == symbol_dtype(alphabet) and symbols.is_contiguous() and symbols.is_cpu, symbols
    return symbols.data_ptr()


def empty(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return an uninitialised vector. Page by page, the faults of a large one cost more than filling it."""
    fresh = torch.empty(count, dtype=dtype)
    if fresh.nbytes >= _LARGE:
        _core.advise_large_pages(fresh.data_ptr(), fresh.nbytes)
    return fresh


def empty_positions(n: int, count: int) -> tuple[bool, Tensor]:
    """Return whether positions below n need 64 bits, and an uninitialised tensor for ``count`` of them."""
    wide = n > 1 << 31
    return wide, empty(count, torch.int64 if wide else torch.int32)


def is_wide(positions: Tensor) -> bool:
    assert positions.dtype in (torch.int32, torch.int64) and positions.is_contiguous()
    return positions.dtype == torch.int64


def weight_of(weight: float | None) -> float:
    return _STORE if weight is None else weight


def require_valid(valid: bool, defect: str) -> None:
    """Raise ``FrameError`` if a decoder of the core found a defect."""
    if not valid:
        raise FrameError(f"the frame holds {defect}")
