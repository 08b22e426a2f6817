"""What kernels are made of: the counter hash, sums in the reference's order, vertical packing of a tile.

Tiles are two-dimensional, rows of neighbouring values. A packing group is 32 rows of 8 lanes; after ``period(bits)``
rows a word boundary comes again, so a tile is cut into such parts and each part's rows are summed, shifted, to words.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.random import M32, row_factor

__all__ = [
    "TILE",
    "exact",
    "factors",
    "halves",
    "hash32",
    "keep",
    "load_tile",
    "low_part_place",
    "noise_of",
    "noise_tile",
    "pairwise",
    "period",
    "read_symbols",
    "signs_of",
    "store_groups",
    "store_symbols",
    "words_of",
]

TILE = 2048
"""Values of a program, where no bucket asks for more: two warps with 32 each."""


def exact(**options: Any) -> dict[str, Any]:
    """Launch options: a product and a sum round twice, as they do in the reference."""
    return {"enable_fp_fusion": False, **options}


def period(bits: int) -> int:
    """Rows until a symbol begins a word again."""
    return 32 // math.gcd(bits, 32)


def words_of(section: Tensor) -> Tensor:
    """The section itself where words can be read from it, else a copy that begins where a word may."""
    return section if section.data_ptr() % 4 == 0 else section.clone()


def halves(number: int) -> tuple[int, int]:
    """A 64-bit number as two int32 arguments, low one first: Python's floats and large ints would change their type."""
    low, high = number & M32, number >> 32 & M32
    return (low ^ 0x80000000) - 0x80000000, (high ^ 0x80000000) - 0x80000000


@lru_cache(maxsize=16)
def factors(device: torch.device) -> Tensor:
    """What a lane's hash is multiplied by in each row of its group."""
    return torch.tensor([halves(row_factor(row))[0] for row in range(32)], dtype=torch.int32, device=device)


@triton.jit
def hash32(counter, low_key, high_key):
    """``random.hash32`` of counters below 2^32; keys are int32 arguments."""
    h = counter.to(tl.uint32) ^ low_key.to(tl.uint32, bitcast=True)
    h = (h ^ (h >> 16)) * 0x7FEB352D
    h = (h ^ (h >> 15) ^ high_key.to(tl.uint32, bitcast=True)) * 0x846CA68B
    return h ^ (h >> 16)


