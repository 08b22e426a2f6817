"""Shares of rANS, a program for each chunk: dealt out by counts, written into books, read from them, dealt to slots.

As in ``books.py``, steps of a program hand each other what they have through scratch memory, with a barrier between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.sections import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding
from laconic.kernels.triton.huffman_tables import heads_at, modes_at
from laconic.kernels.triton.streams import STREAMS

__all__ = ["SLOTS", "deal_slots", "plan_shares", "read_shares"]

_CHUNK = tl.constexpr(CHUNK)
_RAW = tl.constexpr(RAW)
_RANS = tl.constexpr(RANS)
_HUFFMAN = tl.constexpr(HUFFMAN)
_CONSTANT = tl.constexpr(CONSTANT)
_HUFFMAN_AUTO = tl.constexpr(Coding.HUFFMAN_AUTO.value)
_FIRST_CLASS = tl.constexpr(8)
_MAX_CLASS = tl.constexpr(15)

SLOTS = 4096
"""Slots that a program deals out."""


@triton.jit
def chunk_lanes(here):
    return tl.where(here >= 16384, 32, 4)


@triton.jit
def class_of(share):
    """Bits of a share; 0 for none."""
    found = tl.zeros_like(share)
    for k in tl.static_range(15):
        found += (share >= (1 << k)).to(tl.int32)
    return found


@triton.jit
def _last_of(keys, weights, wanted):
    """The largest key that, with all above it, has the weight wanted."""
    low = wanted * 0
    high = low + 0x7FFFFFFE
    for _ in range(31):
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum(tl.where(keys >= middle, weights, 0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _share_out(count, n, scale, BINS: tl.constexpr):
    """Whole shares of 2^scale in proportion to the counts, at least 1 for each symbol that occurs."""
    at = tl.arange(0, BINS)
    exact = count.to(tl.int64) << scale
    part = (exact // n).to(tl.int32)
    share = tl.where(count > 0, tl.maximum(part, 1), 0)
    left = (1 << scale) - tl.sum(share, 0)
    # What is left goes to those cut off most, the lower symbol first.
    cut = ((exact - part.to(tl.int64) * n).to(tl.int32) << 12) | (4095 - at)
    kept = (part > 0).to(tl.int32)
    more = (left > 0) & (part > 0) & (cut >= _last_of(cut, kept, left))
    # What is owed is given in proportion, by the most frequent first, and the higher symbol.
    owed = tl.maximum(-left, 0)
    givers = tl.maximum(tl.sum(tl.where(share > 1, share, 0), 0), 1)
    most = tl.where(count > 0, tl.minimum((owed * share + givers - 1) // givers, share - 1), 0)
    often = (tl.maximum(count - 1, 0) << 12) | at
    last = _last_of(often, most, owed)
    given = tl.sum(tl.where(often > last, most, 0), 0)
    give = tl.where(often > last, most, tl.where((often == last) & (count > 0), owed - given, 0))
    return share + more.to(tl.int32) - give


@triton.jit
def _log2(share):
    """In units of 2^-16, in whole numbers."""
    whole = tl.maximum(class_of(share) - 1, 0)
    y = share.to(tl.uint64) << (31 - whole).to(tl.uint64)
    fraction = tl.zeros_like(share)
    for _ in tl.static_range(16):
        y = (y * y) >> 31
        above = (y >> 32) > 0
        fraction = fraction * 2 + above.to(tl.int32)
        y = tl.where(above, y >> 1, y)
    return (whole << 16) + fraction


@triton.jit
def _token(share, before, inner, classes, BINS: tl.constexpr):
    """The token of each symbol's class and its bits, with the share behind it."""
    own = class_of(share)
    tl.store(classes + tl.arange(0, BINS), own)
    tl.debug_barrier()
    change = own - tl.load(classes + before, mask=inner, other=_FIRST_CLASS)
    token = tl.where(change == 0, 0, tl.where(change == 1, 5, tl.where(change == -1, 1, 3 | (own << 3))))
    bits = tl.where(change == 0, 1, tl.where((change == 1) | (change == -1), 3, 7))
    below = tl.maximum(own - 1, 0)
    mantissa = share - (tl.full(share.shape, 1, tl.int32) << below)
    return token | (mantissa << bits), tl.where(share > 0, bits + below, 0)


