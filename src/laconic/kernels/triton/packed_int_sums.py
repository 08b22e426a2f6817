"""Sums of packed integers: adding, accumulating into wider integers, packing again, and the largest one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import GROUP, PackedIntCoding, num_buckets, packed_ints_nbytes, packed_nbytes
from laconic.kernels.triton.packed_ints import load_words
from laconic.kernels.triton.packing import PackedSection
from laconic.kernels.triton.tile import (
    exact_options,
    load_symbols,
    packing_period,
    store_groups,
    store_symbols,
    word_aligned,
)

__all__ = ["packed_int_accumulate", "packed_int_add", "packed_int_max", "packed_int_repack"]


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
