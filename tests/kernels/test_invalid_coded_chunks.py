"""Invalid coded sections: both backends reject them, and agree on all others."""

from __future__ import annotations

import random
import struct

import pytest
import torch
from invalid_sections import LOW, PARTS, TWO_HALVES, Parts, decode, handmade, rejected

from laconic import FrameError
from laconic.kernels import cpu
from laconic.kernels.sections import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding
from symbols import code, make


@PARTS
def test_unknown_mode_is_rejected(kind, n, alphabet, coding):
    parts = Parts(kind, n, alphabet, coding)
    for mode in (CONSTANT, RAW, 4, 5, 127, 128, 255, HUFFMAN if parts.mode == RANS else RANS):
        parts.mode = mode
        assert parts.rejected(), mode


@PARTS
def test_wrong_chunk_size_is_rejected(kind, n, alphabet, coding):
    parts = Parts(kind, n, alphabet, coding)
    right = len(parts.write()) - 4
    for size in (0, 1, right - 1, right + 1, 2 * right, 2**31, 2**32 - 1):
        parts.size = size
        assert parts.rejected(), size


@PARTS
def test_wrong_number_of_symbols_is_rejected(kind, n, alphabet, coding):
    section = Parts(kind, n, alphabet, coding).write()
    for other in (1, n // 2, 2 * n, 2048, 16384, 65536, CHUNK + 1):
        assert rejected(section, other, alphabet), other
    # In a single Huffman stream the zero padding of the last byte can be one symbol more or less.
    if coding == Coding.RANS or n >= 2048:
        assert rejected(section, n - 1, alphabet) and rejected(section, n + 1, alphabet)


@PARTS
def test_alphabet_without_the_last_symbol_is_rejected(kind, n, alphabet, coding):
    parts = Parts(kind, n, alphabet, coding)
    last = int(parts.symbols.max())
    assert rejected(parts.write(), n, last)
    assert not rejected(parts.write(), n, last + 1)
    assert not rejected(parts.write(), n, 4096)


@pytest.mark.parametrize("alphabet", [2, 9, 256, 257, 4096])
def test_constant_chunk_must_hold_one_valid_symbol(alphabet):
    for symbol in (0, alphabet - 1):
        section = struct.pack("<IBH", 3, CONSTANT, symbol)
        assert not rejected(section, 7, alphabet)
        assert decode(cpu, section, 7, alphabet).tolist() == [symbol] * 7
    for symbol in (alphabet, alphabet + 1, 65535):
        assert rejected(struct.pack("<IBH", 3, CONSTANT, symbol), 7, alphabet)
    assert rejected(struct.pack("<IB", 1, CONSTANT), 7, alphabet)
    assert rejected(struct.pack("<IBB", 2, CONSTANT, 0), 7, alphabet)
    assert rejected(struct.pack("<IBHB", 4, CONSTANT, 0, 0), 7, alphabet)


@pytest.mark.parametrize("n", [1, 100, 256, 257, 700])
@pytest.mark.parametrize("alphabet", [3, 5, 100, 255, 1000, 4095])
def test_raw_symbol_beyond_the_alphabet_is_rejected(n, alphabet):
    bits = (alphabet - 1).bit_length()
    for place in {0, n // 2, n - 1}:
        symbols = torch.zeros(n, dtype=torch.int32)
        for symbol, valid in ((alphabet - 1, True), (alphabet, False), ((1 << bits) - 1, alphabet == 1 << bits)):
            symbols[place] = symbol
            packed = torch.empty(n // 256 * 32 * bits + (n % 256 * bits + 7) // 8, dtype=torch.uint8)
            cpu.pack(symbols, bits, packed)
            body = bytes([RAW]) + bytes(packed.tolist())
            assert rejected(struct.pack("<I", len(body)) + body, n, alphabet) is not valid
            assert rejected(struct.pack("<I", len(body) + 1) + body + b"\0", n, alphabet)
            assert rejected(struct.pack("<I", len(body) - 1) + body[:-1], n, alphabet)


def test_chunks_must_fill_the_section():
    n, constant = CHUNK + 1, struct.pack("<BH", CONSTANT, 1)
    assert not rejected(struct.pack("<II", 3, 3) + constant * 2, n, 4)
    most = 2**32 - 1
    for sizes in ((2, 4), (4, 2), (0, 6), (6, 0), (3, 4), (4, 3), (3, 2), (2, 3), (most, 7), (7, most), (0, 0)):
        assert rejected(struct.pack("<II", *sizes) + constant * 2, n, 4), sizes
    one_less, one_more = struct.pack("<I", 3) + constant, struct.pack("<III", 3, 3, 3) + 3 * constant
    for section in (b"", b"\0" * 4, b"\0" * 9, one_less, one_more):
        assert rejected(section, n, 4)
    # An empty chunk at the end: its mode would lie behind the section.
    assert rejected(struct.pack("<II", 8, 0) + constant + bytes(5), n, 4)
    with pytest.raises(FrameError):
        cpu.chunk_modes(torch.frombuffer(bytearray(struct.pack("<II", 3, 0) + constant), dtype=torch.uint8), n)


def test_missing_bytes_are_rejected():
    for n in (1, 300, CHUNK + 1):
        assert rejected(b"", n, 16)
    for data in (b"\0", b"\0\0\0\0", b"\1\0\0\0", b"\1\0\0\0\2", b"\1\0\0\0\3", b"\2\0\0\0\3\x0c"):
        assert rejected(data, 10, 16)


@pytest.mark.parametrize("n, alphabet", [(2048, 2), (3000, 200), (2100, 1000), (70_000, 4)])
def test_wrong_stream_start_is_rejected(n, alphabet):
    parts = Parts("normal", n, alphabet, Coding.HUFFMAN)
    starts = list(parts.numbers)
    assert starts == sorted(starts) and len(starts) in (5, 29)
    total = 8 * len(parts.rest)
    indices = (0, 1, len(starts) - 1) if n < 50_000 else (0, len(starts) - 1)
    for at in indices:
        for other in (starts[at] - 1, starts[at] + 1, 0, total - 1, total, total + 1, 2**31, 2**32 - 1):
            parts.numbers = list(starts)
            parts.numbers[at] = other
            assert parts.rejected(), (at, other)
    parts.numbers = starts[::-1]
    assert parts.rejected()
    parts.numbers = [starts[1], starts[0], *starts[2:]]
    assert parts.rejected()
    parts.numbers = starts[:-1]
    assert parts.rejected()


@pytest.mark.parametrize("n, alphabet", [(5, 4), (300, 16), (301, 200), (2048, 2), (3000, 256), (66_000, 4)])
def test_missing_or_extra_bits_are_rejected(n, alphabet):
    parts = Parts("normal", n, alphabet, Coding.HUFFMAN)
    bits = parts.rest
    for rest in (bits[:-1], bits + b"\0", bits + b"\xff", bits[: len(bits) // 2], b"", bits + bytes(100)):
        parts.rest = rest
        assert parts.rejected()


def test_nonzero_bit_padding_is_rejected():
    for n in range(3, 40):
        parts = Parts("normal", n, 7, Coding.HUFFMAN)
        used = sum(parts.classes[symbol] for symbol in parts.symbols.tolist()) % 8
        last = parts.rest[-1]
        for bit in range(used or 8, 8):
            parts.rest = parts.rest[:-1] + bytes([last | 1 << bit])
            assert parts.rejected(), (n, bit)


RANS_PARTS = pytest.mark.parametrize(
    "n, alphabet", [(2, 4), (5, 4), (300, 16), (3000, 256), (16_384, 30), (20_001, 1000)]
)


def rans_parts(n, alphabet):
    return Parts("normal" if n > 2 else "all but equal", n, alphabet, Coding.RANS)


@RANS_PARTS
def test_wrong_scale_is_rejected(n, alphabet):
    parts = rans_parts(n, alphabet)
    for scale in {0, 1, 11, 12, 13, 14, 15, 16, 31, 32, 255} - {parts.scale[0]}:
        parts.scale = bytes([scale])
        assert parts.rejected(), scale


@RANS_PARTS
def test_states_out_of_range_are_rejected(n, alphabet):
    parts = rans_parts(n, alphabet)
    states = list(parts.numbers)
    assert all(LOW <= state < 1 << 31 for state in states)
    for i in (0, 1, len(states) - 1):
        for state in (0, 1, LOW - 1, 1 << 31, 2**32 - 1, states[i] | 1 << 31):
            parts.numbers = list(states)
            parts.numbers[i] = state
            assert parts.rejected(), (i, state)


def test_state_below_the_minimum_is_rejected_even_if_it_ends_well():
    # With a frequency of a half, state 0 stays 0, and a word of 2^15 moves it to the valid final state.
    words = struct.pack("<4H", *[LOW] * 4)
    for state in (0, 2048):
        assert rejected(handmade(RANS, TWO_HALVES, struct.pack("<4I", *[state] * 4) + words), 4, 16)
    for state in (1 << 16, (1 << 16) + 2048):
        assert not rejected(handmade(RANS, TWO_HALVES, struct.pack("<4I", *[state] * 4)), 4, 16)


@RANS_PARTS
def test_changed_states_are_rejected_or_change_symbols(n, alphabet):
    # Symbols of equal frequency can be exchanged: only the checksum of the frame detects that.
    parts = rans_parts(n, alphabet)
    states = list(parts.numbers)
    for i in (0, 1, len(states) - 1):
        for change in (1, -1, 1 << 20):
            state = states[i] + change
            if LOW <= state < 1 << 31:
                parts.numbers = list(states)
                parts.numbers[i] = state
                symbols = decode(cpu, parts.write(), n, alphabet)
                assert parts.rejected() == (symbols is None)
                assert symbols is None or not torch.equal(symbols, parts.symbols)
    if len(set(states)) > 1:
        parts.numbers = states[1:] + states[:1]
        assert parts.rejected()
    parts.numbers = states[:-1]
    assert parts.rejected()


@RANS_PARTS
def test_missing_or_extra_words_are_rejected(n, alphabet):
    parts = rans_parts(n, alphabet)
    words = parts.rest
    changed = [words + b"\0\0", words + b"\0", words + b"\xff" * 64]
    if words:
        changed += [words[:-1], words[:-2], words[2:], b"", bytes(len(words)), words[: len(words) // 4 * 2]]
    for rest in changed:
        parts.rest = rest
        assert parts.rejected()


TINY = [
    ("normal", 40, 8, Coding.HUFFMAN), ("normal", 40, 8, Coding.RANS), ("even", 30, 3, Coding.HUFFMAN_AUTO),
    ("skewed", 90, 300, Coding.RANS_AUTO), ("one symbol", 50, 16, Coding.RANS), ("geometric", 60, 4096, Coding.HUFFMAN),
    ("geometric", 60, 4096, Coding.RANS), ("two symbols", 2050, 2, Coding.HUFFMAN), ("skewed", 16_390, 2, Coding.RANS),
]  # fmt: skip


@pytest.mark.parametrize("kind, n, alphabet, coding", TINY)
def test_backends_agree_on_every_flipped_bit(kind, n, alphabet, coding):
    section = bytearray(code(cpu, make(kind, n, alphabet), alphabet, coding).tolist())
    bits = range(8 * len(section))
    if n > 1000:  # the reference is slow: all of the header, some of the rest
        bits = [*range(min(len(bits), 400)), *range(400, len(bits), 97)]
    taken = 0
    for bit in bits:
        section[bit // 8] ^= 1 << bit % 8
        taken += not rejected(bytes(section), n, alphabet)
        section[bit // 8] ^= 1 << bit % 8
    assert taken < len(bits) / 2


@pytest.mark.parametrize("kind, n, alphabet, coding", TINY)
def test_every_truncation_is_rejected(kind, n, alphabet, coding):
    section = bytes(code(cpu, make(kind, n, alphabet), alphabet, coding).tolist())
    for end in range(0, len(section), 1 if n < 1000 else 7):
        assert rejected(section[:end], n, alphabet)
        if end > 4:  # with a consistent size
            assert rejected(struct.pack("<I", end - 4) + section[4:end], n, alphabet)
    for more in (b"\0", b"\0\0", b"\xff" * 9):
        assert rejected(section + more, n, alphabet)
        assert rejected(struct.pack("<I", len(section) + len(more) - 4) + section[4:] + more, n, alphabet)


@pytest.mark.parametrize("mode", [CONSTANT, RAW, HUFFMAN, RANS])
def test_backends_agree_on_random_bytes(mode):
    rng = random.Random(mode)
    for _ in range(400):
        n, alphabet = rng.choice((1, 5, 100, 2050)), rng.choice((2, 5, 256, 4096))
        body = bytes([mode]) + rng.choice((b"", b"\x0c", b"\x0f")) + rng.randbytes(rng.choice((0, 1, 2, 9, 60, 300)))
        rejected(struct.pack("<I", len(body)) + body, n, alphabet)
