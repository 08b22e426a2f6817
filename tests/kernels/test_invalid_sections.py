"""Invalid coded sections: both backends reject them, and agree on all others."""

from __future__ import annotations

import random
import struct

import pytest
import torch

from laconic import FrameError
from laconic.kernels import cpu, reference
from laconic.kernels.reference import code_tables
from laconic.kernels.sections import CHUNK, CONSTANT, HUFFMAN, RANS, RAW, Coding
from symbols import PURE, code, make

BACKENDS = {"cpu": cpu, "reference": reference}
LOW = 1 << 15


def decode(backend, section: bytes, n: int, alphabet: int):
    """Return the symbols, or None if the section is rejected. It lies between bytes that must not matter."""
    buffer = torch.frombuffer(bytearray(b"\xff" * 64 + section + b"\xff" * 64), dtype=torch.uint8)
    try:
        return backend.decode_symbols(buffer[64 : 64 + len(section)], n, alphabet)
    except FrameError:
        return None


def rejected(section: bytes, n: int, alphabet: int) -> bool:
    results = [decode(backend, section, n, alphabet) for backend in BACKENDS.values()]
    assert [result is None for result in results] in ([True, True], [False, False]), "backends differ"
    if results[0] is None:
        buffer = torch.frombuffer(bytearray(section or b"\0"), dtype=torch.uint8)[: len(section)]
        with pytest.raises(FrameError):
            cpu.decode_values(buffer, torch.zeros(alphabet), torch.zeros(n), None)
        return True
    assert torch.equal(*results)
    return False


class Parts:
    """A section of one chunk, split into parts that a test changes before it is written again."""

    def __init__(self, kind: str, n: int, alphabet: int, coding: Coding) -> None:
        self.n, self.alphabet = n, alphabet
        self.symbols = make(kind, n, alphabet)
        data = bytes(code(cpu, self.symbols, alphabet, coding).tolist())
        self.size = None
        self.mode, body = data[4], data[5:]
        self.scale = b""
        if self.mode == RANS:
            self.scale, body = body[:1], body[1:]
        self.classes, self.frequencies, taken = code_tables.read_code_table(
            body, alphabet, with_frequencies=self.mode == RANS
        )
        self.table, body = body[:taken], body[taken:]
        streams = 30 if n >= 65536 else 6 if n >= 2048 else 1
        num_states = 32 if n >= 16384 else 4
        count = streams - 1 if self.mode == HUFFMAN else num_states
        self.numbers = list(struct.unpack_from(f"<{count}I", body))
        self.rest = body[4 * count :]
        assert not rejected(self.write(), n, alphabet), "the unchanged section must be valid"

    def write(self) -> bytes:
        body = bytes([self.mode]) + self.scale + self.table
        body += struct.pack(f"<{len(self.numbers)}I", *self.numbers) + self.rest
        return struct.pack("<I", len(body) if self.size is None else self.size) + body

    def rewrite_table(self) -> None:
        self.table = code_tables.write_code_table(self.classes, self.frequencies if self.mode == RANS else None)

    def rejected(self) -> bool:
        return rejected(self.write(), self.n, self.alphabet)


def bits_to_bytes(bits: str) -> bytes:
    bits += "0" * (-len(bits) % 8)
    return bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))


def u16(value: int) -> str:
    return f"{value:016b}"[::-1]


# ------------------------------------------------------------------------------------------------- mode and directory

SMALL = [("normal", n, alphabet, coding) for n, alphabet in ((300, 16), (3000, 256)) for coding in PURE]
PARTS = pytest.mark.parametrize("kind, n, alphabet, coding", SMALL)


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
def test_a_raw_symbol_beyond_the_alphabet_is_refused(n, alphabet):
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


def test_chunks_must_fill_the_section_one_by_one():
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


# -------------------------------------------------------------------------------------------------------- code tables


def handmade(mode: int, table: str, rest: bytes = bytes(64)) -> bytes:
    """Return a chunk whose code table is given bit by bit, in reading order."""
    body = bytes([mode]) + (b"\x0c" if mode == RANS else b"") + bits_to_bytes(table) + rest
    return struct.pack("<I", len(body)) + body


