"""Exact top-k of each chunk of consecutive values: a program loads whole chunks once and keeps their order.

Magnitudes of float32 are ordered like their bits: the k-th of a chunk is found by bisection, two bits at a time. How
many entries each chunk keeps is known, and so is where they go.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import ChunkCounts
from laconic.kernels.reference.selection import index_dtype
from laconic.kernels.sections import num_buckets
from laconic.kernels.triton.grid_sync import STATE_WORDS
from laconic.kernels.triton.launch_args import exact_options

__all__ = ["AMAX_WORD", "topk_chunks"]

SPAN = 2048
"""Values of a program, unless a chunk has more."""

AMAX_WORD = 2
"""Word of the state that receives the amax bits of the kept values."""


@triton.jit
def _kth_magnitude(magnitude, k):
    """Return the largest magnitude, per row, that k of its values reach."""
    limit = k * 0
    for i in range(16):  # two bits at a time; three counts share a sum
        unit = 1 << (30 - 2 * i)
        first = (magnitude >= limit + unit).to(tl.int64)
        second = (magnitude - unit >= limit + unit).to(tl.int64)
        third = (magnitude - unit - unit >= limit + unit).to(tl.int64)
        reached = tl.sum(first + (second << 20) + (third << 40), 1)[:, None]
        digit = ((reached & 0xFFFFF) >= k).to(tl.int32) + (((reached >> 20) & 0xFFFFF) >= k).to(tl.int32)
        limit += (digit + ((reached >> 40) >= k).to(tl.int32)) * unit
    return limit


@triton.jit(do_not_specialize=["each", "last"])
def _topk_chunks(
    x, state, positions, values, n, each, last, CHUNK: tl.constexpr, ROWS: tl.constexpr, AMAX_WORD: tl.constexpr
):
    """Keep ``each`` values of every chunk and ``last`` of the final one; ROWS chunks per program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    offsets = row * CHUNK + tl.arange(0, CHUNK)[None, :]
    valid = offsets < n
    bits = tl.load(x + offsets, mask=valid, other=0)
    magnitude = bits & 0x7FFFFFFF
    k = tl.where((row + 1) * CHUNK < n, each, last)
    kth = _kth_magnitude(magnitude, k)
    above = valid & (magnitude > kth)
    equal = (valid & (magnitude == kth)).to(tl.int32)
    ties = k - tl.sum(above.to(tl.int32), 1)[:, None]
    rank = tl.cumsum(equal, 1) - equal
    chosen = (above | ((equal > 0) & (rank < ties))).to(tl.int32)
    target = row * each + tl.cumsum(chosen, 1) - chosen
    tl.store(positions + target, offsets.to(positions.dtype.element_ty), mask=chosen > 0)
    tl.store(values + target, bits, mask=chosen > 0)
    largest = tl.max(tl.max(tl.where(chosen > 0, magnitude, 0), 1), 0)
    tl.atomic_max(state + AMAX_WORD, largest, sem="relaxed")


def topk_chunks(x: Tensor, counts: ChunkCounts) -> tuple[Tensor, Tensor, Tensor]:
    """Return positions and values of a float32 tensor that is not empty, and a state with their amax bits; no wait."""
    n, (chunk, each, last) = x.numel(), counts
    rows = max(1, SPAN // chunk)
    state = torch.zeros(STATE_WORDS, dtype=torch.int32, device=x.device)
    positions = torch.empty(counts.total(n), dtype=index_dtype(n), device=x.device)
    values = torch.empty(counts.total(n), device=x.device)
    _topk_chunks[(num_buckets(n, rows * chunk),)](
        x.view(torch.int32), state, positions, values.view(torch.int32), n, each, last, CHUNK=chunk, ROWS=rows,
        AMAX_WORD=AMAX_WORD, **exact_options(num_warps=min(32, max(4, rows * chunk // 512))),
    )  # fmt: skip
    return positions, values, state
