"""Consecutive parts, each of which starts at a multiple of 16: the sections of a frame, the frames of a bundle."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torch import Tensor

from laconic._core import bytes_at
from laconic.errors import FrameError

__all__ = ["ALIGN", "align", "aligned_parts", "body_nbytes"]

ALIGN: Final = 16


def align(nbytes: int) -> int:
    """Round up to a multiple of 16, where sections, and the frames of a bundle, start."""
    return (nbytes + ALIGN - 1) & -ALIGN


def body_nbytes(sections: Sequence[int]) -> int:
    """Return the bytes of consecutive parts, each of which starts at a multiple of 16."""
    total = 0
    for nbytes in sections:
        total = align(total) + nbytes
    return total


def aligned_parts(data: Tensor, offset: int, lengths: Sequence[int]) -> tuple[Tensor, ...]:
    """Return views of consecutive parts, each of which starts at a multiple of 16; the padding must be zero."""
    address, sizes = data.data_ptr(), [offset]
    for nbytes in lengths:
        gap = -offset & (ALIGN - 1)
        if gap and bytes_at(address + offset, gap).strip(b"\0"):
            raise FrameError("the padding between sections must be zero")
        sizes += [gap, nbytes]
        offset += gap + nbytes
    return tuple(data.split_with_sizes(sizes)[2::2])
