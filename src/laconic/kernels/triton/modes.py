"""Chunks of any mode on a GPU: which one each is written in, its bytes to their place, and all of them read.

No mode is asked for on the host. The kernels of each are launched for all chunks, and leave alone what is not theirs.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import CHUNK, RANS, RAW, Coding, coded_limit, num_buckets, symbol_bits, symbol_dtype
from laconic.kernels.triton import coding as huffman
from laconic.kernels.triton.books import STREAMS, plan_books
from laconic.kernels.triton.parts import TILE, exact, period, store_groups
from laconic.kernels.triton.rans import LANES, NEAR_NBYTES, read_lanes, write_lanes
from laconic.kernels.triton.shared import Room
from laconic.kernels.triton.shares import SLOTS, chunk_lanes, deal_slots, plan_shares, read_shares

__all__ = ["read_symbols", "read_values", "write"]

_CHUNK = tl.constexpr(CHUNK)
_RAW = tl.constexpr(RAW)
_RANS = tl.constexpr(RANS)
MOVED = 4096
"""Words that a program moves."""


def _votes(device: torch.device) -> bool:
    """Whether a warp can count by its vote, which Triton's interpreter does not know."""
    return device.type == "cuda"


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
def _move(out, offsets, sizes, plans, books, states, words, n, room, book_words, SPAN: tl.constexpr):
    """What stands before the words of a chunk, and its words, from its room to where the section has it."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    mode = tl.load(plans + 4 * wide)
    if mode >= 0:
        here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
        lanes = chunk_lanes(here)
        size = tl.load(sizes + wide)
        begin = tl.load(offsets + wide) - size
        book = tl.load(plans + 4 * wide + 2)
        rans = mode == _RANS
        head = tl.where(rans, 2 + book + 4 * lanes, 1)
        at = begin + head
        end = begin + size
        from_ = wide * room * 2 + tl.where(rans, 2 * tl.load(plans + 4 * wide + 3), 0)
        if tl.program_id(1) == 0:
            byte = tl.arange(0, 128)
            tl.store(out + begin, mode.to(tl.uint8))
            tl.store(out + begin + 1, tl.load(plans + 4 * wide + 1).to(tl.uint8), mask=rans)
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
        word = (at + 3) // 4 + tl.program_id(1).to(tl.int64) * SPAN + tl.arange(0, SPAN)
        there = word < end // 4
        byte = from_ + 4 * word - at
        shift = 8 * (byte % 4)
        source = words.to(tl.pointer_type(tl.int32)) + byte // 4
        low = tl.load(source, mask=there, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        high = tl.load(source + 1, mask=there & (shift > 0), other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
        both = ((high << 32) | low) >> shift.to(tl.uint64)
        tl.store(out.to(tl.pointer_type(tl.int32)) + word, both.to(tl.uint32).to(tl.int32, bitcast=True), mask=there)


def write(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> Tensor:
    """Writes the section as ``coding`` says, which is not by Huffman alone; gives its bytes, on the device."""
    cut, device = huffman.Cut.of(symbols.numel(), alphabet), symbols.device
    room_nbytes = coded_limit(min(cut.n, CHUNK), alphabet) // 4 * 4
    into = out if out.data_ptr() % 4 == 0 else torch.empty_like(out)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts = torch.empty((cut.chunks, STREAMS.value, cut.bins), **ints)
    huffman._count[(cut.chunks, STREAMS.value)](
        symbols, counts, cut.n, cut.last_streams, cut.last_each, BINS=cut.bins, SPAN=huffman.COUNTED, num_warps=4
    )
    mixed = coding != Coding.RANS
    book_words = 4 + cut.bins
    sizes = torch.empty(cut.chunks, dtype=torch.int64, device=device)
    heads = torch.empty((cut.chunks, 2), **ints)
    starts = torch.empty((cut.chunks, LANES.value), **ints)
    books = torch.zeros((2, cut.chunks, book_words), **ints)
    if mixed:
        scratch, codes = torch.empty((cut.chunks, 24, cut.bins), **ints), torch.empty((cut.chunks, cut.bins), **ints)
        plan_books[(cut.chunks,)](
            counts, scratch, books[1], codes, starts, heads, sizes, cut.last_streams, book_words,
            BINS=cut.bins, STEPS=cut.steps, num_warps=cut.warps,
        )  # fmt: skip
    scratch, plans = torch.empty((cut.chunks, 3, cut.bins), **ints), torch.empty((cut.chunks, 4), **ints)
    table = torch.empty((cut.chunks, cut.bins, 2), dtype=torch.int64, device=device)
    bits = symbol_bits(alphabet)
    plan_shares[(cut.chunks,)](
        counts, scratch, books[0], table, heads, plans, sizes, cut.n, book_words, bits, int(coding),
        BINS=cut.bins, num_warps=cut.warps,
    )  # fmt: skip
    words = torch.empty((cut.chunks, room_nbytes // 2), dtype=torch.int16, device=device)
    states = torch.empty((cut.chunks, LANES.value), **ints)
    near = Room(16 * cut.bins, cut.chunks, device)
    write_lanes[(cut.chunks,)](
        symbols, table.view(torch.int32), near.memory, plans, words, states, sizes, cut.n, room_nbytes // 2,
        BINS=cut.bins, NEAR=cut.bins <= 1024, WARP=_votes(device), ASM=near.asm, num_warps=1,
    )  # fmt: skip
    if mixed and bits:
        _pack_raw[(num_buckets(cut.n, TILE),)](
            symbols, plans, words, cut.n, room_nbytes // 2, BITS=bits, PERIOD=period(bits), SPAN=TILE, num_warps=2
        )
    offsets = sizes.cumsum(0) + 4 * cut.chunks
    huffman._write_heads[(cut.chunks,)](
        into, offsets, books[1], starts, heads, sizes, cut.last_streams, book_words, num_warps=1
    )
    if mixed:
        symbol_words, whole, tail = huffman._words(symbols)
        traces = torch.empty((cut.chunks, LANES.value), **ints)
        huffman._write_bits[(cut.chunks,)](
            symbol_words, tail, whole, codes, starts, heads, sizes, offsets,
            into[: into.numel() // 4 * 4].view(torch.int32), traces, cut.n, cut.last_streams, cut.last_each,
            BINS=cut.bins, SYMBOL=8 * symbols.element_size(), num_warps=1,
        )  # fmt: skip
    _move[(cut.chunks, num_buckets(room_nbytes, 4 * MOVED))](
        into,
        offsets,
        sizes,
        plans,
        books[0],
        states,
        words,
        cut.n,
        room_nbytes // 2,
        book_words,
        SPAN=MOVED,
        num_warps=4,
    )
    if into is not out:
        out.copy_(into)
    return offsets[-1]


# --------------------------------------------------------------------------------------------------------- reading


@triton.jit(do_not_specialize=["n", "alphabet"])
def _read_raw(
    section, bounds, plans, table, out, verdict, n, alphabet, BITS: tl.constexpr, SPAN: tl.constexpr,
    VALUES: tl.constexpr,
):  # fmt: skip
    """Symbols of raw chunks, byte by byte, for they begin anywhere. Those beyond the alphabet are told."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    chunk = begin // _CHUNK
    if tl.load(plans + 8 * chunk) == _RAW:
        here = tl.minimum(n - chunk * _CHUNK, _CHUNK).to(tl.int32)
        at = (begin - chunk * _CHUNK).to(tl.int32) + tl.arange(0, SPAN)
        there = at < here
        section += tl.load(bounds + chunk) + 1
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
        if VALUES:
            tl.store(out + begin + tl.arange(0, SPAN), tl.load(table + symbol, mask=there & (wrong == 0)), mask=there)
        else:
            tl.store(out + begin + tl.arange(0, SPAN), symbol.to(out.dtype.element_ty), mask=there)


