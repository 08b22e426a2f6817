"""Symbols and coded symbols, read as sections 5 and 8 of docs/wire-format.md define them.

A part of ``wire_reader``: plain Python and numpy, written from the document, and nothing of laconic is imported.
"""

from __future__ import annotations

import zlib

import numpy as np

CHUNK = 1 << 19
"""Symbols of a coded chunk."""


class InvalidFrameError(ValueError):
    """A frame that the document tells a reader to reject."""


def require(condition: object, what: str) -> None:
    if not condition:
        raise InvalidFrameError(what)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def bits_of(count: int) -> int:
    """Return the document's ``bits(count)``: the smallest b with 2^b >= count."""
    return (count - 1).bit_length()


def packed_nbytes(count: int, bits: int) -> int:
    return count // 256 * 32 * bits + ceil_div(count % 256 * bits, 8)


def bit_stream(data: bytes) -> np.ndarray:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")


def unpack(data: bytes, count: int, bits: int) -> np.ndarray:
    """Return ``count`` symbols of ``bits`` bits from exactly ``packed_nbytes`` bytes."""
    require(len(data) == packed_nbytes(count, bits), "the packed symbols do not fill their section")
    if bits == 0:
        return np.zeros(count, np.int64)
    groups, tail = divmod(count, 256)
    words = np.frombuffer(data, "<u4", groups * 8 * bits).reshape(groups, bits, 8).astype(np.uint64)
    words = np.concatenate([words, np.zeros((groups, 1, 8), np.uint64)], axis=1)
    symbols = np.empty((groups, 32, 8), np.int64)
    for row in range(32):
        word, shift = divmod(row * bits, 32)
        pair = words[:, word] | words[:, word + 1] << np.uint64(32)
        symbols[:, row] = (pair >> np.uint64(shift) & np.uint64(2**bits - 1)).astype(np.int64)
    stream = bit_stream(data[groups * 32 * bits :])[: tail * bits].reshape(tail, bits).astype(np.int64)
    return np.concatenate([symbols.reshape(-1), stream @ (1 << np.arange(bits, dtype=np.int64))])


def trits_nbytes(count: int) -> int:
    return count // 320 * 64 + ceil_div(count % 320, 5)


def unpack_trits(data: bytes, count: int) -> np.ndarray:
    """Return ``count`` symbols of 0, 1 or 2, five to a byte."""
    require(len(data) == trits_nbytes(count), "the ternary symbols do not fill their section")
    values = np.frombuffer(data, np.uint8).astype(np.int64)
    require(np.all(values <= 242), "a ternary byte is above 242")
    digits = values[:, None] // 3 ** np.arange(5) % 3
    groups = count // 320
    full = digits[: groups * 64].reshape(groups, 64, 5).transpose(0, 2, 1).reshape(-1)
    return np.concatenate([full, digits[groups * 64 :].reshape(-1)])[:count]


class BitReader:
    """Numbers from a bit stream, lowest bit first."""

    def __init__(self, data: bytes) -> None:
        self.value, self.nbits, self.at = int.from_bytes(data, "little"), 8 * len(data), 0

    def take(self, count: int) -> int:
        require(self.at + count <= self.nbits, "a code table ends beyond its chunk")
        number = self.value >> self.at & ((1 << count) - 1)
        self.at += count
        return number

    def skip_padding(self) -> int:
        """Read the zeros to the end of the byte and return how many bytes were read."""
        require(self.take(-self.at % 8) == 0, "the padding of a code table is not zero")
        return self.at // 8


def read_run(reader: BitReader) -> int:
    zeros = 0
    while not reader.take(1):
        zeros += 1
        require(zeros <= 11, "a run of unused symbols is too long")
    return (1 << zeros) + reader.take(zeros)


