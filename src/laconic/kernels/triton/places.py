"""Where selected values stand: gaps coded and read, values put back; a plan waits once, and so does a reader.

Sums of gaps have a closed form (a position tells how many entries lie before it), so of the two parts that a gap is
cut into only the low ones are summed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import (
    POSITIONS_HEADER,
    RICE,
    PositionHeader,
    PositionPlan,
    low_bits_candidates,
    num_buckets,
    packed_nbytes,
)
from laconic.kernels.interface import write_bytes as write_header
from laconic.kernels.reference import positions as plain
from laconic.kernels.triton import placing
from laconic.kernels.triton.packing import pack
from laconic.kernels.triton.parts import TILE, exact

__all__ = ["place", "positions_plan", "positions_read", "positions_write", "scatter"]


@triton.jit
def _gaps(positions, at, k):
    """How many positions are left out before each, as int64; 0 past the end."""
    here = tl.load(positions + at, mask=at < k, other=0).to(tl.int64)
    before = tl.load(positions + at - 1, mask=(at < k) & (at > 0), other=-1).to(tl.int64)
    return tl.where(at < k, here - before - 1, 0)


@triton.jit(do_not_specialize=["low"])
def _high_sums(positions, sums, k, low, TRIED: tl.constexpr, SPAN: tl.constexpr):
    gap = _gaps(positions, tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN), k)
    for i in tl.static_range(TRIED):
        tl.atomic_add(sums + i, tl.sum(gap >> (low + i).to(tl.int64), 0))


def positions_plan(positions: Tensor, n: int) -> PositionPlan:
    """One wait for all that is to be known of the gaps."""
    k = positions.numel()
    if k == n or not k:
        return plain.positions_plan(positions, n)
    tried = low_bits_candidates(n, k)
    sums = torch.zeros(len(tried), dtype=torch.int64, device=positions.device)
    _high_sums[(num_buckets(k, TILE),)](positions, sums, k, tried[0], TRIED=len(tried), SPAN=TILE, **exact(num_warps=4))
    return plain.plan_of(n, k, list(zip(tried, sums.tolist(), strict=True)))


@triton.jit(do_not_specialize=["low"])
def _low_parts(positions, parts, k, low, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    mask = (tl.full((SPAN,), 1, tl.int64) << low.to(tl.int64)) - 1
    tl.store(parts + at, (_gaps(positions, at, k) & mask).to(tl.int32), mask=at < k)


@triton.jit(do_not_specialize=["low"])
def _write_high(positions, low_sums, words, k, low, SPAN: tl.constexpr):
    """A one behind each gap's high part in unary: a bit each, set where the ones and zeros before it end."""
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    there = at < k
    left_out = tl.load(positions + at, mask=there, other=0).to(tl.int64) - at
    end = at + ((left_out - tl.load(low_sums + at, mask=there, other=0)) >> low.to(tl.int64))
    bit = tl.full((SPAN,), 1, tl.uint32) << (end & 31).to(tl.uint32)
    tl.atomic_or(words + (end >> 5), bit.to(tl.int32, bitcast=True), mask=there)


def positions_write(positions: Tensor, n: int, plan: PositionPlan, out: Tensor) -> None:
    if plan.mode != RICE:
        plain.positions_write(positions, n, plan, out)
        return
    k, low_bits = positions.numel(), plan.low_bits
    grid, options = (num_buckets(k, TILE),), exact(SPAN=TILE, num_warps=4)
    parts = torch.empty(k, dtype=torch.int32, device=out.device)
    _low_parts[grid](positions, parts, k, low_bits, **options)
    low_end = POSITIONS_HEADER + packed_nbytes(k, low_bits)
    pack(parts, low_bits, out[POSITIONS_HEADER:low_end])
    words = torch.zeros(num_buckets(plan.nbytes - low_end, 4), dtype=torch.int32, device=out.device)
    _write_high[grid](positions, parts.cumsum(0, dtype=torch.int64), words, k, low_bits, **options)
    out[low_end:] = words.view(torch.uint8)[: plan.nbytes - low_end]
    write_header(out[:POSITIONS_HEADER], (plan.mode | low_bits << 8 | k << 16).to_bytes(POSITIONS_HEADER, "little"))


def positions_read(section: Tensor, n: int, header: PositionHeader) -> Tensor:
    found = placing.read(section, n, header.kept) if header.mode == RICE and placing.reads(section, n) else None
    return plain.positions_read(section, n, header) if found is None else found


def place(section: Tensor, values: Tensor, out: Tensor, weight: float | None) -> bool:
    if values.numel() and placing.reads(section, out.numel()) and placing.place(section, values, out, weight):
        return True
    return plain.place(section, values, out, weight)


@triton.jit
def _scatter(positions, values, out, k, weight, ADD: tl.constexpr, SPAN: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SPAN + tl.arange(0, SPAN)
    there = at < k
    to = out + tl.load(positions + at, mask=there, other=0)
    value = tl.load(values + at, mask=there, other=0.0)
    if ADD:
        value = tl.load(to, mask=there, other=0.0) + value * weight
    tl.store(to, value, mask=there)


def scatter(positions: Tensor, values: Tensor, out: Tensor, weight: float | None) -> None:
    """Values at their positions and zeros elsewhere; with a weight, added to what is there. No position is twice."""
    if weight is None:
        out.zero_()
    k = positions.numel()
    if k:
        _scatter[(num_buckets(k, 1024),)](
            positions, values, out, k, weight or 0.0, ADD=weight is not None, SPAN=1024, **exact(num_warps=4)
        )
