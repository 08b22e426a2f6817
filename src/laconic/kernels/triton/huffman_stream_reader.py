"""Huffman streams read by the lanes of a warp: a ring buffer of each stream in shared memory, and table lookups."""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.huffman_table_reader import PREFIX_BITS, PREFIXES
from laconic.kernels.triton.huffman_tables import reverse32
from laconic.kernels.triton.streams import LANES

__all__ = ["RING_BLOCKS", "decode_round", "decode_slowly", "fill_ring", "skip_round", "skip_slowly"]

RING_BLOCKS = tl.constexpr(8)
"""Blocks of 16 bytes of its stream that a lane holds in a ring buffer or has requested."""


@triton.jit
def _word(memory, ring, word, ASM: tl.constexpr):
    """Load a word of a lane's stream from the ring buffer."""
    block = ((word >> 2) & (RING_BLOCKS - 1)) * (16 * LANES)
    return shared_memory.load(memory, ring + block + 4 * (word & 3), ASM).to(tl.uint32, bitcast=True)


@triton.jit
def _bits(memory, ring, bit, ASM: tl.constexpr):
    """Load 64 bits in halves, from two bits before a position: a code's lowest bits then are an entry's byte offset."""
    first_bit = bit - 2
    a = _word(memory, ring, first_bit >> 5, ASM)
    b = _word(memory, ring, (first_bit >> 5) + 1, ASM)
    c = _word(memory, ring, (first_bit >> 5) + 2, ASM)
    low, _ = shared_memory.shift_right64(a, b, first_bit, ASM)
    high, _ = shared_memory.shift_right64(b, c, first_bit, ASM)
    return low, high


@triton.jit
def _entry(memory, shared, low, high, limits, symbols, LONG: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr):
    """Return the next symbol and, in the lowest 8 bits, its code length; LONG allows codes beyond the lookup table."""
    entry = shared_memory.load(memory, shared + (low & (4 * PREFIXES - 4)).to(tl.int32, bitcast=True), ASM)
    if LONG:
        long = entry == 0
        window = (reverse32((low >> 2) | (high << 30)) >> 17).to(tl.int32)
        length = PREFIX_BITS + 1 + (window >= tl.load(limits + 13)).to(tl.int32)
        length += (window >= tl.load(limits + 14)).to(tl.int32)
        index = (window >> (15 - length)) + tl.load(limits + 16 + length)
        symbol = tl.load(symbols + tl.minimum(tl.maximum(index, 0), BINS - 1), mask=long, other=0)
        entry = tl.where(long, (symbol << 8) | length, entry)
    return entry