def code_table(data: bytes, alphabet: int, shares: bool) -> tuple[list[int], list[int], int]:
    """Return the symbols in use, their classes (or shares) and the bytes of the code table."""
    reader = BitReader(data[: 64 + 4 * alphabet])  # a token of at most 4 bytes for each symbol
    symbol = reader.take(16)
    last = symbol + reader.take(16)
    require(last < alphabet, "a code table has a symbol outside the alphabet")
    symbols, numbers, klass = [], [], 8
    while symbol <= last:
        if reader.take(1):
            if not reader.take(1):
                klass += 1 if reader.take(1) else -1
            elif not reader.take(1):
                klass = reader.take(4)
            else:
                symbol += read_run(reader)
                require(symbol <= last, "a run of unused symbols includes the last symbol")
                continue
        require(1 <= klass <= 15, "a class is outside 1 to 15")
        symbols.append(symbol)
        numbers.append((1 << klass - 1) + reader.take(klass - 1) if shares else klass)
        symbol += 1
    return symbols, numbers, reader.skip_padding()


def huffman_chunk(data: bytes, count: int, alphabet: int) -> np.ndarray:
    symbols, lengths, nbytes = code_table(data, alphabet, shares=False)
    require(len(symbols) >= 2, "a Huffman code has fewer than two symbols")
    longest = max(lengths)
    require(sum(1 << 15 - length for length in lengths) == 1 << 15, "a Huffman code is not complete")
    symbol_at, length_at, at = np.empty(1 << longest, np.int64), np.empty(1 << longest, np.int64), 0
    for length, symbol in sorted(zip(lengths, symbols, strict=True)):
        size = 1 << longest - length
        symbol_at[at : at + size], length_at[at : at + size] = symbol, length
        at += size
    streams = 1 if count < 2048 else 6 if count < 65536 else 30
    require(len(data) >= nbytes + 4 * (streams - 1), "a Huffman chunk has no room for its starts")
    starts = [0, *np.frombuffer(data, "<u4", streams - 1, nbytes).tolist()]
    bits = bit_stream(data[nbytes + 4 * (streams - 1) :])
    require(len(bits), "a Huffman chunk has no bits")
    padded = np.concatenate([bits, np.zeros(longest, np.uint8)])
    window = np.zeros(len(bits), np.int64)
    for i in range(longest):
        window = window << 1 | padded[i : i + len(bits)]
    symbol_of, next_of = symbol_at[window].tolist(), (np.arange(len(bits)) + length_at[window]).tolist()
    decoded, each = [], ceil_div(count, streams)
    for stream, start in enumerate(starts):
        at = start
        for _ in range(min(each, count - stream * each)):
            require(at < len(bits), "a Huffman stream ends beyond its chunk")
            decoded.append(symbol_of[at])
            at = next_of[at]
        require(
            stream == streams - 1 or at == starts[stream + 1], "a Huffman stream ends elsewhere than the next begins"
        )
    require(len(bits) - 8 < at <= len(bits), "the last Huffman stream does not end in the last byte of its chunk")
    require(not bits[at:].any(), "the bits after the last Huffman stream are not zero")
    return np.array(decoded, np.int64)


def rans_chunk(data: bytes, count: int, alphabet: int) -> np.ndarray:
    require(data, "a rANS chunk has no scale")
    scale = data[0]
    require(scale in (12, 15), "the scale of a rANS chunk is neither 12 nor 15")
    symbols, shares, nbytes = code_table(data[1:], alphabet, shares=True)
    require(sum(shares) == 1 << scale and max(shares) < 1 << scale, "the shares do not add up to 2^scale")
    symbol_of = [symbol for symbol, share in zip(symbols, shares, strict=True) for _ in range(share)]
    base, start = {}, 0
    for symbol, share in zip(symbols, shares, strict=True):
        base[symbol], start = start, start + share
    share_of = dict(zip(symbols, shares, strict=True))
    streams = 4 if count < 16384 else 32
    rest = data[1 + nbytes :]
    require(len(rest) >= 4 * streams and len(rest) % 2 == 0, "a rANS chunk has no room for its states and whole words")
    states = np.frombuffer(rest, "<u4", streams).tolist()
    require(all(1 << 15 <= x < 1 << 31 for x in states), "a rANS state is outside 2^15 to 2^31")
    words = np.frombuffer(rest[4 * streams :], "<u2").tolist()
    decoded, used, mask = [], 0, (1 << scale) - 1
    for i in range(count):
        x = states[i % streams]
        slot = x & mask
        symbol = symbol_of[slot]
        x = share_of[symbol] * (x >> scale) + slot - base[symbol]
        if x < 1 << 15:
            require(used < len(words), "a rANS chunk has too few words")
            x = (x << 16) + words[used]
            used += 1
        states[i % streams] = x
        decoded.append(symbol)
    require(used == len(words), "a rANS chunk has words that are not used")
    require(all(x == 1 << 15 for x in states), "a rANS state does not end at 2^15")
    return np.array(decoded, np.int64)


