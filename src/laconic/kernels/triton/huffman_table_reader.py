"""Huffman code tables read on a GPU: modes, code lengths and lookup tables of a section, one program per chunk."""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.triton.huffman_tables import FIRST_CLASS, MAX_LENGTH, reverse32, run_length
from laconic.kernels.triton.streams import STREAMS

__all__ = [
    "PREFIXES", "PREFIX_BITS", "chunk_info_offset", "decode_record_words", "limits_offset", "lookup_offset",
    "order_offset", "read_code_tables",
]  # fmt: skip

PREFIX_BITS = tl.constexpr(12)
"""Bits of the decoder's lookup index. No code that we write for 512 symbols or fewer is longer."""

PREFIXES = tl.constexpr(4096)


@triton.jit
def _words_at(section, nbytes, begin):
    """Return the words from byte ``begin`` on, how many are whole, and the bytes after the last whole one."""
    words = section.to(tl.pointer_type(tl.int32)) + (begin >> 2)
    whole = tl.minimum((nbytes >> 2) - (begin >> 2), 1 << 30).to(tl.int32)
    rest = whole * 0
    for k in tl.static_range(3):
        byte = (nbytes >> 2) * 4 + k
        rest = rest | (tl.load(section + byte, mask=byte < nbytes, other=0).to(tl.int32) << (8 * k))
    return words, whole, rest


@triton.jit
def _more_bits(words, whole, rest, word, held, count):
    """Refill to at least 33 bits; zeros follow the end of the section."""
    if count <= 32:
        next_word = tl.load(words + word, mask=word < whole, other=0) | tl.where(word == whole, rest, 0)
        held = held | (next_word.to(tl.uint32, bitcast=True).to(tl.uint64) << count.to(tl.uint64))
        count += 32
        word += 1
    return word, held, count


@triton.jit
def _read_classes(section, nbytes, begin, end, lengths, alphabet):
    """Read the coded table at byte ``begin`` into zeroed ``lengths``; return its bytes, or -1 if it is invalid.

    The table must end before ``end``.
    """
    words, whole, rest = _words_at(section, nbytes, begin)
    size = 8 * (end - begin).to(tl.int32)
    word = size * 0
    count = size * 0
    bits = count.to(tl.uint64)
    word, bits, count = _more_bits(words, whole, rest, word, bits, count)
    bits = bits >> (8 * (begin & 3)).to(tl.uint64)
    count -= 8 * (begin & 3).to(tl.int32)
    word, bits, count = _more_bits(words, whole, rest, word, bits, count)
    symbol = (bits & 0xFFFF).to(tl.int32)
    last = symbol + ((bits >> 16) & 0xFFFF).to(tl.int32)
    bits = bits >> 32
    count -= 32
    bit = size * 0 + 32
    good = (bit <= size) & (last < alphabet)
    previous_class = symbol * 0 + FIRST_CLASS
    while good & (symbol <= last):
        word, bits, count = _more_bits(words, whole, rest, word, bits, count)
        kind = (bits & 7).to(tl.int32)
        same = (kind & 1) == 0
        step = (kind & 3) == 1
        run = kind == 7
        named = ((bits >> 3) & 15).to(tl.int32)
        ahead = ((bits >> 3) & 0x3FFFFFFF).to(tl.int32)
        zeros, skipped = run_length(ahead, symbol)
        length_class = tl.where(
            same, previous_class, tl.where(step, previous_class + tl.where(kind == 5, 1, -1), named)
        )
        taken = tl.where(same, 1, tl.where(step, 3, tl.where(run, 2 * zeros + 4, 7)))
        bit += taken
        bits = bits >> taken.to(tl.uint64)
        count -= taken
        good = (bit <= size) & tl.where(
            run, (zeros <= 11) & (symbol + skipped <= last), (length_class >= 1) & (length_class <= MAX_LENGTH)
        )
        tl.store(lengths + symbol, length_class, mask=good & (run == 0))
        symbol += tl.where(run, skipped, 1)
        previous_class = tl.where(run, previous_class, length_class)
    word, bits, count = _more_bits(words, whole, rest, word, bits, count)
    padding = (bits & 0xFF).to(tl.int32) & ((1 << ((-bit) & 7)) - 1)
    return tl.where(good & (padding == 0), (bit + 7) >> 3, -1)


@triton.jit
def _bounds(section, chunk):
    """Return begin and end of a chunk, and the end of the last chunk, from the directory."""
    directory = section.to(tl.pointer_type(tl.int32))
    offsets = tl.arange(0, 1024)
    before = tl.zeros((1024,), tl.int64)
    own = tl.zeros((1024,), tl.int64)
    total = tl.zeros((1024,), tl.int64)
    k = chunk * 0
    while k < tl.num_programs(0):
        size = (
            tl.load(directory + k + offsets, mask=k + offsets < tl.num_programs(0), other=0).to(tl.int64) & 0xFFFFFFFF
        )
        before += tl.where(k + offsets < chunk, size, 0)
        own += tl.where(k + offsets == chunk, size, 0)
        total += size
        k += 1024
    begin = 4 * tl.num_programs(0) + tl.sum(before, 0)
    return begin, begin + tl.sum(own, 0), 4 * tl.num_programs(0) + tl.sum(total, 0)


# A decoder's record of a chunk: a row of code lengths, then the fields below.


@triton.jit
def order_offset(BINS: tl.constexpr):
    """Offset of the symbols in the order of their codes."""
    return BINS


