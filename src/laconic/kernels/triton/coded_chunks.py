"""Coded sections on a GPU: the mode of each chunk, its place in the section, and decoding of all modes.

The kernels of a mode are launched for all chunks and skip those of other modes.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from laconic.kernels import sections
from laconic.kernels.sections import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding, num_buckets, symbol_bits
from laconic.kernels.triton.huffman_decode import CodedSection, decode_streams
from laconic.kernels.triton.huffman_encode import build_tables, chunk_offset, count_symbols, write_chunks
from laconic.kernels.triton.launch_args import TILE, exact_options, packing_period
from laconic.kernels.triton.rans import (
    DECODE_SHARED_NBYTES,
    LANES,
    SHARED_TABLE_BINS,
    encode_shared_nbytes,
    rans_decode,
    rans_encode,
)
from laconic.kernels.triton.rans_tables import (
    SLOTS,
    build_frequency_tables,
    build_slot_tables,
    num_states,
    read_frequency_tables,
)
from laconic.kernels.triton.shared_memory import SharedBuffer
from laconic.kernels.triton.streams import CHUNK_SYMBOLS, ChunkLayout, symbols_in_chunk
from laconic.kernels.triton.tile import store_groups, store_or_add

__all__ = ["decode_chunks", "encode_chunks", "round_up_16"]

_RAW = tl.constexpr(RAW)
_RANS = tl.constexpr(RANS)
COPY_SPAN = 4096
"""Words that a program copies."""
LOOKUP_SPAN = 1024
"""Symbols per program of the table lookup."""


# -------------------------------------------------------------------------------------------------------- encoding


@triton.jit(do_not_specialize=["n", "buffer_words"])
def _pack_raw(symbols, plans, words, n, buffer_words, BITS: tl.constexpr, PERIOD: tl.constexpr, SPAN: tl.constexpr):
    """Pack the symbols of raw chunks into their buffers; after the last full group as one bit stream."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    chunk = begin // CHUNK_SYMBOLS
    if tl.load(plans + 4 * chunk) == _RAW:
        offsets = tl.arange(0, SPAN)
        values = tl.load(symbols + begin + offsets, mask=begin + offsets < n, other=0).to(tl.int32)
        words += chunk * buffer_words
        symbols += chunk * CHUNK_SYMBOLS
        chunk_begin = begin - chunk * CHUNK_SYMBOLS
        chunk_size = symbols_in_chunk(n, chunk)
        full = chunk_size // 256 * 256
        store_groups(values, words, chunk_begin, full, BITS, PERIOD, SPAN)
        if (chunk_begin <= full) & (full < chunk_begin + SPAN) & (full < chunk_size):
            byte = tl.arange(0, 512)
            value = tl.zeros((512,), tl.uint32)
            for k in tl.static_range(6 // BITS + 2):
                j = byte * 8 // BITS + k
                shift = j * BITS - byte * 8
                symbol = tl.load(symbols + full + j, mask=(full + j < chunk_size) & (shift < 8), other=0).to(tl.uint32)
                left_shift = tl.minimum(tl.maximum(shift, 0), 31).to(tl.uint32)
                value |= tl.where(shift >= 0, symbol << left_shift, symbol >> tl.maximum(-shift, 0).to(tl.uint32))
            tail = words.to(tl.pointer_type(tl.uint8)) + full // 8 * BITS
            tl.store(tail + byte, (value & 255).to(tl.uint8), mask=byte < ((chunk_size - full) * BITS + 7) // 8)


@triton.jit(do_not_specialize=["n", "buffer_words", "table_words"])
def _copy_chunks(out, sizes, plans, coded_tables, states, words, n, buffer_words, table_words, SPAN: tl.constexpr):
    """Write a chunk's header, and copy its words from its buffer to its place in the section."""
    chunk = tl.program_id(0)
    chunk64 = chunk.to(tl.int64)
    mode = tl.load(plans + 4 * chunk64)
    if mode >= 0:
        chunk_size = symbols_in_chunk(n, chunk64)
        lanes = num_states(chunk_size)
        size = tl.load(sizes + chunk64)
        begin = chunk_offset(sizes, chunk)
        table_nbytes = tl.load(plans + 4 * chunk64 + 2)
        rans = mode == _RANS
        header_nbytes = tl.where(rans, 2 + table_nbytes + 4 * lanes, tl.where(mode == _RAW, 1, 3))
        offsets = begin + header_nbytes
        end = begin + size
        source_begin = chunk64 * buffer_words * 2 + tl.where(rans, 2 * tl.load(plans + 4 * chunk64 + 3), 0)
        if tl.program_id(1) == 0:
            byte = tl.arange(0, 128)
            tl.store(out.to(tl.pointer_type(tl.int32)) + chunk, size.to(tl.int32))
            tl.store(sizes + tl.num_programs(0), end, mask=chunk == tl.num_programs(0) - 1)
            tl.store(out + begin, mode.to(tl.uint8))
            second = tl.load(plans + 4 * chunk64 + 1) >> (8 * byte)  # the scale, or a symbol
            tl.store(
                out + begin + 1 + byte,
                second.to(tl.uint8),
                mask=byte < header_nbytes - 1 - tl.where(rans, header_nbytes - 2, 0),
            )
            done = table_nbytes * 0
            while rans & (done < table_nbytes):
                valid = done + byte < table_nbytes
                word = tl.load(coded_tables + chunk64 * table_words + ((done + byte) >> 2), mask=valid, other=0)
                tl.store(out + begin + 2 + done + byte, (word >> (8 * (byte & 3))).to(tl.uint8), mask=valid)
                done += 128
            state = tl.load(states + chunk64 * LANES + (byte >> 2), mask=rans & (byte < 4 * lanes), other=0)
            state = (state >> (8 * (byte & 3))).to(tl.uint8)
            tl.store(out + begin + 2 + table_nbytes + byte, state, mask=rans & (byte < 4 * lanes))
            # The words at both ends are shared with their neighbours.
            source = words.to(tl.pointer_type(tl.uint8)) + source_begin
            edge = tl.where(byte < 4, offsets // 4 * 4 + byte, end // 4 * 4 + byte - 4)
            edge_valid = (offsets % 4 > 0) & (byte < 4) | (byte >= 4) & (byte < 8)
            edge_valid = edge_valid & (edge >= offsets) & (edge < end)
            tl.store(out + edge, tl.load(source + edge - offsets, mask=edge_valid, other=0), mask=edge_valid)
        first = (offsets + 3) // 4 + tl.program_id(1).to(tl.int64) * SPAN
        if first < end // 4:
            left = tl.minimum(end // 4 - first, SPAN).to(tl.int32)
            byte = source_begin + 4 * first - offsets
            shift = (8 * (byte & 3)).to(tl.uint64)
            source = words.to(tl.pointer_type(tl.int32)) + (byte >> 2)
            word = tl.arange(0, SPAN)
            low = tl.load(source + word, mask=word < left, other=0).to(tl.uint32, bitcast=True).to(tl.uint64)
            high = tl.load(source + word + 1, mask=(word < left) & (shift > 0), other=0)
            both = ((high.to(tl.uint32, bitcast=True).to(tl.uint64) << 32) | low) >> shift
            target = out.to(tl.pointer_type(tl.int32)) + first
            tl.store(target + word, both.to(tl.uint32).to(tl.int32, bitcast=True), mask=word < left)


def encode_chunks(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> Tensor:
    """Encode a section by any coding but plain Huffman; return its size, on the device."""
    layout, device = ChunkLayout.of(symbols.numel(), alphabet), symbols.device
    symbols = symbols if symbols.data_ptr() % 16 == 0 else symbols.clone()
    buffer_words = sections.coded_max_nbytes(min(layout.n, CHUNK), alphabet) // 4 * 2
    aligned = out if out.data_ptr() % 4 == 0 else torch.empty_like(out)
    ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
    counts = count_symbols(symbols, layout)
    plans, bits = torch.empty((layout.chunks, 4), **ints), symbol_bits(alphabet)
    if coding == Coding.RANS:
        huffman_records, sizes, record_words = (
            plans,
            torch.empty(layout.chunks + 1, dtype=torch.int64, device=device),
            0,
        )
    else:
        huffman_records, sizes = build_tables(counts, layout)
        record_words = huffman_records.shape[1]
    table_words = 4 + layout.bins
    coded_tables, scratch = (
        torch.empty((layout.chunks, table_words), **ints),
        torch.empty((layout.chunks, 3, layout.bins), **ints),
    )
    table = torch.empty((layout.chunks, layout.bins, 4), **ints)
    build_frequency_tables[(layout.chunks,)](
        counts, scratch, coded_tables, table.view(torch.int64), plans, sizes, huffman_records, layout.n,
        layout.last_streams, table_words, bits, int(coding), BINS=layout.bins, RECORD=record_words,
        num_warps=layout.warps,
    )  # fmt: skip
    words = torch.empty((layout.chunks, buffer_words), dtype=torch.int16, device=device)
    states = torch.empty((layout.chunks, LANES.value), **ints)
    shared = SharedBuffer(encode_shared_nbytes(layout.bins, symbols.element_size()), layout.chunks, device)
    rans_encode[(layout.chunks,)](
        symbols, table, shared.memory, plans, words, states, sizes, layout.n, buffer_words, BINS=layout.bins,
        SYMBOL=symbols.element_size(), IN_SHARED=layout.bins <= SHARED_TABLE_BINS, ASM=shared.asm, num_warps=1,
    )  # fmt: skip
    if record_words:
        if bits:
            _pack_raw[(num_buckets(layout.n, TILE),)](
                symbols, plans, words, layout.n, buffer_words, BITS=bits, PERIOD=packing_period(bits), SPAN=TILE,
                num_warps=2,
            )  # fmt: skip
        write_chunks(symbols, huffman_records, sizes, layout, aligned)
    _copy_chunks[(layout.chunks, num_buckets(buffer_words, 2 * COPY_SPAN))](
        aligned, sizes, plans, coded_tables, states, words, layout.n, buffer_words, table_words, SPAN=COPY_SPAN,
        num_warps=4,
    )  # fmt: skip
    if aligned is not out:
        out.copy_(aligned)
    return sizes[-1]


# -------------------------------------------------------------------------------------------------------- decoding


@triton.jit(do_not_specialize=["n", "alphabet"])
def _decode_raw(section, plans, out, status, n, alphabet, BITS: tl.constexpr, SPAN: tl.constexpr):
    """Decode raw chunks byte by byte, since they begin anywhere. Symbols outside of the alphabet set the status."""
    begin = tl.program_id(0).to(tl.int64) * SPAN
    chunk = begin // CHUNK_SYMBOLS
    if tl.load(plans + 8 * chunk) == _RAW:
        chunk_size = symbols_in_chunk(n, chunk)
        offsets = (begin - chunk * CHUNK_SYMBOLS).to(tl.int32) + tl.arange(0, SPAN)
        valid = offsets < chunk_size
        section += tl.load((plans + 8 * chunk + 6).to(tl.pointer_type(tl.int64))) + 1
        full = chunk_size // 256 * 256
        grouped = offsets < full
        bit = tl.where(grouped, offsets // 8 % 32, offsets - full) * BITS
        value = tl.zeros((SPAN,), tl.int32)
        for k in tl.static_range((BITS + 14) // 8):
            byte = bit // 8 + k
            # Each of the 8 columns of a group has every eighth word.
            column_byte = offsets // 256 * (32 * BITS) + byte // 4 * 32 + offsets % 8 * 4 + byte % 4
            source = tl.where(grouped, column_byte, full // 8 * BITS + byte)
            valid_byte = valid & (8 * k < bit % 8 + BITS)
            value |= tl.load(section + source, mask=valid_byte, other=0).to(tl.int32) << (8 * k)
        symbol = (value >> (bit % 8)) & ((1 << BITS) - 1)
        wrong = valid & (symbol >= alphabet)
        tl.atomic_or(status, 1, mask=tl.max(wrong.to(tl.int32), 0) > 0, sem="relaxed")
        tl.store(out + begin + tl.arange(0, SPAN), symbol.to(out.dtype.element_ty), mask=valid)


def _decode_rans_and_raw(coded: CodedSection, modes: int, alphabet: int, table: Tensor | None, out: Tensor) -> None:
    """Decode rANS chunks, as symbols or as values of the table, and raw chunks, as symbols."""
    layout, section, records, status = coded
    ints: dict[str, Any] = {"dtype": torch.int32, "device": section.device}
    freqs, ranks = (
        torch.empty((layout.chunks, layout.bins), **ints),
        torch.empty((layout.chunks, 3, layout.bins), **ints),
    )
    plans, bits = torch.empty((layout.chunks, 8), **ints), symbol_bits(alphabet)
    read_frequency_tables[(layout.chunks,)](
        section, records, freqs, ranks, plans, status, alphabet, layout.n, bits,
        BINS=layout.bins, RECORD=records.shape[1], num_warps=layout.warps,
    )  # fmt: skip
    if modes >> RANS & 1:
        slots = torch.empty((layout.chunks, 1 << 15), dtype=torch.int64, device=section.device)
        build_slot_tables[(layout.chunks, (1 << 15) // SLOTS)](
            ranks, plans, slots, BINS=layout.bins, STEPS=layout.steps, SPAN=SLOTS, num_warps=4
        )
        shared = SharedBuffer(DECODE_SHARED_NBYTES, layout.chunks, section.device)
        rans_decode[(layout.chunks,)](
            section, section.numel(), plans, slots, out if table is None else table, shared.memory, out, status,
            layout.n, alphabet, IN_SHARED=alphabet <= 256, ASM=shared.asm, num_warps=1,
        )  # fmt: skip
    if modes >> RAW & 1 and bits:
        _decode_raw[(num_buckets(layout.n, TILE),)](
            section, plans, out, status, layout.n, alphabet, BITS=bits, SPAN=TILE, num_warps=4
        )


@triton.jit(do_not_specialize=["alphabet", "modes"])
def _lookup_values(
    symbols, status, table, out, n, alphabet, modes, weight,
    BINS: tl.constexpr, SPAN: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Look up the values of symbols, unless the section is invalid or has modes that were not decoded."""
    if (tl.load(status) == 0) & ((tl.load(status + 1) | modes) == modes):
        begin = tl.program_id(0).to(tl.int64) * SPAN
        offsets = tl.arange(0, SPAN)
        symbol = tl.load(symbols + begin + offsets, mask=begin + offsets < n, other=0).to(tl.int32) & (BINS - 1)
        if BINS <= 512:
            bins = tl.arange(0, BINS)
            value = tl.gather(tl.load(table + bins, mask=bins < alphabet, other=0.0), symbol, 0)
        else:
            value = tl.load(table + tl.minimum(symbol, alphabet - 1))
        if begin + SPAN <= n:
            store_or_add(out, offsets, begin, n, value, weight, ADD, False)
        else:
            store_or_add(out, offsets, begin, n, value, weight, ADD, True)


def lookup_values(
    coded: CodedSection, symbols: Tensor, modes: int, table: Tensor, out: Tensor, weight: float | None
) -> None:
    """Store the values of symbols in ``out``, or add ``weight`` times them, if all chunks are of these modes."""
    n, bins = out.numel(), max(32, 1 << (table.numel() - 1).bit_length())
    _lookup_values[(num_buckets(n, LOOKUP_SPAN),)](
        symbols, coded.status, table, out, n, table.numel(), modes, weight or 0.0,
        BINS=bins, SPAN=LOOKUP_SPAN, ADD=weight is not None, **exact_options(num_warps=4),
    )  # fmt: skip


def decode_chunks(
    coded: CodedSection, modes: int, alphabet: int, table: Tensor | None, out: Tensor, weight: float | None
) -> None:
    """Decode the chunks of these modes, one bit each, into ``out``: symbols, or values of the table, or add the values.

    Symbols have space for whole blocks of 16. Nothing is added if other modes occur as well.
    """
    if (
        table is not None and weight is None and modes == 1 << RANS
    ):  # decoded in order, so they can go straight to ``out``
        _decode_rans_and_raw(coded, modes, alphabet, table, out)
        return
    symbols = out
    if table is not None:
        symbols = torch.empty(round_up_16(out.numel()), dtype=sections.symbol_dtype(alphabet), device=out.device)
    if modes & (1 << HUFFMAN | 1 << CONSTANT):
        decode_streams(coded, symbols)
    if modes & (1 << RANS | 1 << RAW):
        _decode_rans_and_raw(coded, modes, alphabet, None, symbols)
    if table is not None:
        lookup_values(coded, symbols, modes, table, out, weight)


def round_up_16(n: int) -> int:
    """Round n up to a multiple of 16."""
    return num_buckets(n, 16) * 16
