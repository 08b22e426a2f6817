"""Huffman's code on a GPU: a program for each chunk, a lane for each of its streams, symbol after symbol.

All chunks of a large tensor are under way at once, so what counts is how many cycles a lane needs for a symbol. Its
loads are hence issued long before they are waited for, and nothing it waits for lies farther than the nearest cache.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.interface import CHUNK, num_buckets, symbol_dtype
from laconic.kernels.triton.books import LANES, PREFIX, PREFIXES, STREAMS, plan_books, read_books, reverse32
from laconic.kernels.triton.parts import exact, words_of

__all__ = ["arrange_floats", "arrange_symbols", "huffman_read", "huffman_write"]

_CHUNK = tl.constexpr(CHUNK)
COUNTED = 2048
"""Symbols that a program counts at once."""
ROUND = tl.constexpr(8)
"""Symbols that a reader's lane decodes between two looks at the loop."""
AHEAD = tl.constexpr(16)
"""Words from a lane's place to the one that it calls into the cache, whenever it has come to another sector of 8."""
ROWS = 32
"""Rows of decoded words that are put in order at once."""


def streams_for(n: int) -> int:
    return STREAMS.value if n >= 65536 else 6 if n >= 2048 else 1


class Cut(NamedTuple):
    """How symbols are dealt to chunks and streams."""

    n: int
    chunks: int
    last_streams: int
    last_each: int
    bins: int

    @classmethod
    def of(cls, n: int, alphabet: int) -> Cut:
        chunks = num_buckets(n, CHUNK)
        last = n - (chunks - 1) * CHUNK
        streams = streams_for(last)
        return cls(n, chunks, streams, num_buckets(last, streams), max(32, 1 << (alphabet - 1).bit_length()))

    @property
    def warps(self) -> int:
        return min(8, max(1, self.bins // 128))

    @property
    def steps(self) -> int:
        """Halvings until an interval of so many items is empty."""
        return self.bins.bit_length() + 1


def _words(data: Tensor) -> tuple[Tensor, int, Tensor]:
    """Whole words of flat memory, how many they are, and what is left as a word of its own."""
    data = words_of(data.contiguous().view(torch.uint8))
    count = data.numel() // 4
    tail = torch.zeros(4, dtype=torch.uint8, device=data.device)
    tail[: data.numel() - 4 * count] = data[4 * count :]
    return data[: 4 * count].view(torch.int32) if count else tail.view(torch.int32), count, tail.view(torch.int32)


@triton.jit
def _share(chunk, n, last_streams, last_each):
    """Streams of a chunk, symbols of a stream, symbols in all."""
    last = chunk == tl.num_programs(0) - 1
    streams = tl.where(last, last_streams, STREAMS)
    each = tl.where(last, last_each, (_CHUNK + STREAMS - 1) // STREAMS)
    return streams, each, tl.minimum(n - chunk.to(tl.int64) * _CHUNK, _CHUNK).to(tl.int32)


# --------------------------------------------------------------------------------------------------------- writing


@triton.jit(do_not_specialize=["n", "last_streams", "last_each"])
def _count(symbols, counts, n, last_streams, last_each, BINS: tl.constexpr, SPAN: tl.constexpr):
    """How often each symbol occurs in a stream."""
    chunk, stream = tl.program_id(0), tl.program_id(1)
    streams, each, here = _share(chunk, n, last_streams, last_each)
    begin = stream * each
    end = tl.where(stream < streams, tl.minimum(begin + each, here), begin)
    symbols += chunk.to(tl.int64) * _CHUNK
    at = tl.arange(0, SPAN)
    counted = tl.zeros((BINS,), tl.int32)
    tile = begin
    while tile < end:
        there = tile + at < end
        counted += tl.histogram(tl.load(symbols + tile + at, mask=there, other=0).to(tl.int32), BINS, mask=there)
        tile += SPAN
    tl.store(counts + (chunk.to(tl.int64) * STREAMS + stream) * BINS + tl.arange(0, BINS), counted)


@triton.jit(do_not_specialize=["last_streams", "book_words"])
def _write_heads(out, offsets, books, starts, heads, sizes, last_streams, book_words):
    """Directory, modes, books and starts; zeros where the bits of two streams, or of none, share a word."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    size = tl.load(sizes + chunk)
    begin = tl.load(offsets + chunk) - size
    book = tl.load(heads + 2 * wide)
    symbol = tl.load(heads + 2 * wide + 1)
    coded = book > 0
    tl.store(out.to(tl.pointer_type(tl.int32)) + chunk, size.to(tl.int32))
    tl.store(out + begin, tl.where(coded, 2, 0).to(tl.uint8))
    at = tl.arange(0, 128)
    tl.store(out + begin + 1 + at, (symbol >> (8 * (at & 1))).to(tl.uint8), mask=(at < 2) & (book == 0))
    done = book * 0
    while done < book:
        there = done + at < book
        word = tl.load(books + wide * book_words + ((done + at) >> 2), mask=there, other=0)
        tl.store(out + begin + 1 + done + at, (word >> (8 * (at & 3))).to(tl.uint8), mask=there)
        done += 128
    stream, byte = at >> 2, at & 3
    ours = coded & (stream < streams)
    start = tl.load(starts + wide * 32 + stream, mask=ours, other=0)
    tl.store(out + begin + 1 + book + at - 4, (start >> (8 * byte)).to(tl.uint8), mask=ours & (stream > 0))
    bits = begin + 1 + book + 4 * (streams - 1)
    shared = ((8 * bits + start) >> 5) * 4 + byte
    end = begin + size
    zero = tl.zeros((128,), tl.uint8)
    tl.store(out + shared, zero, mask=ours & (shared >= bits) & (shared < end))
    shared = ((end - 1) >> 2) * 4 + byte
    tl.store(out + shared, zero, mask=coded & (at < 4) & (shared >= bits) & (shared < end))


@triton.jit
def _pair(group, left, codes, SYMBOL: tl.constexpr, PLACE: tl.constexpr):
    """The codes of two symbols of a group, one behind the other, and their bits."""
    mask: tl.constexpr = (1 << SYMBOL) - 1
    symbol = ((group >> (SYMBOL * PLACE)) & mask).to(tl.int32)
    other = ((group >> (SYMBOL * PLACE + SYMBOL)) & mask).to(tl.int32)
    entry = tl.load(codes + symbol, mask=left > 0, other=0)
    behind = tl.load(codes + other, mask=left > 1, other=0)
    return (entry & 0xFFFF) | ((behind & 0xFFFF) << (entry >> 16)), (entry >> 16) + (behind >> 16)


@triton.jit
def _put(held, filled, word, head, first, bits, count, out):
    """Bits behind what is held, at most 30 of them, and a word of it out when it is full; the first word stays."""
    held = held | (bits.to(tl.uint64) << filled.to(tl.uint64))
    filled += count
    full = filled >= 32
    low = held.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.store(out + word, low, mask=full & (first == 0))
    head = tl.where(full & (first == 1), low, head)
    first = tl.where(full, 0, first)
    word += full.to(tl.int32)
    held = tl.where(full, held >> 32, held)
    filled = tl.where(full, filled - 32, filled)
    return held, filled, word, head, first


@triton.jit
def _join(low, high, shift):
    """The word that begins ``shift`` bits into ``low``."""
    both = (high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low.to(tl.uint32, bitcast=True).to(tl.uint64)
    return (both >> shift).to(tl.uint32)


@triton.jit(do_not_specialize=["n", "whole", "last_streams", "last_each"])
def _write_bits(
    words, tail, whole, codes, starts, heads, sizes, offsets, out, traces, n, last_streams, last_each,
    BINS: tl.constexpr, SYMBOL: tl.constexpr,
):  # fmt: skip
    """A lane for each stream. Its first word and its last, which others may share, are added at the end."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams, each, here = _share(chunk, n, last_streams, last_each)
    per: tl.constexpr = 32 // SYMBOL
    lane = tl.arange(0, LANES)
    book = tl.load(heads + 2 * wide)
    bits = tl.load(offsets + chunk) - tl.load(sizes + chunk) + 1 + book + 4 * (streams - 1)
    busy = (lane < streams) & (book > 0)
    left = tl.where(busy, tl.minimum(here - lane * each, each), 0)
    place = tl.load(starts + wide * 32 + lane, mask=busy, other=0) + 8 * (bits & 3).to(tl.int32)
    out += bits >> 2
    codes += wide * BINS
    begin = wide * _CHUNK + lane * each
    at = begin // per
    shift = ((begin % per) * SYMBOL).to(tl.uint64)
    rest = tl.load(tail)

    first_word = place >> 5
    word = first_word
    filled = place & 31
    held = tl.zeros((LANES,), tl.uint64)
    head = tl.zeros((LANES,), tl.int32)
    first = tl.zeros((LANES,), tl.int32) + 1
    w0 = tl.load(words + at, mask=busy & (at < whole), other=rest)
    w1 = tl.load(words + at + 1, mask=busy & (at + 1 < whole), other=rest)
    w2 = tl.load(words + at + 2, mask=busy & (at + 2 < whole), other=rest)
    w3 = tl.load(words + at + 3, mask=busy & (at + 3 < whole), other=rest)
    w4 = tl.load(words + at + 4, mask=busy & (at + 4 < whole), other=rest)
    ahead = tl.load(words + at + AHEAD // 2, mask=busy & (at + AHEAD // 2 < whole), other=0)
    trace = tl.zeros((LANES,), tl.int32)
    done = tl.where(book > 0, 0, each)
    while done < each:
        done += 4 * per
        trace = trace ^ ahead
        ahead = tl.load(words + at + AHEAD, mask=busy & (at % 8 < 4) & (at + AHEAD < whole), other=0)
        at += 4
        v1 = tl.load(words + at + 1, mask=busy & (at + 1 < whole), other=rest)
        v2 = tl.load(words + at + 2, mask=busy & (at + 2 < whole), other=rest)
        v3 = tl.load(words + at + 3, mask=busy & (at + 3 < whole), other=rest)
        v4 = tl.load(words + at + 4, mask=busy & (at + 4 < whole), other=rest)
        # All codes first: behind a store, the compiler would not dare to load.
        group = _join(w0, w1, shift)
        b0, c0 = _pair(group, left, codes, SYMBOL, 0)
        if per == 4:
            b1, c1 = _pair(group, left - 2, codes, SYMBOL, 2)
        group = _join(w1, w2, shift)
        b2, c2 = _pair(group, left - per, codes, SYMBOL, 0)
        if per == 4:
            b3, c3 = _pair(group, left - per - 2, codes, SYMBOL, 2)
        group = _join(w2, w3, shift)
        b4, c4 = _pair(group, left - 2 * per, codes, SYMBOL, 0)
        if per == 4:
            b5, c5 = _pair(group, left - 2 * per - 2, codes, SYMBOL, 2)
        group = _join(w3, w4, shift)
        b6, c6 = _pair(group, left - 3 * per, codes, SYMBOL, 0)
        if per == 4:
            b7, c7 = _pair(group, left - 3 * per - 2, codes, SYMBOL, 2)
        left -= 4 * per
        held, filled, word, head, first = _put(held, filled, word, head, first, b0, c0, out)
        if per == 4:
            held, filled, word, head, first = _put(held, filled, word, head, first, b1, c1, out)
        held, filled, word, head, first = _put(held, filled, word, head, first, b2, c2, out)
        if per == 4:
            held, filled, word, head, first = _put(held, filled, word, head, first, b3, c3, out)
        held, filled, word, head, first = _put(held, filled, word, head, first, b4, c4, out)
        if per == 4:
            held, filled, word, head, first = _put(held, filled, word, head, first, b5, c5, out)
        held, filled, word, head, first = _put(held, filled, word, head, first, b6, c6, out)
        if per == 4:
            held, filled, word, head, first = _put(held, filled, word, head, first, b7, c7, out)
        w0 = w4
        w1 = v1
        w2 = v2
        w3 = v3
        w4 = v4
    tl.atomic_or(out + first_word, head, mask=busy & (first == 0), sem="relaxed")
    low = held.to(tl.uint32).to(tl.int32, bitcast=True)
    tl.atomic_or(out + word, low, mask=busy & (filled > 0), sem="relaxed")
    # Else the compiler would see that nobody needs what is called into the cache.
    tl.store(traces + wide * LANES + lane, trace ^ ahead)


def huffman_write(symbols: Tensor, alphabet: int, out: Tensor) -> Tensor:
    """Writes the section, of symbols below ``alphabet``; gives its bytes, on the device."""
    cut, device = Cut.of(symbols.numel(), alphabet), symbols.device
    room = out if out.data_ptr() % 4 == 0 else torch.empty_like(out)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts = torch.empty((cut.chunks, STREAMS.value, cut.bins), **ints)
    _count[(cut.chunks, STREAMS.value)](
        symbols, counts, cut.n, cut.last_streams, cut.last_each, BINS=cut.bins, SPAN=COUNTED, num_warps=4
    )
    scratch = torch.empty((cut.chunks, 24, cut.bins), **ints)
    # 33 bits at most of a symbol and the run before it; two symbols are never that dear, one after the other.
    book_words = 4 + cut.bins
    books = torch.zeros((cut.chunks, book_words), **ints)
    codes, starts = torch.empty((cut.chunks, cut.bins), **ints), torch.empty((cut.chunks, LANES.value), **ints)
    heads, sizes = torch.empty((cut.chunks, 2), **ints), torch.empty(cut.chunks, dtype=torch.int64, device=device)
    plan_books[(cut.chunks,)](
        counts, scratch, books, codes, starts, heads, sizes, cut.last_streams, book_words,
        BINS=cut.bins, STEPS=cut.steps, num_warps=cut.warps,
    )  # fmt: skip
    offsets = sizes.cumsum(0) + 4 * cut.chunks
    _write_heads[(cut.chunks,)](room, offsets, books, starts, heads, sizes, cut.last_streams, book_words, num_warps=1)
    words, whole, tail = _words(symbols)
    traces = torch.empty((cut.chunks, LANES.value), **ints)
    _write_bits[(cut.chunks,)](
        words, tail, whole, codes, starts, heads, sizes, offsets, room[: room.numel() // 4 * 4].view(torch.int32),
        traces, cut.n, cut.last_streams, cut.last_each, BINS=cut.bins, SYMBOL=8 * symbols.element_size(), num_warps=1,
    )  # fmt: skip
    if room is not out:
        out.copy_(room)
    return offsets[-1]


# --------------------------------------------------------------------------------------------------------- reading


@triton.jit
def _refill(words, rest, whole, held, count, word, following):
    """A word more where one fits; the one behind it is called for."""
    need = count <= 32
    more = reverse32(following.to(tl.uint32, bitcast=True)).to(tl.uint64) << ((32 - count) & 63).to(tl.uint64)
    held = held | tl.where(need, more, 0)
    count += tl.where(need, 32, 0)
    word += need.to(tl.int32)
    following = tl.load(words + word, mask=need & (word < whole), other=tl.where(need, rest, following))
    return held, count, word, following


@triton.jit
def _read_round(
    words, rest, whole, prefixes, limits, symbols, l11, l12, l13, l14, most, out, left,
    held, count, word, following, EDGE: tl.constexpr, SYMBOL: tl.constexpr,
):  # fmt: skip
    """A round of symbols, packed into words, one under another."""
    per: tl.constexpr = 32 // SYMBOL
    packed = left * 0
    for k in tl.static_range(ROUND):
        if k % 2 == 0:
            held, count, word, following = _refill(words, rest, whole, held, count, word, following)
        window = (held >> 49).to(tl.int32)
        length = tl.load(prefixes + (window >> (15 - PREFIX))).to(tl.int32)
        length += (window >= l11).to(tl.int32) + (window >= l12).to(tl.int32)
        length += (window >= l13).to(tl.int32) + (window >= l14).to(tl.int32)
        place = (window >> (15 - length)) + tl.load(limits + 16 + length)
        symbol = tl.load(symbols + tl.minimum(tl.maximum(place, 0), most)).to(tl.int32)
        if EDGE:
            length = tl.where(left > k, length, 0)
        held = held << length.to(tl.uint64)
        count -= length
        packed = packed | (symbol << (SYMBOL * (k % per)))
        if k % per == per - 1:
            tl.store(out + (k // per) * LANES + tl.arange(0, LANES), packed)
            packed = left * 0
    return held, count, word, following


@triton.jit
def _start(section, behind, stream, mask):
    """Where a stream begins, by its own word; the first has none."""
    value = tl.zeros((LANES,), tl.int64)
    for k in tl.static_range(4):
        byte = tl.load(section + behind + 4 * (stream - 1) + k, mask=mask & (stream > 0), other=0)
        value = value | (byte.to(tl.int64) << (8 * k))
    return value


@triton.jit(do_not_specialize=["n", "whole", "last_streams", "last_each", "rows"])
def _read_bits(
    section, words, tail, whole, bounds, symbols, prefixes, limits, heads, out, traces, verdict,
    n, last_streams, last_each, rows, BINS: tl.constexpr, SYMBOL: tl.constexpr,
):  # fmt: skip
    """A lane for each stream; idle ones follow the first. What lies ahead is called into the cache in time."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams, each, here = _share(chunk, n, last_streams, last_each)
    if tl.load(heads + 4 * wide) == 2:
        begin = tl.load(bounds + chunk)
        behind = tl.load(heads + 4 * wide + 2)
        size = (tl.load(bounds + chunk + 1) - begin).to(tl.int32)
        bits = tl.load(heads + 4 * wide + 3)
        section += begin
        lane = tl.arange(0, LANES)
        busy = lane < streams
        last = lane == streams - 1
        room = 8 * (size - bits).to(tl.int64)
        start = _start(section, behind, lane, busy)
        before = _start(section, behind, lane - 1, busy & (lane > 0))
        end = _start(section, behind, lane + 1, lane < streams - 1)
        end = tl.where(last, room, end)
        wrong = busy & ((start < before) | (start > room))
        start = tl.where(wrong | (busy == 0), 0, start).to(tl.int32)

        # Words from the one in which the bits begin; places are counted from there, too.
        from_word = (begin + bits) >> 2
        off = 8 * ((begin + bits) & 3).to(tl.int32)
        words += from_word
        whole = tl.minimum(whole - from_word, 1 << 30).to(tl.int32)
        rest = tl.load(tail)
        place = start + off
        word = place >> 5
        following = tl.load(words + word, mask=word < whole, other=rest)
        held = reverse32(following.to(tl.uint32, bitcast=True)).to(tl.uint64) << (32 + (place & 31)).to(tl.uint64)
        count = 32 - (place & 31)
        word += 1
        following = tl.load(words + word, mask=word < whole, other=rest)

        symbols += wide * BINS
        prefixes += wide * PREFIXES
        limits += wide * 32
        l11 = tl.load(limits + 11)
        l12 = tl.load(limits + 12)
        l13 = tl.load(limits + 13)
        l14 = tl.load(limits + 14)
        out += wide * rows * LANES
        left = tl.where(busy, tl.minimum(here - lane * each, each), 0)
        ahead = tl.load(words + word + AHEAD // 2, mask=word + AHEAD // 2 < whole, other=0)
        trace = tl.zeros((LANES,), tl.int32)
        sector = word * 0 - 1
        done = each * 0
        while done + ROUND <= here - (streams - 1) * each:  # what all streams have
            trace = trace ^ ahead
            ahead = tl.load(words + word + AHEAD, mask=(word >> 3 != sector) & (word + AHEAD < whole), other=0)
            sector = word >> 3
            held, count, word, following = _read_round(
                words, rest, whole, prefixes, limits, symbols, l11, l12, l13, l14, BINS - 1, out, left,
                held, count, word, following, False, SYMBOL,
            )  # fmt: skip
            out += ROUND * SYMBOL // 32 * LANES
            done += ROUND
        left -= done
        while done < each:
            held, count, word, following = _read_round(
                words, rest, whole, prefixes, limits, symbols, l11, l12, l13, l14, BINS - 1, out, left,
                held, count, word, following, True, SYMBOL,
            )  # fmt: skip
            out += ROUND * SYMBOL // 32 * LANES
            left -= ROUND
            done += ROUND
        place = (32 * word - count - off).to(tl.int64)
        wrong = wrong | (busy & (last == 0) & (place != end))
        wrong = wrong | (last & ((place > room) | (place <= room - 8)))
        final = tl.load(section + size - 1).to(tl.int64)
        unused = tl.minimum(tl.maximum(room - place, 0), 7)
        wrong = wrong | (last & ((final >> (8 - unused)) != 0))
        tl.atomic_or(verdict, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
        tl.store(traces + wide * LANES + lane, trace ^ ahead)


class Decoded(NamedTuple):
    """Symbols of a section as its lanes left them: [chunks, rows, lanes] words of two or four each."""

    cut: Cut
    packed: Tensor
    heads: Tensor
    verdict: Tensor
    """Odd where they are not to be used."""
    section: Tensor
    bounds: Tensor


def huffman_read(section: Tensor, n: int, alphabet: int) -> Decoded | None:
    """The symbols, still out of order; None where the section is too short for its directory."""
    cut, device = Cut.of(n, alphabet), section.device
    if section.numel() < 5 * cut.chunks:
        return None
    section = words_of(section.contiguous())
    sizes = section[: 4 * cut.chunks].view(torch.int32).to(torch.int64) & 0xFFFFFFFF
    bounds = torch.zeros(cut.chunks + 1, dtype=torch.int64, device=device)
    torch.cumsum(sizes, 0, out=bounds[1:])
    bounds += 4 * cut.chunks
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    lengths, verdict = torch.zeros((cut.chunks, cut.bins), **ints), torch.zeros(1, **ints)
    symbols = torch.zeros((cut.chunks, cut.bins), dtype=torch.int16, device=device)
    limits = torch.empty((cut.chunks, 32), **ints)
    prefixes = torch.empty((cut.chunks, PREFIXES.value), dtype=torch.uint8, device=device)
    heads = torch.empty((cut.chunks, 4), **ints)
    read_books[(cut.chunks,)](
        section, bounds, section.numel(), lengths, symbols, prefixes, limits, heads, verdict, alphabet,
        cut.last_streams, BINS=cut.bins, num_warps=cut.warps,
    )  # fmt: skip
    symbol_bits = 8 * symbol_dtype(alphabet).itemsize
    longest = cut.last_each if cut.chunks == 1 else num_buckets(CHUNK, STREAMS.value)
    rows = num_buckets(longest, ROUND.value) * ROUND.value * symbol_bits // 32
    packed = torch.empty((cut.chunks, rows, LANES.value), **ints)
    traces = torch.empty((cut.chunks, LANES.value), **ints)
    words, whole, tail = _words(section)
    _read_bits[(cut.chunks,)](
        section, words, tail, whole, bounds, symbols, prefixes, limits, heads, packed, traces, verdict,
        n, cut.last_streams, cut.last_each, rows, BINS=cut.bins, SYMBOL=symbol_bits, num_warps=1,
    )  # fmt: skip
    return Decoded(cut, packed, heads, verdict, section, bounds)


@triton.jit(do_not_specialize=["n", "last_streams", "last_each", "rows"])
def _arrange(
    packed, heads, verdict, table, out, n, last_streams, last_each, rows, weight,
    SYMBOL: tl.constexpr, ROWS: tl.constexpr, VALUES: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Symbols, or the values they stand for, to where they belong, unless the section is to be refused."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams, each, here = _share(chunk, n, last_streams, last_each)
    per: tl.constexpr = 32 // SYMBOL
    row = tl.program_id(1) * ROWS
    ours = (tl.load(verdict) & 1 == 0) & (tl.load(heads + 4 * wide) >= 0)
    if ours & (row * per < each):
        constant = tl.load(heads + 4 * wide) == 0
        lane = tl.arange(0, LANES)
        rows_here = row + tl.arange(0, ROWS)
        found = tl.load(
            packed + (wide * rows + rows_here[:, None]) * LANES + lane[None, :],
            mask=(rows_here[:, None] < rows) & (lane[None, :] < streams), other=0,
        )  # fmt: skip
        found = tl.trans(found).to(tl.uint32, bitcast=True)
        shift = (tl.arange(0, per) * SYMBOL).to(tl.uint32)
        split = (found[:, :, None] >> shift[None, None, :]) & ((1 << SYMBOL) - 1)
        symbol = tl.reshape(split, (LANES, ROWS * per)).to(tl.int32)
        symbol = tl.where(constant, tl.load(heads + 4 * wide + 1), symbol)
        inside = row * per + tl.arange(0, ROWS * per)[None, :]
        at = lane[:, None] * each + inside
        there = (lane[:, None] < streams) & (inside < each) & (at < here)
        out += wide * _CHUNK
        if VALUES:
            value = tl.load(table + symbol, mask=there, other=0.0)
            if ADD:
                value = tl.load(out + at, mask=there, other=0.0) + value * weight
            tl.store(out + at, value, mask=there)
        else:
            tl.store(out + at, symbol.to(out.dtype.element_ty), mask=there)


def _launch(decoded: Decoded, alphabet: int, table: Tensor | None, out: Tensor, weight: float | None) -> None:
    cut, packed = decoded.cut, decoded.packed
    _arrange[(cut.chunks, num_buckets(packed.shape[1], ROWS))](
        packed, decoded.heads, decoded.verdict, out if table is None else table, out, cut.n, cut.last_streams,
        cut.last_each, packed.shape[1], weight or 0.0, SYMBOL=8 * symbol_dtype(alphabet).itemsize, ROWS=ROWS,
        VALUES=table is not None, ADD=weight is not None, **exact(num_warps=4),
    )  # fmt: skip


def arrange_symbols(decoded: Decoded, alphabet: int, out: Tensor) -> None:
    _launch(decoded, alphabet, None, out, None)


def arrange_floats(decoded: Decoded, table: Tensor, out: Tensor, weight: float | None) -> None:
    _launch(decoded, table.numel(), table.to(out.device), out, weight)
