"""Entropy coding, symbol by symbol: slow, and the definition of the bytes.

A section is u32 bytes of each chunk, then the chunks. A chunk is a mode (u8), followed by

- constant: u16 symbol
- raw: the packed symbols
- huffman: a code table, u32 first bit of each stream but the first, the bits
- rans: u8 scale, a code table with frequencies, u32 final states, u16 words
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from itertools import accumulate

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import Grid
from laconic.kernels.reference.code_tables import (
    MAX_LENGTH,
    canonical_codes,
    code_lengths,
    log2_fixed,
    read_code_table,
    scale_frequencies,
    write_code_table,
)
from laconic.kernels.reference.linear import grid_symbols
from laconic.kernels.reference.packing import pack, unpack
from laconic.kernels.reference.reductions import put
from laconic.kernels.sections import (
    CHUNK,
    CONSTANT,
    HUFFMAN,
    RANS,
    RAW,
    Coding,
    packed_nbytes,
    symbol_bits,
    symbol_dtype,
)

SCALES = (12, 15)
_PAST_THE_END = "the frame holds coded symbols that run past their end"
_WRONG_END = "the frame holds coded symbols that end too early"
LOW = 1 << 15
"""rANS states lie in [2^15, 2^31)."""


def streams_for(n: int) -> int:
    return 30 if n >= 65536 else 6 if n >= 2048 else 1


def rans_states_for(n: int) -> int:
    return 32 if n >= 16384 else 4


# ----------------------------------------------------------------------------------------------------------- plans


def huffman_size(counts: list[int]) -> tuple[int, list[int]]:
    """Return the bytes of a Huffman-coded chunk, and the code lengths."""
    lengths = code_lengths(counts)
    bits = sum(count * length for count, length in zip(counts, lengths, strict=True))
    return 1 + len(write_code_table(lengths)) + 4 * (streams_for(sum(counts)) - 1) + -(-bits // 8), lengths


def rans_size(counts: list[int]) -> tuple[int, int, list[int]]:
    """Return about the bytes of a rANS-coded chunk, the scale and the frequencies."""
    best: tuple[int, int, list[int]] | None = None
    used = sum(count > 0 for count in counts)
    for scale in SCALES:
        if used > 1 << (scale - 2) and scale < MAX_LENGTH:
            continue
        frequencies = scale_frequencies(counts, scale)
        cost = sum(
            count * ((scale << 16) - log2_fixed(frequency))
            for count, frequency in zip(counts, frequencies, strict=True)
            if count
        )
        table = write_code_table([frequency.bit_length() for frequency in frequencies], frequencies)
        # A final state takes four bytes and carries about one byte of information on average.
        nbytes = 2 + len(table) + 3 * rans_states_for(sum(counts)) + -(-cost // (1 << 19))
        if best is None or nbytes + nbytes // 512 < best[0]:  # the smaller scale decodes faster
            best = nbytes, scale, frequencies
    assert best is not None
    return best


def choose(counts: list[int], alphabet: int, coding: int) -> int:
    """Return the mode of a chunk with these counts."""
    if sum(count > 0 for count in counts) == 1:
        return CONSTANT
    if coding in (Coding.HUFFMAN, Coding.RANS):
        return HUFFMAN if coding == Coding.HUFFMAN else RANS
    sizes = {
        HUFFMAN: huffman_size(counts)[0],
        RANS: rans_size(counts)[0],
        RAW: 1 + packed_nbytes(sum(counts), symbol_bits(alphabet)),
    }
    best = HUFFMAN if coding == Coding.HUFFMAN_AUTO else RANS
    for mode, nbytes in sizes.items():
        if nbytes + nbytes // 2048 < sizes[best]:
            best = mode
    return best


# --------------------------------------------------------------------------------------------------------- writing


def _write_huffman(symbols: list[int], counts: list[int]) -> bytes:
    lengths = huffman_size(counts)[1]
    codes = canonical_codes(lengths)
    n = len(symbols)
    streams = streams_for(n)
    per_stream = -(-n // streams)
    starts, bits, position = [], [], 0
    for i, symbol in enumerate(symbols):
        if i % per_stream == 0:
            starts.append(position)
        position += lengths[symbol]
        bits.append(f"{codes[symbol]:0{lengths[symbol]}b}"[::-1])
    stream = int("".join(bits)[::-1], 2).to_bytes(-(-position // 8), "little")
    return write_code_table(lengths) + struct.pack(f"<{streams - 1}I", *starts[1:]) + stream


def _write_rans(symbols: list[int], counts: list[int]) -> bytes:
    _, scale, frequencies = rans_size(counts)
    starts = _first_slots(frequencies)
    num_states = rans_states_for(len(symbols))
    states, words = [LOW] * num_states, []
    for i in reversed(range(len(symbols))):  # last in, first out
        frequency, x = frequencies[symbols[i]], states[i % num_states]
        if x >= frequency << (31 - scale):
            words.append(x & 0xFFFF)
            x >>= 16
        states[i % num_states] = (x // frequency << scale) + x % frequency + starts[symbols[i]]
    words.reverse()
    table = write_code_table([frequency.bit_length() for frequency in frequencies], frequencies)
    return struct.pack("<B", scale) + table + struct.pack(f"<{num_states}I{len(words)}H", *states, *words)


def _first_slots(frequencies: list[int]) -> list[int]:
    """Return the first slot of each symbol: the sum of the frequencies before it."""
    return [0, *accumulate(frequencies[:-1])]


def _encode_chunk(symbols: Tensor, alphabet: int, coding: int) -> bytes:
    counts = torch.bincount(symbols, minlength=alphabet).tolist()
    mode = choose(counts, alphabet, coding)
    header = bytes([mode])
    if mode == CONSTANT:
        return header + struct.pack("<H", int(symbols[0]))
    if mode == RAW:
        packed = torch.zeros(packed_nbytes(symbols.numel(), symbol_bits(alphabet)), dtype=torch.uint8)
        pack(symbols, symbol_bits(alphabet), packed)
        return header + bytes(packed.tolist())
    write = _write_huffman if mode == HUFFMAN else _write_rans
    return header + write(symbols.tolist(), counts)


def encode_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
    chunks = [_encode_chunk(part, alphabet, coding) for part in torch.split(symbols.cpu().to(torch.int64), CHUNK)]
    section = struct.pack(f"<{len(chunks)}I", *map(len, chunks)) + b"".join(chunks)
    out[: len(section)] = torch.tensor(list(section), dtype=torch.uint8)
    return len(section)


def encode_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
    return encode_symbols(grid_symbols(x, grid), grid.levels, coding, out)


# --------------------------------------------------------------------------------------------------------- reading


def chunks_of(section: bytes, n: int) -> Iterator[tuple[bytes, int]]:
    """Yield each chunk's bytes and number of symbols."""
    count = -(-n // CHUNK)
    if len(section) < 5 * count:
        raise FrameError(f"the frame holds {len(section)} bytes, too few for {count} coded chunks")
    sizes = struct.unpack_from(f"<{count}I", section)
    if 4 * count + sum(sizes) != len(section) or not all(sizes):
        raise FrameError(f"the frame holds coded chunks of {sum(sizes)} bytes in a section of {len(section)}")
    offset = 4 * count
    for i, size in enumerate(sizes):
        yield section[offset : offset + size], min(CHUNK, n - i * CHUNK)
        offset += size


def _read_huffman(body: bytes, n: int, alphabet: int) -> list[int]:
    lengths, _, table_nbytes = read_code_table(body, alphabet, with_frequencies=False)
    streams = streams_for(n)
    begin = table_nbytes + 4 * (streams - 1)
    if len(body) <= begin:
        raise FrameError("the frame holds a chunk without coded symbols")
    if sum(1 << (MAX_LENGTH - length) for length in lengths if length) != 1 << MAX_LENGTH or lengths.count(0) > (
        alphabet - 2
    ):
        raise FrameError("the frame holds a code table that is not a complete code")
    starts = [0, *struct.unpack_from(f"<{streams - 1}I", body, table_nbytes)]
    longest = max(lengths)
    table = [0] * (1 << longest)
    for symbol, code in enumerate(canonical_codes(lengths)):
        if lengths[symbol]:
            for index in range(code, 1 << longest, 1 << lengths[symbol]):
                table[index] = symbol
    data, per_stream, total = body[begin:], -(-n // streams), 8 * (len(body) - begin)
    symbols = []
    for stream, start in enumerate(starts):
        bit = start
        for _ in range(per_stream if stream + 1 < streams else n - per_stream * (streams - 1)):
            if bit >= total:
                raise FrameError(_PAST_THE_END)
            window = int.from_bytes(data[bit >> 3 : (bit >> 3) + 4], "little") >> (bit & 7)
            symbol = table[window & ((1 << longest) - 1)]
            bit += lengths[symbol]
            symbols.append(symbol)
        if bit > total:
            raise FrameError(_PAST_THE_END)
        if stream + 1 < streams:
            ends_well = bit == starts[stream + 1]
        else:
            ends_well = -(-bit // 8) == len(data) and data[-1] >> (bit % 8 or 8) == 0
        if not ends_well:
            raise FrameError(_WRONG_END)
    return symbols


def _read_rans(body: bytes, n: int, alphabet: int) -> list[int]:
    if not body or body[0] not in SCALES:
        raise FrameError(f"the frame holds a rANS chunk whose scale is not one of {SCALES}")
    scale = body[0]
    _, frequencies, table_nbytes = read_code_table(body[1:], alphabet, with_frequencies=True)
    if sum(frequencies) != 1 << scale or max(frequencies) >> scale:
        raise FrameError("the frame holds rANS frequencies with a wrong sum")
    num_states = rans_states_for(n)
    words_nbytes = len(body) - 1 - table_nbytes - 4 * num_states
    if words_nbytes < 0 or words_nbytes % 2:
        raise FrameError("the frame holds a chunk that is too short for its states")
    states = list(struct.unpack_from(f"<{num_states}I", body, 1 + table_nbytes))
    words = struct.unpack_from(f"<{words_nbytes // 2}H", body, 1 + table_nbytes + 4 * num_states)
    if any(not LOW <= state < 1 << 31 for state in states):
        raise FrameError("the frame holds a rANS state that is out of range")
    symbol_of_slot = [symbol for symbol, frequency in enumerate(frequencies) for _ in range(frequency)]
    starts = _first_slots(frequencies)
    symbols, words_read = [], 0
    for i in range(n):
        x = states[i % num_states]
        slot = x & ((1 << scale) - 1)
        symbol = symbol_of_slot[slot]
        x = frequencies[symbol] * (x >> scale) + slot - starts[symbol]
        if x < LOW:
            if words_read == len(words):
                raise FrameError(_PAST_THE_END)
            x = x << 16 | words[words_read]
            words_read += 1
        states[i % num_states] = x
        symbols.append(symbol)
    if words_read != len(words) or any(state != LOW for state in states):
        raise FrameError(_WRONG_END)
    return symbols


def _decode_chunk(chunk: bytes, n: int, alphabet: int) -> Tensor:
    mode, body = chunk[0], chunk[1:]
    if mode == CONSTANT:
        if len(body) != 2 or int.from_bytes(body, "little") >= alphabet:
            raise FrameError("the frame holds a constant chunk without a valid symbol")
        return torch.full((n,), int.from_bytes(body, "little"))
    if mode == RAW:
        bits = symbol_bits(alphabet)
        if len(body) != packed_nbytes(n, bits):
            raise FrameError(
                f"the frame holds a raw chunk of {len(body)} bytes, {n} symbols take {packed_nbytes(n, bits)}"
            )
        symbols = unpack(torch.tensor(list(body), dtype=torch.uint8), n, bits).long()
        if int(symbols.max()) >= alphabet:
            raise FrameError(f"the frame holds a raw chunk with a symbol above {alphabet - 1}")
        return symbols
    if mode not in (HUFFMAN, RANS):
        raise FrameError(f"the frame holds a coded chunk of unknown mode {mode}")
    return torch.tensor((_read_huffman if mode == HUFFMAN else _read_rans)(body, n, alphabet))


def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:
    parts = [_decode_chunk(chunk, size, alphabet) for chunk, size in chunks_of(bytes(section.tolist()), n)]
    return torch.cat(parts).to(device=section.device, dtype=symbol_dtype(alphabet))


def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    symbols = decode_symbols(section, out.numel(), table.numel())
    put(out, table.to(out.device)[symbols.long()], weight)


def chunk_modes(section: Tensor, n: int) -> Tensor:
    return torch.tensor([chunk[0] for chunk, _ in chunks_of(bytes(section.tolist()), n)])
