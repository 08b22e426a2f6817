"""Huffman's code written on a GPU: a program for each stream counts its symbols, and another one writes its bits.

Where a symbol's bits go is the sum of the lengths before it, so a program's threads put theirs side by side into shared
memory, which then goes out in whole words. A chunk's streams are one run of bits: a word in which one stream ends and
the next begins belongs to the first of both, whose program looks that far ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.sections import CHUNK
from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.huffman_tables import book_at, codes_at, heads_at, plan_books, record_words, starts_at
from laconic.kernels.triton.shared_memory import Room
from laconic.kernels.triton.streams import STREAM_LENGTH, STREAMS, Cut, share
from laconic.kernels.triton.tile import words_of

__all__ = ["chunk_begin", "count_symbols", "huffman_write", "plan", "write_planned"]

_CHUNK = tl.constexpr(CHUNK)
COUNTERS = 4096
"""Counters of a program: as many for each symbol as there is room, so that threads do not wait for one another."""
COUNTED = 2048
"""Symbols that a program counts at once."""
WARPS = 4
PLANNED = 256
"""Symbols whose book is made in shared memory."""
CLOSE = 1024
"""Codes that fit beside the bits in shared memory."""


@triton.jit(do_not_specialize=["n", "last_streams", "last_each"])
def _count(
    symbols, counts, memory, n, last_streams, last_each,
    BINS: tl.constexpr, COPIES: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """How often each symbol occurs in a stream."""
    chunk, stream = tl.program_id(0), tl.program_id(1)
    wide = chunk.to(tl.int64)
    room = shared_memory.address_of(ASM)
    if ASM == "":
        memory += (wide * tl.num_programs(1) + stream) * (BINS * COPIES)
    streams, each, here = share(chunk, n, last_streams, last_each)
    begin = stream * each
    end = tl.where(stream < streams, tl.minimum(begin + each, here), begin)
    symbols += wide * _CHUNK
    shared_memory.clear16(memory, room + 16 * tl.arange(0, BINS * COPIES // 4), ASM)
    tl.debug_barrier()
    at = tl.arange(0, SPAN)
    own = room + 4 * (shared_memory.lane_of(stream, ASM) & (COPIES - 1))
    tile = begin // 16 * 16
    while tile < end:
        if (tile >= begin) & (tile + SPAN <= end):
            symbol = tl.load(symbols + tl.multiple_of(tile, 16) + at).to(tl.int32) & (BINS - 1)
            shared_memory.count_one(memory, own + 4 * COPIES * symbol, symbol >= 0, ASM)
        else:
            there = (tile + at >= begin) & (tile + at < end)
            some = tl.load(symbols + tile + at, mask=there, other=0).to(tl.int32) & (BINS - 1)
            shared_memory.count_one(memory, own + 4 * COPIES * some, there, ASM)
        tile += SPAN
    tl.debug_barrier()
    bins = tl.arange(0, BINS)
    counted = tl.zeros((BINS,), tl.int32)
    for k in range(COPIES):
        counted += shared_memory.load(memory, room + 4 * (bins * COPIES + ((bins + k) & (COPIES - 1))), ASM)
    tl.store(counts + (wide * STREAMS + stream) * BINS + bins, counted)


@triton.jit
def chunk_begin(sizes, chunk):
    """Where a chunk begins: behind the directory and all before it."""
    at = tl.arange(0, 1024)
    before = tl.zeros((1024,), tl.int64)
    k = chunk * 0
    while k < chunk:
        before += tl.load(sizes + k + at, mask=k + at < chunk, other=0)
        k += 1024
    return tl.sum(before, 0) + 4 * tl.num_programs(0)


@triton.jit
def _write_head(out, work, begin, size, book, streams, BINS: tl.constexpr):
    """A chunk's entry in the directory, its mode, and its book and starts or its only symbol."""
    chunk = tl.program_id(0)
    tl.store(out.to(tl.pointer_type(tl.int32)) + chunk, size.to(tl.int32))
    tl.store(out + begin, tl.where(book > 0, 2, 0).to(tl.uint8))
    at = tl.arange(0, 128)
    symbol = tl.load(work + heads_at(BINS) + 1)
    tl.store(out + begin + 1 + at, (symbol >> (8 * (at & 1))).to(tl.uint8), mask=(at < 2) & (book == 0))
    done = book * 0
    while done < book:
        there = done + at < book
        word = tl.load(work + book_at(BINS) + ((done + at) >> 2), mask=there, other=0)
        tl.store(out + begin + 1 + done + at, (word >> (8 * (at & 3))).to(tl.uint8), mask=there)
        done += 128
    stream = 1 + (at >> 2)
    ours = (book > 0) & (stream < streams)
    start = tl.load(work + starts_at(BINS) + stream, mask=ours, other=0)
    tl.store(out + begin + 1 + book + at, (start >> (8 * (at & 3))).to(tl.uint8), mask=ours)