# THREE has three symbols: explicit class 1, one more, the same. TWO_HALVES gives symbols 3 and 5 a frequency of a half:
# explicit class 12, then the same, each with eleven bits of mantissa, and a run of one between.
THREE = u16(0) + u16(2) + "110" + "1000" + "101" + "0"
TWO_HALVES = u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "0" + "0" * 11
STATES = struct.pack("<4I", 1 << 16, (1 << 16) + 2048, 1 << 16, (1 << 16) + 2048)


def test_handmade_tables_decode():
    """Guards the invalid tables below, each of which differs from these in one respect."""
    section = handmade(HUFFMAN, THREE, bits_to_bytes("01011001110"))
    assert not rejected(section, 7, 16)
    assert decode(cpu, section, 7, 16).tolist() == [0, 1, 2, 0, 0, 2, 1]
    section = handmade(RANS, TWO_HALVES, STATES)
    assert not rejected(section, 4, 16)
    assert decode(cpu, section, 4, 16).tolist() == [3, 5, 3, 5]


@pytest.mark.parametrize(
    "table",
    [
        u16(0) + u16(2) + "110" + "0000" + "101" + "0",  # explicit class 0
        u16(0) + u16(2) + "110" + "1000" + "100" + "0",  # one less than 1
        u16(0) + u16(2) + "110" + "1111" + "101" + "0",  # one more than 15
        u16(14) + u16(2) + "110" + "1000" + "101" + "0",  # symbol 16 of 16
        u16(16) + u16(0) + "110" + "1000",
        u16(65535) + u16(65535) + "110" + "1000" + "101" + "0",
        u16(0) + u16(3) + "110" + "1000" + "101" + "0" + "1111",  # ends with a symbol that does not occur
        u16(0) + u16(2) + "110" + "1000" + "0" + "1111",
        u16(0) + u16(5) + "110" + "1000" + "111" + "0001" + "000" + "101" + "0",  # a run of 8 where 5 are left
        u16(0) + u16(15) + "110" + "1000" + "111" + "0" * 12 + "1" + "0" * 12,  # a run of 4,096
        u16(0) + u16(15) + "110" + "1000" + "111" + "0" * 60,
        THREE + "00001",  # nonzero padding
        THREE + "1",
        u16(3) + u16(0) + "110" + "1000",  # one symbol alone: half a code
        u16(0) + u16(1) + "110" + "0100" + "0",  # two quarters
        u16(0) + u16(2) + "110" + "1000" + "0" + "0",  # three halves
        u16(0) + u16(1) + "110" + "1000" + "101",  # a half and a quarter
        "1" * 400,
        "0" * 8,
        "",
    ],
)  # fmt: skip
def test_invalid_table_of_lengths_is_rejected(table):
    for rest in (b"", b"\x00", bits_to_bytes("01011001110"), bytes(40)):
        assert rejected(handmade(HUFFMAN, table, rest), 7, 16)


@pytest.mark.parametrize(
    "table",
    [
        u16(3) + u16(2) + "110" + "0000" + "0" * 11 + "111" + "1" + "0" + "0" * 11,  # explicit class 0
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "101" + "0" * 12,  # a half and the whole scale
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "100" + "0" * 10,  # a half and a quarter
        u16(3) + u16(2) + "110" + "0011" + "10" + "0" * 9 + "111" + "1" + "0" + "0" * 11,  # a sum that is one too large
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "0" + "0" * 11 + "0" + "0" * 11,  # three halves
        u16(3) + u16(0) + "110" + "1011" + "0" * 12,  # the whole scale: must be a constant chunk
        u16(3) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "010" + "0",  # a run of 2 where the last one occurs
        u16(14) + u16(2) + "110" + "0011" + "0" * 11 + "111" + "1" + "0" + "0" * 11,  # symbol 16 of 16
        TWO_HALVES + "1",  # nonzero padding
        TWO_HALVES[:-12],
        "1" * 400,
        "",
    ],
)  # fmt: skip
def test_invalid_table_of_frequencies_is_rejected(table):
    for rest in (b"", STATES, STATES + bytes(2), bytes(40)):
        assert rejected(handmade(RANS, table, rest), 4, 16)


@PARTS
def test_truncated_table_is_rejected(kind, n, alphabet, coding):
    parts = Parts(kind, n, alphabet, coding)
    whole = parts.table
    parts.numbers, parts.rest = [], b""
    for end in range(len(whole) + 1):
        parts.table = whole[:end]
        assert parts.rejected()


