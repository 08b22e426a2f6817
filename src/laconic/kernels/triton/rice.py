"""Rice coding of positions: sums of the gaps' high parts choose the parameter, then the section is written.

Low parts are packed and high parts are set in unary by atomic ORs into zeroed words: a gap may share a word with gaps
of other programs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.reference.positions import plan_of
from laconic.kernels.sections import RICE, PositionPlan, low_bits_candidates, num_buckets
from laconic.kernels.triton import grid_sync
from laconic.kernels.triton.grid_sync import PARTS, end_phase
from laconic.kernels.triton.launch_cache import launches_for
from laconic.kernels.triton.tile import low_bits_location

__all__ = ["GAPS", "RiceCoded", "rice_encode", "sum_gaps", "write_gaps", "zero_words"]

GAPS = 2048
LOW, SUMS = 7, 8


@triton.jit
def zero_words(section, nwords, program, programs, SPAN: tl.constexpr):
    begin = program * SPAN
    while begin < nwords:
        offsets = begin + tl.arange(0, SPAN)
        tl.store(section.to(tl.pointer_type(tl.int32)) + offsets, tl.zeros((SPAN,), tl.int32), mask=offsets < nwords)
        begin += programs * SPAN


@triton.jit
def _gaps(positions, offsets, k):
    """Return the number of positions skipped before each; 0 past the end."""
    position = tl.load(positions + offsets, mask=offsets < k, other=0)
    previous = tl.load(positions + offsets - 1, mask=(offsets < k) & (offsets > 0), other=-1)
    return tl.where(offsets < k, position - previous - 1, 0)


@triton.jit
def sum_gaps(positions, sums, k, first_low, span, part, GAPS: tl.constexpr, PARTS: tl.constexpr):
    """Sum the high parts of a part's gaps for each of three Rice parameters."""
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
def _as_int32(w):
    return w.to(tl.int32, bitcast=True)


@triton.jit
def write_gaps(
    state, positions, sums, section, k, first_low, tried, nwords, span, parts, part,
    GAPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    shortest = k * 0 + 0x7FFFFFFF
    low, high_sum = k * 0, k * 0
    part_index = tl.arange(0, PARTS)
    for i in tl.static_range(3):
        highs = tl.load(sums + i * PARTS + part_index, mask=part_index < parts, other=0)
        high = tl.sum(highs, 0)
        if part == 0:
            tl.store(state + 8 + i, high)
        nbytes = 8 + _packed_nbytes(k, first_low + i) + (k + high + 7) // 8
        better = (nbytes < shortest) & (i < tried)
        low = tl.where(better, first_low + i, low)
        high_sum = tl.where(better, tl.sum(tl.where(part_index < part, highs, 0), 0), high_sum)
        shortest = tl.where(better, nbytes, shortest)
    if part == 0:
        tl.store(state + 7, low)
    if shortest <= 4 * nwords:
        words = section.to(tl.pointer_type(tl.int32))
        if part == 0:
            word = tl.arange(0, 2)
            tl.store(words + word, tl.where(word == 0, 1 | low << 8 | k << 16, k >> 16))
        first_bit = 8 * (8 + _packed_nbytes(k, low))
        begin = part * span
        stop = tl.minimum(begin + span, k)
        while begin < stop:
            offsets = begin + tl.arange(0, GAPS)
            gap = _gaps(positions, offsets, k)
            quotient = gap >> low
            end = first_bit + offsets + high_sum + tl.cumsum(quotient, 0)
            high_sum += tl.sum(quotient, 0)
            one = tl.full((GAPS,), 1, tl.uint32)
            tl.atomic_or(
                words + (end >> 5), _as_int32(one << (end & 31).to(tl.uint32)), mask=offsets < k, sem="relaxed"
            )
            rest = (gap - (quotient << low)).to(tl.uint32, bitcast=True)
            word, shift, step = low_bits_location(offsets, k, low)
            tl.atomic_or(words + word, _as_int32(rest << shift), mask=rest > 0, sem="relaxed")
            over = tl.where(shift > 0, rest >> ((32 - shift) & 31), 0)
            tl.atomic_or(words + word + step, _as_int32(over), mask=over > 0, sem="relaxed")
            begin += GAPS


@triton.jit(do_not_specialize=["k", "first_low", "tried", "span", "parts", "nwords"])
def _encode_phases(
    positions, state, sums, section, k, first_low, tried, span, parts, nwords,
    FIRST: tl.constexpr, LAST: tl.constexpr, GAPS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    program, programs = tl.program_id(0), tl.num_programs(0)
    for phase in tl.static_range(FIRST, LAST + 1):
        part = program
        if phase == 0:
            zero_words(section, nwords, program, programs, GAPS)
            while part < parts:
                sum_gaps(positions, sums, k, first_low, span, part, GAPS, PARTS)
                part += programs
        if phase == 1:
            while part < parts:
                write_gaps(state, positions, sums, section, k, first_low, tried, nwords, span, parts, part, GAPS, PARTS)
                part += programs
        end_phase(state, programs, phase, FIRST, LAST)


class RiceCoded(NamedTuple):
    """The coding of positions, whether the section holds them, and the words of the state."""

    plan: PositionPlan
    written: bool
    state: list[int]


def rice_encode(positions: Tensor, n: int, out: Tensor, state: Tensor | None = None) -> RiceCoded | None:
    """Choose the coding of ascending int32 positions, and write them to ``out`` if it is a Rice code.

    None for none or all of n positions.

    Args:
        state: ``STATE_WORDS`` words on the device, zero from ``LOW`` on; the words before are returned unchanged.
    """
    k = positions.numel()
    if not 0 < k < n <= grid_sync.MAX_NUMEL:
        return None
    nwords = 0 if out.data_ptr() % 4 else out.numel() // 4
    candidates = low_bits_candidates(n, k)
    span, parts = grid_sync.split_into_parts(k, GAPS)
    if state is None:
        state = torch.zeros(grid_sync.STATE_WORDS, dtype=torch.int32, device=out.device)
    sums = torch.empty(3 * PARTS, dtype=torch.int32, device=out.device)
    grid_sync.launch(
        _encode_phases, out.device, (positions, state, sums, out),
        (k, candidates[0], len(candidates), span, parts, nwords),
        {"GAPS": GAPS, "PARTS": PARTS, "enable_fp_fusion": False},
        (max(parts, min(64, num_buckets(nwords, GAPS))), parts), (4, 8),
        single_launch=k <= grid_sync.SINGLE_LAUNCH_NUMEL, cache=launches_for("gaps", n, k, nwords),
    )  # fmt: skip
    result = state.tolist()
    plan = plan_of(n, k, list(zip(candidates, result[SUMS:], strict=False)))
    written = plan.mode == RICE and plan.nbytes <= 4 * nwords and plan.low_bits == result[LOW]
    return RiceCoded(plan, written, result)
