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

from laconic.kernels.sections import CHUNK, num_buckets
from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.huffman_tables import (
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
from laconic.kernels.triton.shared_memory import Room
from laconic.kernels.triton.streams import LANES, STREAMS, Cut, share
from laconic.kernels.triton.tile import exact, keep, words_of

__all__ = ["Opened", "look_up", "open_section", "read_streams"]

_CHUNK = tl.constexpr(CHUNK)
BUSY = 512
"""Programs that keep a device busy."""
PARTS = 32
"""The most parts of a stream."""
SHORT = 1024
"""Symbols of a stream that is not worth it."""
WARM = 1536
"""Bits that a lane reads before its part."""
BLOCKS = tl.constexpr(8)
"""Blocks of 16 bytes that a lane has of its stream, or is waiting for."""
LOOKED_UP = 1024
"""Symbols whose values a program looks up."""


@triton.jit
def _word(memory, ring, word, ASM: tl.constexpr):
    """A word of a lane's stream."""
    block = ((word >> 2) & (BLOCKS - 1)) * (16 * LANES)
    return shared_memory.load(memory, ring + block + 4 * (word & 3), ASM).to(tl.uint32, bitcast=True)


@triton.jit
def _bits(memory, ring, place, ASM: tl.constexpr):
    """64 bits from two before a place on, in halves: so a code's lowest bits are, times four, the entry's address."""
    early = place - 2
    a = _word(memory, ring, early >> 5, ASM)
    b = _word(memory, ring, (early >> 5) + 1, ASM)
    c = _word(memory, ring, (early >> 5) + 2, ASM)
    low, _ = shared_memory.drop_bits(a, b, early, ASM)
    high, _ = shared_memory.drop_bits(b, c, early, ASM)
    return low, high


@triton.jit
def _entry(memory, room, low, high, limits, symbols, LONG: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr):
    """The next symbol, and in the lowest 8 bits the length of its code, which may be LONGer than the table knows."""
    entry = shared_memory.load(memory, room + (low & (4 * PREFIXES - 4)).to(tl.int32, bitcast=True), ASM)
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
    memory, room, ring, place, limits, symbols,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Four symbols, in 32 bits or in 64, and the place behind them."""
    low, high = _bits(memory, ring, place, ASM)
    packed = tl.zeros((LANES,), tl.uint32 if SYMBOL == 8 else tl.uint64)
    for k in tl.static_range(4):
        entry = _entry(memory, room, low, high, limits, symbols, False, BINS, ASM)
        packed = packed | ((entry >> 8).to(packed.dtype) << (SYMBOL * k))
        low, high = shared_memory.drop_bits(low, high, entry, ASM)
        place += entry & 255
    return packed, place


@triton.jit
def _pass_four(
    memory, room, ring, place, begin, stop, entered, count, limits, symbols,
    NUMBER: tl.constexpr, LONG: tl.constexpr, BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Up to four symbols, as far as ``stop``: how many began in between, and where the first of them did."""
    low, high = _bits(memory, ring, place, ASM)
    for _ in tl.static_range(NUMBER):
        entry = _entry(memory, room, low, high, limits, symbols, LONG, BINS, ASM)
        inside = place < stop
        length = tl.where(inside, entry & 255, 0)
        low, high = shared_memory.drop_bits(low, high, length, ASM)
        count += (inside & (place >= begin)).to(tl.int32)
        entered = tl.where(place < begin, place + length, entered)
        place += length
    return place, entered, count


@triton.jit
def _fetch(section, begin, end, memory, ring, place, fetched, ASM: tl.constexpr):
    """A block more where there is room for one: eight symbols leave none or one behind."""
    more = fetched < ((place - 2) >> 7) + BLOCKS
    byte = tl.where(more, 16 * fetched, end)
    target = ring + (fetched & (BLOCKS - 1)) * (16 * LANES)
    shared_memory.fetch16(memory, target, section + byte, byte, begin, end, ASM)
    return fetched + more.to(tl.int32)


@triton.jit
def _next_eight(section, begin, end, memory, ring, place, fetched, ASM: tl.constexpr):
    """So that the bits of eight symbols, which lie in three blocks, are there."""
    fetched = _fetch(section, begin, end, memory, ring, place, fetched, ASM)
    shared_memory.seal(ASM)
    shared_memory.settle(BLOCKS - 3, ASM)
    return fetched


@triton.jit
def _first_eight(section, begin, end, memory, ring, place, ASM: tl.constexpr):
    fetched = (place - 2) >> 7
    for _ in tl.static_range(BLOCKS):
        fetched = _fetch(section, begin, end, memory, ring, place, fetched, ASM)
    shared_memory.seal(ASM)
    shared_memory.settle(0, ASM)
    return fetched


@triton.jit
def _low(packed):
    return packed.to(tl.uint32).to(tl.int32, bitcast=True)


@triton.jit
def _read_round(
    section, begin, end, memory, room, ring, place, fetched, limits, symbols, out, there,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As many symbols as fill 16 bytes, where all of them are there, and the table has their codes."""
    fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ASM)
    a, place = _read_four(memory, room, ring, place, limits, symbols, BINS, SYMBOL, ASM)
    b, place = _read_four(memory, room, ring, place, limits, symbols, BINS, SYMBOL, ASM)
    if SYMBOL == 8:
        fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ASM)
        c, place = _read_four(memory, room, ring, place, limits, symbols, BINS, SYMBOL, ASM)
        d, place = _read_four(memory, room, ring, place, limits, symbols, BINS, SYMBOL, ASM)
        shared_memory.store4(out, _low(a), _low(b), _low(c), _low(d), there, ASM)
    else:
        shared_memory.store4(out, _low(a), _low(a >> 32), _low(b), _low(b >> 32), there, ASM)
    return place, fetched


@triton.jit
def _read_slowly(
    section, begin, end, memory, room, ring, place, fetched, reach, left, ended, limits, symbols, out, there,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """The same for any codes and ``reach`` symbols at most, with the place behind those that are left of the stream.

    One by one: it is rare, and should not be long.
    """
    first = tl.zeros((LANES,), tl.uint64)
    second = first
    number: tl.constexpr = 128 // SYMBOL
    turn = tl.program_id(0) * 0
    turns = tl.minimum(tl.max(reach, 0), number)
    while turn < turns:
        if turn % 8 == 0:
            fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ASM)
        low, high = _bits(memory, ring, place, ASM)
        entry = _entry(memory, room, low, high, limits, symbols, True, BINS, ASM)
        moved = (entry >> 8).to(tl.uint64) << ((turn * SYMBOL) & 63).to(tl.uint64)
        first = tl.where(turn < number // 2, first | moved, first)
        second = tl.where(turn < number // 2, second, second | moved)
        place += tl.where(reach > turn, entry & 255, 0)
        turn += 1
        ended = tl.where((left == turn) & (reach >= turn), place, ended)
    shared_memory.store4(out, _low(first), _low(first >> 32), _low(second), _low(second >> 32), there, ASM)
    return place, fetched, ended


@triton.jit
def _pass_round(
    section, begin, end, memory, room, ring, place, fetched, from_, stop, entered, count, limits, symbols,
    BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    for _ in tl.static_range(2):
        fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ASM)
        for _ in tl.static_range(2):
            place, entered, count = _pass_four(
                memory, room, ring, place, from_, stop, entered, count, limits, symbols, 4, False, BINS, ASM
            )
    return place, fetched, entered, count


@triton.jit
def _pass_slowly(
    section, begin, end, memory, room, ring, place, fetched, from_, stop, entered, count, limits, symbols,
    BINS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    fetched = _next_eight(section, begin, end, memory, ring, place, fetched, ASM)
    turn = tl.program_id(0) * 0
    while turn < 8:
        place, entered, count = _pass_four(
            memory, room, ring, place, from_, stop, entered, count, limits, symbols, 1, True, BINS, ASM
        )
        turn += 1
    return place, fetched, entered, count


@triton.jit
def _start(section, behind, stream, mask):
    """Where a stream begins, by its own word; the first has none."""
    value = tl.zeros((LANES,), tl.int64)
    for k in tl.static_range(4):
        byte = tl.load(section + behind + 4 * (stream - 1) + k, mask=mask & (stream > 0), other=0)
        value = value | (byte.to(tl.int64) << (8 * k))
    return value


@triton.jit
def _open(section, nbytes, skew, known, memory, room, streams, BINS: tl.constexpr, ASM: tl.constexpr):
    """A chunk's table into the room, and where its streams are.

    Places are counted in bits, from ``off`` before the first of them; the section comes back as that place, and with
    the bytes, from there on, at which it begins and ends. It began ``skew`` bytes behind a multiple of 16.
    """
    for first in range(0, PREFIXES, 1024):
        entry = first + tl.arange(0, 1024)
        shared_memory.store(memory, room + 4 * entry, tl.load(known + table_at(BINS) + entry), ASM)
    modes = known + modes_at(BINS)
    begin = tl.load((modes + 6).to(tl.pointer_type(tl.int64)))
    behind = tl.load(modes + 2)
    bits = tl.load(modes + 3)
    size = tl.load(modes + 4)
    stream = tl.arange(0, LANES)
    busy = stream < streams
    size_in_bits = 8 * (size - bits).to(tl.int64)
    start = _start(section + begin, behind, stream, busy)
    before = _start(section + begin, behind, stream - 1, busy & (stream > 0))
    end = _start(section + begin, behind, stream + 1, stream < streams - 1)
    end = tl.where(stream == streams - 1, size_in_bits, end)
    wrong = busy & ((start < before) | (start > size_in_bits))
    # From the block before the one in which the bits begin.
    from_byte = begin + bits + skew
    off = 128 + 8 * (from_byte & 15).to(tl.int32)
    section += from_byte // 16 * 16 - 16 - skew
    first_byte = tl.maximum(skew - from_byte // 16 * 16 + 16, -64).to(tl.int32)
    end_byte = tl.minimum(skew + nbytes - from_byte // 16 * 16 + 16, 1 << 30).to(tl.int32)
    place = tl.where(wrong | (busy == 0), 0, start).to(tl.int32) + off
    tl.debug_barrier()
    return section, first_byte, end_byte, off, place, end, size_in_bits, wrong


@triton.jit(do_not_specialize=["nbytes", "skew", "last_streams"])
def _find_parts(
    section, nbytes, skew, known, parts, memory, last_streams,
    BINS: tl.constexpr, KNOWN: tl.constexpr, WARM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """For each lane of a part: where its first symbol begins, where its last one ends, how many they are."""
    chunk, part = tl.program_id(0), tl.program_id(1)
    wide = chunk.to(tl.int64)
    room = shared_memory.address_of(ASM)
    if ASM == "":
        memory += (wide * tl.num_programs(1) + part) * (PREFIXES + 4 * BLOCKS * LANES)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    known += wide * KNOWN
    if tl.load(known + modes_at(BINS)) == 2:
        section, first_byte, end_byte, off, start, end, size_in_bits, _ = _open(
            section, nbytes, skew, known, memory, room, streams, BINS, ASM
        )
        symbols = known + order_at(BINS)
        limits = known + limits_at(BINS)
        lane = tl.arange(0, LANES)
        ring = room + 4 * PREFIXES + 16 * lane
        stop = tl.where(lane < streams, tl.minimum(end, size_in_bits), 0).to(tl.int32) + off
        span = (tl.maximum(stop - start, 0) + tl.num_programs(1) - 1) // tl.num_programs(1)
        from_ = start + part * span
        until = tl.minimum(from_ + span, stop)
        place = tl.where(part == 0, start, tl.maximum(start, from_ - WARM))
        fetched = _first_eight(section, first_byte, end_byte, memory, ring, place, ASM)
        entered = place
        count = place * 0
        short = tl.load(limits + PREFIX) == 32768  # the table has all codes
        going = tl.max((place < until).to(tl.int32), 0)
        while going > 0:
            if short:
                place, fetched, entered, count = _pass_round(
                    section, first_byte, end_byte, memory, room, ring, place, fetched, from_, until, entered, count,
                    limits, symbols, BINS, ASM,
                )  # fmt: skip
            else:
                place, fetched, entered, count = _pass_slowly(
                    section, first_byte, end_byte, memory, room, ring, place, fetched, from_, until, entered, count,
                    limits, symbols, BINS, ASM,
                )  # fmt: skip
            going = tl.max((place < until).to(tl.int32), 0)
        found = parts + (wide * tl.num_programs(1) + part) * (3 * LANES) + lane
        tl.store(found, entered)
        tl.store(found + LANES, place)
        tl.store(found + 2 * LANES, count)


@triton.jit
def _join_parts(parts, part, PARTS: tl.constexpr):
    """How many symbols are before a part and how many before the next, for each lane; whether all are in step."""
    k = tl.arange(0, PARTS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    found = parts + k * (3 * LANES) + lane
    counts = tl.load(found + 2 * LANES)
    earlier = tl.sum(tl.where(k < part, counts, 0), 0)
    upto = tl.sum(tl.where(k <= part, counts, 0), 0)
    behind = tl.load(found - 2 * LANES, mask=(k > 0) & (lane >= 0), other=0)
    in_step = ((k == 0) | (tl.load(found) == behind)).to(tl.int32)
    return earlier, upto, tl.min(tl.min(in_step, 0), 0)


@triton.jit
def _fill(out, symbol, here, SYMBOL: tl.constexpr, ASM: tl.constexpr):
    """A chunk of one symbol."""
    round_: tl.constexpr = 128 // SYMBOL
    row = tl.arange(0, LANES)
    word = tl.zeros((LANES,), tl.int32) + symbol * (0x01010101 if SYMBOL == 8 else 0x00010001)
    target = out + (tl.program_id(0).to(tl.int64) * (_CHUNK // round_) + row) * 4
    done = here * 0
    while done < here:
        shared_memory.store4(target, word, word, word, word, done + row * round_ < here, ASM)
        target += 4 * LANES
        done += LANES * round_


@triton.jit(do_not_specialize=["n", "nbytes", "skew", "last_streams", "last_each"])
def _read_bits(
    section, nbytes, skew, known, parts, out, memory, verdict, n, last_streams, last_each,
    BINS: tl.constexpr, KNOWN: tl.constexpr, SYMBOL: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A lane for each stream, or for a part of it."""
    chunk, part = tl.program_id(0), tl.program_id(1)
    wide = chunk.to(tl.int64)
    out = out.to(tl.pointer_type(tl.int32))
    room = shared_memory.address_of(ASM)
    if ASM == "":
        memory += (wide * PARTS + part) * (PREFIXES + 4 * BLOCKS * LANES)
    streams, each, here = share(chunk, n, last_streams, last_each)
    known += wide * KNOWN
    mode = tl.load(known + modes_at(BINS))
    if mode == 2:
        section, first_byte, end_byte, off, place, end, size_in_bits, wrong = _open(
            section, nbytes, skew, known, memory, room, streams, BINS, ASM
        )
        symbols = known + order_at(BINS)
        limits = known + limits_at(BINS)
        stream = tl.arange(0, LANES)
        busy = stream < streams
        last = stream == streams - 1
        ring = room + 4 * PREFIXES + 16 * stream
        own = tl.where(busy, tl.minimum(here - stream * each, each), 0)
        if PARTS > 1:
            parts += wide * (PARTS * 3 * LANES)
            earlier, upto, in_step = _join_parts(parts, part, PARTS)
            entered = tl.load(parts + part * (3 * LANES) + stream)
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
        round_: tl.constexpr = 128 // SYMBOL
        # Sixteen bytes belong to the lane whose symbol is their first. It reads on to their end, into the next stream
        # if need be, which follows at once; the next lane passes over as much.
        begins = stream * each + earlier
        row = (begins + round_ - 1) // round_
        reach = tl.where(active, tl.minimum(row * round_, here) - begins, 0)
        left = tl.where(ending, own - earlier, -1)
        ended = place * 0 - 1
        rows = tl.minimum(stream * each + upto + round_ - 1, here + round_ - 1) // round_
        fetched = _first_eight(section, first_byte, end_byte, memory, ring, place, ASM)
        target = out + (wide * (_CHUNK // round_) + tl.where(row < rows, row, 0)) * 4
        if tl.max(reach, 0) > 0:
            place, fetched, ended = _read_slowly(
                section, first_byte, end_byte, memory, room, ring, place, fetched, reach, left, ended, limits, symbols,
                target, stream < 0, BINS, SYMBOL, ASM,
            )  # fmt: skip
        left -= reach
        reach = tl.where(active, tl.minimum(rows * round_, here) - row * round_, 0)
        most = tl.max((reach + round_ - 1) // round_, 0)
        # What all have, if the table has all codes; the place behind a stream's last symbol is found slowly.
        short = tl.load(limits + PREFIX) == 32768
        full = tl.where(ending, left - 1, reach)
        common = tl.where(short, tl.min(tl.where(active, full, 1 << 20), 0) // round_, 0)
        done = most * 0
        while done < most:
            if done < common:
                place, fetched = _read_round(
                    section, first_byte, end_byte, memory, room, ring, place, fetched, limits, symbols, target,
                    reach > 0, BINS, SYMBOL, ASM,
                )  # fmt: skip
            else:
                place, fetched, ended = _read_slowly(
                    section, first_byte, end_byte, memory, room, ring, place, fetched, reach, left, ended, limits,
                    symbols, target, reach > 0, BINS, SYMBOL, ASM,
                )  # fmt: skip
            target += 4
            left -= round_
            reach -= round_
            done += 1
        behind_last = (ended - off).to(tl.int64)
        wrong = wrong | (ending & (last == 0) & (behind_last != end))
        past = (behind_last > size_in_bits) | (behind_last <= size_in_bits - 8)
        unused = tl.minimum(tl.maximum(size_in_bits - behind_last, 0), 7)
        final = tl.load(section + ((off + size_in_bits) >> 3) - 1).to(tl.int64)
        wrong = wrong | (ending & last & (past | ((final >> (8 - unused)) != 0)))
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
    if (mode == 0) & (part == 0):
        _fill(out, tl.load(known + modes_at(BINS) + 1), here, SYMBOL, ASM)


class Opened(NamedTuple):
    """A section whose books have been read, all on the device."""

    cut: Cut
    section: Tensor
    known: Tensor
    verdict: Tensor
    """Not 0 for a section that no coder wrote; behind it a bit for each mode that occurs."""


def _parts(cut: Cut) -> int:
    """A power of two. With two, reading everything twice, nothing would be won."""
    most = min(PARTS, BUSY // cut.chunks)
    return 1 if cut.longest < SHORT or most < 4 else 1 << (most.bit_length() - 1)


def open_section(section: Tensor, n: int, alphabet: int) -> Opened | None:
    """What its books say; None where the section is too short for its directory."""
    cut, device = Cut.of(n, alphabet), section.device
    if section.numel() < 5 * cut.chunks:
        return None
    section = words_of(section.contiguous())
    verdict = torch.zeros(2, dtype=torch.int32, device=device)
    known = torch.empty((cut.chunks, known_words(cut.bins)), dtype=torch.int32, device=device)
    read_books[(cut.chunks,)](
        section, section.numel(), known, verdict, alphabet, cut.last_streams,
        BINS=cut.bins, KNOWN=known.shape[1], num_warps=max(4, cut.warps),
    )  # fmt: skip
    return Opened(cut, section, known, verdict)


def read_streams(opened: Opened, symbols: Tensor) -> None:
    """Chunks of Huffman's code, and constant ones, into their part of ``symbols``, which have whole blocks of 16."""
    cut, section, known, verdict = opened
    parts = _parts(cut)
    programs, skew = (cut.chunks, parts), section.data_ptr() % 16
    room = Room(4 * PREFIXES.value + 16 * BLOCKS.value * LANES.value, cut.chunks * parts, section.device)
    found = verdict
    if parts > 1:
        found = torch.empty((*programs, 3, LANES.value), dtype=torch.int32, device=section.device)
        _find_parts[programs](
            section, section.numel(), skew, known, found, room.memory, cut.last_streams,
            BINS=cut.bins, KNOWN=known.shape[1], WARM=WARM, ASM=room.asm, num_warps=1,
        )  # fmt: skip
    _read_bits[programs](
        section, section.numel(), skew, known, found, symbols, room.memory, verdict, cut.n, cut.last_streams,
        cut.last_each, BINS=cut.bins, KNOWN=known.shape[1], SYMBOL=8 * symbols.element_size(), PARTS=parts,
        ASM=room.asm, num_warps=1,
    )  # fmt: skip


@triton.jit(do_not_specialize=["alphabet", "modes"])
def _look_up(
    symbols, verdict, table, out, n, alphabet, modes, weight,
    BINS: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """The values that symbols stand for, unless the section is to be refused, or has modes that were not read."""
    if (tl.load(verdict) == 0) & ((tl.load(verdict + 1) | modes) == modes):
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


def look_up(opened: Opened, symbols: Tensor, modes: int, table: Tensor, out: Tensor, weight: float | None) -> None:
    """Values of symbols into ``out``, or added to it ``weight`` times, if all chunks are of these modes."""
    n, bins = out.numel(), max(32, 1 << (table.numel() - 1).bit_length())
    _look_up[(num_buckets(n, LOOKED_UP),)](
        symbols, opened.verdict, table, out, n, table.numel(), modes, weight or 0.0,
        BINS=bins, SPAN=LOOKED_UP, ADD=weight is not None, **exact(num_warps=4),
    )  # fmt: skip
