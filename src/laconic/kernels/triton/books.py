"""Codebooks of Huffman's code: lengths by package-merge, codes, books written and read, a program for each chunk.

Steps of a program hand each other what they have through scratch memory of the chunk's own, with a barrier between.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LANES", "PREFIX", "PREFIXES", "STREAMS", "plan_books", "read_books", "reverse32"]

STREAMS = tl.constexpr(30)
"""The most streams of a chunk."""
LANES = tl.constexpr(32)
PREFIX = tl.constexpr(10)
"""Bits that a reader looks up: longer codes are told apart by comparing."""

PREFIXES = tl.constexpr(1024)

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


@triton.jit(do_not_specialize=["last_streams", "book_words"])
def plan_books(
    counts,  # [chunks, STREAMS, BINS]
    scratch,  # [chunks, 24, BINS]
    books,  # [chunks, words], zeros
    codes,  # [chunks, BINS]: a code, its first bit lowest, and its length in the upper half
    starts,  # [chunks, LANES]: the bit at which a stream begins
    heads,  # [chunks, 2]: bytes of the book or 0 for a constant chunk, the lowest symbol of the rarest
    sizes,  # [chunks]: bytes
    last_streams,
    book_words,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
):
    """All that is to be known of a chunk before its bits are written."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    counts += wide * (STREAMS * BINS)
    scratch += wide * (24 * BINS)
    codes += wide * BINS
    books += wide * book_words
    at = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    stream = streams * 0
    while stream < streams:
        count += tl.load(counts + stream * BINS + at)
        stream += 1
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
    first = tl.min(tl.where(count > 0, at, BINS), 0)
    last = tl.max(tl.where(count > 0, at, 0), 0)
    tl.store(books, first | ((last - first) << 16))
    book = (32 + tl.sum(bits, 0) + 7) // 8

    end = used * 0
    stream = streams * 0
    while stream < streams:
        tl.store(starts + wide * LANES + stream, end)
        end += tl.sum(tl.load(counts + stream * BINS + at) * length, 0)
        stream += 1
    nbytes = tl.where(used == 1, 3, 1 + book + 4 * (streams - 1) + (end + 7) // 8)
    tl.store(heads + wide * 2, tl.where(used == 1, 0, book))
    tl.store(heads + wide * 2 + 1, first)
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


@triton.jit(do_not_specialize=["nbytes", "alphabet", "last_streams"])
def read_books(
    section,
    bounds,  # [chunks + 1]: where a chunk begins
    nbytes,
    scratch,  # [chunks, BINS], zeros: lengths
    symbols,  # [chunks, BINS]: the symbols in the order of their codes
    prefixes,  # [chunks, PREFIXES]: the length of the code that begins so, or one bit more than PREFIX
    limits,  # [chunks, 32]: by length, the first code that is longer; behind it what leads from a code to its symbol
    heads,  # [chunks, 4]: mode or -1, the constant symbol, where the starts begin and the bits, behind the chunk
    verdict,  # 1 for a section that no coder writes, 2 for one with chunks that are read elsewhere
    alphabet,
    last_streams,
    BINS: tl.constexpr,
):
    """Modes and books of a section. What it says is believed as far as it lies within the chunk."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    begin = tl.load(bounds + chunk)
    end = tl.load(bounds + chunk + 1)
    there = (begin < end) & (end <= nbytes)
    # Bounds ascend, so they end well where the last one does.
    there = there & (tl.load(bounds + tl.num_programs(0)) == nbytes)
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
    lengths = scratch + wide * BINS
    behind = _read_classes(section, body * 0 + 8, 8 * body, lengths, alphabet)
    bits = behind + 4 * (streams - 1)
    tl.debug_barrier()

    at = tl.arange(0, BINS)
    prefix = tl.arange(0, PREFIXES)
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
        shortest += ((long <= PREFIX) & ((prefix << (15 - PREFIX)) >= limit)).to(tl.int32)
        following = following << 1
    tl.store(prefixes + wide * PREFIXES + prefix, shortest.to(tl.uint8))
    complete = (filled == (1 << 15)) & (base >= 2)
    huffman = huffman & (behind >= 0) & (bits < body) & complete
    good = good | huffman
    elsewhere = there & ((mode == 1) | (mode == 3))
    said = tl.where(good, 0, tl.where(elsewhere, 2, 1))
    tl.atomic_or(verdict, said, mask=said > 0, sem="relaxed")
    heads += wide * 4
    tl.store(heads, tl.where(good, mode, -1))
    tl.store(heads + 1, symbol)
    tl.store(heads + 2, behind)
    tl.store(heads + 3, bits)
