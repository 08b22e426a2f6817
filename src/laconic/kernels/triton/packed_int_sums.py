"""Sums of packed integers: adding, accumulating into wider integers, packing again, and the largest one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import CLIP_LIMIT, FLOAT32_MAX, NONFINITE
from laconic.kernels.sections import GROUP, PackedIntCoding, num_buckets, packed_ints_nbytes, packed_nbytes
from laconic.kernels.triton.launch_args import exact_options, packing_period, word_aligned
from laconic.kernels.triton.packed_ints import load_words
from laconic.kernels.triton.packing import PackedSection
from laconic.kernels.triton.tile import load_symbols, store_groups, store_symbols

__all__ = ["agreed_clips", "packed_int_accumulate", "packed_int_add", "packed_int_max", "packed_int_repack"]

_NONFINITE = tl.constexpr(NONFINITE)
_CLIP_LIMIT = tl.constexpr(CLIP_LIMIT)
_FLOAT32_MAX = tl.constexpr(FLOAT32_MAX)


@triton.jit
def _agreed_clips(
    agreed, own, heads, clips, flags, own_flags, nonfinite, mismatch, blocks, factor, digest, SPAN: tl.constexpr
):
    """One program per tensor: its flags, and the clips of its blocks, which are 0 if it is not usable."""
    tensor = tl.program_id(0)
    if tensor == 0:
        differ = tl.load(agreed + blocks) + tl.load(agreed + blocks + 1) != digest
        tl.atomic_add(mismatch, 1, mask=differ, sem="relaxed")
    begin, end = tl.load(heads + tensor), tl.load(heads + tensor + 1)
    largest, own_largest = tl.zeros((SPAN,), tl.float32), tl.zeros((SPAN,), tl.float32)
    first = begin
    while first < end:
        block = first + tl.arange(0, SPAN)
        largest = tl.maximum(largest, tl.load(agreed + block, mask=block < end, other=0.0))
        own_largest = tl.maximum(own_largest, tl.load(own + block, mask=block < end, other=0.0))  # infinite, not NaN
        first += SPAN
    usable = tl.max(largest, 0) < _FLOAT32_MAX
    tl.store(flags + tensor, tl.where(usable, 0, _NONFINITE))
    tl.store(own_flags + tensor, tl.where(tl.max(own_largest, 0) < _FLOAT32_MAX, 0, _NONFINITE))
    tl.atomic_add(nonfinite, 1, mask=usable == 0, sem="relaxed")
    first = begin
    while first < end:
        block = first + tl.arange(0, SPAN)
        clip = tl.load(agreed + block, mask=block < end, other=0.0) * factor
        clip = tl.where(clip < _CLIP_LIMIT, clip, _CLIP_LIMIT)
        tl.store(clips + block, tl.where(usable, clip, 0.0), mask=block < end)
        first += SPAN


def agreed_clips(
    agreed: Tensor, own: Tensor, heads: Tensor, factor: float, digest: int, nonfinite: Tensor, mismatch: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the clips of all blocks, and the flags of each tensor by the agreed and by the own scales."""
    flags, own_flags = torch.empty(2, heads.numel() - 1, dtype=torch.int32, device=agreed.device).unbind()
    clips = torch.empty_like(own)
    _agreed_clips[(flags.numel(),)](
        agreed, own, heads, clips, flags, own_flags, nonfinite, mismatch, own.numel(), factor, float(digest), SPAN=1024,
        **exact_options(num_warps=4),
    )  # fmt: skip
    return clips, flags, own_flags


def packed_int_add(other: Tensor, total: Tensor) -> None:
    """Add packed words as 32-bit integers: torch adds them at the speed of memory."""
    assert other.numel() == total.numel() and total.numel() % 4 == 0
    total.view(torch.int32).add_(word_aligned(other).view(torch.int32))


