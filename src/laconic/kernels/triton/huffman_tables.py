"""Huffman code tables built on a GPU: code lengths by package-merge, codes and coded tables, one program per chunk.

The steps of a program exchange data through scratch memory of the chunk, with barriers in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.streams import LANES, STREAMS

__all__ = [
    "FIRST_CLASS", "MAX_LENGTH", "build_code_tables", "coded_table_offset", "codes_offset", "encode_record_words",
    "reverse32", "run_length", "starts_offset", "summary_offset",
]  # fmt: skip

FIRST_CLASS = tl.constexpr(8)
"""Class from which the first token of a coded table differs."""

MAX_LENGTH = tl.constexpr(15)
"""Bits of the longest code."""


@triton.jit
def reverse32(x):
    """Reverse the bits of a uint32."""
    x = ((x >> 1) & 0x55555555) | ((x & 0x55555555) << 1)
    x = ((x >> 2) & 0x33333333) | ((x & 0x33333333) << 2)
    x = ((x >> 4) & 0x0F0F0F0F) | ((x & 0x0F0F0F0F) << 4)
    x = ((x >> 8) & 0x00FF00FF) | ((x & 0x00FF00FF) << 8)
    return (x >> 16) | (x << 16)


@triton.jit
def run_length(bits, like):
    """Read the Elias gamma code of a run of unused symbols; return its leading zeros, at most 12, and its value.

    ``like`` is an int32 of the shape and type of the results.
    """
    zeros = like * 0
    for k in tl.static_range(1, 13):
        zeros += ((bits & ((1 << k) - 1)) == 0).to(tl.int32)
    one = (like * 0 + 1) << tl.minimum(zeros, 11)
    return zeros, one + ((bits >> (zeros + 1)) & (one - 1))


@triton.jit
def _below(memory, numbers, count, value, STEPS: tl.constexpr, EQUAL: tl.constexpr, ASM: tl.constexpr):
    """Count how many of ``count`` ascending numbers are below each value; with EQUAL also those that are equal."""
    low = tl.zeros_like(value)
    high = low + count
    for _ in range(STEPS):
        middle = (low + high) >> 1
        searching = low < high
        number = shared_memory.load(memory, numbers + 4 * middle, ASM)
        if EQUAL:
            up = searching & (number <= value)
        else:
            up = searching & (number < value)
        low = tl.where(up, middle + 1, low)
        high = tl.where(searching & (up == 0), middle, high)
    return low


@triton.jit
def _code_lengths(memory, shared, keys, used, BINS: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr):
    """Return the code length of each leaf in the order of ``keys`` (count and symbol); needs 20 rows of scratch."""
    leaves = shared
    packages = leaves + 4 * BINS
    items = packages + 4 * BINS
    ranks = items + 8 * BINS
    offsets = tl.arange(0, BINS)
    valid = offsets < used
    weight = keys >> 12
    shared_memory.store_masked(memory, leaves + 4 * offsets, weight, valid, ASM)
    shared_memory.store_masked(memory, items + 4 * offsets, weight, valid, ASM)
    tl.debug_barrier()
    bits = used * 0
    for k in tl.static_range(12):
        bits += (used > (1 << k)).to(tl.int32)
    limit = tl.minimum(MAX_LENGTH, tl.maximum(12, bits + 3))
    total = used
    level = used * 0 + 1
    while level < limit:
        pairs = total // 2
        paired = offsets < pairs
        package = shared_memory.load(memory, items + 8 * offsets, ASM) + shared_memory.load(
            memory, items + 8 * offsets + 4, ASM
        )
        shared_memory.store_masked(memory, packages + 4 * offsets, package, paired, ASM)
        tl.debug_barrier()
        rank = offsets + _below(memory, packages, pairs, weight, STEPS, False, ASM)
        shared_memory.store_masked(memory, items + 4 * rank, weight, valid, ASM)
        shared_memory.store_masked(memory, ranks + 4 * (level * BINS + offsets), rank, valid, ASM)
        package_rank = offsets + _below(memory, leaves, used, package, STEPS, True, ASM)
        shared_memory.store_masked(memory, items + 4 * package_rank, package, paired, ASM)
        total = used + pairs
        level += 1
        tl.debug_barrier()
    length = tl.zeros_like(weight)
    take = 2 * used - 2
    while level > 1:
        level -= 1
        rank = shared_memory.load(memory, ranks + 4 * (level * BINS + offsets), ASM)
        among = tl.sum((valid & (rank < take)).to(tl.int32), 0)
        length += (offsets < among).to(tl.int32)
        take = 2 * (take - among)
    return length + (offsets < tl.minimum(take, used)).to(tl.int32)


# An encoder's record of a chunk: 24 rows of scratch (where shared memory is too small), then the fields below.


@triton.jit
def codes_offset(BINS: tl.constexpr):
    """Offset of the codes by symbol: the code, first bit lowest, and its length in the upper half."""
    return 24 * BINS


@triton.jit
def coded_table_offset(BINS: tl.constexpr):
    """Offset of the coded table. A symbol with the run before it takes at most 33 bits, and never two in a row do."""
    return 25 * BINS


@triton.jit
def starts_offset(BINS: tl.constexpr):
    """Offset of the first bit of each stream, and of the end of the last one."""
    return 26 * BINS + 16


@triton.jit
def summary_offset(BINS: tl.constexpr):
    """Offset of the table's bytes (0 for a constant chunk) and the lowest symbol."""
    return 26 * BINS + 48


