"""Huffman's code read on a GPU: a program for each chunk, a lane for each of its streams, symbol after symbol.

What counts is how many cycles a lane waits for a symbol: for one look into a table in shared memory and a shift. What
it needs of the section is called for long before.

A large tensor has as many chunks as the device has room for. The streams of a small one are cut into parts, with a lane
for each. A lane begins somewhat early, wherever that is: after some symbols it is in step with the code, as happens
with prefix codes. It reads its part once to see where it came into step and how many symbols that makes, and again to
write them. Should a lane not be in step with the one before it, those of the first parts read all.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import CHUNK, num_buckets, symbol_dtype
from laconic.kernels.triton import shared
from laconic.kernels.triton.books import (
    PREFIX,
    PREFIXES,
    known_words,
    limits_at,
    modes_at,
    order_at,
    read_books,
    reverse32,
    table_at,
)
from laconic.kernels.triton.parts import exact, keep, words_of
from laconic.kernels.triton.shared import Room
from laconic.kernels.triton.streams import LANES, Cut, share

__all__ = ["Decoded", "huffman_read", "look_up"]

_CHUNK = tl.constexpr(CHUNK)
MANY = 160
"""Chunks that keep the device busy without being cut."""
SHORT = 1024
"""Symbols of a stream that is not worth it."""
PARTS = 8
WARM = 1536
"""Bits that a lane reads before its part."""
LOOKED_UP = 4096
"""Symbols whose values a program looks up."""


@triton.jit
def _word(memory, ring, word, ALL: tl.constexpr, BLOCKS: tl.constexpr, ASM: tl.constexpr):
    """A word of a lane's stream."""
    block = ((word >> 2) & (BLOCKS - 1)) * (16 * ALL)
    return shared.load(memory, ring + block + 4 * (word & 3), ASM).to(tl.uint32, bitcast=True)


@triton.jit
def _bits(memory, ring, place, ALL: tl.constexpr, BLOCKS: tl.constexpr, ASM: tl.constexpr):
    """64 bits from two before a place on, in halves: so a code's lowest bits are, times four, the entry's address."""
    early = place - 2
    a = _word(memory, ring, early >> 5, ALL, BLOCKS, ASM)
    b = _word(memory, ring, (early >> 5) + 1, ALL, BLOCKS, ASM)
    c = _word(memory, ring, (early >> 5) + 2, ALL, BLOCKS, ASM)
    low, _ = shared.drop_bits(a, b, early, ASM)
    high, _ = shared.drop_bits(b, c, early, ASM)
    return low, high


@triton.jit
def _entry(memory, room, low, high, limits, symbols, LONG: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr):
    """The next symbol, and in the lowest 8 bits the length of its code, which may be LONGer than the table knows."""
    entry = shared.load(memory, room + (low & (4 * PREFIXES - 4)).to(tl.int32, bitcast=True), ASM)
    if LONG:
        long = entry == 0
        window = (reverse32((low >> 2) | (high << 30)) >> 17).to(tl.int32)
        more = PREFIX + 1 + (window >= tl.load(limits + 13)).to(tl.int32)
        more += (window >= tl.load(limits + 14)).to(tl.int32)
        at = (window >> (15 - more)) + tl.load(limits + 16 + more)
        found = tl.load(symbols + tl.minimum(tl.maximum(at, 0), BINS - 1), mask=long, other=0)
        entry = tl.where(long, (found << 8) | more, entry)
    return entry


