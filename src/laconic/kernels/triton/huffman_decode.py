"""Huffman decoding on a GPU: one program per chunk, one lane per stream, symbol after symbol.

The cost is the cycles that a lane waits per symbol: one lookup in a table in shared memory and a shift. The bytes of
the section are fetched long before they are needed.

A large tensor has enough chunks to fill the device. The streams of a small one are split into parts with a lane each. A
lane starts somewhat early, at an arbitrary bit: after some symbols it is synchronized with the code, as is usual for
prefix codes. It reads its part once to find where it synchronized and how many symbols follow, and again to write them.
If a lane is not synchronized with the one before it, the lanes of the first parts decode everything.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.huffman_stream_reader import (
    RING_BLOCKS,
    decode_round,
    decode_slowly,
    fill_ring,
    skip_round,
    skip_slowly,
)
from laconic.kernels.triton.huffman_table_reader import (
    PREFIX_BITS,
    PREFIXES,
    chunk_info_offset,
    decode_record_words,
    limits_offset,
    lookup_offset,
    order_offset,
    read_code_tables,
)
from laconic.kernels.triton.launch_args import whole_words
from laconic.kernels.triton.shared_memory import SharedBuffer
from laconic.kernels.triton.streams import CHUNK_SYMBOLS, LANES, STREAMS, ChunkLayout, chunk_shape

__all__ = ["CodedSection", "decode_streams", "open_section"]

BUSY_PROGRAMS = 512
"""Programs that fill a device."""
MAX_PARTS = 32
"""Largest number of parts of a stream."""
MIN_SPLIT_SYMBOLS = 1024
"""Streams of fewer symbols are not split."""
SYNC_BITS = 1536
"""Bits that a lane reads before its part in order to synchronize."""


@triton.jit
def _stream_start(section, table_end, stream, mask):
    """Load where a stream begins; the first one has no such word."""
    value = tl.zeros((LANES,), tl.int64)
    for k in tl.static_range(4):
        byte = tl.load(section + table_end + 4 * (stream - 1) + k, mask=mask & (stream > 0), other=0)
        value = value | (byte.to(tl.int64) << (8 * k))
    return value


@triton.jit
def _open_chunk(section, nbytes, skew, records, memory, shared, streams, BINS: tl.constexpr, ASM: tl.constexpr):
    """Copy a chunk's lookup table to shared memory and return where its streams are.

    Positions are counted in bits, from ``off`` bits before the first stream. The returned section pointer is that
    position, with the bytes, relative to it, at which the section begins and ends. The section begins ``skew`` bytes
    after a multiple of 16.
    """
    for first in range(0, PREFIXES, 1024):
        entry = first + tl.arange(0, 1024)
        shared_memory.store(memory, shared + 4 * entry, tl.load(records + lookup_offset(BINS) + entry), ASM)
    modes = records + chunk_info_offset(BINS)
    begin = tl.load((modes + 6).to(tl.pointer_type(tl.int64)))
    table_end = tl.load(modes + 2)
    bits = tl.load(modes + 3)
    size = tl.load(modes + 4)
    stream = tl.arange(0, LANES)
    active = stream < streams
    size_in_bits = 8 * (size - bits).to(tl.int64)
    start = _stream_start(section + begin, table_end, stream, active)
    before = _stream_start(section + begin, table_end, stream - 1, active & (stream > 0))
    end = _stream_start(section + begin, table_end, stream + 1, stream < streams - 1)
    end = tl.where(stream == streams - 1, size_in_bits, end)
    wrong = active & ((start < before) | (start > size_in_bits))
    # Start at the block before the one in which the bits begin.
    from_byte = begin + bits + skew
    off = 128 + 8 * (from_byte & 15).to(tl.int32)
    section += from_byte // 16 * 16 - 16 - skew
    first_byte = tl.maximum(skew - from_byte // 16 * 16 + 16, -64).to(tl.int32)
    end_byte = tl.minimum(skew + nbytes - from_byte // 16 * 16 + 16, 1 << 30).to(tl.int32)
    bit = tl.where(wrong | (active == 0), 0, start).to(tl.int32) + off
    tl.debug_barrier()
    return section, first_byte, end_byte, off, bit, end, size_in_bits, wrong


@triton.jit(do_not_specialize=["nbytes", "skew", "last_streams"])
def _synchronize_parts(
    section, nbytes, skew, records, parts, memory, last_streams,
    BINS: tl.constexpr, RECORD: tl.constexpr, SYNC_BITS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Find, for each lane of a part, where its first symbol begins, where its last one ends, and their number."""
    chunk, part = tl.program_id(0), tl.program_id(1)
    chunk64 = chunk.to(tl.int64)
    program = chunk64 * tl.num_programs(1) + part
    shared, memory = shared_memory.program_shared(memory, program, PREFIXES + 4 * RING_BLOCKS * LANES, ASM)
    streams = tl.where(chunk == tl.num_programs(0) - 1, last_streams, STREAMS)
    records += chunk64 * RECORD
    if tl.load(records + chunk_info_offset(BINS)) == 2:
        section, first_byte, end_byte, off, start, end, size_in_bits, _ = _open_chunk(
            section, nbytes, skew, records, memory, shared, streams, BINS, ASM
        )
        symbols = records + order_offset(BINS)
        limits = records + limits_offset(BINS)
        lane = tl.arange(0, LANES)
        ring = shared + 4 * PREFIXES + 16 * lane
        stop = tl.where(lane < streams, tl.minimum(end, size_in_bits), 0).to(tl.int32) + off
        span = (tl.maximum(stop - start, 0) + tl.num_programs(1) - 1) // tl.num_programs(1)
        part_begin = start + part * span
        part_end = tl.minimum(part_begin + span, stop)
        bit = tl.where(part == 0, start, tl.maximum(start, part_begin - SYNC_BITS))
        fetched = fill_ring(section, first_byte, end_byte, memory, ring, bit, ASM)
        first_symbol = bit
        count = bit * 0
        short = tl.load(limits + PREFIX_BITS) == 32768  # the lookup table has all codes
        active = tl.max((bit < part_end).to(tl.int32), 0)
        while active > 0:
            if short:
                bit, fetched, first_symbol, count = skip_round(
                    section, first_byte, end_byte, memory, shared, ring, bit, fetched, part_begin, part_end,
                    first_symbol, count, limits, symbols, BINS, ASM,
                )  # fmt: skip
            else:
                bit, fetched, first_symbol, count = skip_slowly(
                    section, first_byte, end_byte, memory, shared, ring, bit, fetched, part_begin, part_end,
                    first_symbol, count, limits, symbols, BINS, ASM,
                )  # fmt: skip
            active = tl.max((bit < part_end).to(tl.int32), 0)
        result = parts + (chunk64 * tl.num_programs(1) + part) * (3 * LANES) + lane
        tl.store(result, first_symbol)
        tl.store(result + LANES, bit)
        tl.store(result + 2 * LANES, count)