def encode_record_words(bins: int) -> int:
    return 26 * bins + 64


@triton.jit
def _counts_of(counts, first, streams, ROWS: tl.constexpr, BINS: tl.constexpr):
    """Load the counts of ROWS streams, [ROWS, BINS]."""
    stream = first + tl.arange(0, ROWS)[:, None]
    return tl.load(counts + stream * BINS + tl.arange(0, BINS)[None, :], mask=stream < streams, other=0)


@triton.jit(do_not_specialize=["last_streams"])
def build_code_tables(
    counts,  # [chunks, STREAMS, BINS]
    records,  # [chunks, RECORD]
    sizes,  # [chunks]: bytes
    last_streams,
    BINS: tl.constexpr,
    STEPS: tl.constexpr,
    RECORD: tl.constexpr,
    ROWS: tl.constexpr,
    ASM: tl.constexpr,
):
    """Build the codes, the coded table, the stream starts and the size of a chunk."""
    chunk = tl.program_id(0)
    chunk64 = chunk.to(tl.int64)
    shared = shared_memory.declare_shared(ASM)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    counts += chunk64 * (STREAMS * BINS)
    scratch = records + chunk64 * RECORD
    codes = scratch + codes_offset(BINS)
    coded_table = scratch + coded_table_offset(BINS)
    starts = scratch + starts_offset(BINS)
    summary = scratch + summary_offset(BINS)
    offsets = tl.arange(0, BINS)
    count = tl.zeros((BINS,), tl.int32)
    for first in range(0, LANES, ROWS):
        count += tl.sum(_counts_of(counts, first, streams, ROWS, BINS), 0)
    tl.store(coded_table + offsets, tl.zeros_like(count))
    tl.store(coded_table + BINS + tl.arange(0, 16), tl.zeros((16,), tl.int32))
    used = tl.sum((count > 0).to(tl.int32), 0)
    keys = tl.where(count > 0, (tl.minimum(count, (1 << 19) - 1) << 12) | offsets, 0x7FFFFFFF)
    keys = tl.sort(keys)
    by_leaf = _code_lengths(scratch, shared, keys, used, BINS, STEPS, ASM)
    # Reorder lengths from counts to symbols.
    lengths = shared + 80 * BINS
    order = shared + 84 * BINS
    shared_memory.store(scratch, lengths + 4 * offsets, tl.zeros_like(count), ASM)
    tl.debug_barrier()
    shared_memory.store_masked(scratch, lengths + 4 * (keys & 4095), by_leaf, offsets < used, ASM)
    tl.debug_barrier()
    length = shared_memory.load(scratch, lengths + 4 * offsets, ASM)

    code = tl.zeros_like(count)
    next_code = used * 0
    code_length = used * 0
    while code_length < MAX_LENGTH:
        code_length += 1
        this_length = (length == code_length).to(tl.int32)
        code = tl.where(this_length == 1, next_code + tl.cumsum(this_length, 0) - 1, code)
        next_code = (next_code + tl.sum(this_length, 0)) << 1
    reverse = reverse32(code.to(tl.uint32)) >> ((32 - length) & 31).to(tl.uint32)
    tl.store(codes + offsets, tl.where(length > 0, reverse.to(tl.int32) | (length << 16), 0))

    occurs = length > 0
    rank = tl.cumsum(occurs.to(tl.int32), 0) - 1
    shared_memory.store_masked(scratch, order + 4 * rank, offsets, occurs, ASM)
    tl.debug_barrier()
    inner = occurs & (rank > 0)
    before = tl.where(inner, shared_memory.load(scratch, order + 4 * tl.maximum(rank - 1, 0), ASM), 0)
    class_before = tl.where(inner, shared_memory.load(scratch, lengths + 4 * before, ASM), FIRST_CLASS)
    run = tl.where(inner, offsets - before - 1, 0)
    run_bits = tl.zeros_like(run)
    for k in tl.static_range(1, 12):
        run_bits += (run >= (1 << k)).to(tl.int32)
    one = (tl.zeros_like(run) + 1) << run_bits
    skip = tl.where(run > 0, 7 | (one << 3) | ((run - one) << (run_bits + 4)), 0)
    skip_bits = tl.where(run > 0, 2 * run_bits + 4, 0)
    change = length - class_before
    token = tl.where(change == 0, 0, tl.where(change == 1, 5, tl.where(change == -1, 1, 3 | (length << 3))))
    token_bits = tl.where(change == 0, 1, tl.where((change == 1) | (change == -1), 3, 7))
    bits = tl.where(occurs, skip_bits + token_bits, 0)
    bit = 32 + tl.cumsum(bits, 0) - bits
    both = skip.to(tl.uint64) | (token.to(tl.uint64) << skip_bits.to(tl.uint64))
    both = both << (bit & 31).to(tl.uint64)
    high = (both >> 32).to(tl.uint32)
    tl.atomic_or(coded_table + (bit >> 5), both.to(tl.uint32).to(tl.int32, bitcast=True), mask=occurs, sem="relaxed")
    tl.atomic_or(coded_table + (bit >> 5) + 1, high.to(tl.int32, bitcast=True), mask=occurs & (high > 0), sem="relaxed")
    lowest = tl.min(tl.where(count > 0, offsets, BINS), 0)
    last = tl.max(tl.where(count > 0, offsets, 0), 0)
    tl.store(coded_table, lowest | ((last - lowest) << 16))
    table_nbytes = (32 + tl.sum(bits, 0) + 7) // 8

    row = tl.arange(0, ROWS)
    for first in range(0, LANES, ROWS):
        weighed = _counts_of(counts, first, streams, ROWS, BINS) * length[None, :]
        tl.store(scratch + first + row, tl.sum(weighed, 1))
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    of_stream = tl.load(scratch + lane)
    tl.store(starts + lane, tl.cumsum(of_stream, 0) - of_stream)
    end = tl.sum(of_stream, 0)
    nbytes = tl.where(used == 1, 3, 1 + table_nbytes + 4 * (streams - 1) + (end + 7) // 8)
    tl.store(summary, tl.where(used == 1, 0, table_nbytes))
    tl.store(summary + 1, lowest)
    tl.store(sizes + chunk64, nbytes.to(tl.int64))