@triton.jit
def _decode_four(
    memory, shared, ring, bit, limits, symbols,
    BINS: tl.constexpr, SYMBOL_BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode four symbols into 32 or 64 bits; return them and the position after them."""
    low, high = _bits(memory, ring, bit, ASM)
    packed = tl.zeros((LANES,), tl.uint32 if SYMBOL_BITS == 8 else tl.uint64)
    for k in tl.static_range(4):
        entry = _entry(memory, shared, low, high, limits, symbols, False, BINS, ASM)
        packed = packed | ((entry >> 8).to(packed.dtype) << (SYMBOL_BITS * k))
        low, high = shared_memory.shift_right64(low, high, entry, ASM)
        bit += entry & 255
    return packed, bit


@triton.jit
def _skip_four(
    memory, shared, ring, bit, part_begin, stop, first_symbol, count, limits, symbols,
    NUMBER: tl.constexpr, LONG: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Skip up to four symbols before ``stop``; count those from ``part_begin`` on, and note the first."""
    low, high = _bits(memory, ring, bit, ASM)
    for _ in tl.static_range(NUMBER):
        entry = _entry(memory, shared, low, high, limits, symbols, LONG, BINS, ASM)
        active = bit < stop
        length = tl.where(active, entry & 255, 0)
        low, high = shared_memory.shift_right64(low, high, length, ASM)
        count += (active & (bit >= part_begin)).to(tl.int32)
        first_symbol = tl.where(bit < part_begin, bit + length, first_symbol)
        bit += length
    return bit, first_symbol, count


@triton.jit
def _fetch_block(section, begin, end, memory, ring, bit, fetched, ASM: tl.constexpr):
    """Request the next block if the ring has space: eight symbols consume at most one block."""
    has_space = fetched < ((bit - 2) >> 7) + RING_BLOCKS
    byte = tl.where(has_space, 16 * fetched, end)
    target = ring + (fetched & (RING_BLOCKS - 1)) * (16 * LANES)
    shared_memory.fetch16_async(memory, target, section + byte, byte, begin, end, ASM)
    return fetched + has_space.to(tl.int32)


@triton.jit
def _prepare_eight(section, begin, end, memory, ring, bit, fetched, ASM: tl.constexpr):
    """Wait until the bits of eight symbols, which span at most three blocks, are present."""
    fetched = _fetch_block(section, begin, end, memory, ring, bit, fetched, ASM)
    shared_memory.commit_fetches(ASM)
    shared_memory.wait_fetches(RING_BLOCKS - 3, ASM)
    return fetched


@triton.jit
def fill_ring(section, begin, end, memory, ring, bit, ASM: tl.constexpr):
    fetched = (bit - 2) >> 7
    for _ in tl.static_range(RING_BLOCKS):
        fetched = _fetch_block(section, begin, end, memory, ring, bit, fetched, ASM)
    shared_memory.commit_fetches(ASM)
    shared_memory.wait_fetches(0, ASM)
    return fetched


@triton.jit
def _low_word(packed):
    return packed.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def decode_round(
    section, begin, end, memory, shared, ring, bit, fetched, limits, symbols, out, valid,
    BINS: tl.constexpr, SYMBOL_BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode 16 bytes of symbols, where all of them exist and the lookup table has their codes."""
    fetched = _prepare_eight(section, begin, end, memory, ring, bit, fetched, ASM)
    a, bit = _decode_four(memory, shared, ring, bit, limits, symbols, BINS, SYMBOL_BITS, ASM)
    b, bit = _decode_four(memory, shared, ring, bit, limits, symbols, BINS, SYMBOL_BITS, ASM)
    if SYMBOL_BITS == 8:
        fetched = _prepare_eight(section, begin, end, memory, ring, bit, fetched, ASM)
        c, bit = _decode_four(memory, shared, ring, bit, limits, symbols, BINS, SYMBOL_BITS, ASM)
        d, bit = _decode_four(memory, shared, ring, bit, limits, symbols, BINS, SYMBOL_BITS, ASM)
        shared_memory.store4_global(out, _low_word(a), _low_word(b), _low_word(c), _low_word(d), valid, ASM)
    else:
        shared_memory.store4_global(out, _low_word(a), _low_word(a >> 32), _low_word(b), _low_word(b >> 32), valid, ASM)
    return bit, fetched


@triton.jit
def decode_slowly(
    section, begin, end, memory, shared, ring, bit, fetched, reach, left, ended, limits, symbols, out, valid,
    BINS: tl.constexpr, SYMBOL_BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode at most ``reach`` symbols one by one, with codes of any length, and note where the stream's last one ends.

    This is the slow path: it is rare, so its code should be short.
    """
    first = tl.zeros((LANES,), tl.uint64)
    second = first
    per_round: tl.constexpr = 128 // SYMBOL_BITS
    index = tl.program_id(0) * 0
    count = tl.minimum(tl.max(reach, 0), per_round)
    while index < count:
        if index % 8 == 0:
            fetched = _prepare_eight(section, begin, end, memory, ring, bit, fetched, ASM)
        low, high = _bits(memory, ring, bit, ASM)
        entry = _entry(memory, shared, low, high, limits, symbols, True, BINS, ASM)
        shifted = (entry >> 8).to(tl.uint64) << ((index * SYMBOL_BITS) & 63).to(tl.uint64)
        first = tl.where(index < per_round // 2, first | shifted, first)
        second = tl.where(index < per_round // 2, second, second | shifted)
        bit += tl.where(reach > index, entry & 255, 0)
        index += 1
        ended = tl.where((left == index) & (reach >= index), bit, ended)
    shared_memory.store4_global(
        out, _low_word(first), _low_word(first >> 32), _low_word(second), _low_word(second >> 32), valid, ASM
    )
    return bit, fetched, ended


@triton.jit
def skip_round(
    section, begin, end, memory, shared, ring, bit, fetched, part_begin, stop, first_symbol, count, limits, symbols,
    BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    for _ in tl.static_range(2):
        fetched = _prepare_eight(section, begin, end, memory, ring, bit, fetched, ASM)
        for _ in tl.static_range(2):
            bit, first_symbol, count = _skip_four(
                memory, shared, ring, bit, part_begin, stop, first_symbol, count, limits, symbols, 4, False, BINS, ASM
            )
    return bit, fetched, first_symbol, count


@triton.jit
def skip_slowly(
    section, begin, end, memory, shared, ring, bit, fetched, part_begin, stop, first_symbol, count, limits, symbols,
    BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    fetched = _prepare_eight(section, begin, end, memory, ring, bit, fetched, ASM)
    index = tl.program_id(0) * 0
    while index < 8:
        bit, first_symbol, count = _skip_four(
            memory, shared, ring, bit, part_begin, stop, first_symbol, count, limits, symbols, 1, True, BINS, ASM
        )
        index += 1
    return bit, fetched, first_symbol, count
