"""Huffman's code read on a GPU: a program for each chunk, a lane for each of its streams, symbol after symbol.

All chunks of a large tensor are under way at once, so what counts is how many cycles a lane waits for a symbol: for one
look into a table in shared memory and a shift. What it needs of the section is called for long before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import CHUNK, num_buckets, symbol_dtype
from laconic.kernels.triton import shared
from laconic.kernels.triton.books import PREFIX, PREFIXES, read_books, reverse32
from laconic.kernels.triton.parts import exact, words_of
from laconic.kernels.triton.shared import Room
from laconic.kernels.triton.streams import LANES, Cut, share

__all__ = ["Decoded", "arrange", "huffman_read"]

_CHUNK = tl.constexpr(CHUNK)
BLOCKS = tl.constexpr(8)
"""Blocks of 16 bytes that a lane has of its stream, or is waiting for: it reads in four, and leaves two in a round."""
COLUMNS = 128
"""Symbols of each stream that are put in order at once."""


@triton.jit
def _word(memory, ring, word, ASM: tl.constexpr):
    """A word of a lane's stream."""
    block = ((word >> 2) & (BLOCKS - 1)) * (16 * LANES)
    return shared.load(memory, ring + block + 4 * (word & 3), ASM).to(tl.uint32, bitcast=True)


