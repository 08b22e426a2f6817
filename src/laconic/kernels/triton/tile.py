"""Building blocks of kernels: loads and stores of a tile, sums in the reference's order, vertical packing.

Tiles are two-dimensional: rows of neighbouring values. A packing group has 32 rows of 8 columns. Symbols meet a word
boundary again after ``packing_period(bits)`` rows, so a tile is cut into such parts, and each part's rows are shifted
and summed to words.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "load_symbols", "load_tile", "low_bits_location", "pairwise_sum", "store_groups", "store_or_add", "store_symbols",
]  # fmt: skip


@triton.jit
def load_tile(x, offsets, begin, n, SPAN: tl.constexpr):
    """Load values from ``begin`` on, zeros past the end. All tiles but the last load full vectors without a mask."""
    if begin + SPAN <= n:
        v = tl.load(x + begin + offsets)
    else:
        v = tl.load(x + begin + offsets, mask=begin + offsets < n, other=0.0)
    return v


@triton.jit
def store_or_add(out, offsets, begin, n, values, weight, ADD: tl.constexpr, EDGE: tl.constexpr):
    """Store decoded values, or add ``weight`` times them. Only a tile at the EDGE needs a mask."""
    if EDGE:
        valid = begin + offsets < n
        if ADD:
            values = tl.load(out + begin + offsets, mask=valid, other=0.0) + values * weight
        tl.store(out + begin + offsets, values, mask=valid)
    else:
        if ADD:
            values = tl.load(out + begin + offsets) + values * weight
        tl.store(out + begin + offsets, values)


@triton.jit
def pairwise_sum(v, ROWS: tl.constexpr, LENGTH: tl.constexpr, STAGES: tl.constexpr):
    """Compute ``reference.pairwise_sum`` of each row; LENGTH = 16 << STAGES. ``tl.sum`` of two has only one order."""
    for stage in tl.static_range(STAGES):
        v = tl.sum(tl.reshape(v, (ROWS, LENGTH // (32 << stage), 2, 16)), 2)
    for fold in tl.static_range(4):
        v = tl.sum(tl.reshape(v, (ROWS, 2, 8 >> fold)), 1)
    return tl.reshape(v, (ROWS,))


@triton.jit
def store_groups(symbols, packed, begin, full, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr):
    """Pack those symbols of a tile that lie in full groups."""
    parts: tl.constexpr = SPAN // (8 * PERIOD)
    words: tl.constexpr = PERIOD * BITS // 32
    t = tl.reshape(symbols.to(tl.uint32), (parts, PERIOD, 8))
    row = tl.arange(0, PERIOD)[None, :, None]
    part = tl.arange(0, parts)[:, None]
    column = tl.arange(0, 8)[None, :]
    base = packed.to(tl.pointer_type(tl.int32)) + begin // 32 * BITS
    valid = (begin + part * (8 * PERIOD) < full) & (column < 8)
    for m in tl.static_range(words):
        bit = row * BITS - 32 * m
        left, right = tl.minimum(tl.maximum(bit, 0), 31), tl.maximum(-bit, 0)
        moved = tl.where(bit >= 0, t << left.to(tl.uint32), t >> right.to(tl.uint32))
        word = tl.sum(tl.where((bit > -BITS) & (bit < 32), moved, 0), 1)
        tl.store(base + (part * words + m) * 8 + column, word.to(tl.int32, bitcast=True), mask=valid)


@triton.jit
def store_symbols(
    symbols, packed, tail, begin, n, full,
    BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Pack a tile's symbols; those after the last full group go to ``tail``, one int32 each."""
    store_groups(symbols, packed, begin, full, BITS, PERIOD, SPAN)
    if begin + SPAN > full:
        if full < n:
            positions = begin + tl.arange(0, SPAN)
            tl.store(
                tail + (positions - full), tl.reshape(symbols, (SPAN,)), mask=(positions >= full) & (positions < n)
            )


@triton.jit
def load_symbols(packed, offsets, begin, n, full, BITS: tl.constexpr, EDGE: tl.constexpr):
    """Load the symbols (int32) of values from ``begin`` on, a multiple of 256; 0 past the end.

    A tile at the EDGE has symbols in the tail. Kernels decide once per tile whether it is at the edge: layouts that
    suit single bytes must not reach the other tiles.
    """
    bit = offsets // 8 % 32 * BITS
    words = packed.to(tl.pointer_type(tl.int32)) + begin // 32 * BITS
    word = offsets // 256 * (8 * BITS) + bit // 32 * 8 + offsets % 8
    shift = (bit % 32).to(tl.uint32)
    mask: tl.constexpr = (1 << BITS) - 1
    if EDGE:
        grouped = begin + offsets < full
        value = tl.load(words + word, mask=grouped, other=0).to(tl.uint32, bitcast=True) >> shift
        if 32 % BITS != 0:
            crosses = grouped & (bit % 32 + BITS > 32)
            more = tl.load(words + word + 8, mask=crosses, other=0).to(tl.uint32, bitcast=True)
            value = value | tl.where(shift > 0, more << ((32 - shift) & 31), 0)
        # The symbols after the last full group are one plain bit stream.
        in_tail = (begin + offsets >= full) & (begin + offsets < n)
        stream = (begin + offsets - full).to(tl.int32) * BITS
        from_byte = packed + full // 8 * BITS + stream // 8
        shift_in_byte = stream % 8
        tail_bits = tl.zeros_like(value).to(tl.int64)
        for k in tl.static_range((BITS + 14) // 8):
            reaches = in_tail & (8 * k < shift_in_byte + BITS)
            tail_bits = tail_bits | (tl.load(from_byte + k, mask=reaches, other=0).to(tl.int64) << (8 * k))
        value = tl.where(in_tail, (tail_bits >> shift_in_byte.to(tl.int64)).to(tl.uint32), value)
    else:
        value = tl.load(words + word).to(tl.uint32, bitcast=True) >> shift
        if 32 % BITS != 0:
            more = tl.load(words + word + 8, mask=bit % 32 + BITS > 32, other=0).to(tl.uint32, bitcast=True)
            value = value | tl.where(shift > 0, more << ((32 - shift) & 31), 0)
    return (value & mask).to(tl.int32, bitcast=True)


@triton.jit
def low_bits_location(offsets, k, bits):
    """Return word, bit and word step of each of k symbols after the header: a symbol may continue a step further.

    ``bits`` is a run-time argument.
    """
    full = k // 256 * 256
    grouped = offsets < full
    column = offsets // 8 % 32 * bits
    stream = (offsets - full) * bits
    word = tl.where(
        grouped, offsets // 256 * (8 * bits) + column // 32 * 8 + offsets % 8, full // 32 * bits + stream // 32
    )
    shift = tl.where(grouped, column, stream) % 32
    return 2 + word, shift.to(tl.uint32), tl.where(grouped, 8, 1)
