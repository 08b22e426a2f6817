"""Sections of coded symbols, symbol by symbol: the truth about their bytes, and slow.

u32 bytes of each chunk, then the chunks. A chunk is a mode (u8) and what the mode says:

- constant: u16 symbol
- raw: the symbols, packed
- huffman: a book, u32 the bit at which each stream but the first begins, the bits
- rans: u8 scale, a book, u32 the state of each lane, u16 words
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import torch
from torch import Tensor

from laconic.errors import FrameError
from laconic.kernels.interface import Grid
from laconic.kernels.reference.code_tables import (
    MAX_LENGTH,
    canonical_codes,
    code_lengths,
    log2_fixed,
    read_book,
    share_out,
    write_book,
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
LOW = 1 << 15
"""States of rANS lie in [2^15, 2^31)."""


def streams_for(n: int) -> int:
    return 30 if n >= 65536 else 6 if n >= 2048 else 1


def lanes_for(n: int) -> int:
    return 32 if n >= 16384 else 4


# ----------------------------------------------------------------------------------------------------------- plans


def huffman_size(counts: list[int]) -> tuple[int, list[int]]:
    """Bytes of a chunk under Huffman's code, and the lengths."""
    lengths = code_lengths(counts)
    bits = sum(count * length for count, length in zip(counts, lengths, strict=True))
    return 1 + len(write_book(lengths)) + 4 * (streams_for(sum(counts)) - 1) + -(-bits // 8), lengths


def rans_size(counts: list[int]) -> tuple[int, int, list[int]]:
    """About the bytes of a chunk under rANS, with the scale and the shares."""
    best: tuple[int, int, list[int]] | None = None
    used = sum(count > 0 for count in counts)
    for scale in SCALES:
        if used > 1 << (scale - 2) and scale < MAX_LENGTH:
            continue
        shares = share_out(counts, scale)
        cost = sum(
            count * ((scale << 16) - log2_fixed(share)) for count, share in zip(counts, shares, strict=True) if count
        )
        book = write_book([share.bit_length() for share in shares], shares)
        # A state ends in four bytes, of which it began with nearly two and one is of use on average.
        nbytes = 2 + len(book) + 3 * lanes_for(sum(counts)) + -(-cost // (1 << 19))
        if best is None or nbytes + nbytes // 512 < best[0]:  # the small scale reads faster
            best = nbytes, scale, shares
    assert best is not None
    return best


def choose(counts: list[int], alphabet: int, coding: int) -> int:
    """The mode of a chunk with these counts."""
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
    each = -(-n // streams)
    starts, bits, at = [], [], 0
    for place, symbol in enumerate(symbols):
        if place % each == 0:
            starts.append(at)
        at += lengths[symbol]
        bits.append(f"{codes[symbol]:0{lengths[symbol]}b}"[::-1])
    stream = int("".join(bits)[::-1], 2).to_bytes(-(-at // 8), "little")
    return write_book(lengths) + struct.pack(f"<{streams - 1}I", *starts[1:]) + stream


def _write_rans(symbols: list[int], counts: list[int]) -> bytes:
    _, scale, shares = rans_size(counts)
    starts = [0] * len(shares)
    for symbol in range(1, len(shares)):
        starts[symbol] = starts[symbol - 1] + shares[symbol - 1]
    lanes = lanes_for(len(symbols))
    states, words = [LOW] * lanes, []
    for place in reversed(range(len(symbols))):  # last in, first out
        share, x = shares[symbols[place]], states[place % lanes]
        if x >= share << (31 - scale):
            words.append(x & 0xFFFF)
            x >>= 16
        states[place % lanes] = (x // share << scale) + x % share + starts[symbols[place]]
    words.reverse()
    book = write_book([share.bit_length() for share in shares], shares)
    return struct.pack("<B", scale) + book + struct.pack(f"<{lanes}I{len(words)}H", *states, *words)


def _chunk(symbols: Tensor, alphabet: int, coding: int) -> bytes:
    counts = torch.bincount(symbols, minlength=alphabet).tolist()
    mode = choose(counts, alphabet, coding)
    head = bytes([mode])
    if mode == CONSTANT:
        return head + struct.pack("<H", int(symbols[0]))
    if mode == RAW:
        packed = torch.zeros(packed_nbytes(symbols.numel(), symbol_bits(alphabet)), dtype=torch.uint8)
        pack(symbols, symbol_bits(alphabet), packed)
        return head + bytes(packed.tolist())
    write = _write_huffman if mode == HUFFMAN else _write_rans
    return head + write(symbols.tolist(), counts)


def encode_symbols(symbols: Tensor, alphabet: int, coding: int, out: Tensor) -> int:
    """Write a section; returns its bytes."""
    chunks = [_chunk(part, alphabet, coding) for part in torch.split(symbols.cpu().to(torch.int64), CHUNK)]
    section = struct.pack(f"<{len(chunks)}I", *map(len, chunks)) + b"".join(chunks)
    out[: len(section)] = torch.tensor(list(section), dtype=torch.uint8)
    return len(section)


def encode_values(x: Tensor, grid: Grid, coding: int, out: Tensor) -> int:
    return encode_symbols(grid_symbols(x, grid), grid.levels, coding, out)


# --------------------------------------------------------------------------------------------------------- reading


def chunks_of(section: bytes, n: int) -> Iterator[tuple[bytes, int]]:
    """Each chunk's bytes and number of symbols."""
    count = -(-n // CHUNK)
    if len(section) < 5 * count:
        raise FrameError(f"{len(section)} bytes are too few for {count} coded chunks")
    sizes = struct.unpack_from(f"<{count}I", section)
    if 4 * count + sum(sizes) != len(section) or not all(sizes):
        raise FrameError(f"coded chunks of {sum(sizes)} bytes do not fill a section of {len(section)}")
    at = 4 * count
    for i, size in enumerate(sizes):
        yield section[at : at + size], min(CHUNK, n - i * CHUNK)
        at += size


def _read_huffman(body: bytes, n: int, alphabet: int) -> list[int]:
    lengths, _, taken = read_book(body, alphabet, with_shares=False)
    streams = streams_for(n)
    begin = taken + 4 * (streams - 1)
    if len(body) <= begin:
        raise FrameError("a chunk in the frame has no coded symbols")
    if sum(1 << (MAX_LENGTH - length) for length in lengths if length) != 1 << MAX_LENGTH or lengths.count(0) > (
        alphabet - 2
    ):
        raise FrameError("a codebook in the frame is no complete code")
    starts = [0, *struct.unpack_from(f"<{streams - 1}I", body, taken)]
    longest = max(lengths)
    table = [0] * (1 << longest)
    for symbol, code in enumerate(canonical_codes(lengths)):
        if lengths[symbol]:
            for index in range(code, 1 << longest, 1 << lengths[symbol]):
                table[index] = symbol
    data, each, total = body[begin:], -(-n // streams), 8 * (len(body) - begin)
    symbols = []
    for stream, start in enumerate(starts):
        at = start
        for _ in range(each if stream + 1 < streams else n - each * (streams - 1)):
            if at >= total:
                raise FrameError("coded symbols in the frame run past their end")
            window = int.from_bytes(data[at >> 3 : (at >> 3) + 4], "little") >> (at & 7)
            symbol = table[window & ((1 << longest) - 1)]
            at += lengths[symbol]
            symbols.append(symbol)
        if at > total:
            raise FrameError("coded symbols in the frame run past their end")
        if stream + 1 < streams:
            well = at == starts[stream + 1]
        else:
            well = -(-at // 8) == len(data) and data[-1] >> (at % 8 or 8) == 0
        if not well:
            raise FrameError("coded symbols in the frame do not end where they must")
    return symbols


def _read_rans(body: bytes, n: int, alphabet: int) -> list[int]:
    if not body or body[0] not in SCALES:
        raise FrameError(f"rANS has a scale of {SCALES}, the frame another")
    scale = body[0]
    _, shares, taken = read_book(body[1:], alphabet, with_shares=True)
    if sum(shares) != 1 << scale or max(shares) >> scale:
        raise FrameError("the shares of a codebook in the frame do not add up")
    lanes = lanes_for(n)
    words_nbytes = len(body) - 1 - taken - 4 * lanes
    if words_nbytes < 0 or words_nbytes % 2:
        raise FrameError("a chunk in the frame is too short for its states")
    states = list(struct.unpack_from(f"<{lanes}I", body, 1 + taken))
    words = struct.unpack_from(f"<{words_nbytes // 2}H", body, 1 + taken + 4 * lanes)
    if any(not LOW <= state < 1 << 31 for state in states):
        raise FrameError("a state of rANS in the frame is out of range")
    owner = [symbol for symbol, share in enumerate(shares) for _ in range(share)]
    starts = [0] * alphabet
    for symbol in range(1, alphabet):
        starts[symbol] = starts[symbol - 1] + shares[symbol - 1]
    symbols, read = [], 0
    for place in range(n):
        x = states[place % lanes]
        slot = x & ((1 << scale) - 1)
        symbol = owner[slot]
        x = shares[symbol] * (x >> scale) + slot - starts[symbol]
        if x < LOW:
            if read == len(words):
                raise FrameError("coded symbols in the frame run past their end")
            x = x << 16 | words[read]
            read += 1
        states[place % lanes] = x
        symbols.append(symbol)
    if read != len(words) or any(state != LOW for state in states):
        raise FrameError("coded symbols in the frame do not end where they must")
    return symbols


def _symbols(chunk: bytes, n: int, alphabet: int) -> Tensor:
    mode, body = chunk[0], chunk[1:]
    if mode == CONSTANT:
        if len(body) != 2 or int.from_bytes(body, "little") >= alphabet:
            raise FrameError("a constant chunk in the frame holds no symbol")
        return torch.full((n,), int.from_bytes(body, "little"))
    if mode == RAW:
        bits = symbol_bits(alphabet)
        if len(body) != packed_nbytes(n, bits):
            raise FrameError(f"a raw chunk of {n} symbols has {packed_nbytes(n, bits)} bytes, the frame's {len(body)}")
        symbols = unpack(torch.tensor(list(body), dtype=torch.uint8), n, bits).long()
        if int(symbols.max()) >= alphabet:
            raise FrameError(f"a raw chunk in the frame holds a symbol beyond {alphabet - 1}")
        return symbols
    if mode not in (HUFFMAN, RANS):
        raise FrameError(f"unknown mode {mode} of a coded chunk")
    return torch.tensor((_read_huffman if mode == HUFFMAN else _read_rans)(body, n, alphabet))


def decode_symbols(section: Tensor, n: int, alphabet: int) -> Tensor:
    parts = [_symbols(chunk, size, alphabet) for chunk, size in chunks_of(bytes(section.tolist()), n)]
    return torch.cat(parts).to(device=section.device, dtype=symbol_dtype(alphabet))


def decode_values(section: Tensor, table: Tensor, out: Tensor, weight: float | None) -> None:
    symbols = decode_symbols(section, out.numel(), table.numel())
    put(out, table.to(out.device)[symbols.long()], weight)


def chunk_modes(section: Tensor, n: int) -> Tensor:
    return torch.tensor([chunk[0] for chunk, _ in chunks_of(bytes(section.tolist()), n)])