@pytest.mark.parametrize("kind, n, alphabet", [("normal", 300, 16), ("normal", 3000, 256), ("geometric", 500, 1000)])
def test_incomplete_code_is_rejected(kind, n, alphabet):
    parts = Parts(kind, n, alphabet, Coding.HUFFMAN)
    lengths = list(parts.classes)
    used = [symbol for symbol, length in enumerate(lengths) if length]
    for symbol in used[:: max(1, len(used) // 8)]:
        for other in {lengths[symbol] - 1, lengths[symbol] + 1, 15, 0} - {lengths[symbol]}:
            if other > 15:
                continue
            parts.classes = list(lengths)
            parts.classes[symbol] = other
            parts.rewrite_table()
            assert parts.rejected(), (symbol, other)


@pytest.mark.parametrize("kind, n, alphabet", [("normal", 300, 16), ("normal", 3000, 256), ("geometric", 17_000, 30)])
def test_frequencies_with_a_wrong_sum_are_rejected(kind, n, alphabet):
    parts = Parts(kind, n, alphabet, Coding.RANS)
    frequencies = list(parts.frequencies)
    used = [symbol for symbol, frequency in enumerate(frequencies) if frequency]
    for symbol in used[:: max(1, len(used) // 8)]:
        for other in {frequencies[symbol] - 1, frequencies[symbol] + 1, 2 * frequencies[symbol], 0}:
            parts.frequencies = list(frequencies)
            parts.frequencies[symbol] = other
            parts.classes = [frequency.bit_length() for frequency in parts.frequencies]
            parts.rewrite_table()
            assert parts.rejected(), (symbol, other)


@pytest.mark.parametrize("scale", [12, 15])
def test_frequency_of_the_whole_scale_is_rejected(scale):
    # A constant must use its own mode; here it would make every word and state valid.
    parts = Parts("normal", 300, 16, Coding.RANS)
    parts.scale = bytes([scale])
    parts.frequencies = [0, 1 << scale, *[0] * 14]
    parts.classes = [frequency.bit_length() if frequency < 1 << 15 else 15 for frequency in parts.frequencies]
    parts.numbers, parts.rest = [LOW] * 4, b""
    if scale == 12:
        parts.rewrite_table()
        assert parts.rejected()
    parts.frequencies[1] = (1 << scale) - 1
    parts.classes = [frequency.bit_length() for frequency in parts.frequencies]
    parts.rewrite_table()
    assert parts.rejected()


@PARTS
def test_nonzero_table_padding_is_rejected(kind, n, alphabet, coding):
    parts = Parts(kind, n, alphabet, coding)
    table = parts.table
    parts.table = table[:-1] + bytes([table[-1] | 0x80])
    # If the table fills its last byte, this is another table.
    assert table[-1] & 0x80 or parts.rejected()


# ----------------------------------------------------------------------------------------------------------- Huffman


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


# -------------------------------------------------------------------------------------------------------------- rANS

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


# ------------------------------------------------------------------------------------------------- every bit and byte

TINY = [
    ("normal", 40, 8, Coding.HUFFMAN),
    ("normal", 40, 8, Coding.RANS),
    ("even", 30, 3, Coding.HUFFMAN_AUTO),
    ("skewed", 90, 300, Coding.RANS_AUTO),
    ("one symbol", 50, 16, Coding.RANS),
    ("geometric", 60, 4096, Coding.HUFFMAN),
    ("geometric", 60, 4096, Coding.RANS),
    ("two symbols", 2050, 2, Coding.HUFFMAN),
    ("skewed", 16_390, 2, Coding.RANS),
]


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


@pytest.mark.parametrize("coding", [Coding.HUFFMAN, Coding.RANS], ids=lambda coding: coding.name)
def test_backends_agree_on_permuted_tables(coding):
    """The table stays readable: two symbols exchange their lengths or frequencies."""
    rng = random.Random(coding)
    taken = 0
    for _ in range(150):
        n, alphabet = rng.choice((20, 300, 2100)), rng.choice((4, 30, 300))
        parts = Parts(rng.choice(("normal", "geometric", "even")), n, alphabet, coding)
        given = parts.classes if coding == Coding.HUFFMAN else parts.frequencies
        a, b = rng.sample(range(alphabet), 2)
        given[a], given[b] = given[b], given[a]
        if coding == Coding.RANS:
            parts.classes = [frequency.bit_length() for frequency in parts.frequencies]
        parts.rewrite_table()
        taken += not parts.rejected()
    assert taken > 0