def chunk_symbols(data: bytes, count: int, alphabet: int) -> np.ndarray:
    require(data, "a chunk has no mode")
    mode, body = data[0], data[1:]
    if mode == 0:
        require(len(body) == 2, "a constant chunk does not have 3 bytes")
        symbols = np.full(count, int.from_bytes(body, "little"), np.int64)
    elif mode == 1:
        symbols = unpack(body, count, bits_of(alphabet))
    elif mode == 2:
        symbols = huffman_chunk(body, count, alphabet)
    elif mode == 3:
        symbols = rans_chunk(body, count, alphabet)
    else:
        raise InvalidFrameError("a chunk has an unknown mode")
    require(np.all(symbols < alphabet), "a symbol is outside its alphabet")
    return symbols


def coded_nbytes(count: int, alphabet: int) -> int:
    """Return ``coded(n, A)`` of section 11: the most bytes of a section of coded chunks."""
    sizes = [min(CHUNK, count - at) for at in range(0, count, CHUNK)]
    return sum(4 + 198 + ceil_div(21 * alphabet, 8) + c * (bits_of(alphabet) + 2) // 8 for c in sizes)


def chunked_symbols(data: bytes, count: int, alphabet: int) -> np.ndarray:
    """Return the symbols of a section in the format of ``huffman`` and ``rans``."""
    chunks = ceil_div(count, CHUNK)
    require(len(data) >= 4 * chunks, "a coded section has no room for the sizes of its chunks")
    at, parts = 4 * chunks, []
    for index, size in enumerate(np.frombuffer(data, "<u4", chunks).tolist()):
        require(at + size <= len(data), "a chunk ends beyond its section")
        parts.append(chunk_symbols(data[at : at + size], min(CHUNK, count - index * CHUNK), alphabet))
        at += size
    require(at == len(data), "the chunks do not fill their section")
    return np.concatenate(parts)


def inflate(data: bytes, nbytes: int, coder: str) -> bytes:
    """Return ``nbytes`` bytes from one whole zlib stream or Zstandard frame."""
    if coder == "deflate":
        stream = zlib.decompressobj()
        try:
            plain = stream.decompress(data, nbytes + 1)
        except zlib.error as error:
            raise InvalidFrameError(f"the zlib stream is damaged: {error}") from None
        left = stream.unused_data or stream.unconsumed_tail
    else:
        import zstandard

        require(data[:4] == bytes.fromhex("28b52ffd"), "the section is not a Zstandard frame")
        stream = zstandard.ZstdDecompressor(max_window_size=1 << 27).decompressobj()
        try:
            plain = stream.decompress(data)
        except zstandard.ZstdError as error:
            raise InvalidFrameError(f"the Zstandard frame is damaged: {error}") from None
        left = stream.unused_data
    require(stream.eof and not left, "the compressed stream does not end with its section")
    require(len(plain) == nbytes, "the compressed stream gives another number of symbols")
    return plain


def coded_symbols(data: bytes, count: int, alphabet: int, coder: str, largest_alphabet: int) -> np.ndarray:
    """Return ``count`` symbols of a coded section; ``largest_alphabet`` is the one that bounds its size."""
    if coder in ("huffman", "rans"):
        require(len(data) <= coded_nbytes(count, largest_alphabet), "a coded section is larger than section 11 allows")
        return chunked_symbols(data, count, alphabet)
    width = 1 if largest_alphabet <= 256 else 2
    require(len(data) <= width * count + width * count // 100 + 1024, "a coded section is larger than allowed")
    width = 1 if alphabet <= 256 else 2
    symbols = np.frombuffer(inflate(data, width * count, coder), f"<u{width}").astype(np.int64)
    require(np.all(symbols < alphabet), "a symbol is outside its alphabet")
    return symbols
