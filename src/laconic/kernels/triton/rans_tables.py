"""rANS frequency tables on a GPU: computed from counts, written, read, and expanded to slots; one program per chunk.

As in ``huffman_tables.py``, the steps of a program exchange data through scratch memory, with barriers in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.sections import CONSTANT, HUFFMAN, RANS, RAW, Coding
from laconic.kernels.triton.huffman_table_reader import chunk_info_offset
from laconic.kernels.triton.huffman_tables import FIRST_CLASS, run_length, summary_offset
from laconic.kernels.triton.streams import STREAMS, symbols_in_chunk

__all__ = ["SLOTS", "build_frequency_tables", "build_slot_tables", "read_frequency_tables"]

_RAW = tl.constexpr(RAW)
_RANS = tl.constexpr(RANS)
_HUFFMAN = tl.constexpr(HUFFMAN)
_CONSTANT = tl.constexpr(CONSTANT)
_HUFFMAN_AUTO = tl.constexpr(Coding.HUFFMAN_AUTO.value)
MAX_CLASS = tl.constexpr(15)

SLOTS = 4096
"""Slots that a program fills."""


@triton.jit
def num_states(chunk_size):
    return tl.where(chunk_size >= 16384, 32, 4)


@triton.jit
def bit_length(number):
    """Return the bits of a number; 0 for 0."""
    bits = tl.zeros_like(number)
    for k in tl.static_range(15):
        bits += (number >= (1 << k)).to(tl.int32)
    return bits


@triton.jit
def _threshold_key(keys, weights, wanted):
    """Return the largest key such that it and all larger ones have at least the wanted weight."""
    low = wanted * 0
    high = low + 0x7FFFFFFE
    for _ in range(31):
        middle = low + ((high - low + 1) >> 1)
        enough = tl.sum(tl.where(keys >= middle, weights, 0), 0) >= wanted
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _normalize_counts(count, n, scale, BINS: tl.constexpr):
    """Return frequencies that sum to 2^scale in proportion to the counts, at least 1 for each symbol that occurs."""
    offsets = tl.arange(0, BINS)
    scaled_counts = count.to(tl.int64) << scale
    part = (scaled_counts // n).to(tl.int32)
    freq = tl.where(count > 0, tl.maximum(part, 1), 0)
    remainder = (1 << scale) - tl.sum(freq, 0)
    # The remainder goes to the symbols that rounding down cut most, the lower symbol first.
    cut_off = ((scaled_counts - part.to(tl.int64) * n).to(tl.int32) << 12) | (4095 - offsets)
    rounded_down = (part > 0).to(tl.int32)
    more = (remainder > 0) & (part > 0) & (cut_off >= _threshold_key(cut_off, rounded_down, remainder))
    # An excess is taken in proportion, from the most frequent symbols first, and the higher symbol first.
    excess = tl.maximum(-remainder, 0)
    reducible = tl.maximum(tl.sum(tl.where(freq > 1, freq, 0), 0), 1)
    largest_cut = tl.where(count > 0, tl.minimum((excess * freq + reducible - 1) // reducible, freq - 1), 0)
    by_count = (tl.maximum(count - 1, 0) << 12) | offsets
    last_key = _threshold_key(by_count, largest_cut, excess)
    taken = tl.sum(tl.where(by_count > last_key, largest_cut, 0), 0)
    reduction = tl.where(
        by_count > last_key, largest_cut, tl.where((by_count == last_key) & (count > 0), excess - taken, 0)
    )
    return freq + more.to(tl.int32) - reduction


@triton.jit
def _log2(freq):
    """Compute log2 in units of 2^-16 by integer arithmetic."""
    whole = tl.maximum(bit_length(freq) - 1, 0)
    y = freq.to(tl.uint64) << (31 - whole).to(tl.uint64)
    fraction = tl.zeros_like(freq)
    for _ in tl.static_range(16):
        y = (y * y) >> 31
        above = (y >> 32) > 0
        fraction = fraction * 2 + above.to(tl.int32)
        y = tl.where(above, y >> 1, y)
    return (whole << 16) + fraction


@triton.jit
def _token(freq, before, inner, classes, BINS: tl.constexpr):
    """Return the token of each symbol's class followed by the frequency's mantissa, and its bits."""
    own = bit_length(freq)
    tl.store(classes + tl.arange(0, BINS), own)
    tl.debug_barrier()
    change = own - tl.load(classes + before, mask=inner, other=FIRST_CLASS)
    token = tl.where(change == 0, 0, tl.where(change == 1, 5, tl.where(change == -1, 1, 3 | (own << 3))))
    bits = tl.where(change == 0, 1, tl.where((change == 1) | (change == -1), 3, 7))
    below = tl.maximum(own - 1, 0)
    mantissa = freq - (tl.full(freq.shape, 1, tl.int32) << below)
    return token | (mantissa << bits), tl.where(freq > 0, bits + below, 0)


@triton.jit
def _estimate(freq, count, bits, skip_bits, scale, lanes):
    """Estimate the bytes of the chunk, and return the bytes of the table.

    A state ends in four bytes, of which it began with nearly two; so about three count.
    """
    cost = tl.sum(tl.where(count > 0, count.to(tl.int64) * ((scale << 16) - _log2(freq)), 0), 0)
    table_nbytes = (32 + tl.sum(bits + skip_bits, 0) + 7) // 8
    return 2 + table_nbytes + 3 * lanes + ((cost + (1 << 19) - 1) >> 19).to(tl.int32), table_nbytes


@triton.jit
def _write_bits(words, value, bit, mask):
    """OR bits into a bit stream that other threads write as well."""
    both = value.to(tl.uint64) << (bit & 31).to(tl.uint64)
    high = (both >> 32).to(tl.uint32)
    tl.atomic_or(words + (bit >> 5), both.to(tl.uint32).to(tl.int32, bitcast=True), mask=mask, sem="relaxed")
    tl.atomic_or(words + (bit >> 5) + 1, high.to(tl.int32, bitcast=True), mask=mask & (high > 0), sem="relaxed")


@triton.jit
def _chunk_of_program(n):
    """Return the number of a program's chunk, as int32 and as int64, and the chunk's symbols and states."""
    chunk = tl.program_id(0)
    chunk64 = chunk.to(tl.int64)
    chunk_size = symbols_in_chunk(n, chunk64)
    return chunk, chunk64, chunk_size, num_states(chunk_size)


@triton.jit(do_not_specialize=["n", "last_streams", "table_words", "symbol_bits", "coding"])
def build_frequency_tables(
    counts,  # [chunks, STREAMS, BINS]
    scratch,  # [chunks, 3, BINS]
    coded_tables,  # [chunks, words]
    table,  # [chunks, BINS, 2]: reciprocal, bias, 2^scale - freq; shift, least state that emits a word
    plans,  # [chunks, 4]: mode (-1 for Huffman and constant chunks); scale or the only symbol; bytes of the table
    sizes,  # [chunks]: bytes; those of rANS chunks are known later
    huffman_records,  # Huffman records, or unused
    n,
    last_streams,
    table_words,
    symbol_bits,
    coding,
    BINS: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Compute frequencies, coded table, mode and encoder table of each chunk."""
    chunk, chunk64, chunk_size, states = _chunk_of_program(n)
    counts += chunk64 * (STREAMS * BINS)
    scratch += chunk64 * (3 * BINS)
    coded_tables += chunk64 * table_words
    offsets = tl.arange(0, BINS)
    tl.store(coded_tables + offsets, tl.zeros_like(offsets))
    tl.store(coded_tables + BINS + tl.arange(0, 4), tl.zeros((4,), tl.int32))
    count = tl.zeros((BINS,), tl.int32)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    stream = streams * 0
    while stream < streams:
        count += tl.load(counts + stream * BINS + offsets)
        stream += 1
    occurs = count > 0
    used = tl.sum(occurs.to(tl.int32), 0)
    first = tl.min(tl.where(occurs, offsets, BINS), 0)
    last = tl.max(tl.where(occurs, offsets, 0), 0)
    order = scratch
    rank = tl.cumsum(occurs.to(tl.int32), 0) - 1
    tl.store(order + rank, offsets, mask=occurs)
    tl.debug_barrier()
    inner = occurs & (rank > 0)
    before = tl.load(order + rank - 1, mask=inner, other=0)

    run = tl.where(inner, offsets - before - 1, 0)
    run_bits = tl.maximum(bit_length(run) - 1, 0)
    one = tl.full((BINS,), 1, tl.int32) << run_bits
    skip = 7 | (one << 3) | ((run - one) << (run_bits + 4))
    skip_bits = tl.where(run > 0, 2 * run_bits + 4, 0)

    freq = _normalize_counts(count, chunk_size, 12, BINS)
    token, bits = _token(freq, before, inner, scratch + BINS, BINS)
    size, table_nbytes = _estimate(freq, count, bits, skip_bits, 12, states)
    fine = _normalize_counts(count, chunk_size, 15, BINS)
    fine_token, fine_bits = _token(fine, before, inner, scratch + 2 * BINS, BINS)
    fine_size, fine_book = _estimate(fine, count, fine_bits, skip_bits, 15, states)
    finer = (used > 1024) | (fine_size + fine_size // 512 < size)
    scale = tl.where(finer, 15, 12)
    freq = tl.where(finer, fine, freq)
    token = tl.where(finer, fine_token, token)
    bits = tl.where(finer, fine_bits, bits)
    size = tl.where(finer, fine_size, size)
    table_nbytes = tl.where(finer, fine_book, table_nbytes)

    tl.store(coded_tables, first | ((last - first) << 16))
    bit = 32 + tl.cumsum(bits + skip_bits, 0) - bits
    _write_bits(coded_tables, skip, bit - skip_bits, run > 0)
    _write_bits(coded_tables, token, bit, occurs)

    shift = bit_length(tl.maximum(freq, 1) - 1)  # ceil(log2)
    divisor = tl.maximum(freq, 1).to(tl.int64)
    reciprocal = ((tl.full((BINS,), 1, tl.int64) << (31 + shift)) + divisor - 1) // divisor
    base = tl.cumsum(freq, 0) - freq
    # A frequency of 1 has no such reciprocal: the quotient is one too small, and the bias makes up for it.
    alone = freq == 1
    reciprocal = tl.where(alone, 0xFFFFFFFF, reciprocal)
    base += tl.where(alone, (1 << scale) - 1, 0)
    entry = (reciprocal << 32) | (base.to(tl.int64) << 16) | ((1 << scale) - freq).to(tl.int64)
    limit = (tl.maximum(shift - 1, 0).to(tl.int64) << 32) | (freq << (31 - scale)).to(tl.int64)
    table += chunk64 * (2 * BINS) + 2 * offsets
    tl.store(table, entry)
    tl.store(table + 1, limit)

    raw = 1 + (chunk_size // 256) * 32 * symbol_bits + ((chunk_size % 256) * symbol_bits + 7) // 8
    mode = used * 0 + _RANS
    if RECORD > 0:
        huffman = tl.load(sizes + chunk64).to(tl.int32)
        mode = tl.where(coding == _HUFFMAN_AUTO, _HUFFMAN, mode)
        least = tl.where(coding == _HUFFMAN_AUTO, huffman, size)
        smaller = huffman + huffman // 2048 < least
        mode = tl.where(smaller, _HUFFMAN, mode)
        least = tl.where(smaller, huffman, least)
        smaller = size + size // 2048 < least
        mode = tl.where(smaller, _RANS, mode)
        least = tl.where(smaller, size, least)
        smaller = raw + raw // 2048 < least
        mode = tl.where(smaller, _RAW, mode)
        size = tl.where(smaller, raw, least)
        not_huffman = (used > 1) & (mode != _HUFFMAN)
        tl.store(huffman_records + chunk64 * RECORD + summary_offset(BINS), -1, mask=not_huffman)
        mode = tl.where(not_huffman, mode, -1)
    else:
        mode = tl.where(used == 1, _CONSTANT, mode)
    plans += 4 * chunk64
    tl.store(plans, mode)
    tl.store(plans + 1, tl.where(used == 1, first, scale))
    tl.store(plans + 2, table_nbytes)
    tl.store(sizes + chunk64, tl.where(used == 1, 3, size).to(tl.int64))


# -------------------------------------------------------------------------------------------------------- decoding


@triton.jit
def _peek(section, bit, end):
    """Load the next 40 bits, less those of the first byte that were read; zeros from bit ``end`` on."""
    byte = bit >> 3
    window = tl.load(section + byte, mask=bit < end, other=0).to(tl.int64)
    for k in tl.static_range(1, 5):
        next_byte = tl.load(section + byte + k, mask=8 * (byte + k) < end, other=0).to(tl.int64)
        window = window | (next_byte << (8 * k))
    return window >> (bit & 7)


@triton.jit
def _read_coded_table(section, bit, end, freqs, alphabet):
    """Read a coded table into ``freqs``, which are zeros; return the byte after it, or -1 if it is invalid."""
    head = _peek(section, bit, end)
    symbol = (head & 0xFFFF).to(tl.int32)
    last = symbol + ((head >> 16) & 0xFFFF).to(tl.int32)
    good = (bit + 32 <= end) & (last < alphabet)
    bit += 32
    previous_class = symbol * 0 + FIRST_CLASS
    while good & (symbol <= last):
        window = _peek(section, bit, end)
        kind = (window & 7).to(tl.int32)
        same = (kind & 1) == 0
        step = (kind & 3) == 1
        run = kind == 7
        rest = (window >> 3).to(tl.int32)
        zeros, skipped = run_length(rest, symbol)
        freq_class = tl.where(
            same, previous_class, tl.where(step, previous_class + tl.where(kind == 5, 1, -1), rest & 15)
        )
        taken = tl.where(same, 1, tl.where(step, 3, 7))
        below = tl.minimum(tl.maximum(freq_class - 1, 0), MAX_CLASS - 1)
        leading = (symbol * 0 + 1) << below
        freq = leading | ((window >> taken.to(tl.int64)).to(tl.int32) & (leading - 1))
        bit += tl.where(run, 2 * zeros + 4, taken + below)
        good = (bit <= end) & tl.where(
            run, (zeros <= 11) & (symbol + skipped <= last), (freq_class >= 1) & (freq_class <= MAX_CLASS)
        )
        tl.store(freqs + symbol, freq, mask=good & (run == 0))
        symbol += tl.where(run, skipped, 1)
        previous_class = tl.where(run, previous_class, freq_class)
    padding = _peek(section, bit, end) & ((1 << ((-bit) & 7)) - 1)
    return tl.where(good & (padding == 0), (bit + 7) >> 3, -1)


@triton.jit(do_not_specialize=["alphabet", "n", "symbol_bits"])
def read_frequency_tables(
    section,
    records,  # [chunks, RECORD]: what ``read_code_tables`` wrote
    freqs,  # [chunks, BINS]
    ranks,  # [chunks, 3, BINS]: by rank among symbols in use: first slot, symbol, frequency
    plans,  # [chunks, 8]: RANS, RAW or -1; scale; bytes before the states; words; symbols in use; (int64) begin
    status,
    alphabet,
    n,
    symbol_bits,
    BINS: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Determine which chunks are rANS or raw, and read the frequencies of the former within the chunk's bounds."""
    _, chunk64, chunk_size, states = _chunk_of_program(n)
    chunk_info = records + chunk64 * RECORD + chunk_info_offset(BINS)
    size = tl.load(chunk_info + 4)
    begin = tl.load((chunk_info + 6).to(tl.pointer_type(tl.int64)))
    valid = size > 0  # else it is outside of the section
    section += tl.where(valid, begin, 0)
    mode = tl.load(section, mask=valid, other=255).to(tl.int32)
    raw_size = 1 + (chunk_size // 256) * 32 * symbol_bits + ((chunk_size % 256) * symbol_bits + 7) // 8
    raw = (mode == _RAW) & (size == raw_size)
    # A symbol takes at most one word, so no chunk has more bytes.
    rans = (mode == _RANS) & (size >= 2) & (size < (1 << 21))
    body = tl.where(rans, size, 0)
    scale = tl.load(section + 1, mask=rans, other=0).to(tl.int32)
    freqs += chunk64 * BINS
    offsets = tl.arange(0, BINS)
    tl.store(freqs + offsets, tl.zeros_like(offsets))
    tl.debug_barrier()
    table_end = _read_coded_table(section, body * 0 + 16, 8 * body, freqs, alphabet)
    tl.debug_barrier()
    freq = tl.load(freqs + offsets)
    occurs = freq > 0
    base = tl.cumsum(freq, 0) - freq
    rank = tl.cumsum(occurs.to(tl.int32), 0) - 1
    ranks += chunk64 * (3 * BINS)
    tl.store(ranks + rank, base, mask=occurs)
    tl.store(ranks + BINS + rank, offsets, mask=occurs)
    tl.store(ranks + 2 * BINS + rank, freq, mask=occurs)
    words = body - table_end - 4 * states
    rans = rans & ((scale == 12) | (scale == 15)) & (table_end >= 0) & (words >= 0) & (words % 2 == 0)
    scale_total = (chunk_size * 0 + 1) << tl.where(rans, scale, 0)
    rans = rans & (tl.sum(freq, 0) == scale_total) & (tl.max(freq, 0) < scale_total)
    wrong = (tl.load(chunk_info) < 0) & (rans == 0) & (raw == 0)
    tl.atomic_or(status, 1, mask=wrong, sem="relaxed")
    plans += chunk64 * 8
    tl.store(plans, tl.where(rans, _RANS, tl.where(raw, _RAW, -1)))
    tl.store(plans + 1, scale)
    tl.store(plans + 2, table_end)
    tl.store(plans + 3, words // 2)
    tl.store(plans + 4, tl.sum(occurs.to(tl.int32), 0))
    tl.store((plans + 6).to(tl.pointer_type(tl.int64)), begin)


@triton.jit
def build_slot_tables(
    ranks, plans, slots,  # [chunks, 2^15]: symbol, offset of the slot within its frequency, frequency
    BINS: tl.constexpr, STEPS: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Fill the slot table: the symbol of each slot."""
    chunk = tl.program_id(0)
    chunk64 = chunk.to(tl.int64)
    begin = tl.program_id(1) * SPAN
    rans = tl.load(plans + 8 * chunk64) == _RANS
    scale_total = (begin * 0 + 1) << tl.where(rans, tl.load(plans + 8 * chunk64 + 1), 0)
    if rans & (begin < scale_total):
        ranks += chunk64 * (3 * BINS)
        slot = begin + tl.arange(0, SPAN)
        low = tl.zeros((SPAN,), tl.int32)
        high = low + tl.load(plans + 8 * chunk64 + 4)
        for _ in range(STEPS):  # count the symbols whose first slot is at or before the slot
            middle = (low + high) >> 1
            searching = low < high
            up = searching & (tl.load(ranks + middle, mask=searching, other=0) <= slot)
            low = tl.where(up, middle + 1, low)
            high = tl.where(searching & (up == 0), middle, high)
        rank = low - 1
        symbol = tl.load(ranks + BINS + rank)
        step = ((slot - tl.load(ranks + rank)) << 16) | tl.load(ranks + 2 * BINS + rank)
        entry = (symbol.to(tl.int64) << 32) | step.to(tl.int64)
        tl.store(slots + chunk64 * 32768 + slot, entry)
