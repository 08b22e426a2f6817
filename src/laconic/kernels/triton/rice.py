"""Positions coded as gaps: sums of their high parts, which say how, then the section, word by word.

Low parts are packed and high parts set in unary by atomic ORs into words that are zero at first: a gap's bits may share
a word with those of gaps that other programs have.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.reference.positions import plan_of
from laconic.kernels.sections import RICE, PositionPlan, low_bits_candidates, num_buckets
from laconic.kernels.triton.grid_sync import BARRIER, MOST, PARTS, SMALL, STATE, cut, launch, wait_for_all
from laconic.kernels.triton.launch_cache import remembered
from laconic.kernels.triton.tile import low_part_place

__all__ = ["GAPS", "clear_words", "code", "code_gaps", "sum_gaps"]

GAPS = 2048
LOW, SUMS = 7, 8


@triton.jit
def clear_words(section, nwords, program, programs, SPAN: tl.constexpr):
    begin = program * SPAN
    while begin < nwords:
        at = begin + tl.arange(0, SPAN)
        tl.store(section.to(tl.pointer_type(tl.int32)) + at, tl.zeros((SPAN,), tl.int32), mask=at < nwords)
        begin += programs * SPAN


@triton.jit
def _gaps(positions, at, k):
    """How many positions are left out before each; 0 past the end."""
    here = tl.load(positions + at, mask=at < k, other=0)
    before = tl.load(positions + at - 1, mask=(at < k) & (at > 0), other=-1)
    return tl.where(at < k, here - before - 1, 0)


@triton.jit
def sum_gaps(positions, sums, k, first_low, span, part, GAPS: tl.constexpr, PARTS: tl.constexpr):
    """The high parts of a part's gaps, added up, for each of three Rice parameters."""
    first, second, third = k * 0, k * 0, k * 0
    begin = part * span
    end = tl.minimum(begin + span, k)
    while begin < end:
        high = _gaps(positions, begin + tl.arange(0, GAPS), k) >> first_low
        first += tl.sum(high, 0)
        second += tl.sum(high >> 1, 0)
        third += tl.sum(high >> 2, 0)
        begin += GAPS
    tl.store(sums + part, first)
    tl.store(sums + PARTS + part, second)
    tl.store(sums + 2 * PARTS + part, third)


@triton.jit
def _packed_nbytes(k, bits):
    return k // 256 * 32 * bits + (k % 256 * bits + 7) // 8


@triton.jit
def _signed(w):
    return w.to(tl.int32, bitcast=True)


@triton.jit
def code_gaps(
    state, positions, sums, section, k, first_low, tried, nwords, span, parts, part,
    GAPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    shortest = k * 0 + 0x7FFFFFFF
    low, behind = k * 0, k * 0
    others = tl.arange(0, PARTS)
    for i in tl.static_range(3):
        highs = tl.load(sums + i * PARTS + others, mask=others < parts, other=0)
        high = tl.sum(highs, 0)
        if part == 0:
            tl.store(state + 8 + i, high)
        nbytes = 8 + _packed_nbytes(k, first_low + i) + (k + high + 7) // 8
        better = (nbytes < shortest) & (i < tried)
        low = tl.where(better, first_low + i, low)
        behind = tl.where(better, tl.sum(tl.where(others < part, highs, 0), 0), behind)
        shortest = tl.where(better, nbytes, shortest)
    if part == 0:
        tl.store(state + 7, low)
    if shortest <= 4 * nwords:
        into = section.to(tl.pointer_type(tl.int32))
        if part == 0:
            word = tl.arange(0, 2)
            tl.store(into + word, tl.where(word == 0, 1 | low << 8 | k << 16, k >> 16))
        first_bit = 8 * (8 + _packed_nbytes(k, low))
        begin = part * span
        stop = tl.minimum(begin + span, k)
        while begin < stop:
            at = begin + tl.arange(0, GAPS)
            gap = _gaps(positions, at, k)
            quotient = gap >> low
            end = first_bit + at + behind + tl.cumsum(quotient, 0)
            behind += tl.sum(quotient, 0)
            one = tl.full((GAPS,), 1, tl.uint32)
            tl.atomic_or(into + (end >> 5), _signed(one << (end & 31).to(tl.uint32)), mask=at < k, sem="relaxed")
            rest = (gap - (quotient << low)).to(tl.uint32, bitcast=True)
            word, shift, step = low_part_place(at, k, low)
            tl.atomic_or(into + word, _signed(rest << shift), mask=rest > 0, sem="relaxed")
            over = tl.where(shift > 0, rest >> ((32 - shift) & 31), 0)
            tl.atomic_or(into + word + step, _signed(over), mask=over > 0, sem="relaxed")
            begin += GAPS


@triton.jit(do_not_specialize=["k", "first_low", "tried", "span", "parts", "nwords"])
def _phases(
    positions, state, sums, section, k, first_low, tried, span, parts, nwords,
    FIRST: tl.constexpr, LAST: tl.constexpr, GAPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            clear_words(section, nwords, program, programs, GAPS)
            while part < parts:
                sum_gaps(positions, sums, k, first_low, span, part, GAPS, PARTS)
                part += programs
        if phase == 1:
            while part < parts:
                code_gaps(state, positions, sums, section, k, first_low, tried, nwords, span, parts, part, GAPS, PARTS)
                part += programs
        if phase < LAST:
            wait_for_all(state + BARRIER, programs * (phase - FIRST + 1))


def code(positions: Tensor, n: int, out: Tensor) -> tuple[PositionPlan, bool] | None:
    """How ascending positions (int32) are coded best, and whether ``out`` has them so; None for all or none of n."""
    k = positions.numel()
    if not 0 < k < n <= MOST:
        return None
    nwords = 0 if out.data_ptr() % 4 else out.numel() // 4
    tried = low_bits_candidates(n, k)
    span, parts = cut(k, GAPS)
    state = torch.zeros(STATE, dtype=torch.int32, device=out.device)
    sums = torch.empty(3 * PARTS, dtype=torch.int32, device=out.device)
    launch(
        _phases, out.device, (positions, state, sums, out), (k, tried[0], len(tried), span, parts, nwords),
        {"GAPS": GAPS, "PARTS": PARTS, "enable_fp_fusion": False},
        (max(parts, min(64, num_buckets(nwords, GAPS))), parts), (4, 8), together=k <= SMALL,
        known=remembered("gaps", n, k, nwords),
    )  # fmt: skip
    found = state.tolist()
    plan = plan_of(n, k, list(zip(tried, found[SUMS:], strict=False)))
    written = plan.mode == RICE and plan.nbytes <= 4 * nwords and plan.low_bits == found[LOW]
    return plan, written
