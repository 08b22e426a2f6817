"""Codebooks of Huffman's code: lengths by package-merge, codes, books written and read, a program for each chunk.

Steps of a program hand each other what they have through scratch memory of the chunk's own, with a barrier between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.triton.streams import LANES, STREAMS

__all__ = [
    "PREFIX",
    "PREFIXES",
    "book_at",
    "codes_at",
    "heads_at",
    "plan_books",
    "read_books",
    "record_words",
    "reverse32",
    "starts_at",
]

PREFIX = tl.constexpr(12)
"""Bits that a reader looks up. No code of 512 symbols or fewer that we write is longer."""

PREFIXES = tl.constexpr(4096)

_FIRST_CLASS = tl.constexpr(8)
_MAX_LENGTH = tl.constexpr(15)


@triton.jit
def reverse32(x):
    """The bits of uint32 in the other order."""
    x = ((x >> 1) & 0x55555555) | ((x & 0x55555555) << 1)
    x = ((x >> 2) & 0x33333333) | ((x & 0x33333333) << 2)
    x = ((x >> 4) & 0x0F0F0F0F) | ((x & 0x0F0F0F0F) << 4)
    x = ((x >> 8) & 0x00FF00FF) | ((x & 0x00FF00FF) << 8)
    return (x >> 16) | (x << 16)


@triton.jit
def _below(numbers, count, value, STEPS: tl.constexpr, EQUAL: tl.constexpr):
    """How many of ``count`` ascending numbers are below each value, or as large where EQUAL."""
    low = tl.zeros_like(value)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) >> 1
        open_ = low < high
        found = tl.load(numbers + middle, mask=open_, other=0)
        if EQUAL:
            up = open_ & (found <= value)
        else:
            up = open_ & (found < value)
        low = tl.where(up, middle + 1, low)
        high = tl.where(open_ & (up == 0), middle, high)
    return low


@triton.jit
def _code_lengths(keys, used, leaves, packages, items, places, BINS: tl.constexpr, STEPS: tl.constexpr):
    """The length of each leaf's code, in the order of ``keys`` (count and symbol, ascending)."""
    at = tl.arange(0, BINS)
    there = at < used
    weight = keys >> 12
    tl.store(leaves + at, weight, mask=there)
    tl.store(items + at, weight, mask=there)
    tl.debug_barrier()
    bits = used * 0
    for k in tl.static_range(12):
        bits += (used > (1 << k)).to(tl.int32)
    limit = tl.minimum(_MAX_LENGTH, tl.maximum(12, bits + 3))
    total = used
    level = used * 0 + 1
    while level < limit:
        pairs = total // 2
        paired = at < pairs
        package = tl.load(items + 2 * at, mask=paired, other=0) + tl.load(items + 2 * at + 1, mask=paired, other=0)
        tl.store(packages + at, package, mask=paired)
        tl.debug_barrier()
        place = at + _below(packages, pairs, weight, STEPS, False)
        tl.store(items + place, weight, mask=there)
        tl.store(places + level * BINS + at, place, mask=there)
        tl.store(items + at + _below(leaves, used, package, STEPS, True), package, mask=paired)
        total = used + pairs
        level += 1
        tl.debug_barrier()
    length = tl.zeros_like(weight)
    take = 2 * used - 2
    while level > 1:
        level -= 1
        place = tl.load(places + level * BINS + at, mask=there, other=0)
        among = tl.sum((there & (place < take)).to(tl.int32), 0)
        length += (at < among).to(tl.int32)
        take = 2 * (take - among)
    return length + (at < tl.minimum(take, used)).to(tl.int32)


# A chunk's record: 24 rows of scratch, then what is made of it.


@triton.jit
def codes_at(BINS: tl.constexpr):
    """By symbol, its code, first bit lowest, and its length in the upper half."""
    return 24 * BINS


@triton.jit
def book_at(BINS: tl.constexpr):
    """The book. 33 bits at most of a symbol and the run before it; two are never that dear, one after the other."""
    return 25 * BINS


@triton.jit
def starts_at(BINS: tl.constexpr):
    """The bit at which each stream begins, and behind them where the last one ends."""
    return 26 * BINS + 16


@triton.jit
def heads_at(BINS: tl.constexpr):
    """Bytes of the book or 0 for a constant chunk, and the lowest symbol."""
    return 26 * BINS + 48