@triton.jit
def lane_hash(at, first_group, low_key, high_key):
    """The hash that a lane's 32 values share, for values at ``at`` behind the first group."""
    return hash32((first_group + at // 256) * 8 + at % 8, low_key, high_key)


@triton.jit
def noise_of(at, first_group, factors, low_key, high_key, FRACTION_BITS: tl.constexpr):
    """``random.dither``, as int32."""
    factor = tl.load(factors + at // 8 % 32).to(tl.uint32, bitcast=True)
    return ((lane_hash(at, first_group, low_key, high_key) * factor) >> (32 - FRACTION_BITS)).to(tl.int32)


@triton.jit
def noise_tile(first_group, factors, low_key, high_key, FRACTION_BITS: tl.constexpr, SPAN: tl.constexpr):
    """The same for a tile of whole groups, as [groups, 32, 8]: a row's factor is loaded once, and stays."""
    group = first_group + tl.arange(0, SPAN // 256)[:, None, None]
    lane = tl.arange(0, 8)[None, None, :]
    factor = tl.load(factors + tl.arange(0, 32)).to(tl.uint32, bitcast=True)[None, :, None]
    return ((hash32(group * 8 + lane, low_key, high_key) * factor) >> (32 - FRACTION_BITS)).to(tl.int32)


@triton.jit
def signs_of(at, first_group, low_key, high_key):
    """±1 for each value, as the rotation has it."""
    turned = (lane_hash(at, first_group, low_key, high_key) >> (at // 8 % 32).to(tl.uint32)) & 1
    return tl.where(turned == 1, -1.0, 1.0)


@triton.jit
def load_tile(x, at, begin, n, SPAN: tl.constexpr):
    """Values behind ``begin``, zeros past the end. All but the last tile load without asking, in full vectors."""
    if begin + SPAN <= n:
        v = tl.load(x + begin + at)
    else:
        v = tl.load(x + begin + at, mask=begin + at < n, other=0.0)
    return v


@triton.jit
def keep(out, at, begin, n, values, weight, ADD: tl.constexpr, EDGE: tl.constexpr):
    """Store decoded values, or add them ``weight`` times. Only at the EDGE does a tile ask where the end is."""
    if EDGE:
        there = begin + at < n
        if ADD:
            values = tl.load(out + begin + at, mask=there, other=0.0) + values * weight
        tl.store(out + begin + at, values, mask=there)
    else:
        if ADD:
            values = tl.load(out + begin + at) + values * weight
        tl.store(out + begin + at, values)


@triton.jit
def pairwise(v, ROWS: tl.constexpr, LENGTH: tl.constexpr, STAGES: tl.constexpr):
    """``reference.pairwise_sum`` of each row; LENGTH = 16 << STAGES. A sum of two has but one order."""
    for stage in tl.static_range(STAGES):
        v = tl.sum(tl.reshape(v, (ROWS, LENGTH // (32 << stage), 2, 16)), 2)
    for fold in tl.static_range(4):
        v = tl.sum(tl.reshape(v, (ROWS, 2, 8 >> fold)), 1)
    return tl.reshape(v, (ROWS,))


@triton.jit
def store_groups(symbols, packed, begin, full, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr):
    """Pack those of a tile's symbols that lie in full groups."""
    parts: tl.constexpr = SPAN // (8 * PERIOD)
    words: tl.constexpr = PERIOD * BITS // 32
    t = tl.reshape(symbols.to(tl.uint32), (parts, PERIOD, 8))
    row = tl.arange(0, PERIOD)[None, :, None]
    part = tl.arange(0, parts)[:, None]
    lane = tl.arange(0, 8)[None, :]
    base = packed.to(tl.pointer_type(tl.int32)) + begin // 32 * BITS
    there = (begin + part * (8 * PERIOD) < full) & (lane < 8)
    for m in tl.static_range(words):
        place = row * BITS - 32 * m
        left, right = tl.minimum(tl.maximum(place, 0), 31), tl.maximum(-place, 0)
        moved = tl.where(place >= 0, t << left.to(tl.uint32), t >> right.to(tl.uint32))
        word = tl.sum(tl.where((place > -BITS) & (place < 32), moved, 0), 1)
        tl.store(base + (part * words + m) * 8 + lane, word.to(tl.int32, bitcast=True), mask=there)


@triton.jit
def store_symbols(
    symbols,
    packed,
    tail,
    begin,
    n,
    full,
    BITS: tl.constexpr,
    PERIOD: tl.constexpr,
    SPAN: tl.constexpr,
):
    """Pack a tile's symbols; those behind the last full group go to ``tail``, one int32 each."""
    store_groups(symbols, packed, begin, full, BITS, PERIOD, SPAN)
    if begin + SPAN > full:
        if full < n:
            here = begin + tl.arange(0, SPAN)
            tl.store(tail + (here - full), tl.reshape(symbols, (SPAN,)), mask=(here >= full) & (here < n))


@triton.jit
def read_symbols(packed, at, begin, n, full, BITS: tl.constexpr, EDGE: tl.constexpr):
    """The symbols (int32) of values behind ``begin``, a multiple of 256. At the EDGE some lie in the tail; 0 past it.

    Kernels decide once which of both a tile is: layouts that suit single bytes must not reach the tiles in between.
    """
    bit = at // 8 % 32 * BITS
    words = packed.to(tl.pointer_type(tl.int32)) + begin // 32 * BITS
    place = at // 256 * (8 * BITS) + bit // 32 * 8 + at % 8
    shift = (bit % 32).to(tl.uint32)
    mask: tl.constexpr = (1 << BITS) - 1
    if EDGE:
        grouped = begin + at < full
        value = tl.load(words + place, mask=grouped, other=0).to(tl.uint32, bitcast=True) >> shift
        if 32 % BITS != 0:
            crosses = grouped & (bit % 32 + BITS > 32)
            more = tl.load(words + place + 8, mask=crosses, other=0).to(tl.uint32, bitcast=True)
            value = value | tl.where(shift > 0, more << ((32 - shift) & 31), 0)
        # Behind the last full group lies one plain stream of bits.
        behind = (begin + at >= full) & (begin + at < n)
        stream = (begin + at - full).to(tl.int32) * BITS
        from_byte = packed + full // 8 * BITS + stream // 8
        off = stream % 8
        loose = tl.zeros_like(value).to(tl.int64)
        for k in tl.static_range((BITS + 14) // 8):
            inside = behind & (8 * k < off + BITS)
            loose = loose | (tl.load(from_byte + k, mask=inside, other=0).to(tl.int64) << (8 * k))
        value = tl.where(behind, (loose >> off.to(tl.int64)).to(tl.uint32), value)
    else:
        value = tl.load(words + place).to(tl.uint32, bitcast=True) >> shift
        if 32 % BITS != 0:
            more = tl.load(words + place + 8, mask=bit % 32 + BITS > 32, other=0).to(tl.uint32, bitcast=True)
            value = value | tl.where(shift > 0, more << ((32 - shift) & 31), 0)
    return (value & mask).to(tl.int32, bitcast=True)


@triton.jit
def low_part_place(at, k, bits):
    """Where k symbols lie in words, behind 8 bytes of header: word and bit, and how many words on a symbol continues.

    ``bits`` is not settled when the kernel is compiled.
    """
    full = k // 256 * 256
    grouped = at < full
    column = at // 8 % 32 * bits
    stream = (at - full) * bits
    word = tl.where(grouped, at // 256 * (8 * bits) + column // 32 * 8 + at % 8, full // 32 * bits + stream // 32)
    shift = tl.where(grouped, column, stream) % 32
    return 2 + word, shift.to(tl.uint32), tl.where(grouped, 8, 1)