@triton.jit
def _estimate(share, count, bits, skip_bits, scale, lanes):
    """About the bytes of the chunk. A state ends in four, of which it began with nearly two, and one is of use."""
    cost = tl.sum(tl.where(count > 0, count.to(tl.int64) * ((scale << 16) - _log2(share)), 0), 0)
    book = (32 + tl.sum(bits + skip_bits, 0) + 7) // 8
    return 2 + book + 3 * lanes + ((cost + (1 << 19) - 1) >> 19).to(tl.int32), book


@triton.jit
def _or_bits(words, value, place, mask):
    """Bits into a stream of words that others write, too."""
    both = value.to(tl.uint64) << (place & 31).to(tl.uint64)
    high = (both >> 32).to(tl.uint32)
    tl.atomic_or(words + (place >> 5), both.to(tl.uint32).to(tl.int32, bitcast=True), mask=mask, sem="relaxed")
    tl.atomic_or(words + (place >> 5) + 1, high.to(tl.int32, bitcast=True), mask=mask & (high > 0), sem="relaxed")


@triton.jit(do_not_specialize=["n", "last_streams", "book_words", "symbol_bits", "coding"])
def plan_shares(
    counts,  # [chunks, STREAMS, BINS]
    scratch,  # [chunks, 3, BINS]
    books,  # [chunks, words]
    table,  # [chunks, BINS, 2]: reciprocal, what is added, 2^scale less the share; shift, least state to give a word
    plans,  # [chunks, 4]: the mode, or -1 where Huffman's writer has the chunk; the scale or the only symbol; the book
    sizes,  # [chunks]: bytes; those of rANS are known later
    work,  # records of Huffman's planner, or nothing
    n,
    last_streams,
    book_words,
    symbol_bits,
    coding,
    BINS: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Shares and the book of each chunk, the mode it is written in, and what its writer looks up."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
    lanes = chunk_lanes(here)
    counts += wide * (STREAMS * BINS)
    scratch += wide * (3 * BINS)
    books += wide * book_words
    at = tl.arange(0, BINS)
    tl.store(books + at, tl.zeros_like(at))
    tl.store(books + BINS + tl.arange(0, 4), tl.zeros((4,), tl.int32))
    count = tl.zeros((BINS,), tl.int32)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    stream = streams * 0
    while stream < streams:
        count += tl.load(counts + stream * BINS + at)
        stream += 1
    occurs = count > 0
    used = tl.sum(occurs.to(tl.int32), 0)
    first = tl.min(tl.where(occurs, at, BINS), 0)
    last = tl.max(tl.where(occurs, at, 0), 0)
    order = scratch
    rank = tl.cumsum(occurs.to(tl.int32), 0) - 1
    tl.store(order + rank, at, mask=occurs)
    tl.debug_barrier()
    inner = occurs & (rank > 0)
    before = tl.load(order + rank - 1, mask=inner, other=0)

    run = tl.where(inner, at - before - 1, 0)
    below = tl.maximum(class_of(run) - 1, 0)
    one = tl.full((BINS,), 1, tl.int32) << below
    skip = 7 | (one << 3) | ((run - one) << (below + 4))
    skip_bits = tl.where(run > 0, 2 * below + 4, 0)

    share = _share_out(count, here, 12, BINS)
    token, bits = _token(share, before, inner, scratch + BINS, BINS)
    size, book = _estimate(share, count, bits, skip_bits, 12, lanes)
    fine = _share_out(count, here, 15, BINS)
    fine_token, fine_bits = _token(fine, before, inner, scratch + 2 * BINS, BINS)
    fine_size, fine_book = _estimate(fine, count, fine_bits, skip_bits, 15, lanes)
    finer = (used > 1024) | (fine_size + fine_size // 512 < size)
    scale = tl.where(finer, 15, 12)
    share = tl.where(finer, fine, share)
    token = tl.where(finer, fine_token, token)
    bits = tl.where(finer, fine_bits, bits)
    size = tl.where(finer, fine_size, size)
    book = tl.where(finer, fine_book, book)

    tl.store(books, first | ((last - first) << 16))
    place = 32 + tl.cumsum(bits + skip_bits, 0) - bits
    _or_bits(books, skip, place - skip_bits, run > 0)
    _or_bits(books, token, place, occurs)

    shift = class_of(tl.maximum(share, 1) - 1)  # ceil(log2)
    divisor = tl.maximum(share, 1).to(tl.int64)
    reciprocal = ((tl.full((BINS,), 1, tl.int64) << (31 + shift)) + divisor - 1) // divisor
    base = tl.cumsum(share, 0) - share
    # A share of 1 has no such reciprocal: one less than the state, and what is added makes up for it.
    alone = share == 1
    reciprocal = tl.where(alone, 0xFFFFFFFF, reciprocal)
    base += tl.where(alone, (1 << scale) - 1, 0)
    entry = (reciprocal << 32) | (base.to(tl.int64) << 16) | ((1 << scale) - share).to(tl.int64)
    limit = (tl.maximum(shift - 1, 0).to(tl.int64) << 32) | (share << (31 - scale)).to(tl.int64)
    table += wide * (2 * BINS) + 2 * at
    tl.store(table, entry)
    tl.store(table + 1, limit)

    raw = 1 + (here // 256) * 32 * symbol_bits + ((here % 256) * symbol_bits + 7) // 8
    mode = used * 0 + _RANS
    if RECORD > 0:
        huffman = tl.load(sizes + wide).to(tl.int32)
        mode = tl.where(coding == _HUFFMAN_AUTO, _HUFFMAN, mode)
        least = tl.where(coding == _HUFFMAN_AUTO, huffman, size)
        turned = huffman + huffman // 2048 < least
        mode = tl.where(turned, _HUFFMAN, mode)
        least = tl.where(turned, huffman, least)
        turned = size + size // 2048 < least
        mode = tl.where(turned, _RANS, mode)
        least = tl.where(turned, size, least)
        turned = raw + raw // 2048 < least
        mode = tl.where(turned, _RAW, mode)
        size = tl.where(turned, raw, least)
        ours = (used > 1) & (mode != _HUFFMAN)
        tl.store(work + wide * RECORD + heads_at(BINS), -1, mask=ours)
        mode = tl.where(ours, mode, -1)
    else:
        mode = tl.where(used == 1, _CONSTANT, mode)
    plans += 4 * wide
    tl.store(plans, mode)
    tl.store(plans + 1, tl.where(used == 1, first, scale))
    tl.store(plans + 2, book)
    tl.store(sizes + wide, tl.where(used == 1, 3, size).to(tl.int64))


# --------------------------------------------------------------------------------------------------------- reading


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
def _read_book(section, at, end, shares, alphabet):
    """Reads a book with shares into ``shares``, which are zeros: the byte behind it, or -1 where it makes no sense."""
    head = _peek(section, at, end)
    symbol = (head & 0xFFFF).to(tl.int32)
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
        rest = (window >> 3).to(tl.int32)
        zeros = symbol * 0
        for k in tl.static_range(1, 13):
            zeros += ((rest & ((1 << k) - 1)) == 0).to(tl.int32)
        one = (symbol * 0 + 1) << tl.minimum(zeros, 11)
        skipped = one + ((rest >> (zeros + 1)) & (one - 1))
        here = tl.where(same, before, tl.where(step, before + tl.where(kind == 5, 1, -1), rest & 15))
        taken = tl.where(same, 1, tl.where(step, 3, 7))
        below = tl.minimum(tl.maximum(here - 1, 0), _MAX_CLASS - 1)
        leading = (symbol * 0 + 1) << below
        share = leading | ((window >> taken.to(tl.int64)).to(tl.int32) & (leading - 1))
        at += tl.where(run, 2 * zeros + 4, taken + below)
        good = (at <= end) & tl.where(
            run, (zeros <= 11) & (symbol + skipped <= last), (here >= 1) & (here <= _MAX_CLASS)
        )
        tl.store(shares + symbol, share, mask=good & (run == 0))
        symbol += tl.where(run, skipped, 1)
        before = tl.where(run, before, here)
    padding = _peek(section, at, end) & ((1 << ((-at) & 7)) - 1)
    return tl.where(good & (padding == 0), (at + 7) >> 3, -1)


@triton.jit(do_not_specialize=["alphabet", "n", "symbol_bits"])
def read_shares(
    section,
    known,  # [chunks, KNOWN]: what ``read_books`` found
    shares,  # [chunks, BINS]
    ranks,  # [chunks, 3, BINS]: by rank among those in use, the first slot, the symbol, the share
    plans,  # [chunks, 8]: RANS or RAW or -1, scale, bytes before the states, words, symbols in use; where it begins
    verdict,
    alphabet,
    n,
    symbol_bits,
    BINS: tl.constexpr,
    KNOWN: tl.constexpr,
):
    """Which chunks are rANS or raw, and the shares of the former. What lies outside of the chunk is not believed."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    here = tl.minimum(n - wide * _CHUNK, _CHUNK).to(tl.int32)
    lanes = chunk_lanes(here)
    modes = known + wide * KNOWN + modes_at(BINS)
    size = tl.load(modes + 4)
    begin = tl.load((modes + 6).to(tl.pointer_type(tl.int64)))
    there = size > 0  # else it lies not within the section
    section += tl.where(there, begin, 0)
    mode = tl.load(section, mask=there, other=255).to(tl.int32)
    raw_size = 1 + (here // 256) * 32 * symbol_bits + ((here % 256) * symbol_bits + 7) // 8
    raw = (mode == _RAW) & (size == raw_size)
    # A symbol takes a word at most, so no chunk has more bytes.
    rans = (mode == _RANS) & (size >= 2) & (size < (1 << 21))
    body = tl.where(rans, size, 0)
    scale = tl.load(section + 1, mask=rans, other=0).to(tl.int32)
    shares += wide * BINS
    at = tl.arange(0, BINS)
    tl.store(shares + at, tl.zeros_like(at))
    tl.debug_barrier()
    behind = _read_book(section, body * 0 + 16, 8 * body, shares, alphabet)
    tl.debug_barrier()
    share = tl.load(shares + at)
    occurs = share > 0
    base = tl.cumsum(share, 0) - share
    rank = tl.cumsum(occurs.to(tl.int32), 0) - 1
    ranks += wide * (3 * BINS)
    tl.store(ranks + rank, base, mask=occurs)
    tl.store(ranks + BINS + rank, at, mask=occurs)
    tl.store(ranks + 2 * BINS + rank, share, mask=occurs)
    words = body - behind - 4 * lanes
    rans = rans & ((scale == 12) | (scale == 15)) & (behind >= 0) & (words >= 0) & (words % 2 == 0)
    whole = (here * 0 + 1) << tl.where(rans, scale, 0)
    rans = rans & (tl.sum(share, 0) == whole) & (tl.max(share, 0) < whole)
    wrong = (tl.load(modes) < 0) & (rans == 0) & (raw == 0)
    tl.atomic_or(verdict, 1, mask=wrong, sem="relaxed")
    plans += wide * 8
    tl.store(plans, tl.where(rans, _RANS, tl.where(raw, _RAW, -1)))
    tl.store(plans + 1, scale)
    tl.store(plans + 2, behind)
    tl.store(plans + 3, words // 2)
    tl.store(plans + 4, tl.sum(occurs.to(tl.int32), 0))
    tl.store((plans + 6).to(tl.pointer_type(tl.int64)), begin)


@triton.jit
def deal_slots(
    ranks, plans, slots,  # [chunks, 2^15]: a symbol, how far into its share the slot is, the share
    BINS: tl.constexpr, STEPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """What each slot stands for."""
    chunk = tl.program_id(0)
    wide = chunk.to(tl.int64)
    begin = tl.program_id(1) * SPAN
    rans = tl.load(plans + 8 * wide) == _RANS
    whole = (begin * 0 + 1) << tl.where(rans, tl.load(plans + 8 * wide + 1), 0)
    if rans & (begin < whole):
        ranks += wide * (3 * BINS)
        slot = begin + tl.arange(0, SPAN)
        low = tl.zeros((SPAN,), tl.int32)
        high = low + tl.load(plans + 8 * wide + 4)
        for _ in range(STEPS):  # how many shares begin at the slot or before
            middle = (low + high) >> 1
            open_ = low < high
            up = open_ & (tl.load(ranks + middle, mask=open_, other=0) <= slot)
            low = tl.where(up, middle + 1, low)
            high = tl.where(open_ & (up == 0), middle, high)
        rank = low - 1
        symbol = tl.load(ranks + BINS + rank)
        step = ((slot - tl.load(ranks + rank)) << 16) | tl.load(ranks + 2 * BINS + rank)
        entry = (symbol.to(tl.int64) << 32) | step.to(tl.int64)
        tl.store(slots + wide * 32768 + slot, entry)