@triton.jit
def _four(
    memory, room, ring, place, left, limits, symbols,
    GENERAL: tl.constexpr, BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Four symbols from the bits at a place, in 32 bits or in 64, and the place behind them."""
    # Two bits early, as if the first code were shifted left by two: so it is the address of its entry.
    early = place - 2
    a = _word(memory, ring, early >> 5, ASM)
    b = _word(memory, ring, (early >> 5) + 1, ASM)
    c = _word(memory, ring, (early >> 5) + 2, ASM)
    low, _ = shared.drop_bits(a, b, early, ASM)
    high, _ = shared.drop_bits(b, c, early, ASM)
    packed = tl.zeros((LANES,), tl.uint32 if SYMBOL == 8 else tl.uint64)
    for k in tl.static_range(4):
        entry = shared.load(memory, room + (low & (4 * PREFIXES - 4)).to(tl.int32, bitcast=True), ASM)
        symbol = entry >> 8
        length = entry & 255
        if GENERAL:
            long = length == 0
            window = (reverse32((low >> 2) | (high << 30)) >> 17).to(tl.int32)
            more = PREFIX + 1 + (window >= tl.load(limits + 13)).to(tl.int32)
            more += (window >= tl.load(limits + 14)).to(tl.int32)
            at = (window >> (15 - more)) + tl.load(limits + 16 + more)
            found = tl.load(symbols + tl.minimum(tl.maximum(at, 0), BINS - 1), mask=long, other=0).to(tl.int32)
            symbol = tl.where(long, found, symbol)
            length = tl.where(left > k, tl.where(long, more, length), 0)
            low, high = shared.drop_bits(low, high, length, ASM)
        else:
            low, high = shared.drop_bits(low, high, entry, ASM)
        place += length
        packed = packed | (symbol.to(packed.dtype) << (SYMBOL * k))
    return packed, place


@triton.jit
def _low(packed):
    return packed.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _read_round(
    memory, room, ring, place, left, limits, symbols, out,
    GENERAL: tl.constexpr, BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As many symbols as fill 16 bytes. In GENERAL, streams may end and codes be longer than the table knows."""
    out += 4 * tl.arange(0, LANES)
    a, place = _four(memory, room, ring, place, left, limits, symbols, GENERAL, BINS, SYMBOL, ASM)
    b, place = _four(memory, room, ring, place, left - 4, limits, symbols, GENERAL, BINS, SYMBOL, ASM)
    if SYMBOL == 8:
        c, place = _four(memory, room, ring, place, left - 8, limits, symbols, GENERAL, BINS, SYMBOL, ASM)
        d, place = _four(memory, room, ring, place, left - 12, limits, symbols, GENERAL, BINS, SYMBOL, ASM)
        shared.store4(out, _low(a), _low(b), _low(c), _low(d), ASM)
    else:
        shared.store4(out, _low(a), _low(a >> 32), _low(b), _low(b >> 32), ASM)
    return place


@triton.jit
def _fetch(section, begin, end, ring, memory, place, fetched, ASM: tl.constexpr):
    """A block more where there is room for one."""
    more = fetched < ((place - 2) >> 7) + BLOCKS
    byte = tl.where(more, 16 * fetched, end)
    target = ring + (fetched & (BLOCKS - 1)) * (16 * LANES)
    shared.fetch16(memory, target, section + byte, byte, begin, end, ASM)
    return fetched + more.to(tl.int32)


@triton.jit
def _start(section, behind, stream, mask):
    """Where a stream begins, by its own word; the first has none."""
    value = tl.zeros((LANES,), tl.int64)
    for k in tl.static_range(4):
        byte = tl.load(section + behind + 4 * (stream - 1) + k, mask=mask & (stream > 0), other=0)
        value = value | (byte.to(tl.int64) << (8 * k))
    return value


@triton.jit(do_not_specialize=["n", "nbytes", "skew", "last_streams", "last_each", "rounds"])
def _read_bits(
    section, nbytes, skew, bounds, symbols, tables, limits, heads, out, memory, verdict,
    n, last_streams, last_each, rounds, BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A lane for each stream; idle ones follow the first. The section begins ``skew`` bytes behind a multiple of 16."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    room = shared.address_of(ASM)
    if ASM == "":
        memory += wide * (PREFIXES + 4 * BLOCKS * LANES)
    streams, each, here = share(chunk, n, last_streams, last_each)
    if tl.load(heads + 4 * wide) == 2:
        lane = tl.arange(0, LANES)
        tables += wide * PREFIXES
        for first in range(0, PREFIXES, 1024):
            entry = first + tl.arange(0, 1024)
            shared.store(memory, room + 4 * entry, tl.load(tables + entry), ASM)

        begin = tl.load(bounds + chunk)
        behind = tl.load(heads + 4 * wide + 2)
        size = (tl.load(bounds + chunk + 1) - begin).to(tl.int32)
        bits = tl.load(heads + 4 * wide + 3)
        busy = lane < streams
        last = lane == streams - 1
        size_in_bits = 8 * (size - bits).to(tl.int64)
        start = _start(section + begin, behind, lane, busy)
        before = _start(section + begin, behind, lane - 1, busy & (lane > 0))
        end = _start(section + begin, behind, lane + 1, lane < streams - 1)
        end = tl.where(last, size_in_bits, end)
        wrong = busy & ((start < before) | (start > size_in_bits))
        start = tl.where(wrong | (busy == 0), 0, start).to(tl.int32)
        final = tl.load(section + begin + size - 1).to(tl.int64)

        # Places are counted from the block before the one in which the bits begin, and so are bytes.
        from_byte = begin + bits + skew
        off = 128 + 8 * (from_byte & 15).to(tl.int32)
        section += from_byte // 16 * 16 - 16 - skew
        first_byte = tl.maximum(skew - from_byte // 16 * 16 + 16, -64).to(tl.int32)
        end_byte = tl.minimum(skew + nbytes - from_byte // 16 * 16 + 16, 1 << 30).to(tl.int32)
        place = start + off
        fetched = (place - 2) >> 7
        ring = room + 4 * PREFIXES + 16 * lane
        for _ in tl.static_range(BLOCKS):
            fetched = _fetch(section, first_byte, end_byte, ring, memory, place, fetched, ASM)
        shared.seal(ASM)

        symbols += wide * BINS
        limits += wide * 32
        out += wide * rounds * (4 * LANES)
        left = tl.where(busy, tl.minimum(here - lane * each, each), 0)
        round_: tl.constexpr = 128 // SYMBOL
        # What all streams have, if the table has all codes.
        common = tl.where(tl.load(limits + PREFIX) == 32768, here - (streams - 1) * each, 0)
        tl.debug_barrier()
        done = each * 0
        while done < each:
            fetched = _fetch(section, first_byte, end_byte, ring, memory, place, fetched, ASM)
            fetched = _fetch(section, first_byte, end_byte, ring, memory, place, fetched, ASM)
            shared.seal(ASM)
            shared.settle(ASM)
            if done + round_ <= common:
                place = _read_round(memory, room, ring, place, left, limits, symbols, out, False, BINS, SYMBOL, ASM)
            else:
                place = _read_round(memory, room, ring, place, left, limits, symbols, out, True, BINS, SYMBOL, ASM)
            out += 4 * LANES
            left -= round_
            done += round_
        place = (place - off).to(tl.int64)
        wrong = wrong | (busy & (last == 0) & (place != end))
        wrong = wrong | (last & ((place > size_in_bits) | (place <= size_in_bits - 8)))
        unused = tl.minimum(tl.maximum(size_in_bits - place, 0), 7)
        wrong = wrong | (last & ((final >> (8 - unused)) != 0))
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")


class Decoded(NamedTuple):
    """Symbols of a section as its lanes left them: by chunk, then 16 bytes of each lane in turn."""

    cut: Cut
    packed: Tensor
    heads: Tensor
    verdict: Tensor
    """Not 0 where they are not to be used, or not all; behind it a bit for each mode that occurs."""
    section: Tensor
    bounds: Tensor


def huffman_read(section: Tensor, n: int, alphabet: int) -> Decoded | None:
    """The symbols, still out of order; None where the section is too short for its directory."""
    cut, device = Cut.of(n, alphabet), section.device
    if section.numel() < 5 * cut.chunks:
        return None
    section = words_of(section.contiguous())
    verdict = torch.zeros(2, dtype=torch.int32, device=device)
    bounds = torch.empty(cut.chunks + 1, dtype=torch.int64, device=device)
    lengths = torch.empty((cut.chunks, cut.bins), dtype=torch.int32, device=device)
    symbols = torch.empty((cut.chunks, cut.bins), dtype=torch.int16, device=device)
    tables = torch.empty((cut.chunks, PREFIXES.value), dtype=torch.int32, device=device)
    limits = torch.empty((cut.chunks, 32), dtype=torch.int32, device=device)
    heads = torch.empty((cut.chunks, 4), dtype=torch.int32, device=device)
    read_books[(cut.chunks,)](
        section, bounds, section.numel(), lengths, symbols, tables, limits, heads, verdict, alphabet,
        cut.last_streams, BINS=cut.bins, num_warps=max(4, cut.warps),
    )  # fmt: skip
    symbol_bits = 8 * symbol_dtype(alphabet).itemsize
    rounds = num_buckets(cut.longest, 128 // symbol_bits)
    packed = torch.empty((cut.chunks, rounds * 4 * LANES.value), dtype=torch.int32, device=device)
    room = Room(4 * PREFIXES.value + 16 * BLOCKS.value * LANES.value, cut.chunks, device)
    _read_bits[(cut.chunks,)](
        section, section.numel(), section.data_ptr() % 16, bounds, symbols, tables, limits, heads, packed, room.memory,
        verdict, n, cut.last_streams, cut.last_each, rounds, BINS=cut.bins, SYMBOL=symbol_bits, ASM=room.asm,
        num_warps=1,
    )  # fmt: skip
    return Decoded(cut, packed, heads, verdict, section, bounds)


@triton.jit(do_not_specialize=["n", "last_streams", "last_each", "words", "alphabet"])
def _arrange(
    packed, heads, verdict, table, out, n, last_streams, last_each, words, alphabet, weight,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, COLUMNS: tl.constexpr, VALUES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Symbols, or the values they stand for, to where they belong, unless the section is to be refused."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams, each, here = share(chunk, n, last_streams, last_each)
    column = tl.program_id(1) * COLUMNS
    if (tl.load(verdict) == 0) & (tl.load(heads + 4 * wide) >= 0) & (column < each):
        at = tl.arange(0, LANES * COLUMNS)
        lane = at // COLUMNS
        inside = column + at % COLUMNS
        place = lane * each + inside
        there = (lane < streams) & (inside < each) & (place < here)
        if tl.load(heads + 4 * wide) == 0:
            symbol = tl.zeros((LANES * COLUMNS,), tl.int32) + tl.load(heads + 4 * wide + 1)
        else:
            per: tl.constexpr = 128 // SYMBOL
            found = (packed + wide * words).to(tl.pointer_type(tl.uint8 if SYMBOL == 8 else tl.int16))
            found += (inside // per) * (per * LANES) + lane * per + inside % per
            symbol = tl.load(found, mask=there, other=0).to(tl.int32)
        out += wide * _CHUNK
        if VALUES:
            if BINS <= 512:
                bins = tl.arange(0, BINS)
                value = tl.gather(tl.load(table + bins, mask=bins < alphabet, other=0.0), symbol & (BINS - 1), 0)
            else:
                value = tl.load(table + symbol, mask=there, other=0.0)
            if ADD:
                value = tl.load(out + place, mask=there, other=0.0) + value * weight
            tl.store(out + place, value, mask=there)
        else:
            tl.store(out + place, symbol.to(out.dtype.element_ty), mask=there)


def arrange(decoded: Decoded, alphabet: int, table: Tensor | None, out: Tensor, weight: float | None) -> None:
    """Symbols, or values of the table, into ``out`` or, ``weight`` times, onto it."""
    cut, packed = decoded.cut, decoded.packed
    _arrange[(cut.chunks, num_buckets(cut.longest, COLUMNS))](
        packed, decoded.heads, decoded.verdict, out if table is None else table, out, cut.n, cut.last_streams,
        cut.last_each, packed.shape[1], alphabet, weight or 0.0, BINS=cut.bins,
        SYMBOL=8 * symbol_dtype(alphabet).itemsize, COLUMNS=COLUMNS,
        VALUES=table is not None, ADD=weight is not None, **exact(num_warps=4),
    )  # fmt: skip
