"""Codebooks of Huffman's code: lengths by package-merge, codes, books written and read, a program for each chunk.

Steps of a program hand each other what they have through scratch memory of the chunk's own, with a barrier between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.streams import LANES, STREAMS

__all__ = [
    "PREFIX",
    "PREFIXES",
    "book_at",
    "codes_at",
    "heads_at",
    "known_words",
    "limits_at",
    "modes_at",
    "order_at",
    "plan_books",
    "read_books",
    "record_words",
    "reverse32",
    "starts_at",
    "table_at",
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
def _below(memory, numbers, count, value, STEPS: tl.constexpr, EQUAL: tl.constexpr, ASM: tl.constexpr):
    """How many of ``count`` ascending numbers are below each value, or as large where EQUAL."""
    low = tl.zeros_like(value)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) >> 1
        open_ = low < high
        found = shared_memory.load(memory, numbers + 4 * middle, ASM)
        if EQUAL:
            up = open_ & (found <= value)
        else:
            up = open_ & (found < value)
        low = tl.where(up, middle + 1, low)
        high = tl.where(open_ & (up == 0), middle, high)
    return low


@triton.jit
def _code_lengths(memory, room, keys, used, BINS: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr):
    """The length of each leaf's code, in the order of ``keys`` (count and symbol, ascending). Takes 20 rows of room."""
    leaves = room
    packages = leaves + 4 * BINS
    items = packages + 4 * BINS
    places = items + 8 * BINS
    at = tl.arange(0, BINS)
    there = at < used
    weight = keys >> 12
    shared_memory.store_some(memory, leaves + 4 * at, weight, there, ASM)
    shared_memory.store_some(memory, items + 4 * at, weight, there, ASM)
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
        package = shared_memory.load(memory, items + 8 * at, ASM) + shared_memory.load(memory, items + 8 * at + 4, ASM)
        shared_memory.store_some(memory, packages + 4 * at, package, paired, ASM)
        tl.debug_barrier()
        place = at + _below(memory, packages, pairs, weight, STEPS, False, ASM)
        shared_memory.store_some(memory, items + 4 * place, weight, there, ASM)
        shared_memory.store_some(memory, places + 4 * (level * BINS + at), place, there, ASM)
        behind = at + _below(memory, leaves, used, package, STEPS, True, ASM)
        shared_memory.store_some(memory, items + 4 * behind, package, paired, ASM)
        total = used + pairs
        level += 1
        tl.debug_barrier()
    length = tl.zeros_like(weight)
    take = 2 * used - 2
    while level > 1:
        level -= 1
        place = shared_memory.load(memory, places + 4 * (level * BINS + at), ASM)
        among = tl.sum((there & (place < take)).to(tl.int32), 0)
        length += (at < among).to(tl.int32)
        take = 2 * (take - among)
    return length + (at < tl.minimum(take, used)).to(tl.int32)


