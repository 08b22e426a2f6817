"""Chunks of any mode on a GPU: which one each is written in, its bytes to their place, and all of them read.

The kernels of a mode are launched for all chunks, and leave alone what is not theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import (
    CHUNK,
    CONSTANT,
    HUFFMAN,
    RANS,
    RAW,
    Coding,
    coded_max_nbytes,
    num_buckets,
    symbol_bits,
    symbol_dtype,
)
from laconic.kernels.triton.huffman_decode import Opened, look_up, read_streams
from laconic.kernels.triton.huffman_encode import chunk_begin, count_symbols, plan, write_planned
from laconic.kernels.triton.rans import LANES, NEAR_BINS, NEAR_NBYTES, read_lanes, write_lanes, write_near_nbytes
from laconic.kernels.triton.rans_tables import SLOTS, chunk_lanes, deal_slots, plan_shares, read_shares
from laconic.kernels.triton.shared_memory import Room
from laconic.kernels.triton.streams import Cut
from laconic.kernels.triton.tile import TILE, period, store_groups

__all__ = ["blocks_of_16", "read", "write"]

_CHUNK = tl.constexpr(CHUNK)
_RAW = tl.constexpr(RAW)
_RANS = tl.constexpr(RANS)
MOVED = 4096
"""Words that a program moves."""


# --------------------------------------------------------------------------------------------------------- writing


@triton.jit(do_not_specialize=["n", "room"])
def _pack_raw(symbols, plans, words, n, room, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr):
    """Symbols of raw chunks, packed into their room; behind the last full group one stream of bits."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    chunk = begin // _CHUNK
    if tl.load(plans + 4 * chunk) == _RAW:
        at = tl.arange(0, SPAN)
        found = tl.load(symbols + begin + at, mask=begin + at < n, other=0).to(tl.int32)
        words += chunk * room
        symbols += chunk * _CHUNK
        inside = begin - chunk * _CHUNK
        here = tl.minimum(n - chunk * _CHUNK, _CHUNK).to(tl.int32)
        full = here // 256 * 256
        store_groups(found, words, inside, full, BITS, PERIOD, SPAN)
        if (inside <= full) & (full < inside + SPAN) & (full < here):
            byte = tl.arange(0, 512)
            value = tl.zeros((512,), tl.uint32)
            for k in tl.static_range(6 // BITS + 2):
                j = byte * 8 // BITS + k
                place = j * BITS - byte * 8
                symbol = tl.load(symbols + full + j, mask=(full + j < here) & (place < 8), other=0).to(tl.uint32)
                left = tl.minimum(tl.maximum(place, 0), 31).to(tl.uint32)
                value |= tl.where(place >= 0, symbol << left, symbol >> tl.maximum(-place, 0).to(tl.uint32))
            tail = words.to(tl.pointer_type(tl.uint8)) + full // 8 * BITS
            tl.store(tail + byte, (value & 255).to(tl.uint8), mask=byte < ((here - full) * BITS + 7) // 8)


@triton.jit(do_not_specialize=["n", "room", "book_words"])
def _move(out, sizes, plans, books, states, words, n, room, book_words, SPAN: tl.constexpr):
    """What stands before the words of a chunk, and its words, from its room to where the section has it."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    mode = tl.load(plans + 4 * wide)
    if mode >= 0:
        here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
        lanes = chunk_lanes(here)
        size = tl.load(sizes + wide)
        begin = chunk_begin(sizes, chunk)
        book = tl.load(plans + 4 * wide + 2)
        rans = mode == _RANS
        head = tl.where(rans, 2 + book + 4 * lanes, tl.where(mode == _RAW, 1, 3))
        at = begin + head
        end = begin + size
        from_ = wide * room * 2 + tl.where(rans, 2 * tl.load(plans + 4 * wide + 3), 0)
        if tl.program_id(1) == 0:
            byte = tl.arange(0, 128)
            tl.store(out.to(tl.pointer_type(tl.int32)) + chunk, size.to(tl.int32))
            tl.store(sizes + tl.num_programs(0), end, mask=chunk == tl.num_programs(0) - 1)
            tl.store(out + begin, mode.to(tl.uint8))
            second = tl.load(plans + 4 * wide + 1) >> (8 * byte)  # the scale, or a symbol
            tl.store(out + begin + 1 + byte, second.to(tl.uint8), mask=byte < head - 1 - tl.where(rans, head - 2, 0))
            done = book * 0
            while rans & (done < book):
                there = done + byte < book
                word = tl.load(books + wide * book_words + ((done + byte) >> 2), mask=there, other=0)
                tl.store(out + begin + 2 + done + byte, (word >> (8 * (byte & 3))).to(tl.uint8), mask=there)
                done += 128
            state = tl.load(states + wide * LANES + (byte >> 2), mask=rans & (byte < 4 * lanes), other=0)
            state = (state >> (8 * (byte & 3))).to(tl.uint8)
            tl.store(out + begin + 2 + book + byte, state, mask=rans & (byte < 4 * lanes))
            # Words at both ends are shared with what stands there.
            source = words.to(tl.pointer_type(tl.uint8)) + from_
            edge = tl.where(byte < 4, at // 4 * 4 + byte, end // 4 * 4 + byte - 4)
            alone = (at % 4 > 0) & (byte < 4) | (byte >= 4) & (byte < 8)
            alone = alone & (edge >= at) & (edge < end)
            tl.store(out + edge, tl.load(source + edge - at, mask=alone, other=0), mask=alone)
        first = (at + 3) // 4 + tl.program_id(1).to(tl.int64) * SPAN
        if first < end // 4:
            left = tl.minimum(end // 4 - first, SPAN).to(tl.int32)
            byte = from_ + 4 * first - at
            shift = (8 * (byte & 3)).to(tl.uint64)
            source = words.to(tl.pointer_type(tl.int32)) + (byte >> 2)
            word = tl.arange(0, SPAN)
            low = tl.load(source + word, mask=word < left, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
            high = tl.load(source + word + 1, mask=(word < left) & (shift > 0), other=0)
            both = ((high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low) >> shift
            target = out.to(tl.pointer_type(tl.int32)) + first
            tl.store(target + word, both.to(tl.uint32).to(tl.int32, bitcast=True), mask=word < left)


def write(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> Tensor:
    """Writes the section as ``coding`` says, which is not by Huffman alone; gives its bytes, on the device."""
    cut, device = Cut.of(symbols.numel(), alphabet), symbols.device
    symbols = symbols if symbols.data_ptr() % 16 == 0 else symbols.clone()
    room = coded_max_nbytes(min(cut.n, CHUNK), alphabet) // 4 * 2
    aligned = out if out.data_ptr() % 4 == 0 else torch.empty_like(out)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts = count_symbols(symbols, cut)
    plans, bits = torch.empty((cut.chunks, 4), **ints), symbol_bits(alphabet)
    if coding == Coding.RANS:
        work, sizes, record = plans, torch.empty(cut.chunks + 1, dtype=torch.int64, device=device), 0
    else:
        work, sizes = plan(counts, cut)
        record = work.shape[1]
    book_words = 4 + cut.bins
    books, scratch = torch.empty((cut.chunks, book_words), **ints), torch.empty((cut.chunks, 3, cut.bins), **ints)
    table = torch.empty((cut.chunks, cut.bins, 4), **ints)
    plan_shares[(cut.chunks,)](
        counts, scratch, books, table.view(torch.int64), plans, sizes, work, cut.n, cut.last_streams, book_words, bits,
        int(coding), BINS=cut.bins, RECORD=record, num_warps=cut.warps,
    )  # fmt: skip
    words = torch.empty((cut.chunks, room), dtype=torch.int16, device=device)
    states = torch.empty((cut.chunks, LANES.value), **ints)
    near = Room(write_near_nbytes(cut.bins, symbols.element_size()), cut.chunks, device)
    write_lanes[(cut.chunks,)](
        symbols, table, near.memory, plans, words, states, sizes, cut.n, room,
        BINS=cut.bins, SYMBOL=symbols.element_size(), NEAR=cut.bins <= NEAR_BINS, ASM=near.asm, num_warps=1,
    )  # fmt: skip
    if record:
        if bits:
            _pack_raw[(num_buckets(cut.n, TILE),)](
                symbols, plans, words, cut.n, room, BITS=bits, PERIOD=period(bits), SPAN=TILE, num_warps=2
            )
        write_planned(symbols, work, sizes, cut, aligned)
    _move[(cut.chunks, num_buckets(room, 2 * MOVED))](
        aligned, sizes, plans, books, states, words, cut.n, room, book_words, SPAN=MOVED, num_warps=4
    )
    if aligned is not out:
        out.copy_(aligned)
    return sizes[-1]


# --------------------------------------------------------------------------------------------------------- reading


@triton.jit(do_not_specialize=["n", "alphabet"])
def _read_raw(section, plans, out, verdict, n, alphabet, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Symbols of raw chunks, byte by byte, for they begin anywhere. Those beyond the alphabet are told."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    chunk = begin // _CHUNK
    if tl.load(plans + 8 * chunk) == _RAW:
        here = tl.minimum(n - chunk * _CHUNK, _CHUNK).to(tl.int32)
        at = (begin - chunk * _CHUNK).to(tl.int32) + tl.arange(0, SPAN)
        there = at < here
        section += tl.load((plans + 8 * chunk + 6).to(tl.pointer_type(tl.int64))) + 1
        full = here // 256 * 256
        grouped = at < full
        bit = tl.where(grouped, at // 8 % 32, at - full) * BITS
        value = tl.zeros((SPAN,), tl.int32)
        for k in tl.static_range((BITS + 14) // 8):
            byte = bit // 8 + k
            # Of a group each of 8 lanes has every eighth word.
            of_lane = at // 256 * (32 * BITS) + byte // 4 * 32 + at % 8 * 4 + byte % 4
            place = tl.where(grouped, of_lane, full // 8 * BITS + byte)
            reaches = there & (8 * k < bit % 8 + BITS)
            value |= tl.load(section + place, mask=reaches, other=0).to(tl.int32) << (8 * k)
        symbol = (value >> (bit % 8)) & ((1 << BITS) - 1)
        wrong = there & (symbol >= alphabet)
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
        tl.store(out + begin + tl.arange(0, SPAN), symbol.to(out.dtype.element_ty), mask=there)


def _read_others(opened: Opened, modes: int, alphabet: int, table: Tensor | None, out: Tensor) -> None:
    """Chunks of rANS, as symbols or by the table, and raw ones, as symbols, into their part of ``out``."""
    cut, section, known, verdict = opened
    ints: dict[str, Any] = {"dtype": torch.int32, "device": section.device}
    shares, ranks = torch.empty((cut.chunks, cut.bins), **ints), torch.empty((cut.chunks, 3, cut.bins), **ints)
    plans, bits = torch.empty((cut.chunks, 8), **ints), symbol_bits(alphabet)
    read_shares[(cut.chunks,)](
        section, known, shares, ranks, plans, verdict, alphabet, cut.n, bits,
        BINS=cut.bins, KNOWN=known.shape[1], num_warps=cut.warps,
    )  # fmt: skip
    if modes >> RANS & 1:
        slots = torch.empty((cut.chunks, 1 << 15), dtype=torch.int64, device=section.device)
        deal_slots[(cut.chunks, (1 << 15) // SLOTS)](
            ranks, plans, slots, BINS=cut.bins, STEPS=cut.steps, SPAN=SLOTS, num_warps=4
        )
        near = Room(NEAR_NBYTES, cut.chunks, section.device)
        read_lanes[(cut.chunks,)](
            section, section.numel(), plans, slots, out if table is None else table, near.memory, out, verdict, cut.n,
            alphabet, NEAR=alphabet <= 256, ASM=near.asm, num_warps=1,
        )  # fmt: skip
    if modes >> RAW & 1 and bits:
        _read_raw[(num_buckets(cut.n, TILE),)](
            section, plans, out, verdict, cut.n, alphabet, BITS=bits, SPAN=TILE, num_warps=4
        )


def read(opened: Opened, modes: int, alphabet: int, table: Tensor | None, out: Tensor, weight: float | None) -> None:
    """Chunks of these modes, a bit for each, into ``out``: symbols, or values of the table, or these added to it.

    Symbols have room for whole blocks of 16. Nothing is added where other modes occur, too.
    """
    if table is not None and weight is None and modes == 1 << RANS:  # which are in order, and may go where they belong
        _read_others(opened, modes, alphabet, table, out)
        return
    symbols = out
    if table is not None:
        symbols = torch.empty(blocks_of_16(out.numel()), dtype=symbol_dtype(alphabet), device=out.device)
    if modes & (1 << HUFFMAN | 1 << CONSTANT):
        read_streams(opened, symbols)
    if modes & (1 << RANS | 1 << RAW):
        _read_others(opened, modes, alphabet, None, symbols)
    if table is not None:
        look_up(opened, symbols, modes, table, out, weight)


def blocks_of_16(n: int) -> int:
    """Symbols in blocks that hold so many."""
    return num_buckets(n, 16) * 16