@triton.jit
def _read_four(
    memory, room, ring, place, limits, symbols, ALL: tl.constexpr, BLOCKS: tl.constexpr,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Four symbols, in 32 bits or in 64, and the place behind them."""
    low, high = _bits(memory, ring, place, ALL, BLOCKS, ASM)
    packed = tl.zeros((ALL,), tl.uint32 if SYMBOL == 8 else tl.uint64)
    for k in tl.static_range(4):
        entry = _entry(memory, room, low, high, limits, symbols, False, BINS, ASM)
        packed = packed | ((entry >> 8).to(packed.dtype) << (SYMBOL * k))
        low, high = shared.drop_bits(low, high, entry, ASM)
        place += entry & 255
    return packed, place


@triton.jit
def _pass_four(
    memory, room, ring, place, begin, stop, entered, count, limits, symbols, ALL: tl.constexpr, BLOCKS: tl.constexpr,
    NUMBER: tl.constexpr, LONG: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Up to four symbols, as far as ``stop``: how many began in between, and where the first of them did."""
    low, high = _bits(memory, ring, place, ALL, BLOCKS, ASM)
    for _ in tl.static_range(NUMBER):
        entry = _entry(memory, room, low, high, limits, symbols, LONG, BINS, ASM)
        inside = place < stop
        length = tl.where(inside, entry & 255, 0)
        low, high = shared.drop_bits(low, high, length, ASM)
        count += (inside & (place >= begin)).to(tl.int32)
        entered = tl.where(place < begin, place + length, entered)
        place += length
    return place, entered, count


@triton.jit
def _fetch(
    section, begin, end, memory, ring, place, fetched, ALL: tl.constexpr, BLOCKS: tl.constexpr, ASM: tl.constexpr
):
    """A block more where there is room for one: eight symbols leave none or one behind."""
    more = fetched < ((place - 2) >> 7) + BLOCKS
    byte = tl.where(more, 16 * fetched, end)
    target = ring + (fetched & (BLOCKS - 1)) * (16 * ALL)
    shared.fetch16(memory, target, section + byte, byte, begin, end, ASM)
    return fetched + more.to(tl.int32)


@triton.jit
def _next_eight(
    section, begin, end, memory, ring, place, fetched, ALL: tl.constexpr, BLOCKS: tl.constexpr, ASM: tl.constexpr
):
    """So that the bits of eight symbols, which lie in three blocks, are there."""
    fetched = _fetch(section, begin, end, memory, ring, place, fetched, ALL, BLOCKS, ASM)
    shared.seal(ASM)
    shared.settle(BLOCKS - 3, ASM)
    return fetched


@triton.jit
def _first_eight(section, begin, end, memory, ring, place, ALL: tl.constexpr, BLOCKS: tl.constexpr, ASM: tl.constexpr):
    fetched = (place - 2) >> 7
    for _ in tl.static_range(BLOCKS):
        fetched = _fetch(section, begin, end, memory, ring, place, fetched, ALL, BLOCKS, ASM)
    shared.seal(ASM)
    shared.settle(0, ASM)
    return fetched


@triton.jit
def _low(packed):
    return packed.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _read_round(
    section, begin, end, memory, room, ring, place, fetched, limits, symbols, out, there,
    ALL: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As many symbols as fill 16 bytes, where all of them are there, and the table has their codes."""
    fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ALL, BLOCKS, ASM)
    a, place = _read_four(memory, room, ring, place, limits, symbols, ALL, BLOCKS, BINS, SYMBOL, ASM)
    b, place = _read_four(memory, room, ring, place, limits, symbols, ALL, BLOCKS, BINS, SYMBOL, ASM)
    if SYMBOL == 8:
        fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ALL, BLOCKS, ASM)
        c, place = _read_four(memory, room, ring, place, limits, symbols, ALL, BLOCKS, BINS, SYMBOL, ASM)
        d, place = _read_four(memory, room, ring, place, limits, symbols, ALL, BLOCKS, BINS, SYMBOL, ASM)
        shared.store4(out, _low(a), _low(b), _low(c), _low(d), there, ASM)
    else:
        shared.store4(out, _low(a), _low(a >> 32), _low(b), _low(b >> 32), there, ASM)
    return place, fetched


@triton.jit
def _read_slowly(
    section, begin, end, memory, room, ring, place, fetched, reach, left, ended, limits, symbols, out, there,
    ALL: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The same for any codes and ``reach`` symbols at most, with the place behind those that are left of the stream.

    One by one: it is rare, and should not be long.
    """
    first = tl.zeros((ALL,), tl.uint64)
    second = first
    number: tl.constexpr = 128 // SYMBOL
    turn = tl.program_id(0) * 0
    turns = tl.minimum(tl.max(reach, 0), number)
    while turn < turns:
        if turn % 8 == 0:
            fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ALL, BLOCKS, ASM)
        low, high = _bits(memory, ring, place, ALL, BLOCKS, ASM)
        entry = _entry(memory, room, low, high, limits, symbols, True, BINS, ASM)
        moved = (entry >> 8).to(tl.uint64) << ((turn * SYMBOL) & 63).to(tl.uint64)
        first = tl.where(turn < number // 2, first | moved, first)
        second = tl.where(turn < number // 2, second, second | moved)
        place += tl.where(reach > turn, entry & 255, 0)
        turn += 1
        ended = tl.where((left == turn) & (reach >= turn), place, ended)
    shared.store4(out, _low(first), _low(first >> 32), _low(second), _low(second >> 32), there, ASM)
    return place, fetched, ended


@triton.jit
def _pass_round(
    section, begin, end, memory, room, ring, place, fetched, from_, stop, entered, count, limits, symbols,
    ALL: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    for _ in tl.static_range(2):
        fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ALL, BLOCKS, ASM)
        for _ in tl.static_range(2):
            place, entered, count = _pass_four(
                memory,
                room,
                ring,
                place,
                from_,
                stop,
                entered,
                count,
                limits,
                symbols,
                ALL,
                BLOCKS,
                4,
                False,
                BINS,
                ASM,
            )
    return place, fetched, entered, count


@triton.jit
def _pass_slowly(
    section, begin, end, memory, room, ring, place, fetched, from_, stop, entered, count, limits, symbols,
    ALL: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ALL, BLOCKS, ASM)
    turn = tl.program_id(0) * 0
    while turn < 8:
        place, entered, count = _pass_four(
            memory, room, ring, place, from_, stop, entered, count, limits, symbols, ALL, BLOCKS, 1, True, BINS, ASM
        )
        turn += 1
    return place, fetched, entered, count


@triton.jit
def _find_parts(
    section, begin, end, memory, room, ring, exchange, stream, part, start, stop, limits, symbols, short,
    PARTS: tl.constexpr, WARM: tl.constexpr, ALL: tl.constexpr, BLOCKS: tl.constexpr, BINS: tl.constexpr,
    ASM: tl.constexpr,
):  # fmt: skip
    """Where each part begins, how many symbols are before it and how many before the next; whether all is in step."""
    span = (tl.maximum(stop - start, 0) + PARTS - 1) // PARTS
    from_ = start + part * span
    until = tl.minimum(from_ + span, stop)
    place = tl.where(part == 0, start, tl.maximum(start, from_ - WARM))
    fetched = _first_eight(section, begin, end, memory, ring, place, ALL, BLOCKS, ASM)
    entered = place
    count = place * 0
    going = tl.max((place < until).to(tl.int32), 0)
    while going > 0:
        if short:
            place, fetched, entered, count = _pass_round(
                section, begin, end, memory, room, ring, place, fetched, from_, until, entered, count, limits, symbols,
                ALL, BLOCKS, BINS, ASM,
            )  # fmt: skip
        else:
            place, fetched, entered, count = _pass_slowly(
                section, begin, end, memory, room, ring, place, fetched, from_, until, entered, count, limits, symbols,
                ALL, BLOCKS, BINS, ASM,
            )  # fmt: skip
        going = tl.max((place < until).to(tl.int32), 0)
    own = exchange + 4 * tl.arange(0, ALL)
    shared.store(memory, own, entered, ASM)
    shared.store(memory, own + 4 * ALL, place, ASM)
    shared.store(memory, own + 8 * ALL, count, ASM)
    shared.settle(0, ASM)
    tl.debug_barrier()
    others = exchange + 4 * stream
    behind = shared.load(memory, others + 4 * ALL, ASM)
    before = tl.zeros((ALL,), tl.int32)
    upto = shared.load(memory, others + 8 * ALL, ASM)
    in_step = tl.zeros((ALL,), tl.int32) + 1
    for k in tl.static_range(1, PARTS):
        others += 4 * LANES
        in_step = in_step & (shared.load(memory, others, ASM) == behind).to(tl.int32)
        behind = shared.load(memory, others + 4 * ALL, ASM)
        before = tl.where(part == k, upto, before)
        upto += tl.where(part >= k, shared.load(memory, others + 8 * ALL, ASM), 0)
    return entered, before, upto, tl.min(in_step, 0)


@triton.jit
def _start(section, behind, stream, mask, ALL: tl.constexpr):
    """Where a stream begins, by its own word; the first has none."""
    value = tl.zeros((ALL,), tl.int64)
    for k in tl.static_range(4):
        byte = tl.load(section + behind + 4 * (stream - 1) + k, mask=mask & (stream > 0), other=0)
        value = value | (byte.to(tl.int64) << (8 * k))
    return value


@triton.jit
def _fill(out, symbol, here, ALL: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr):
    """A chunk of one symbol."""
    round_: tl.constexpr = 128 // SYMBOL
    row = tl.arange(0, ALL)
    word = tl.zeros((ALL,), tl.int32) + symbol * (0x01010101 if SYMBOL == 8 else 0x00010001)
    target = out + (tl.program_id(0).to(tl.int64) * (_CHUNK // round_) + row) * 4
    done = here * 0
    while done < here:
        shared.store4(target, word, word, word, word, done + row * round_ < here, ASM)
        target += 4 * ALL
        done += ALL * round_


@triton.jit(do_not_specialize=["n", "nbytes", "skew", "last_streams", "last_each"])
def _read_bits(
    section, nbytes, skew, known, out, memory, verdict, n, last_streams, last_each,
    BINS: tl.constexpr, KNOWN: tl.constexpr, SYMBOL: tl.constexpr, PARTS: tl.constexpr, WARM: tl.constexpr,
    BLOCKS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A lane for each part of a stream, which has BLOCKS of 16 bytes of it, or is waiting for them.

    The section begins ``skew`` bytes behind a multiple of 16.
    """
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    out = out.to(tl.pointer_type(tl.int32))
    room = shared.address_of(ASM)
    lanes: tl.constexpr = PARTS * LANES
    if ASM == "":
        memory += wide * (PREFIXES + (4 * BLOCKS + 3) * lanes)
    streams, each, here = share(chunk, n, last_streams, last_each)
    known += wide * KNOWN
    modes = known + modes_at(BINS)
    if tl.load(modes) == 2:
        lane = tl.arange(0, lanes)
        stream = lane % LANES
        part = lane // LANES
        for first in range(0, PREFIXES, 1024):
            entry = first + tl.arange(0, 1024)
            shared.store(memory, room + 4 * entry, tl.load(known + table_at(BINS) + entry), ASM)

        begin = tl.load((modes + 6).to(tl.pointer_type(tl.int64)))
        behind = tl.load(modes + 2)
        bits = tl.load(modes + 3)
        size = tl.load(modes + 4)
        busy = stream < streams
        last = stream == streams - 1
        size_in_bits = 8 * (size - bits).to(tl.int64)
        start = _start(section + begin, behind, stream, busy, lanes)
        before = _start(section + begin, behind, stream - 1, busy & (stream > 0), lanes)
        end = _start(section + begin, behind, stream + 1, stream < streams - 1, lanes)
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
        ring = room + 4 * PREFIXES + 16 * lane
        symbols = known + order_at(BINS)
        limits = known + limits_at(BINS)
        short = tl.load(limits + PREFIX) == 32768  # the table has all codes
        round_: tl.constexpr = 128 // SYMBOL
        tl.debug_barrier()

        place = start + off
        own = tl.where(busy, tl.minimum(here - stream * each, each), 0)
        if PARTS > 1:
            stop = tl.where(busy, tl.minimum(end, size_in_bits), 0).to(tl.int32) + off
            exchange = room + 4 * PREFIXES + 16 * BLOCKS * lanes
            entered, earlier, upto, in_step = _find_parts(
                section, first_byte, end_byte, memory, room, ring, exchange, stream, part, place, stop, limits, symbols,
                short, PARTS, WARM, lanes, BLOCKS, BINS, ASM,
            )  # fmt: skip
            place = tl.where(in_step > 0, entered, place)
            earlier = tl.where(in_step > 0, earlier, 0)
            active = busy & tl.where(in_step > 0, earlier < own, part == 0)
            # Bits that fill the last byte may look like further symbols.
            ending = active & ((in_step == 0) | (upto >= own) | (part == PARTS - 1))
            upto = tl.where(ending, own, upto)
        else:
            ending = busy
            active = busy
            earlier = own * 0
            upto = own
        # Sixteen bytes belong to the lane whose symbol is their first. It reads on to their end, into the next stream
        # if need be, which follows at once; the next lane passes over as much.
        begins = stream * each + earlier
        row = (begins + round_ - 1) // round_
        reach = tl.where(active, tl.minimum(row * round_, here) - begins, 0)
        left = tl.where(ending, own - earlier, -1)
        ended = place * 0 - 1
        rows = tl.minimum(stream * each + upto + round_ - 1, here + round_ - 1) // round_
        fetched = _first_eight(section, first_byte, end_byte, memory, ring, place, lanes, BLOCKS, ASM)
        target = out + (wide * (_CHUNK // round_) + tl.where(row < rows, row, 0)) * 4
        if tl.max(reach, 0) > 0:
            place, fetched, ended = _read_slowly(
                section, first_byte, end_byte, memory, room, ring, place, fetched, reach, left, ended, limits, symbols,
                target, lane < 0, lanes, BLOCKS, BINS, SYMBOL, ASM,
            )  # fmt: skip
        left -= reach
        reach = tl.where(active, tl.minimum(rows * round_, here) - row * round_, 0)
        most = tl.max((reach + round_ - 1) // round_, 0)
        # What all have, if the table has all codes; the place behind a stream's last symbol is found slowly.
        full = tl.where(ending, left - 1, reach)
        common = tl.where(short, tl.min(tl.where(active, full, 1 << 20), 0) // round_, 0)
        done = most * 0
        while done < most:
            if done < common:
                place, fetched = _read_round(
                    section, first_byte, end_byte, memory, room, ring, place, fetched, limits, symbols, target,
                    reach > 0, lanes, BLOCKS, BINS, SYMBOL, ASM,
                )  # fmt: skip
            else:
                place, fetched, ended = _read_slowly(
                    section, first_byte, end_byte, memory, room, ring, place, fetched, reach, left, ended, limits,
                    symbols, target, reach > 0, lanes, BLOCKS, BINS, SYMBOL, ASM,
                )  # fmt: skip
            target += 4
            left -= round_
            reach -= round_
            done += 1
        behind_last = (ended - off).to(tl.int64)
        wrong = wrong | (ending & (last == 0) & (behind_last != end))
        past = (behind_last > size_in_bits) | (behind_last <= size_in_bits - 8)
        unused = tl.minimum(tl.maximum(size_in_bits - behind_last, 0), 7)
        wrong = wrong | (ending & last & (past | ((final >> (8 - unused)) != 0)))
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
    if tl.load(modes) == 0:
        _fill(out, tl.load(modes + 1), here, PARTS * LANES, SYMBOL, ASM)


class Decoded(NamedTuple):
    """Symbols of a section, and whether to trust them, both on the device."""

    symbols: Tensor
    verdict: Tensor
    """0 for a section that is whole; the first bit for one that no coder wrote, the second for one with other modes."""


def huffman_read(section: Tensor, n: int, alphabet: int) -> Decoded | None:
    """Its symbols; None where the section is too short for its directory."""
    cut, device = Cut.of(n, alphabet), section.device
    if section.numel() < 5 * cut.chunks:
        return None
    section = words_of(section.contiguous())
    verdict = torch.zeros(1, dtype=torch.int32, device=device)
    known = torch.empty((cut.chunks, known_words(cut.bins)), dtype=torch.int32, device=device)
    read_books[(cut.chunks,)](
        section, section.numel(), known, verdict, alphabet, cut.last_streams,
        BINS=cut.bins, KNOWN=known.shape[1], num_warps=max(4, cut.warps),
    )  # fmt: skip
    symbols = torch.empty(num_buckets(n, 16) * 16, dtype=symbol_dtype(alphabet), device=device)
    parts = 1 if cut.chunks >= MANY or cut.longest < SHORT else PARTS
    blocks = 8 if parts == 1 else 4
    room = Room(4 * PREFIXES.value + (16 * blocks + 12) * parts * LANES.value, cut.chunks, device)
    _read_bits[(cut.chunks,)](
        section, section.numel(), section.data_ptr() % 16, known, symbols, room.memory, verdict,
        n, cut.last_streams, cut.last_each, BINS=cut.bins, KNOWN=known.shape[1],
        SYMBOL=8 * symbols.element_size(), PARTS=parts, WARM=WARM, BLOCKS=blocks, ASM=room.asm, num_warps=parts,
    )  # fmt: skip
    return Decoded(symbols[:n], verdict)


@triton.jit(do_not_specialize=["alphabet"])
def _look_up(
    symbols, verdict, table, out, n, alphabet, weight, BINS: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr
):
    """The values that symbols stand for, unless the section is to be refused."""
    if tl.load(verdict) == 0:
        begin = tl.program_id(0).to(tl.int64) * SPAN
        at = tl.arange(0, SPAN)
        symbol = tl.load(symbols + begin + at, mask=begin + at < n, other=0).to(tl.int32) & (BINS - 1)
        if BINS <= 512:
            bins = tl.arange(0, BINS)
            value = tl.gather(tl.load(table + bins, mask=bins < alphabet, other=0.0), symbol, 0)
        else:
            value = tl.load(table + tl.minimum(symbol, alphabet - 1))
        if begin + SPAN <= n:
            keep(out, at, begin, n, value, weight, ADD, False)
        else:
            keep(out, at, begin, n, value, weight, ADD, True)


def look_up(decoded: Decoded, table: Tensor, out: Tensor, weight: float | None) -> None:
    n, bins = out.numel(), max(32, 1 << (table.numel() - 1).bit_length())
    _look_up[(num_buckets(n, LOOKED_UP),)](
        decoded.symbols, decoded.verdict, table.to(out.device), out, n, table.numel(), weight or 0.0,
        BINS=bins, SPAN=LOOKED_UP, ADD=weight is not None, **exact(num_warps=4),
    )  # fmt: skip
