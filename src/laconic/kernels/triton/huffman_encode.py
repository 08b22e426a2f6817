"""Huffman encoding on a GPU: one program per stream counts symbols, another writes bits.

A symbol's bits begin at the sum of the lengths before it, so the threads of a program place their codes side by side in
shared memory, which is then written in whole words. The streams of a chunk are one run of bits: a word in which one
stream ends and the next begins belongs to the first of them, whose program reads that far ahead.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels.triton import shared_memory
from laconic.kernels.triton.huffman_tables import (
    build_code_tables,
    coded_table_offset,
    codes_offset,
    encode_record_words,
    starts_offset,
    summary_offset,
)
from laconic.kernels.triton.launch_args import word_aligned
from laconic.kernels.triton.shared_memory import SharedBuffer
from laconic.kernels.triton.streams import CHUNK_SYMBOLS, STREAM_LENGTH, STREAMS, ChunkLayout, chunk_shape

__all__ = ["build_tables", "chunk_offset", "count_symbols", "encode_section", "write_chunks"]

COUNTERS = 4096
"""Counters per program: each symbol gets as many as fit, so that threads rarely contend."""
COUNT_SPAN = 2048
"""Symbols that a program counts at once."""
WARPS = 4
SHARED_TABLE_SYMBOLS = 256
"""Up to this many symbols the code table is built in shared memory."""
SHARED_CODES = 1024
"""Up to this many codes fit into shared memory beside the bits."""


@triton.jit(do_not_specialize=["n", "last_streams", "last_stream_size"])
def _count(
    symbols, counts, memory, n, last_streams, last_stream_size,
    BINS: tl.constexpr, COPIES: tl.constexpr, SPAN: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Count each symbol of a stream."""
    chunk, stream = tl.program_id(0), tl.program_id(1)
    chunk64 = chunk.to(tl.int64)
    shared, memory = shared_memory.program_shared(memory, chunk64 * tl.num_programs(1) + stream, BINS * COPIES, ASM)
    streams, stream_size, chunk_size = chunk_shape(chunk, n, last_streams, last_stream_size)
    begin = stream * stream_size
    end = tl.where(stream < streams, tl.minimum(begin + stream_size, chunk_size), begin)
    symbols += chunk64 * CHUNK_SYMBOLS
    shared_memory.clear16(memory, shared + 16 * tl.arange(0, BINS * COPIES // 4), ASM)
    tl.debug_barrier()
    offsets = tl.arange(0, SPAN)
    thread_counter = shared + 4 * (shared_memory.lane_id(stream, ASM) & (COPIES - 1))
    tile = begin // 16 * 16
    while tile < end:
        if (tile >= begin) & (tile + SPAN <= end):
            symbol = tl.load(symbols + tl.multiple_of(tile, 16) + offsets).to(tl.int32) & (BINS - 1)
            shared_memory.increment(memory, thread_counter + 4 * COPIES * symbol, symbol >= 0, ASM)
        else:
            valid = (tile + offsets >= begin) & (tile + offsets < end)
            symbol = tl.load(symbols + tile + offsets, mask=valid, other=0).to(tl.int32) & (BINS - 1)
            shared_memory.increment(memory, thread_counter + 4 * COPIES * symbol, valid, ASM)
        tile += SPAN
    tl.debug_barrier()
    bins = tl.arange(0, BINS)
    counted = tl.zeros((BINS,), tl.int32)
    for k in range(COPIES):
        counted += shared_memory.load(memory, shared + 4 * (bins * COPIES + ((bins + k) & (COPIES - 1))), ASM)
    tl.store(counts + (chunk64 * STREAMS + stream) * BINS + bins, counted)


@triton.jit
def chunk_offset(sizes, chunk):
    """Return where a chunk begins: after the directory and all chunks before it."""
    offsets = tl.arange(0, 1024)
    before = tl.zeros((1024,), tl.int64)
    k = chunk * 0
    while k < chunk:
        before += tl.load(sizes + k + offsets, mask=k + offsets < chunk, other=0)
        k += 1024
    return tl.sum(before, 0) + 4 * tl.num_programs(0)


@triton.jit
def _write_head(out, records, begin, size, table_nbytes, streams, BINS: tl.constexpr):
    """Write a chunk's directory entry, its mode, and its coded table and starts, or its only symbol."""
    chunk = tl.program_id(0)
    tl.store(out.to(tl.pointer_type(tl.int32)) + chunk, size.to(tl.int32))
    tl.store(out + begin, tl.where(table_nbytes > 0, 2, 0).to(tl.uint8))
    offsets = tl.arange(0, 128)
    symbol = tl.load(records + summary_offset(BINS) + 1)
    tl.store(
        out + begin + 1 + offsets,
        (symbol >> (8 * (offsets & 1))).to(tl.uint8),
        mask=(offsets < 2) & (table_nbytes == 0),
    )
    done = table_nbytes * 0
    while done < table_nbytes:
        valid = done + offsets < table_nbytes
        word = tl.load(records + coded_table_offset(BINS) + ((done + offsets) >> 2), mask=valid, other=0)
        tl.store(out + begin + 1 + done + offsets, (word >> (8 * (offsets & 3))).to(tl.uint8), mask=valid)
        done += 128
    stream = 1 + (offsets >> 2)
    ours = (table_nbytes > 0) & (stream < streams)
    start = tl.load(records + starts_offset(BINS) + stream, mask=ours, other=0)
    tl.store(out + begin + 1 + table_nbytes + offsets, (start >> (8 * (offsets & 3))).to(tl.uint8), mask=ours)


@triton.jit
def _load_code(word, offsets, reach, memory, codes, K: tl.constexpr, BINS: tl.constexpr, SYMBOL_BITS: tl.constexpr,
          IN_SHARED: tl.constexpr, ASM: tl.constexpr):  # fmt: skip
    """Return the code of symbol K of a word and, in the upper half, its length; 0 after the last symbol."""
    symbol = ((word >> (SYMBOL_BITS * K)) & ((1 << SYMBOL_BITS) - 1)).to(tl.int32, bitcast=True) & (BINS - 1)
    if IN_SHARED:
        entry = tl.where(offsets < reach, shared_memory.load(memory, codes + 4 * symbol, ASM), 0)
    else:
        entry = tl.load(codes + symbol, mask=offsets < reach, other=0)
    return entry


@triton.jit
def _append_codes(memory, shared, pending, filled, word, head, first, entry, next_entry, ASM: tl.constexpr):
    """Append two codes, 30 bits at most, and store a word when full; a thread keeps its first word in ``head``."""
    bits = (entry & 0xFFFF) | ((next_entry & 0xFFFF) << (entry >> 16))
    pending = pending | (bits.to(tl.uint64) << filled.to(tl.uint64))
    filled += (entry >> 16) + (next_entry >> 16)
    full = filled >= 32
    low = pending.to(tl.uint32).to(tl.int32, bitcast=True)
    shared_memory.store_masked(memory, shared + 4 * word, low, full & (first == 0), ASM)
    head = tl.where(full & (first == 1), low, head)
    first = tl.where(full, 0, first)
    word += full.to(tl.int32)
    pending = tl.where(full, pending >> 32, pending)
    filled &= 31
    return pending, filled, word, head, first


@triton.jit
def _load_word(source, offsets, whole, rest):
    """Load a word of symbols; after the whole words come the remaining symbols."""
    return tl.load(source + offsets, mask=offsets < whole, other=rest).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["n", "last_streams", "last_stream_size"])
def _write(
    symbols, records, sizes, out, memory, n, last_streams, last_stream_size,
    BINS: tl.constexpr, RECORD: tl.constexpr, BITS: tl.constexpr, SYMBOL_BITS: tl.constexpr, THREADS: tl.constexpr,
    SPAN: tl.constexpr, IN_SHARED: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Write a stream's bits, at most BITS bytes; the program of the first stream also writes what precedes them."""
    chunk, stream = tl.program_id(0), tl.program_id(1)
    chunk64 = chunk.to(tl.int64)
    shared_words: tl.constexpr = (BITS + 4 * BINS * IN_SHARED) // 4
    shared, memory = shared_memory.program_shared(memory, chunk64 * tl.num_programs(1) + stream, shared_words, ASM)
    streams, stream_size, chunk_size = chunk_shape(chunk, n, last_streams, last_stream_size)
    if stream < streams:
        records += chunk64 * RECORD
        begin = chunk_offset(sizes, chunk)
        size = tl.load(sizes + chunk)
        table_nbytes = tl.load(records + summary_offset(BINS))
        if stream == 0:
            _write_head(out, records, begin, size, table_nbytes, streams, BINS)
            if chunk == tl.num_programs(0) - 1:
                tl.store(sizes + tl.num_programs(0), begin + size)
        if table_nbytes > 0:
            from_byte = begin + 1 + table_nbytes + 4 * (streams - 1)
            start = tl.load(records + starts_offset(BINS) + stream)
            bits = tl.load(records + starts_offset(BINS) + stream + 1) - start
            lead = ((8 * from_byte + start) & 31).to(tl.int32)
            out_word = (8 * from_byte + start) >> 5
            words = (lead + bits + 31) >> 5
            # A code has at least one bit, so 31 more symbols fill the last word.
            symbols_left = chunk_size - stream * stream_size
            reach = tl.where(stream < streams - 1, tl.minimum(symbols_left, stream_size + 31), symbols_left)
            if IN_SHARED:
                bins = tl.arange(0, BINS)
                codes = shared + BITS
                shared_memory.store(memory, codes + 4 * bins, tl.load(records + codes_offset(BINS) + bins), ASM)
            else:
                codes = records + codes_offset(BINS)
            offsets = tl.arange(0, SPAN)
            done = words * 0
            # 20 more words: what those 31 symbols may fill, and what a group writes past its own.
            while 4 * done < words + 20:
                shared_memory.clear16(memory, shared + 16 * tl.minimum(done + offsets, BITS // 16 - 1), ASM)
                done += SPAN
            tl.debug_barrier()
            # Sixteen symbols per thread; all threads begin at the same symbol of a word.
            per: tl.constexpr = 32 // SYMBOL_BITS
            from_symbol = chunk64 * CHUNK_SYMBOLS + stream * stream_size
            source = symbols.to(tl.pointer_type(tl.int32)) + from_symbol // per
            words_here = tl.minimum(n // per - from_symbol // per, 1 << 30).to(tl.int32)
            shift = ((from_symbol % per) * SYMBOL_BITS).to(tl.int32)
            rest = words_here * 0
            for k in tl.static_range(per - 1):
                tail = n // per * per + k
                of_rest = tl.load(symbols + tail, mask=tail < n, other=0).to(tl.int32) & ((1 << SYMBOL_BITS) - 1)
                rest = rest | (of_rest << (SYMBOL_BITS * k))
            lane = tl.arange(0, THREADS)
            bit_position = lead
            done = words * 0
            while done < reach:
                first_symbol = done + 16 * lane
                first_word = first_symbol // per
                words_of_symbols = ()
                for k in tl.static_range(SYMBOL_BITS // 2 + 1):
                    word = _load_word(source, first_word + k, words_here, rest)
                    words_of_symbols = words_of_symbols + (word,)  # type: ignore[assignment]
                entries = ()
                count = lane * 0
                for k in tl.static_range(SYMBOL_BITS // 2):
                    word, _ = shared_memory.shift_right64(
                        words_of_symbols[k], words_of_symbols[k + 1], shift + lane * 0, ASM
                    )
                    for j in tl.static_range(per):
                        entry = _load_code(
                            word, first_symbol + (k * per + j), reach, memory, codes, j, BINS, SYMBOL_BITS, IN_SHARED,
                            ASM,
                        )  # fmt: skip
                        count += entry >> 16
                        entries = entries + (entry,)  # type: ignore[assignment]
                first_bit = bit_position + tl.cumsum(count, 0) - count
                out_first = first_bit >> 5
                next_word = out_first
                filled = first_bit & 31
                pending = tl.zeros((THREADS,), tl.uint64)
                head = tl.zeros((THREADS,), tl.int32)
                first = head + 1
                for k in tl.static_range(8):
                    pending, filled, next_word, head, first = _append_codes(
                        memory, shared, pending, filled, next_word, head, first, entries[2 * k], entries[2 * k + 1], ASM
                    )
                # Words that other threads may share: the first one, if full, and the last.
                shared_memory.atomic_or_shared(memory, shared + 4 * out_first, head, ASM)
                shared_memory.atomic_or_shared(
                    memory, shared + 4 * next_word, pending.to(tl.uint32).to(tl.int32, bitcast=True), ASM
                )
                bit_position += tl.sum(count, 0)
                done += 16 * THREADS
            tl.debug_barrier()
            end = begin + size
            done = words * 0
            while done < words:
                index = done + offsets
                value = shared_memory.load(memory, shared + 4 * tl.minimum(index, BITS // 4 - 1), ASM)
                owned = (index < words) & ((32 * index >= lead) | (stream == 0))
                byte = 4 * (out_word + index)
                whole = owned & (byte >= from_byte) & (byte + 4 <= end)
                tl.store(out.to(tl.pointer_type(tl.int32)) + out_word + index, value, mask=whole)
                if (4 * (out_word + done) < from_byte) | (4 * (out_word + done + SPAN) > end):
                    partial = owned & (whole == 0)
                    for k in tl.static_range(4):
                        in_section = partial & (byte + k >= from_byte) & (byte + k < end)
                        tl.store(out + byte + k, (value >> (8 * k)).to(tl.uint8), mask=in_section)
                done += SPAN


def _bits_nbytes(bins: int) -> int:
    """Return the bytes for the bits of the longest stream and what is written past it."""
    longest = min(15, max(12, bins.bit_length() + 2))
    return ((STREAM_LENGTH + 31) * longest // 32 + 32) * 4 // 16 * 16


def count_symbols(symbols: Tensor, layout: ChunkLayout) -> Tensor:
    """Count each symbol by chunk and stream. Symbols begin at a multiple of four bytes."""
    counts = torch.empty((layout.chunks, STREAMS.value, layout.bins), dtype=torch.int32, device=symbols.device)
    copies = min(32, COUNTERS // layout.bins)
    shared = SharedBuffer(4 * layout.bins * copies, layout.chunks * layout.streams, symbols.device)
    _count[(layout.chunks, layout.streams)](
        symbols, counts, shared.memory, layout.n, layout.last_streams, layout.last_stream_size,
        BINS=layout.bins, COPIES=copies, SPAN=COUNT_SPAN, ASM=shared.asm, num_warps=8,
    )  # fmt: skip
    return counts


def build_tables(counts: Tensor, layout: ChunkLayout) -> tuple[Tensor, Tensor]:
    """Return a record of each chunk, and the chunk sizes with space for their sum."""
    records = torch.empty((layout.chunks, encode_record_words(layout.bins)), dtype=torch.int32, device=counts.device)
    sizes = torch.empty(layout.chunks + 1, dtype=torch.int64, device=counts.device)
    shared = SharedBuffer(88 * layout.bins, 0, counts.device)
    build_code_tables[(layout.chunks,)](
        counts, records, sizes, layout.last_streams, BINS=layout.bins, STEPS=layout.steps, RECORD=records.shape[1],
        ROWS=max(1, min(8, 2048 // layout.bins)), ASM=shared.asm if layout.bins <= SHARED_TABLE_SYMBOLS else "",
        num_warps=layout.warps,
    )  # fmt: skip
    return records, sizes


def write_chunks(symbols: Tensor, records: Tensor, sizes: Tensor, layout: ChunkLayout, out: Tensor) -> None:
    """Write the directory and the Huffman and constant chunks; ``out`` begins at a multiple of four bytes."""
    bits, in_shared = _bits_nbytes(layout.bins), layout.bins <= SHARED_CODES
    shared = SharedBuffer(bits + 4 * layout.bins * in_shared, layout.chunks * layout.streams, symbols.device)
    _write[(layout.chunks, layout.streams)](
        symbols, records, sizes, out, shared.memory, layout.n, layout.last_streams, layout.last_stream_size,
        BINS=layout.bins, RECORD=records.shape[1], BITS=bits, SYMBOL_BITS=8 * symbols.element_size(),
        THREADS=32 * WARPS, SPAN=512, IN_SHARED=in_shared, ASM=shared.asm, num_warps=WARPS,
    )  # fmt: skip


def encode_section(symbols: Tensor, alphabet: int, out: Tensor) -> Tensor:
    """Encode symbols below ``alphabet`` into a section; return its size, on the device."""
    symbols = word_aligned(symbols.contiguous())
    layout = ChunkLayout.of(symbols.numel(), alphabet)
    aligned = out if out.data_ptr() % 4 == 0 else torch.empty_like(out)
    records, sizes = build_tables(count_symbols(symbols, layout), layout)
    write_chunks(symbols, records, sizes, layout, aligned)
    if aligned is not out:
        out.copy_(aligned)
    return sizes[-1]