@triton.jit
def _load_sums(total, offsets, begin, SUM_WIDTH: tl.constexpr):
    """Load sums of 8, 16 or 32 bits, packed vertically except for 32 bits; all groups are full."""
    words = total.to(tl.pointer_type(tl.int32)) + begin // 32 * SUM_WIDTH
    if SUM_WIDTH == 32:
        value = tl.load(words + offsets).to(tl.uint32, bitcast=True)
    else:
        bit = offsets // 8 % 32 * SUM_WIDTH
        value = tl.load(words + offsets // 256 * (8 * SUM_WIDTH) + bit // 32 * 8 + offsets % 8).to(
            tl.uint32, bitcast=True
        )
        value = (value >> (bit % 32).to(tl.uint32)) & ((1 << SUM_WIDTH) - 1)
    return value.to(tl.int32, bitcast=True)


@triton.jit
def _add_group(
    packed, total, offsets, begin, n, full,
    WIDTH: tl.constexpr, SUM_WIDTH: tl.constexpr, PERIOD: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    added = _load_sums(total, offsets, begin, SUM_WIDTH) + load_symbols(packed, offsets, begin, n, full, WIDTH, EDGE)
    if SUM_WIDTH == 32:
        tl.store(total.to(tl.pointer_type(tl.int32)) + begin + offsets, added)
    else:
        store_groups(added, total, begin, begin + 256, SUM_WIDTH, PERIOD, 256)


@triton.jit
def _accumulate(packed, total, n, full, WIDTH: tl.constexpr, SUM_WIDTH: tl.constexpr, PERIOD: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * 256
    offsets = tl.arange(0, 256)
    if begin + 256 <= full:
        _add_group(packed, total, offsets, begin, n, full, WIDTH, SUM_WIDTH, PERIOD, False)
    else:
        _add_group(packed, total, offsets, begin, n, full, WIDTH, SUM_WIDTH, PERIOD, True)


def packed_int_accumulate(packed: Tensor, n: int, width: int, sum_width: int, total: Tensor) -> None:
    groups = num_buckets(n, GROUP)
    assert packed.numel() == packed_nbytes(n, width) and total.numel() == groups * 32 * sum_width
    assert total.data_ptr() % 4 == 0
    if n:
        _accumulate[(groups,)](
            word_aligned(packed), total, n, n // GROUP * GROUP, WIDTH=width, SUM_WIDTH=sum_width,
            PERIOD=32 // sum_width, **exact_options(num_warps=1),
        )  # fmt: skip


@triton.jit
def _pack_sum(total, out, tail, n, full, WIDTH: tl.constexpr, SUM_WIDTH: tl.constexpr, PERIOD: tl.constexpr):
    begin = tl.program_id(0).to(tl.int64) * 256
    offsets = tl.arange(0, 256)
    symbols = _load_sums(total, offsets, begin, SUM_WIDTH)
    store_symbols(symbols, out, tail, begin, n, full, WIDTH, PERIOD, 256)


def packed_int_repack(total: Tensor, n: int, sum_width: int, width: int, out: Tensor) -> None:
    groups = num_buckets(n, GROUP)
    assert total.numel() == groups * 32 * sum_width and total.data_ptr() % 4 == 0
    if n:
        section = PackedSection(out, n, width)
        _pack_sum[(groups,)](
            total, section.target, section.tail, n, section.full, WIDTH=width, SUM_WIDTH=sum_width,
            PERIOD=packing_period(width), **exact_options(num_warps=1),
        )  # fmt: skip
        section.finish()


@triton.jit
def _packed_int_max(integers, largest, n, full, WIDTH: tl.constexpr, PACKED: tl.constexpr, SPAN: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    begin = program * SPAN
    offsets = tl.arange(0, SPAN)
    if PACKED:
        symbols = load_symbols(integers, offsets, begin, n, full, WIDTH, True)
    else:
        symbols = load_words(integers, offsets, begin, n, WIDTH)
    tl.store(largest + program, tl.max(symbols, 0))


def packed_int_max(integers: Tensor, n: int, coding: PackedIntCoding) -> Tensor:
    """Return the largest integer of each program."""
    assert integers.numel() == packed_ints_nbytes(n, coding)
    programs = num_buckets(n, 2048)
    largest = torch.empty(programs, dtype=torch.int32, device=integers.device)
    _packed_int_max[(programs,)](
        word_aligned(integers), largest, n, n // GROUP * GROUP, WIDTH=coding.width, PACKED=coding.packed, SPAN=2048,
        **exact_options(num_warps=4),
    )  # fmt: skip
    return largest