@triton.jit
def _join_parts(parts, part, PARTS: tl.constexpr):
    """Return each lane's symbols before a part and before the next one, and whether all parts are synchronized."""
    k = tl.arange(0, PARTS)[:, None]
    lane = tl.arange(0, LANES)[None, :]
    results = parts + k * (3 * LANES) + lane
    counts = tl.load(results + 2 * LANES)
    earlier = tl.sum(tl.where(k < part, counts, 0), 0)
    through = tl.sum(tl.where(k <= part, counts, 0), 0)
    previous_end = tl.load(results - 2 * LANES, mask=(k > 0) & (lane >= 0), other=0)
    synchronized = ((k == 0) | (tl.load(results) == previous_end)).to(tl.int32)
    return earlier, through, tl.min(tl.min(synchronized, 0), 0)


@triton.jit
def _fill_constant(out, symbol, chunk_size, SYMBOL_BITS: tl.constexpr, ASM: tl.constexpr):
    """Fill a constant chunk."""
    per_round: tl.constexpr = 128 // SYMBOL_BITS
    row = tl.arange(0, LANES)
    word = tl.zeros((LANES,), tl.int32) + symbol * (0x01010101 if SYMBOL_BITS == 8 else 0x00010001)
    target = out + (tl.program_id(0).to(tl.int64) * (CHUNK_SYMBOLS // per_round) + row) * 4
    done = chunk_size * 0
    while done < chunk_size:
        shared_memory.store4_global(target, word, word, word, word, done + row * per_round < chunk_size, ASM)
        target += 4 * LANES
        done += LANES * per_round


@triton.jit(do_not_specialize=["n", "nbytes", "skew", "last_streams", "last_stream_size"])
def _decode_streams(
    section, nbytes, skew, records, parts, out, memory, status, n, last_streams, last_stream_size,
    BINS: tl.constexpr, RECORD: tl.constexpr, SYMBOL_BITS: tl.constexpr, PARTS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Decode a chunk's streams, or parts of them, with a lane for each."""
    chunk, part = tl.program_id(0), tl.program_id(1)
    chunk64 = chunk.to(tl.int64)
    out = out.to(tl.pointer_type(tl.int32))
    shared, memory = shared_memory.program_shared(
        memory, chunk64 * PARTS + part, PREFIXES + 4 * RING_BLOCKS * LANES, ASM
    )
    streams, stream_size, chunk_size = chunk_shape(chunk, n, last_streams, last_stream_size)
    records += chunk64 * RECORD
    mode = tl.load(records + chunk_info_offset(BINS))
    if mode == 2:
        section, first_byte, end_byte, off, bit, end, size_in_bits, wrong = _open_chunk(
            section, nbytes, skew, records, memory, shared, streams, BINS, ASM
        )
        symbols = records + order_offset(BINS)
        limits = records + limits_offset(BINS)
        stream = tl.arange(0, LANES)
        active_stream = stream < streams
        last = stream == streams - 1
        ring = shared + 4 * PREFIXES + 16 * stream
        stream_symbols = tl.where(active_stream, tl.minimum(chunk_size - stream * stream_size, stream_size), 0)
        if PARTS > 1:
            parts += chunk64 * (PARTS * 3 * LANES)
            earlier, through, synchronized = _join_parts(parts, part, PARTS)
            first_symbol = tl.load(parts + part * (3 * LANES) + stream)
            bit = tl.where(synchronized > 0, first_symbol, bit)
            earlier = tl.where(synchronized > 0, earlier, 0)
            active = active_stream & tl.where(synchronized > 0, earlier < stream_symbols, part == 0)
            # Padding bits of the last byte may look like further symbols.
            ending = active & ((synchronized == 0) | (through >= stream_symbols) | (part == PARTS - 1))
            through = tl.where(ending, stream_symbols, through)
        else:
            ending = active_stream
            active = active_stream
            earlier = stream_symbols * 0
            through = stream_symbols
        per_round: tl.constexpr = 128 // SYMBOL_BITS
        # Sixteen output bytes belong to the lane of their first symbol. It decodes to their end, if necessary into the
        # next stream, which follows at once; the next lane skips as many.
        first_index = stream * stream_size + earlier
        block = (first_index + per_round - 1) // per_round
        reach = tl.where(active, tl.minimum(block * per_round, chunk_size) - first_index, 0)
        remaining = tl.where(ending, stream_symbols - earlier, -1)
        ended = bit * 0 - 1
        end_block = tl.minimum(stream * stream_size + through + per_round - 1, chunk_size + per_round - 1) // per_round
        fetched = fill_ring(section, first_byte, end_byte, memory, ring, bit, ASM)
        target = out + (chunk64 * (CHUNK_SYMBOLS // per_round) + tl.where(block < end_block, block, 0)) * 4
        if tl.max(reach, 0) > 0:
            bit, fetched, ended = decode_slowly(
                section, first_byte, end_byte, memory, shared, ring, bit, fetched, reach, remaining, ended, limits,
                symbols, target, stream < 0, BINS, SYMBOL_BITS, ASM,
            )  # fmt: skip
        remaining -= reach
        reach = tl.where(active, tl.minimum(end_block * per_round, chunk_size) - block * per_round, 0)
        rounds = tl.max((reach + per_round - 1) // per_round, 0)
        # Rounds that all lanes have, if the lookup table has all codes; the end of a stream is found by the slow path.
        short = tl.load(limits + PREFIX_BITS) == 32768
        full = tl.where(ending, remaining - 1, reach)
        fast_rounds = tl.where(short, tl.min(tl.where(active, full, 1 << 20), 0) // per_round, 0)
        done = rounds * 0
        while done < rounds:
            if done < fast_rounds:
                bit, fetched = decode_round(
                    section, first_byte, end_byte, memory, shared, ring, bit, fetched, limits, symbols, target,
                    reach > 0, BINS, SYMBOL_BITS, ASM,
                )  # fmt: skip
            else:
                bit, fetched, ended = decode_slowly(
                    section, first_byte, end_byte, memory, shared, ring, bit, fetched, reach, remaining, ended, limits,
                    symbols, target, reach > 0, BINS, SYMBOL_BITS, ASM,
                )  # fmt: skip
            target += 4
            remaining -= per_round
            reach -= per_round
            done += 1
        stream_end = (ended - off).to(tl.int64)
        wrong = wrong | (ending & (last == 0) & (stream_end != end))
        wrong_end = (stream_end > size_in_bits) | (stream_end <= size_in_bits - 8)
        unused = tl.minimum(tl.maximum(size_in_bits - stream_end, 0), 7)
        final = tl.load(section + ((off + size_in_bits) >> 3) - 1).to(tl.int64)
        wrong = wrong | (ending & last & (wrong_end | ((final >> (8 - unused)) != 0)))
        tl.atomic_or(status, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
    if (mode == 0) & (part == 0):
        _fill_constant(out, tl.load(records + chunk_info_offset(BINS) + 1), chunk_size, SYMBOL_BITS, ASM)


class CodedSection(NamedTuple):
    """A coded section whose code tables have been read, on the device."""

    layout: ChunkLayout
    section: Tensor
    records: Tensor
    status: Tensor
    """Nonzero for a section that no coder wrote; then one bit for each mode that occurs."""


def _num_parts(layout: ChunkLayout) -> int:
    """Return the number of parts, a power of two; two parts would gain nothing, since all is read twice."""
    most = min(MAX_PARTS, BUSY_PROGRAMS // layout.chunks)
    return 1 if layout.longest < MIN_SPLIT_SYMBOLS or most < 4 else 1 << (most.bit_length() - 1)


def open_section(section: Tensor, n: int, alphabet: int) -> CodedSection | None:
    """Read a section's code tables; None if it is too short for its directory."""
    layout, device = ChunkLayout.of(n, alphabet), section.device
    if section.numel() < 5 * layout.chunks:
        return None
    section = whole_words(section.contiguous(), 16)
    status = torch.zeros(2, dtype=torch.int32, device=device)
    records = torch.empty((layout.chunks, decode_record_words(layout.bins)), dtype=torch.int32, device=device)
    read_code_tables[(layout.chunks,)](
        section, section.numel(), records, status, alphabet, layout.last_streams,
        BINS=layout.bins, RECORD=records.shape[1], num_warps=max(4, layout.warps),
    )  # fmt: skip
    return CodedSection(layout, section, records, status)


def decode_streams(coded: CodedSection, symbols: Tensor) -> None:
    """Decode the Huffman and constant chunks into their part of ``symbols``, which has whole blocks of 16."""
    layout, section, records, status = coded
    parts = _num_parts(layout)
    programs, skew = (layout.chunks, parts), section.data_ptr() % 16
    shared = SharedBuffer(
        4 * PREFIXES.value + 16 * RING_BLOCKS.value * LANES.value, layout.chunks * parts, section.device
    )
    part_results = status
    if parts > 1:
        part_results = torch.empty((*programs, 3, LANES.value), dtype=torch.int32, device=section.device)
        _synchronize_parts[programs](
            section, section.numel(), skew, records, part_results, shared.memory, layout.last_streams,
            BINS=layout.bins, RECORD=records.shape[1], SYNC_BITS=SYNC_BITS, ASM=shared.asm, num_warps=1,
        )  # fmt: skip
    _decode_streams[programs](
        section, section.numel(), skew, records, part_results, symbols, shared.memory, status, layout.n,
        layout.last_streams, layout.last_stream_size, BINS=layout.bins, RECORD=records.shape[1],
        SYMBOL_BITS=8 * symbols.element_size(), PARTS=parts, ASM=shared.asm, num_warps=1,
    )  # fmt: skip
