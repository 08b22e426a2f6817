"""Positions of chunks that keep equally many entries: for each chunk the rank of its set of offsets, in equal bits.

Enumerative coding (Cover 1973): the sets of m offsets p1 < p2 < … < pm are numbered by C(p1, 1) + C(p2, 2) + … +
C(pm, m). The functions take the bit packing of a backend.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import ChunkCounts
from laconic.kernels.reference.packing import pack, unpack
from laconic.kernels.reference.selection import index_dtype
from laconic.kernels.sections import (
    RANKS,
    RANKS_HEADER,
    num_buckets,
    num_ranks,
    ranks_nbytes,
    read_ranks_header,
    symbol_bits,
    write_bytes,
)

__all__ = ["ranks_decode", "ranks_encode", "read_ranks", "write_ranks"]


def _binomials(chunk: int, each: int, device: torch.device) -> list[Tensor]:
    """Return C(p, j) for every offset p, for j = 0 to ``each``."""
    rows = [torch.ones(chunk, dtype=torch.int64, device=device)]
    for _ in range(each):  # C(p, j) is the sum of C(q, j - 1) over q < p
        rows.append(torch.cat([rows[-1].new_zeros(1), rows[-1].cumsum(0)[:-1]]))
    return rows


def write_ranks(
    positions: Tensor, n: int, counts: ChunkCounts, out: Tensor, pack: Callable[[Tensor, int, Tensor], None]
) -> int:
    """Write the header (mode, count, chunk, entries of each chunk and of the last) and the packed ranks."""
    chunk, each, last = counts
    chunks, binomials = num_buckets(n, chunk), _binomials(chunk, each, out.device)
    offsets = positions.to(torch.int64) % chunk
    split = (chunks - 1) * each
    ranks = torch.zeros(chunks, dtype=torch.int64, device=out.device)
    for j in range(each):
        ranks[:-1] += binomials[j + 1][offsets[:split].view(-1, each)[:, j]]
        if j < last:
            ranks[-1] += binomials[j + 1][offsets[split + j]]
    nbytes = ranks_nbytes(n, chunk, each)
    header = RANKS | positions.numel() << 16 | chunk << 64 | each << 96 | last << 112
    write_bytes(out[:RANKS_HEADER], header.to_bytes(RANKS_HEADER, "little"))
    pack(ranks.to(torch.int32), symbol_bits(num_ranks(chunk, each)), out[RANKS_HEADER:nbytes])
    return nbytes


def read_ranks(section: Tensor, n: int, k: int, unpack: Callable[[Tensor, int, int], Tensor]) -> Tensor:
    """Return k ascending positions below n; ``FrameError`` if the section does not hold them."""
    chunk, each, last = read_ranks_header(section, n, k)
    chunks, binomials = num_buckets(n, chunk), _binomials(chunk, each, section.device)
    ranks = unpack(section[RANKS_HEADER:], chunks, symbol_bits(num_ranks(chunk, each))).to(torch.int64)
    limits = torch.full_like(ranks, num_ranks(chunk, each))
    limits[-1] = math.comb((n - 1) % chunk + 1, last)
    if bool((ranks >= limits).any()):
        raise FrameError(f"the frame holds a rank beyond the ways to keep {each} of {chunk} entries")
    final = ranks[-1:].clone()
    offsets = torch.empty((chunks, each), dtype=torch.int64, device=section.device)
    for j in reversed(range(each)):
        offsets[:, j] = torch.searchsorted(binomials[j + 1], ranks, right=True) - 1
        ranks -= binomials[j + 1][offsets[:, j]]
        if j < last:  # the last chunk keeps fewer entries
            offsets[-1:, j] = torch.searchsorted(binomials[j + 1], final, right=True) - 1
            final -= binomials[j + 1][offsets[-1:, j]]
    first = torch.arange(chunks, device=section.device) * chunk
    return (offsets + first[:, None]).view(-1)[:k].to(index_dtype(n))


def ranks_encode(positions: Tensor, n: int, counts: ChunkCounts, out: Tensor) -> int:
    return write_ranks(positions, n, counts, out, pack)


def ranks_decode(section: Tensor, n: int, k: int) -> Tensor:
    return read_ranks(section, n, k, unpack)