@triton.jit(do_not_specialize=["n"])
def _add_found(found, plans, verdict, table, out, n, weight, SPAN: tl.constexpr):
    """Values of symbols that are in order, unless the section is to be refused."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    if ((tl.load(verdict) & 1) == 0) & (tl.load(plans + 8 * (begin // _CHUNK)) >= 0):
        at = begin + tl.arange(0, SPAN)
        there = at < n
        value = tl.load(table + tl.load(found + at, mask=there, other=0).to(tl.int32))
        tl.store(out + at, tl.load(out + at, mask=there, other=0.0) + value * weight, mask=there)


def _read(decoded: huffman.Decoded, alphabet: int, table: Tensor | None, out: Tensor) -> Tensor:
    """Chunks of rANS and raw ones into ``out``, as symbols or by the table; the plans of the chunks."""
    cut, section, device = decoded.cut, decoded.section, out.device
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    shares, ranks = torch.zeros((cut.chunks, cut.bins), **ints), torch.empty((cut.chunks, 3, cut.bins), **ints)
    plans, bits = torch.empty((cut.chunks, 8), **ints), symbol_bits(alphabet)
    read_shares[(cut.chunks,)](
        section, decoded.bounds, section.numel(), shares, ranks, plans, decoded.verdict, alphabet, cut.n, bits,
        BINS=cut.bins, num_warps=cut.warps,
    )  # fmt: skip
    slots = torch.empty((cut.chunks, 1 << 15), dtype=torch.int64, device=device)
    values = table is not None
    deal_slots[(cut.chunks, (1 << 15) // SLOTS)](
        ranks, plans, slots, BINS=cut.bins, STEPS=cut.steps, SPAN=SLOTS, num_warps=4
    )
    near = Room(NEAR_NBYTES, cut.chunks, device)
    read_lanes[(cut.chunks,)](
        section, section.numel(), decoded.bounds, plans, slots, table if values else out, near.memory, out,
        decoded.verdict, cut.n, alphabet, NEAR=alphabet <= 256, WARP=_votes(device), ASM=near.asm, num_warps=1,
    )  # fmt: skip
    if bits:
        _read_raw[(num_buckets(cut.n, TILE),)](
            section, decoded.bounds, plans, table if values else out, out, decoded.verdict, cut.n, alphabet,
            BITS=bits, SPAN=TILE, VALUES=values, num_warps=4,
        )  # fmt: skip
    return plans


def read_symbols(section: Tensor, n: int, alphabet: int) -> tuple[Tensor, Tensor] | None:
    """The symbols and the verdict on them, on the device; None where the section is too short for its directory."""
    decoded = huffman.huffman_read(section, n, alphabet)
    if decoded is None:
        return None
    out = torch.empty(n, dtype=symbol_dtype(alphabet), device=section.device)
    _read(decoded, alphabet, None, out)
    huffman.arrange_symbols(decoded, alphabet, out)
    return out, decoded.verdict


def read_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> Tensor | None:
    """Values into ``out``, or added to it where the verdict, which is given, is good."""
    n, alphabet, table = out.numel(), table.numel(), table.to(out.device)
    decoded = huffman.huffman_read(section, n, alphabet)
    if decoded is None:
        return None
    if weight is None:
        _read(decoded, alphabet, table, out)
    else:
        found = torch.empty(n, dtype=symbol_dtype(alphabet), device=section.device)
        plans = _read(decoded, alphabet, None, found)
        _add_found[(num_buckets(n, TILE),)](
            found, plans, decoded.verdict, table, out, n, weight, SPAN=TILE, **exact(num_warps=4)
        )
    huffman.arrange_floats(decoded, table, out, weight)
    return decoded.verdict