@triton.jit
def _code(word, at, reach, memory, codes, K: tl.constexpr, BINS: tl.constexpr, SYMBOL: tl.constexpr,
          NEAR: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """The code of symbol K of a word and, in the upper half, its bits; zeros behind the last symbol."""
    symbol = ((word >> (SYMBOL * K)) & ((1 << SYMBOL) - 1)).to(tl.int32, bitcast=True) & (BINS - 1)
    if NEAR:
        entry = tl.where(at < reach, shared_memory.load(memory, codes + 4 * symbol, ASM), 0)
    else:
        entry = tl.load(codes + symbol, mask=at < reach, other=0)
    return entry


@triton.jit
def _put(memory, room, held, filled, word, head, first, entry, behind, ASM: tl.constexpr):
    """Two codes behind what is held, 30 bits at most, and a word of it into the room when full; the first stays."""
    bits = (entry & 0xFFFF) | ((behind & 0xFFFF) << (entry >> 16))
    held = held | (bits.to(tl.uint64) << filled.to(tl.uint64))
    filled += (entry >> 16) + (behind >> 16)
    full = filled >= 32
    low = held.to(tl.uint32).to(tl.int32, bitcast=True)
    shared_memory.store_some(memory, room + 4 * word, low, full & (first == 0), ASM)
    head = tl.where(full & (first == 1), low, head)
    first = tl.where(full, 0, first)
    word += full.to(tl.int32)
    held = tl.where(full, held >> 32, held)
    filled &= 31
    return held, filled, word, head, first


@triton.jit
def _word(source, at, whole, rest):
    """A word of symbols; behind the whole ones lies what is left of them."""
    return tl.load(source + at, mask=at < whole, other=rest).to(tl.uint32, bitcast=True)


@triton.jit
def _two_codes(word, at, reach, memory, codes, BINS: tl.constexpr, NEAR: tl.constexpr, ASM: tl.constexpr):
    a = _code(word, at, reach, memory, codes, 0, BINS, 16, NEAR, ASM)
    b = _code(word, at + 1, reach, memory, codes, 1, BINS, 16, NEAR, ASM)
    return a, b


@triton.jit
def _four_codes(word, at, reach, memory, codes, BINS: tl.constexpr, NEAR: tl.constexpr, ASM: tl.constexpr):
    a = _code(word, at, reach, memory, codes, 0, BINS, 8, NEAR, ASM)
    b = _code(word, at + 1, reach, memory, codes, 1, BINS, 8, NEAR, ASM)
    c = _code(word, at + 2, reach, memory, codes, 2, BINS, 8, NEAR, ASM)
    d = _code(word, at + 3, reach, memory, codes, 3, BINS, 8, NEAR, ASM)
    return a, b, c, d


@triton.jit
def _lengths(a, b):
    return (a >> 16) + (b >> 16)


@triton.jit(do_not_specialize=["n", "last_streams", "last_each"])
def _write(
    symbols, work, sizes, out, memory, n, last_streams, last_each,
    BINS: tl.constexpr, RECORD: tl.constexpr, BITS: tl.constexpr, SYMBOL: tl.constexpr, THREADS: tl.constexpr,
    SPAN: tl.constexpr, NEAR: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A stream's bits, of which BITS bytes are room for; the first one's program writes what precedes them, too."""
    chunk, stream = tl.program_id(0), tl.program_id(1)
    wide = chunk.to(tl.int64)
    room = shared_memory.address_of(ASM)
    if ASM == "":
        memory += (wide * tl.num_programs(1) + stream) * ((BITS + 4 * BINS * NEAR) // 4)
    streams, each, here = share(chunk, n, last_streams, last_each)
    if stream < streams:
        work += wide * RECORD
        begin = chunk_begin(sizes, chunk)
        size = tl.load(sizes + chunk)
        book = tl.load(work + heads_at(BINS))
        if stream == 0:
            _write_head(out, work, begin, size, book, streams, BINS)
            if chunk == tl.num_programs(0) - 1:
                tl.store(sizes + tl.num_programs(0), begin + size)
        if book > 0:
            from_byte = begin + 1 + book + 4 * (streams - 1)
            start = tl.load(work + starts_at(BINS) + stream)
            bits = tl.load(work + starts_at(BINS) + stream + 1) - start
            lead = ((8 * from_byte + start) & 31).to(tl.int32)
            word = (8 * from_byte + start) >> 5
            words = (lead + bits + 31) >> 5
            # No code is shorter than a bit, so that 31 symbols more fill the last word.
            ours = here - stream * each
            reach = tl.where(stream < streams - 1, tl.minimum(ours, each + 31), ours)
            if NEAR:
                bins = tl.arange(0, BINS)
                codes = room + BITS
                shared_memory.store(memory, codes + 4 * bins, tl.load(work + codes_at(BINS) + bins), ASM)
            else:
                codes = work + codes_at(BINS)
            at = tl.arange(0, SPAN)
            done = words * 0
            # 20 words more: what those 31 symbols may fill, and what a group reaches beyond its own.
            while 4 * done < words + 20:
                shared_memory.clear16(memory, room + 16 * tl.minimum(done + at, BITS // 16 - 1), ASM)
                done += SPAN
            tl.debug_barrier()
            # Sixteen symbols to a thread: where they begin in their words is the same for all.
            per: tl.constexpr = 32 // SYMBOL
            from_symbol = wide * _CHUNK + stream * each
            source = symbols.to(tl.pointer_type(tl.int32)) + from_symbol // per
            words_here = tl.minimum(n // per - from_symbol // per, 1 << 30).to(tl.int32)
            shift = ((from_symbol % per) * SYMBOL).to(tl.int32)
            rest = words_here * 0
            for k in tl.static_range(per - 1):
                tail = n // per * per + k
                of_rest = tl.load(symbols + tail, mask=tail < n, other=0).to(tl.int32) & ((1 << SYMBOL) - 1)
                rest = rest | (of_rest << (SYMBOL * k))
            lane = tl.arange(0, THREADS)
            place = lead
            done = words * 0
            while done < reach:
                own = done + 16 * lane
                of_word = own // per
                w0 = _word(source, of_word, words_here, rest)
                w1 = _word(source, of_word + 1, words_here, rest)
                w2 = _word(source, of_word + 2, words_here, rest)
                w3 = _word(source, of_word + 3, words_here, rest)
                w4 = _word(source, of_word + 4, words_here, rest)
                w0, _ = shared_memory.drop_bits(w0, w1, shift + lane * 0, ASM)
                w1, _ = shared_memory.drop_bits(w1, w2, shift + lane * 0, ASM)
                w2, _ = shared_memory.drop_bits(w2, w3, shift + lane * 0, ASM)
                w3, _ = shared_memory.drop_bits(w3, w4, shift + lane * 0, ASM)
                if SYMBOL == 8:
                    e0, e1, e2, e3 = _four_codes(w0, own, reach, memory, codes, BINS, NEAR, ASM)
                    e4, e5, e6, e7 = _four_codes(w1, own + 4, reach, memory, codes, BINS, NEAR, ASM)
                    e8, e9, ea, eb = _four_codes(w2, own + 8, reach, memory, codes, BINS, NEAR, ASM)
                    ec, ed, ee, ef = _four_codes(w3, own + 12, reach, memory, codes, BINS, NEAR, ASM)
                else:
                    w5 = _word(source, of_word + 5, words_here, rest)
                    w6 = _word(source, of_word + 6, words_here, rest)
                    w7 = _word(source, of_word + 7, words_here, rest)
                    w8 = _word(source, of_word + 8, words_here, rest)
                    w4, _ = shared_memory.drop_bits(w4, w5, shift + lane * 0, ASM)
                    w5, _ = shared_memory.drop_bits(w5, w6, shift + lane * 0, ASM)
                    w6, _ = shared_memory.drop_bits(w6, w7, shift + lane * 0, ASM)
                    w7, _ = shared_memory.drop_bits(w7, w8, shift + lane * 0, ASM)
                    e0, e1 = _two_codes(w0, own, reach, memory, codes, BINS, NEAR, ASM)
                    e2, e3 = _two_codes(w1, own + 2, reach, memory, codes, BINS, NEAR, ASM)
                    e4, e5 = _two_codes(w2, own + 4, reach, memory, codes, BINS, NEAR, ASM)
                    e6, e7 = _two_codes(w3, own + 6, reach, memory, codes, BINS, NEAR, ASM)
                    e8, e9 = _two_codes(w4, own + 8, reach, memory, codes, BINS, NEAR, ASM)
                    ea, eb = _two_codes(w5, own + 10, reach, memory, codes, BINS, NEAR, ASM)
                    ec, ed = _two_codes(w6, own + 12, reach, memory, codes, BINS, NEAR, ASM)
                    ee, ef = _two_codes(w7, own + 14, reach, memory, codes, BINS, NEAR, ASM)
                count = _lengths(e0, e1) + _lengths(e2, e3) + _lengths(e4, e5) + _lengths(e6, e7)
                count += _lengths(e8, e9) + _lengths(ea, eb) + _lengths(ec, ed) + _lengths(ee, ef)
                bit = place + tl.cumsum(count, 0) - count
                first_word = bit >> 5
                spot = first_word
                filled = bit & 31
                held = tl.zeros((THREADS,), tl.uint64)
                head = tl.zeros((THREADS,), tl.int32)
                first = head + 1
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, e0, e1, ASM)
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, e2, e3, ASM)
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, e4, e5, ASM)
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, e6, e7, ASM)
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, e8, e9, ASM)
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, ea, eb, ASM)
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, ec, ed, ASM)
                held, filled, spot, head, first = _put(memory, room, held, filled, spot, head, first, ee, ef, ASM)
                # Words that others may share: the first, if it is full, and the last.
                shared_memory.put_or(memory, room + 4 * first_word, head, ASM)
                shared_memory.put_or(memory, room + 4 * spot, held.to(tl.uint32).to(tl.int32, bitcast=True), ASM)
                place += tl.sum(count, 0)
                done += 16 * THREADS
            tl.debug_barrier()
            end = begin + size
            done = words * 0
            while done < words:
                index = done + at
                value = shared_memory.load(memory, room + 4 * tl.minimum(index, BITS // 4 - 1), ASM)
                owned = (index < words) & ((32 * index >= lead) | (stream == 0))
                byte = 4 * (word + index)
                whole = owned & (byte >= from_byte) & (byte + 4 <= end)
                tl.store(out.to(tl.pointer_type(tl.int32)) + word + index, value, mask=whole)
                if (4 * (word + done) < from_byte) | (4 * (word + done + SPAN) > end):
                    part = owned & (whole == 0)
                    for k in tl.static_range(4):
                        inside = part & (byte + k >= from_byte) & (byte + k < end)
                        tl.store(out + byte + k, (value >> (8 * k)).to(tl.uint8), mask=inside)
                done += SPAN


def _room_for_bits(bins: int) -> int:
    """Bytes that the bits of the longest stream may take, with what is looked at behind it."""
    longest = min(15, max(12, bins.bit_length() + 2))
    return ((STREAM_LENGTH + 31) * longest // 32 + 32) * 4 // 16 * 16


def count_symbols(symbols: Tensor, cut: Cut) -> Tensor:
    """How often each symbol occurs, by chunk and stream. Symbols lie at a multiple of four bytes."""
    counts = torch.empty((cut.chunks, STREAMS.value, cut.bins), dtype=torch.int32, device=symbols.device)
    copies = min(32, COUNTERS // cut.bins)
    room = Room(4 * cut.bins * copies, cut.chunks * cut.streams, symbols.device)
    _count[(cut.chunks, cut.streams)](
        symbols, counts, room.memory, cut.n, cut.last_streams, cut.last_each,
        BINS=cut.bins, COPIES=copies, SPAN=COUNTED, ASM=room.asm, num_warps=8,
    )  # fmt: skip
    return counts


def plan(counts: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """A record of each chunk, and its bytes; behind these is room for all of them."""
    work = torch.empty((cut.chunks, record_words(cut.bins)), dtype=torch.int32, device=counts.device)
    sizes = torch.empty(cut.chunks + 1, dtype=torch.int64, device=counts.device)
    room = Room(88 * cut.bins, 0, counts.device)
    plan_books[(cut.chunks,)](
        counts, work, sizes, cut.last_streams, BINS=cut.bins, STEPS=cut.steps, RECORD=work.shape[1],
        ROWS=max(1, min(8, 2048 // cut.bins)), ASM=room.asm if cut.bins <= PLANNED else "", num_warps=cut.warps,
    )  # fmt: skip
    return work, sizes


def write_planned(symbols: Tensor, work: Tensor, sizes: Tensor, cut: Cut, out: Tensor) -> None:
    """The directory, and those chunks that are Huffman's or constant by their records, to a multiple of four bytes."""
    bits, near = _room_for_bits(cut.bins), cut.bins <= CLOSE
    room = Room(bits + 4 * cut.bins * near, cut.chunks * cut.streams, symbols.device)
    _write[(cut.chunks, cut.streams)](
        symbols, work, sizes, out, room.memory, cut.n, cut.last_streams, cut.last_each, BINS=cut.bins,
        RECORD=work.shape[1], BITS=bits, SYMBOL=8 * symbols.element_size(), THREADS=32 * WARPS, SPAN=512, NEAR=near,
        ASM=room.asm, num_warps=WARPS,
    )  # fmt: skip


def huffman_write(symbols: Tensor, alphabet: int, out: Tensor) -> Tensor:
    """Writes the section, of symbols below ``alphabet``; gives its bytes, on the device."""
    symbols = words_of(symbols.contiguous())
    cut = Cut.of(symbols.numel(), alphabet)
    aligned = out if out.data_ptr() % 4 == 0 else torch.empty_like(out)
    work, sizes = plan(count_symbols(symbols, cut), cut)
    write_planned(symbols, work, sizes, cut, aligned)
    if aligned is not out:
        out.copy_(aligned)
    return sizes[-1]