@triton.jit
def lookup_offset(BINS: tl.constexpr):
    """Offset of the lookup table by the next PREFIX_BITS bits, lowest first.

    An entry is a symbol and, in the lowest 8 bits, its code length; 0 for longer codes.
    """
    return 2 * BINS


@triton.jit
def limits_offset(BINS: tl.constexpr):
    """Offset of the first longer code by length; 16 words later the difference of a code and its index in the order."""
    return 2 * BINS + PREFIXES


@triton.jit
def chunk_info_offset(BINS: tl.constexpr):
    """Offset of the chunk's fields.

    They are mode (-1 if invalid), constant symbol, bytes before the starts and before the bits, bytes in all, an unused
    word, and (int64) where the chunk begins.
    """
    return 2 * BINS + PREFIXES + 32


def decode_record_words(bins: int) -> int:
    return 2 * bins + int(PREFIXES.value) + 40


@triton.jit(do_not_specialize=["nbytes", "alphabet", "last_streams"])
def read_code_tables(
    section,  # at a multiple of four bytes
    nbytes,
    records,  # [chunks, RECORD]
    status,  # [2]: 1 for a section that no coder writes; one bit for each mode that occurs
    alphabet,
    last_streams,
    BINS: tl.constexpr,
    RECORD: tl.constexpr,
):
    """Read the modes and code tables of a section. Offsets in it are only trusted within the chunk."""
    chunk = tl.program_id(0)
    chunk64 = chunk.to(tl.int64)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    offsets = tl.arange(0, BINS)
    lengths = records + chunk64 * RECORD
    symbols = lengths + order_offset(BINS)
    limits = lengths + limits_offset(BINS)
    chunk_info = lengths + chunk_info_offset(BINS)
    tl.store(lengths + offsets, tl.zeros_like(offsets))
    begin, end, last_end = _bounds(section, chunk)
    tl.debug_barrier()
    valid = (begin < end) & (end <= nbytes)
    # Bounds ascend, so all are valid if the last one is.
    valid = valid & (last_end == nbytes)
    size = tl.where(valid, end - begin, 0)
    chunk_at = section + tl.where(valid, begin, 0)
    mode = tl.load(chunk_at, mask=valid, other=255).to(tl.int32)
    constant = (mode == 0) & (size == 3)
    symbol = tl.load(chunk_at + 1, mask=constant, other=255).to(tl.int32)
    symbol |= tl.load(chunk_at + 2, mask=constant, other=255).to(tl.int32) << 8
    accepted = constant & (symbol < alphabet)
    # No Huffman chunk has more bytes: shorter streams must end where it does.
    huffman = (mode == 2) & (size < (1 << 21))
    body = tl.where(huffman, size, 0).to(tl.int32)
    # A chunk without a coded table reads nothing: its end comes first.
    table_begin = tl.where(huffman, begin + 1, 4)
    table_end = _read_classes(section, nbytes, table_begin, table_begin + tl.maximum(body - 1, 0), lengths, alphabet)
    table_end = tl.where(table_end >= 0, table_end + 1, -1)
    bits = table_end + 4 * (streams - 1)
    tl.debug_barrier()

    prefix = tl.arange(0, PREFIXES)
    window = (reverse32(prefix.to(tl.uint32)) >> (32 - MAX_LENGTH)).to(tl.int32)
    length = tl.load(lengths + offsets)
    shortest = tl.zeros((PREFIXES,), tl.int32) + 1
    next_code = body * 0
    base = body * 0
    filled = body * 0
    code_length = body * 0
    while code_length < MAX_LENGTH:
        code_length += 1
        this_length = (length == code_length).to(tl.int32)
        number = tl.sum(this_length, 0)
        tl.store(symbols + base + tl.cumsum(this_length, 0) - 1, offsets, mask=this_length == 1)
        tl.store(limits + 16 + code_length, base - next_code)
        next_code += number
        base += number
        limit = next_code << (MAX_LENGTH - code_length)
        filled += number << (MAX_LENGTH - code_length)
        tl.store(limits + code_length, limit)
        shortest += ((code_length <= PREFIX_BITS) & (window >= limit)).to(tl.int32)
        next_code = next_code << 1
    tl.debug_barrier()
    short = shortest <= PREFIX_BITS
    rank = (window >> (15 - shortest)) + tl.load(limits + 16 + shortest, mask=short, other=0)
    symbol_of = tl.load(symbols + tl.minimum(tl.maximum(rank, 0), BINS - 1), mask=short, other=0)
    tl.store(lengths + lookup_offset(BINS) + prefix, tl.where(short, (symbol_of << 8) | shortest, 0))
    complete = (filled == (1 << 15)) & (base >= 2)
    huffman = huffman & (table_end >= 0) & (bits < body) & complete
    accepted = accepted | huffman
    readable = accepted | (valid & ((mode == 1) | (mode == 3)))
    tl.atomic_or(status, 1, mask=readable == 0, sem="relaxed")
    tl.atomic_or(status + 1, 1 << (mode & 3), mask=readable, sem="relaxed")
    tl.store(chunk_info, tl.where(accepted, mode, -1))
    tl.store(chunk_info + 1, symbol)
    tl.store(chunk_info + 2, table_end)
    tl.store(chunk_info + 3, bits)
    tl.store(chunk_info + 4, size.to(tl.int32))
    tl.store((chunk_info + 6).to(tl.pointer_type(tl.int64)), begin)