def record_words(bins: int) -> int:
    return 26 * bins + 64


@triton.jit
def _counts_of(counts, first, streams, ROWS: tl.constexpr, BINS: tl.constexpr):
    """Of some streams, [ROWS, BINS]."""
    stream = first + tl.arange(0, ROWS)[:, None]
    return tl.load(counts + stream * BINS + tl.arange(0, BINS)[None, :], mask=stream < streams, other=0)


@triton.jit(do_not_specialize=["last_streams"])
def plan_books(
    counts,  # [chunks, STREAMS, BINS]
    work,  # [chunks, RECORD]
    sizes,  # [chunks]: bytes
    last_streams,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
):
    """All that is to be known of a chunk before its bits are written."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    counts += wide * (STREAMS * BINS)
    scratch = work + wide * RECORD
    codes = scratch + codes_at(BINS)
    books = scratch + book_at(BINS)
    starts = scratch + starts_at(BINS)
    heads = scratch + heads_at(BINS)
    at = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for first in range(0, LANES, ROWS):
        count += tl.sum(_counts_of(counts, first, streams, ROWS, BINS), 0)
    tl.store(books + at, tl.zeros_like(count))
    tl.store(books + BINS + tl.arange(0, 16), tl.zeros((16,), tl.int32))
    used = tl.sum((count > 0).to(tl.int32), 0)
    keys = tl.where(count > 0, (tl.minimum(count, (1 << 19) - 1) << 12) | at, 0x7FFFFFFF)
    keys = tl.sort(keys)
    leaves, packages, items, places = scratch, scratch + BINS, scratch + 2 * BINS, scratch + 4 * BINS
    by_leaf = _code_lengths(keys, used, leaves, packages, items, places, BINS, STEPS)
    # From the order of counts to that of symbols.
    lengths, order = scratch + 20 * BINS, scratch + 21 * BINS
    tl.store(lengths + at, tl.zeros_like(count))
    tl.debug_barrier()
    tl.store(lengths + (keys & 4095), by_leaf, mask=at < used)
    tl.debug_barrier()
    length = tl.load(lengths + at)

    code = tl.zeros_like(count)
    following = used * 0
    long = used * 0
    while long < _MAX_LENGTH:
        long += 1
        mine = (length == long).to(tl.int32)
        code = tl.where(mine == 1, following + tl.cumsum(mine, 0) - 1, code)
        following = (following + tl.sum(mine, 0)) << 1
    reverse = reverse32(code.to(tl.uint32)) >> ((32 - length) & 31).to(tl.uint32)
    tl.store(codes + at, tl.where(length > 0, reverse.to(tl.int32) | (length << 16), 0))

    occurs = length > 0
    rank = tl.cumsum(occurs.to(tl.int32), 0) - 1
    tl.store(order + rank, at, mask=occurs)
    tl.debug_barrier()
    inner = occurs & (rank > 0)
    before = tl.load(order + rank - 1, mask=inner, other=0)
    class_before = tl.load(lengths + before, mask=inner, other=_FIRST_CLASS)
    run = tl.where(inner, at - before - 1, 0)
    below = tl.zeros_like(run)
    for k in tl.static_range(1, 12):
        below += (run >= (1 << k)).to(tl.int32)
    one = (tl.zeros_like(run) + 1) << below
    skip = tl.where(run > 0, 7 | (one << 3) | ((run - one) << (below + 4)), 0)
    skip_bits = tl.where(run > 0, 2 * below + 4, 0)
    change = length - class_before
    token = tl.where(change == 0, 0, tl.where(change == 1, 5, tl.where(change == -1, 1, 3 | (length << 3))))
    token_bits = tl.where(change == 0, 1, tl.where((change == 1) | (change == -1), 3, 7))
    bits = tl.where(occurs, skip_bits + token_bits, 0)
    place = 32 + tl.cumsum(bits, 0) - bits
    both = skip.to(tl.uint64) | (token.to(tl.uint64) << skip_bits.to(tl.uint64))
    both = both << (place & 31).to(tl.uint64)
    high = (both >> 32).to(tl.uint32)
    tl.atomic_or(books + (place >> 5), both.to(tl.uint32).to(tl.int32, bitcast=True), mask=occurs, sem="relaxed")
    tl.atomic_or(books + (place >> 5) + 1, high.to(tl.int32, bitcast=True), mask=occurs & (high > 0), sem="relaxed")
    lowest = tl.min(tl.where(count > 0, at, BINS), 0)
    last = tl.max(tl.where(count > 0, at, 0), 0)
    tl.store(books, lowest | ((last - lowest) << 16))
    book = (32 + tl.sum(bits, 0) + 7) // 8

    row = tl.arange(0, ROWS)
    for first in range(0, LANES, ROWS):
        weighed = _counts_of(counts, first, streams, ROWS, BINS) * length[None, :]
        tl.store(scratch + first + row, tl.sum(weighed, 1))
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    of_stream = tl.load(scratch + lane)
    tl.store(starts + lane, tl.cumsum(of_stream, 0) - of_stream)
    end = tl.sum(of_stream, 0)
    nbytes = tl.where(used == 1, 3, 1 + book + 4 * (streams - 1) + (end + 7) // 8)
    tl.store(heads, tl.where(used == 1, 0, book))
    tl.store(heads + 1, lowest)
    tl.store(sizes + wide, nbytes.to(tl.int64))


@triton.jit
def _peek(section, at, end):
    """The next 40 bits less those of the first byte that have been read; zeros from ``end`` on, both in bits."""
    byte = at >> 3
    found = tl.load(section + byte, mask=at < end, other=0).to(tl.int64)
    for k in tl.static_range(1, 5):
        more = tl.load(section + byte + k, mask=8 * (byte + k) < end, other=0).to(tl.int64)
        found = found | (more << (8 * k))
    return found >> (at & 7)


@triton.jit
def _read_classes(section, at, end, lengths, alphabet):
    """Reads a book into ``lengths``, which are zeros: the byte behind it, or -1 where it makes no sense."""
    head = _peek(section, at, end)
    symbol = (head & 0xFFFF).to(tl.int32)
    # All 32 bits: a book begins with a byte.
    last = symbol + ((head >> 16) & 0xFFFF).to(tl.int32)
    good = (at + 32 <= end) & (last < alphabet)
    at += 32
    before = symbol * 0 + _FIRST_CLASS
    while good & (symbol <= last):
        window = _peek(section, at, end)
        kind = (window & 7).to(tl.int32)
        same = (kind & 1) == 0
        step = (kind & 3) == 1
        run = kind == 7
        named = ((window >> 3) & 15).to(tl.int32)
        rest = (window >> 3).to(tl.int32)
        zeros = symbol * 0
        for k in tl.static_range(1, 13):
            zeros += ((rest & ((1 << k) - 1)) == 0).to(tl.int32)
        one = (symbol * 0 + 1) << tl.minimum(zeros, 11)
        skipped = one + ((rest >> (zeros + 1)) & (one - 1))
        here = tl.where(same, before, tl.where(step, before + tl.where(kind == 5, 1, -1), named))
        at += tl.where(same, 1, tl.where(step, 3, tl.where(run, 2 * zeros + 4, 7)))
        good = (at <= end) & tl.where(
            run, (zeros <= 11) & (symbol + skipped <= last), (here >= 1) & (here <= _MAX_LENGTH)
        )
        tl.store(lengths + symbol, here, mask=good & (run == 0))
        symbol += tl.where(run, skipped, 1)
        before = tl.where(run, before, here)
    padding = _peek(section, at, end) & ((1 << ((-at) & 7)) - 1)
    return tl.where(good & (padding == 0), (at + 7) >> 3, -1)


@triton.jit
def _bounds(section, chunk):
    """Where a chunk begins and ends, and where the last one does, by the directory."""
    directory = section.to(tl.pointer_type(tl.int32))
    at = tl.arange(0, 1024)
    before = tl.zeros((1024,), tl.int64)
    own = tl.zeros((1024,), tl.int64)
    all_ = tl.zeros((1024,), tl.int64)
    k = chunk * 0
    while k < tl.num_programs(0):
        size = tl.load(directory + k + at, mask=k + at < tl.num_programs(0), other=0).to(tl.int64) & 0xFFFFFFFF
        before += tl.where(k + at < chunk, size, 0)
        own += tl.where(k + at == chunk, size, 0)
        all_ += size
        k += 1024
    begin = 4 * tl.num_programs(0) + tl.sum(before, 0)
    return begin, begin + tl.sum(own, 0), 4 * tl.num_programs(0) + tl.sum(all_, 0)


@triton.jit(do_not_specialize=["nbytes", "alphabet", "last_streams"])
def read_books(
    section,  # at a multiple of four bytes
    bounds,  # [chunks + 1]: where a chunk begins
    nbytes,
    scratch,  # [chunks, BINS]: lengths
    symbols,  # [chunks, BINS]: the symbols in the order of their codes
    tables,  # [chunks, PREFIXES]: by the next bits, lowest first, a symbol and in the lowest 8 bits its length, or 0
    limits,  # [chunks, 32]: by length, the first code that is longer; behind it what leads from a code to its symbol
    heads,  # [chunks, 4]: mode or -1, the constant symbol, where the starts begin and the bits, behind the chunk
    verdict,  # 1 for a section that no coder writes, 2 for one with chunks that are read elsewhere; a bit for each mode
    alphabet,
    last_streams,
    BINS: tl.constexpr,
):
    """Modes and books of a section. What it says is believed as far as it lies within the chunk."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    at = tl.arange(0, BINS)
    lengths = scratch + wide * BINS
    tl.store(lengths + at, tl.zeros_like(at))
    begin, end, all_end = _bounds(section, chunk)
    tl.store(bounds + chunk, begin)
    tl.store(bounds + chunk + 1, end)
    tl.debug_barrier()
    there = (begin < end) & (end <= nbytes)
    # Bounds ascend, so they end well where the last one does.
    there = there & (all_end == nbytes)
    size = tl.where(there, end - begin, 0)
    section += tl.where(there, begin, 0)
    mode = tl.load(section, mask=there, other=255).to(tl.int32)
    constant = (mode == 0) & (size == 3)
    symbol = tl.load(section + 1, mask=constant, other=255).to(tl.int32)
    symbol |= tl.load(section + 2, mask=constant, other=255).to(tl.int32) << 8
    good = constant & (symbol < alphabet)
    # No chunk of Huffman's code has more bytes: streams that are shorter than that must end where it does.
    huffman = (mode == 2) & (size < (1 << 21))
    body = tl.where(huffman, size, 0).to(tl.int32)
    behind = _read_classes(section, body * 0 + 8, 8 * body, lengths, alphabet)
    bits = behind + 4 * (streams - 1)
    tl.debug_barrier()

    prefix = tl.arange(0, PREFIXES)
    window = (reverse32(prefix.to(tl.uint32)) >> (32 - _MAX_LENGTH)).to(tl.int32)
    symbols += wide * BINS
    limits += wide * 32
    length = tl.load(lengths + at)
    shortest = tl.zeros((PREFIXES,), tl.int32) + 1
    following = body * 0
    base = body * 0
    filled = body * 0
    long = body * 0
    while long < _MAX_LENGTH:
        long += 1
        mine = (length == long).to(tl.int32)
        number = tl.sum(mine, 0)
        tl.store(symbols + base + tl.cumsum(mine, 0) - 1, at.to(tl.int16), mask=mine == 1)
        tl.store(limits + 16 + long, base - following)
        following += number
        base += number
        limit = following << (_MAX_LENGTH - long)
        filled += number << (_MAX_LENGTH - long)
        tl.store(limits + long, limit)
        shortest += ((long <= PREFIX) & (window >= limit)).to(tl.int32)
        following = following << 1
    tl.debug_barrier()
    short = shortest <= PREFIX
    place = (window >> (15 - shortest)) + tl.load(limits + 16 + shortest, mask=short, other=0)
    symbol_of = tl.load(symbols + tl.minimum(tl.maximum(place, 0), BINS - 1), mask=short, other=0).to(tl.int32)
    tl.store(tables + wide * PREFIXES + prefix, tl.where(short, (symbol_of << 8) | shortest, 0))
    complete = (filled == (1 << 15)) & (base >= 2)
    huffman = huffman & (behind >= 0) & (bits < body) & complete
    good = good | huffman
    elsewhere = there & ((mode == 1) | (mode == 3))
    said = tl.where(good, 0, tl.where(elsewhere, 2, 1))
    tl.atomic_or(verdict, said, mask=said > 0, sem="relaxed")
    tl.atomic_or(verdict + 1, 1 << (mode & 3), mask=said != 1, sem="relaxed")
    heads += wide * 4
    tl.store(heads, tl.where(good, mode, -1))
    tl.store(heads + 1, symbol)
    tl.store(heads + 2, behind)
    tl.store(heads + 3, bits)