# A chunk's record: 24 rows of scratch, for where they are too many for shared memory, then what is made of it.


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
    ASM: tl.constexpr,
):
    """All that is to be known of a chunk before its bits are written."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    room = shared_memory.address_of(ASM)
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
    by_leaf = _code_lengths(scratch, room, keys, used, BINS, STEPS, ASM)
    # From the order of counts to that of symbols.
    lengths = room + 80 * BINS
    order = room + 84 * BINS
    shared_memory.store(scratch, lengths + 4 * at, tl.zeros_like(count), ASM)
    tl.debug_barrier()
    shared_memory.store_some(scratch, lengths + 4 * (keys & 4095), by_leaf, at < used, ASM)
    tl.debug_barrier()
    length = shared_memory.load(scratch, lengths + 4 * at, ASM)

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
    shared_memory.store_some(scratch, order + 4 * rank, at, occurs, ASM)
    tl.debug_barrier()
    inner = occurs & (rank > 0)
    before = tl.where(inner, shared_memory.load(scratch, order + 4 * tl.maximum(rank - 1, 0), ASM), 0)
    class_before = tl.where(inner, shared_memory.load(scratch, lengths + 4 * before, ASM), _FIRST_CLASS)
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
def _words_at(section, nbytes, begin):
    """Words from the one in which byte ``begin`` lies, how many are whole, and what follows the last whole one."""
    words = section.to(tl.pointer_type(tl.int32)) + (begin >> 2)
    whole = tl.minimum((nbytes >> 2) - (begin >> 2), 1 << 30).to(tl.int32)
    rest = whole * 0
    for k in tl.static_range(3):
        byte = (nbytes >> 2) * 4 + k
        rest = rest | (tl.load(section + byte, mask=byte < nbytes, other=0).to(tl.int32) << (8 * k))
    return words, whole, rest


@triton.jit
def _more_bits(words, whole, rest, word, held, count):
    """At least 33 of the next bits, if there were one; whatever follows the section is zeros."""
    if count <= 32:
        found = tl.load(words + word, mask=word < whole, other=0) | tl.where(word == whole, rest, 0)
        held = held | (found.to(tl.uint32, bitcast=True).to(tl.uint64) << count.to(tl.uint64))
        count += 32
        word += 1
    return word, held, count


@triton.jit
def _read_classes(section, nbytes, begin, end, lengths, alphabet):
    """Reads the book at byte ``begin`` into ``lengths``, which are zeros: its bytes, or -1 where it makes no sense.

    None at ``end`` or behind belongs to it.
    """
    words, whole, rest = _words_at(section, nbytes, begin)
    size = 8 * (end - begin).to(tl.int32)
    word = size * 0
    count = size * 0
    held = count.to(tl.uint64)
    word, held, count = _more_bits(words, whole, rest, word, held, count)
    held = held >> (8 * (begin & 3)).to(tl.uint64)
    count -= 8 * (begin & 3).to(tl.int32)
    word, held, count = _more_bits(words, whole, rest, word, held, count)
    symbol = (held & 0xFFFF).to(tl.int32)
    last = symbol + ((held >> 16) & 0xFFFF).to(tl.int32)
    held = held >> 32
    count -= 32
    at = size * 0 + 32
    good = (at <= size) & (last < alphabet)
    before = symbol * 0 + _FIRST_CLASS
    while good & (symbol <= last):
        word, held, count = _more_bits(words, whole, rest, word, held, count)
        kind = (held & 7).to(tl.int32)
        same = (kind & 1) == 0
        step = (kind & 3) == 1
        run = kind == 7
        named = ((held >> 3) & 15).to(tl.int32)
        ahead = ((held >> 3) & 0x3FFFFFFF).to(tl.int32)
        zeros = symbol * 0
        for k in tl.static_range(1, 13):
            zeros += ((ahead & ((1 << k) - 1)) == 0).to(tl.int32)
        one = (symbol * 0 + 1) << tl.minimum(zeros, 11)
        skipped = one + ((ahead >> (zeros + 1)) & (one - 1))
        here = tl.where(same, before, tl.where(step, before + tl.where(kind == 5, 1, -1), named))
        taken = tl.where(same, 1, tl.where(step, 3, tl.where(run, 2 * zeros + 4, 7)))
        at += taken
        held = held >> taken.to(tl.uint64)
        count -= taken
        good = (at <= size) & tl.where(
            run, (zeros <= 11) & (symbol + skipped <= last), (here >= 1) & (here <= _MAX_LENGTH)
        )
        tl.store(lengths + symbol, here, mask=good & (run == 0))
        symbol += tl.where(run, skipped, 1)
        before = tl.where(run, before, here)
    word, held, count = _more_bits(words, whole, rest, word, held, count)
    padding = (held & 0xFF).to(tl.int32) & ((1 << ((-at) & 7)) - 1)
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


# What a reader knows of a chunk: a row of lengths, then what is made of them.


@triton.jit
def order_at(BINS: tl.constexpr):
    """The symbols in the order of their codes."""
    return BINS


@triton.jit
def table_at(BINS: tl.constexpr):
    """By the next PREFIX bits, lowest first, a symbol and in the lowest 8 bits its length; 0 for longer codes."""
    return 2 * BINS


@triton.jit
def limits_at(BINS: tl.constexpr):
    """By length, the first code that is longer; 16 words behind it what leads from a code to its place in the order."""
    return 2 * BINS + PREFIXES


@triton.jit
def modes_at(BINS: tl.constexpr):
    """Mode or -1, the constant symbol, bytes before the starts and before the bits, bytes in all; a word that is free;
    in two words where the chunk begins.
    """
    return 2 * BINS + PREFIXES + 32


def known_words(bins: int) -> int:
    return 2 * bins + int(PREFIXES.value) + 40


@triton.jit(do_not_specialize=["nbytes", "alphabet", "last_streams"])
def read_books(
    section,  # at a multiple of four bytes
    nbytes,
    known,  # [chunks, KNOWN]
    verdict,  # [2]: 1 for a section that no coder writes; a bit for each mode that occurs
    alphabet,
    last_streams,
    BINS: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """Modes and books of a section. What it says is believed as far as it lies within the chunk."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    at = tl.arange(0, BINS)
    lengths = known + wide * KNOWN
    symbols = lengths + order_at(BINS)
    limits = lengths + limits_at(BINS)
    modes = lengths + modes_at(BINS)
    tl.store(lengths + at, tl.zeros_like(at))
    begin, end, all_end = _bounds(section, chunk)
    tl.debug_barrier()
    there = (begin < end) & (end <= nbytes)
    # Bounds ascend, so they end well where the last one does.
    there = there & (all_end == nbytes)
    size = tl.where(there, end - begin, 0)
    chunk_at = section + tl.where(there, begin, 0)
    mode = tl.load(chunk_at, mask=there, other=255).to(tl.int32)
    constant = (mode == 0) & (size == 3)
    symbol = tl.load(chunk_at + 1, mask=constant, other=255).to(tl.int32)
    symbol |= tl.load(chunk_at + 2, mask=constant, other=255).to(tl.int32) << 8
    good = constant & (symbol < alphabet)
    # No chunk of Huffman's code has more bytes: streams that are shorter than that must end where it does.
    huffman = (mode == 2) & (size < (1 << 21))
    body = tl.where(huffman, size, 0).to(tl.int32)
    # A chunk that has no book reads none of it: its end comes first.
    book = tl.where(huffman, begin + 1, 4)
    behind = _read_classes(section, nbytes, book, book + tl.maximum(body - 1, 0), lengths, alphabet)
    behind = tl.where(behind >= 0, behind + 1, -1)
    bits = behind + 4 * (streams - 1)
    tl.debug_barrier()

    prefix = tl.arange(0, PREFIXES)
    window = (reverse32(prefix.to(tl.uint32)) >> (32 - _MAX_LENGTH)).to(tl.int32)
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
        tl.store(symbols + base + tl.cumsum(mine, 0) - 1, at, mask=mine == 1)
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
    symbol_of = tl.load(symbols + tl.minimum(tl.maximum(place, 0), BINS - 1), mask=short, other=0)
    tl.store(lengths + table_at(BINS) + prefix, tl.where(short, (symbol_of << 8) | shortest, 0))
    complete = (filled == (1 << 15)) & (base >= 2)
    huffman = huffman & (behind >= 0) & (bits < body) & complete
    good = good | huffman
    readable = good | (there & ((mode == 1) | (mode == 3)))
    tl.atomic_or(verdict, 1, mask=readable == 0, sem="relaxed")
    tl.atomic_or(verdict + 1, 1 << (mode & 3), mask=readable, sem="relaxed")
    tl.store(modes, tl.where(good, mode, -1))
    tl.store(modes + 1, symbol)
    tl.store(modes + 2, behind)
    tl.store(modes + 3, bits)
    tl.store(modes + 4, size.to(tl.int32))
    tl.store((modes + 6).to(tl.pointer_type(tl.int64)), begin)
