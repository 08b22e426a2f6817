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
from laconic.kernels.triton.streams import LANES, STREAMS, Cut, share

__all__ = ["Decoded", "arrange_floats", "arrange_symbols", "huffman_read"]

_CHUNK = tl.constexpr(CHUNK)
AHEAD = 32
"""Words from a lane's place to the one that it calls into the cache, whenever it has come to another sector of 8."""
COLUMNS = 128
"""Symbols of each stream that are put in order at once."""


@triton.jit
def _word(words, at, whole, rest, need):
    """A word of the section; the last one, ``rest``, may have less than four bytes, and stands for all behind it."""
    return tl.load(words + at, mask=need & (at < whole), other=rest)


@triton.jit
def _read_round(
    words, rest, whole, room, memory, limits, symbols, out, left, held, count, word, following, second,
    GENERAL: tl.constexpr, BINS: tl.constexpr, SYMBOL: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """As many symbols as fill four words. In GENERAL, streams may end and codes be longer than the table knows.

    ``held`` has the next ``count`` bits, lowest first, 32 at least but for the length of one code; the words behind them
    are ``following`` and ``second``, and ``word`` is the place of the one behind those.
    """
    per: tl.constexpr = 32 // SYMBOL
    packed = left * 0
    first = packed
    middle = packed
    third = packed
    for k in tl.static_range(4 * per):
        entry = shared.load(memory, room + ((held & (PREFIXES - 1)).to(tl.int32) << 2), ASM)
        need = count <= 32
        held = held | tl.where(need, following.to(tl.uint32, bitcast=True).to(tl.uint64) << count.to(tl.uint64), 0)
        count += tl.where(need, 32, 0)
        following = tl.where(need, second, following)
        second = _word(words, word, whole, tl.where(need, rest, second), need)
        word += need.to(tl.int32)
        length = entry & 15
        symbol = entry >> 4
        if GENERAL:
            long = length == 0
            window = (reverse32(held.to(tl.uint32)) >> 17).to(tl.int32)
            more = PREFIX + 1 + (window >= tl.load(limits + 13)).to(tl.int32) + (window >= tl.load(limits + 14)).to(tl.int32)
            place = (window >> (15 - more)) + tl.load(limits + 16 + more)
            found = tl.load(symbols + tl.minimum(tl.maximum(place, 0), BINS - 1), mask=long, other=0).to(tl.int32)
            symbol = tl.where(long, found, symbol)
            length = tl.where(left > k, tl.where(long, more, length), 0)
        held = held >> length.to(tl.uint64)
        count -= length
        packed = packed | (symbol << (SYMBOL * (k % per)))
        if k == per - 1:
            first = packed
        if k == 2 * per - 1:
            middle = packed
        if k == 3 * per - 1:
            third = packed
        if k % per == per - 1:
            if k < 4 * per - 1:
                packed = left * 0
    shared.store4(out + 4 * tl.arange(0, LANES), first, middle, third, packed, ASM)
    return held, count, word, following, second


@triton.jit
def _start(section, behind, stream, mask):
    """Where a stream begins, by its own word; the first has none."""
    value = tl.zeros((LANES,), tl.int64)
    for k in tl.static_range(4):
        byte = tl.load(section + behind + 4 * (stream - 1) + k, mask=mask & (stream > 0), other=0)
        value = value | (byte.to(tl.int64) << (8 * k))
    return value


@triton.jit(do_not_specialize=["n", "nbytes", "last_streams", "last_each", "rounds"])
def _read_bits(
    section, nbytes, bounds, symbols, tables, limits, heads, out, memory, verdict, n, last_streams, last_each, rounds,
    BINS: tl.constexpr, SYMBOL: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """A lane for each stream; idle ones follow the first."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    room = shared.address_of(ASM)
    if ASM == "":
        memory += wide * PREFIXES
    streams, each, here = share(chunk, n, last_streams, last_each)
    if tl.load(heads + 4 * wide) == 2:
        lane = tl.arange(0, LANES)
        tables += wide * PREFIXES
        entry = tl.arange(0, PREFIXES // 2)
        shared.store(memory, room + 4 * entry, tl.load(tables + entry), ASM)
        entry += PREFIXES // 2
        shared.store(memory, room + 4 * entry, tl.load(tables + entry), ASM)

        begin = tl.load(bounds + chunk)
        behind = tl.load(heads + 4 * wide + 2)
        size = (tl.load(bounds + chunk + 1) - begin).to(tl.int32)
        bits = tl.load(heads + 4 * wide + 3)
        words = section.to(tl.pointer_type(tl.int32)) + ((begin + bits) >> 2)
        whole = tl.minimum((nbytes >> 2) - ((begin + bits) >> 2), 1 << 30).to(tl.int32)
        rest = chunk * 0
        for k in tl.static_range(3):
            byte = (nbytes >> 2) * 4 + k
            rest = rest | (tl.load(section + byte, mask=byte < nbytes, other=0).to(tl.int32) << (8 * k))
        section += begin
        busy = lane < streams
        last = lane == streams - 1
        size_in_bits = 8 * (size - bits).to(tl.int64)
        start = _start(section, behind, lane, busy)
        before = _start(section, behind, lane - 1, busy & (lane > 0))
        end = _start(section, behind, lane + 1, lane < streams - 1)
        end = tl.where(last, size_in_bits, end)
        wrong = busy & ((start < before) | (start > size_in_bits))
        start = tl.where(wrong | (busy == 0), 0, start).to(tl.int32)

        # Places are counted from the word in which the bits begin.
        off = 8 * ((begin + bits) & 3).to(tl.int32)
        place = start + off
        word = place >> 5
        always = lane >= 0
        held = _word(words, word, whole, rest, always).to(tl.uint32, bitcast=True).to(tl.uint64)
        held = held >> (place & 31).to(tl.uint64)
        count = 32 - (place & 31)
        # 32 bits at least, before the first look.
        more = _word(words, word + 1, whole, rest, always).to(tl.uint32, bitcast=True).to(tl.uint64)
        held = held | (more << count.to(tl.uint64))
        count += 32
        following = _word(words, word + 2, whole, rest, always)
        second = _word(words, word + 3, whole, rest, always)
        word += 4

        symbols += wide * BINS
        limits += wide * 32
        out += wide * rounds * (4 * LANES)
        left = tl.where(busy, tl.minimum(here - lane * each, each), 0)
        sector = word * 0 - 1
        round_: tl.constexpr = 128 // SYMBOL
        # What all streams have, if the table has all codes.
        common = tl.where(tl.load(limits + PREFIX) == 32768, here - (streams - 1) * each, 0)
        tl.debug_barrier()
        done = each * 0
        while done + round_ <= common:
            ahead = (word >> 3 != sector) & (word + AHEAD < whole)
            shared.prefetch(words + word + AHEAD, ahead, ASM)
            sector = word >> 3
            held, count, word, following, second = _read_round(
                words, rest, whole, room, memory, limits, symbols, out, left, held, count, word, following, second,
                False, BINS, SYMBOL, ASM,
            )  # fmt: skip
            out += 4 * LANES
            done += round_
        left -= done
        while done < each:
            held, count, word, following, second = _read_round(
                words, rest, whole, room, memory, limits, symbols, out, left, held, count, word, following, second,
                True, BINS, SYMBOL, ASM,
            )  # fmt: skip
            out += 4 * LANES
            left -= round_
            done += round_
        place = (32 * (word - 2) - count - off).to(tl.int64)
        wrong = wrong | (busy & (last == 0) & (place != end))
        wrong = wrong | (last & ((place > size_in_bits) | (place <= size_in_bits - 8)))
        final = tl.load(section + size - 1).to(tl.int64)
        unused = tl.minimum(tl.maximum(size_in_bits - place, 0), 7)
        wrong = wrong | (last & ((final >> (8 - unused)) != 0))
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")


class Decoded(NamedTuple):
    """Symbols of a section as its lanes left them: by chunk, then 16 bytes of each lane in turn."""

    cut: Cut
    packed: Tensor
    heads: Tensor
    verdict: Tensor
    """Not 0 where they are not to be used."""


def huffman_read(section: Tensor, n: int, alphabet: int) -> Decoded | None:
    """The symbols, still out of order; None where the section is too short for its directory."""
    cut, device = Cut.of(n, alphabet), section.device
    if section.numel() < 5 * cut.chunks:
        return None
    section = words_of(section.contiguous())
    verdict = torch.zeros(1, dtype=torch.int32, device=device)
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
    room = Room(4 * PREFIXES.value, cut.chunks, device)
    _read_bits[(cut.chunks,)](
        section, section.numel(), bounds, symbols, tables, limits, heads, packed, room.memory, verdict,
        n, cut.last_streams, cut.last_each, rounds, BINS=cut.bins, SYMBOL=symbol_bits, AHEAD=AHEAD, ASM=room.asm,
        num_warps=1,
    )  # fmt: skip
    return Decoded(cut, packed, heads, verdict)


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
    if (tl.load(verdict) == 0) & (column < each):
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


def _launch(decoded: Decoded, alphabet: int, table: Tensor | None, out: Tensor, weight: float | None) -> None:
    cut, packed = decoded.cut, decoded.packed
    _arrange[(cut.chunks, num_buckets(cut.longest, COLUMNS))](
        packed, decoded.heads, decoded.verdict, out if table is None else table, out, cut.n, cut.last_streams,
        cut.last_each, packed.shape[1], alphabet, weight or 0.0, BINS=cut.bins,
        SYMBOL=8 * symbol_dtype(alphabet).itemsize, COLUMNS=COLUMNS,
        VALUES=table is not None, ADD=weight is not None, **exact(num_warps=4),
    )  # fmt: skip


def arrange_symbols(decoded: Decoded, alphabet: int) -> Tensor:
    out = torch.empty(decoded.cut.n, dtype=symbol_dtype(alphabet), device=decoded.packed.device)
    _launch(decoded, alphabet, None, out, None)
    return out


def arrange_floats(decoded: Decoded, table: Tensor, out: Tensor, weight: float | None) -> None:
    _launch(decoded, table.numel(), table.to(out.device), out, weight)
