"""Amax bits, sums in a fixed order, and float sections: helpers of the other modules."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.errors import FrameError

PIECE = 65536
"""Values whose squares are summed at once; what threads of the C++ core share."""
PIECES = 64
"""Pieces that are converted to float64 at once, to bound the memory."""


def amax_bits_of(x: Tensor) -> int:
    """Return the amax bits of a float32 tensor."""
    return int((x.view(torch.int32) & 0x7FFFFFFF).max()) if x.numel() else 0


def in_buckets(x: Tensor, bucket: int) -> Tensor:
    """Return x as rows of one bucket each, the last padded with zeros."""
    rows = -(-x.numel() // bucket)
    padded = torch.zeros(rows * bucket, dtype=x.dtype, device=x.device)
    padded[: x.numel()] = x
    return padded.view(rows, bucket)


def pairwise_sum(x: Tensor) -> Tensor:
    """Sum each row (of a power of two, at least 16, values) in the order that every backend keeps.

    A row is cut into vectors of 16. Neighbours are added until one vector is left, which is folded in half four times.
    """
    t = x.view(x.shape[0], -1, 16)
    while t.shape[1] > 1:
        t = t[:, 0::2] + t[:, 1::2]
    t = t[:, 0]
    for half in (8, 4, 2, 1):
        t = t[:, :half] + t[:, half:]
    return t[:, 0]


def sum_of_squares(x: Tensor) -> Tensor:
    """Sum the squares of all values in float64: those of each ``PIECE``, then the sums, both pairwise."""
    pieces = torch.split(in_buckets(x, PIECE), PIECES)
    sums = torch.cat([pairwise_sum(piece.to(torch.float64).square()) for piece in pieces])
    padded = sums.new_zeros(max(16, 1 << (sums.numel() - 1).bit_length()))
    padded[: sums.numel()] = sums
    return pairwise_sum(padded.unsqueeze(0))[0]


def put(out: Tensor, values: Tensor, weight: float | None) -> None:
    """Store decoded values, or accumulate them."""
    if weight is None:
        out.copy_(values)
    else:
        out.add_(values * torch.tensor(weight, dtype=torch.float32, device=out.device))


def read_floats(section: Tensor, name: str, *, signed: bool = False) -> Tensor:
    """Return a section's float32 values; raise ``FrameError`` if one is not finite or has the wrong sign."""
    values = section.clone().view(torch.float32)
    if not bool(torch.isfinite(values).all()) or (not signed and bool((values < 0).any())):
        raise FrameError(f"the frame holds a {name} that is not a finite{'' if signed else ', non-negative'} number")
    return values


def write_floats(values: Tensor, section: Tensor) -> None:
    section.copy_(values.to(torch.float32).contiguous().view(torch.uint8))
